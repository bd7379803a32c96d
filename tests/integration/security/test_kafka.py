"""TLS and SASL to Apache Kafka: whatever talks to it does so by every way, and says in one line what is wrong."""

import asyncio
import json
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from streams.broker.aiokafka_internals import bound_tls_shutdown
from streams.client import Client, ConnectionFailed
from tests.certificates import Certificates
from tests.conftest import Database
from tests.disclosure import assert_silent
from tests.integration.client.conftest import client_environment
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, anabranch, as_avro, query, until
from tests.integration.kafka.apache_kafka import MECHANISMS, PASSWORD, USER, ApacheKafka

pytestmark = pytest.mark.parametrize(
    "broker", ["kafka"], indirect=True
)  # the embedded one has no other listeners

WRONG = "canary-of-a-wrong-password"
PASSPHRASE = "canary-of-a-key %41+/="
SECRETS = (PASSWORD, WRONG, PASSPHRASE)
VECTOR = unit_vectors(1, 1)[0]


def silent(*texts: str) -> None:
    assert_silent(SECRETS, *texts)


@dataclass(frozen=True)
class Way:
    """A listener, and how to come to it.

    Attributes:
        client: whose certificate is shown, and what locks its key.
        settings: as they stand in the environment; those with a secret.
        files: those that come as ``<NAME>_FILE``.
    """

    listener: str
    settings: dict[str, str] = field(default_factory=dict)
    authority: str | None = "authority"
    client: tuple[str, str | None, bool] | None = None
    files: dict[str, str] = field(default_factory=dict)

    def environment(self, kafka: ApacheKafka, certificates: Certificates, folder: Path) -> dict[str, str]:
        server = kafka.bootstrap_servers if self.listener == "PLAINTEXT" else kafka.listener(self.listener)
        environment = {"KAFKA_BOOTSTRAP_SERVERS": server, **self.settings}
        if self.authority is not None:
            environment["KAFKA_SSL_CAFILE"] = str(getattr(certificates, self.authority))
        if self.client is not None:
            name, passphrase, trusted = self.client
            identity = certificates.client(name, passphrase=passphrase, trusted=trusted)
            environment["KAFKA_SSL_CERTFILE"] = str(identity.certificate)
            environment["KAFKA_SSL_KEYFILE"] = str(identity.key)
        for name, secret in self.files.items():
            file = folder / name
            file.write_text(f"{secret}\n")
            environment[f"{name}_FILE"] = str(file)
        return environment


def login(mechanism: str, protocol: str = "SASL_SSL") -> dict[str, str]:
    return {
        "KAFKA_SECURITY_PROTOCOL": protocol,
        "KAFKA_SASL_MECHANISM": mechanism,
        "KAFKA_SASL_USERNAME": USER,
    }


TLS = {"KAFKA_SECURITY_PROTOCOL": "SSL"}
MUTUAL = Way("MUTUAL", TLS, client=("worker", PASSPHRASE, True), files={"KAFKA_SSL_KEY_PASSWORD": PASSPHRASE})
SCRAM = Way("SASL_SSL", login("SCRAM-SHA-512"), files={"KAFKA_SASL_PASSWORD": PASSWORD})

WAYS = {
    "TLS": Way("SSL", TLS),
    "mutual TLS": MUTUAL,
    "SCRAM-SHA-256 in the clear": Way(
        "SASL_PLAINTEXT",
        {**login("SCRAM-SHA-256", "SASL_PLAINTEXT"), "KAFKA_SASL_PASSWORD": PASSWORD},
        authority=None,
    ),
    **{
        f"{mechanism} over TLS": Way("SASL_SSL", {**login(mechanism), "KAFKA_SASL_PASSWORD": PASSWORD})
        for mechanism in MECHANISMS
    },
}


def test_a_tls_connection_with_open_requests_is_closed_at_once(
    broker: ApacheKafka, certificates: Certificates
) -> None:
    """uvloop would wait 30 s for the broker's part of the TLS shutdown, longer than a worker's grace period."""
    bound_tls_shutdown()
    host, _, port = broker.listener("SSL").partition(":")

    async def closed() -> None:
        connection = await create_conn(
            host,
            int(port),
            security_protocol="SSL",
            ssl_context=ssl.create_default_context(cafile=str(certificates.authority)),
        )
        requests = [asyncio.ensure_future(connection.send(MetadataRequest([]))) for _ in range(2)]
        await asyncio.sleep(0)  # they are sent
        async with asyncio.timeout(20):
            await connection.close()
        given_up = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(error, KafkaConnectionError) for error in given_up), given_up

    uvloop.run(closed())  # as in a worker


@pytest.mark.parametrize("name", WAYS)
async def test_a_worker_answers(
    name: str,
    *,
    kafka: ApacheKafka,
    certificates: Certificates,
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    await load(database.writer, tiny_corpus())
    settings = WAYS[name].environment(kafka, certificates, tmp_path)
    worker = start_worker(database.worker, **settings)
    event = query(VECTOR, profile="docs")
    await channel.send(as_avro(event))
    await channel.send(b"noise")
    await worker.until_ready()
    await output_reader.until_answered({event["event_id"]}, seconds=30)
    await output_reader.until(dead_letters=1)
    code, _ = await worker.terminate()
    assert code == 0
    silent(worker.log)


@pytest.mark.parametrize(
    "way", [pytest.param(MUTUAL, id="mutual TLS"), pytest.param(SCRAM, id="SCRAM over TLS")]
)
async def test_every_command_goes_that_way_and_secrets_stay_where_they_were_put(
    way: Way,
    *,
    kafka: ApacheKafka,
    certificates: Certificates,
    database: Database,
    channel: Channel,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    await load(database.writer, tiny_corpus())
    settings = way.environment(kafka, certificates, tmp_path)
    event = query(VECTOR, profile="docs", k=1)
    golden = tmp_path / "golden.jsonl"
    golden.write_text(
        json.dumps(
            {
                "embedding": event["embedding"],
                "principals": ["user:1"],
                "expected": [{"source_url_glob": "*"}],
            }
        )
    )
    worker = start_worker(database.worker, **settings)
    await worker.until_ready()

    async def run(*arguments: str, given: str = "") -> str:
        done = await asyncio.to_thread(
            anabranch, *arguments, channel=channel, dsn=database.worker, given=given, **settings
        )
        assert done.returncode == 0, done.stdout + done.stderr
        silent(done.stdout, done.stderr)
        return done.stdout

    assert await run("publish", given=json.dumps(event)) == f"{event['event_id']}\n"
    assert event["event_id"] in await run("tail", "--from-beginning", "--limit", "1")
    assert (await run("topics", "--max-event-bytes", "4194304")).count("exists") == 4
    assert [finding["level"] for finding in json.loads(await run("check", "--json"))].count("ok") >= 4
    assert json.loads(await run("validate", str(golden), "--json"))["answered"] == 1
    assert json.loads(await run("replay", "--apply", "--json"))["chosen"] == 0
    async with Client.from_environment({**settings, **client_environment(channel)}) as client:
        assert (await client.retrieve(embedding=VECTOR, principals=["user:1"], profile="docs", k=1)).results

    process = Path("/proc") / str(worker.process.pid)
    _, metrics = await asyncio.to_thread(worker.page, "/metrics")
    _, ready = await asyncio.to_thread(worker.page, "/healthz/ready")
    silent(
        metrics,
        ready,
        worker.log,
        (process / "cmdline").read_bytes().decode(),
        # They came in files, and in the environment there is no more than the files' names.
        (process / "environ").read_bytes().decode(),
    )


@dataclass(frozen=True)
class Rejection:
    """A way that leads nowhere, and what is said of it."""

    way: Way
    reported: str
    setting: str


def rejections() -> dict[str, Rejection]:
    wrong = {"KAFKA_SASL_PASSWORD": WRONG}
    right = {"KAFKA_SASL_PASSWORD": PASSWORD}
    tls = login("SCRAM-SHA-512")
    clear = login("SCRAM-SHA-512", "SASL_PLAINTEXT")
    return {
        **{
            f"wrong password, {mechanism}": Rejection(
                Way("SASL_SSL", {**login(mechanism), **wrong}),
                f"rejects the {mechanism} login",
                "KAFKA_SASL_PASSWORD",
            )
            for mechanism in MECHANISMS
        },
        "no such user": Rejection(
            Way("SASL_SSL", {**tls, **right, "KAFKA_SASL_USERNAME": "nobody"}),
            "rejects the SCRAM-SHA-512 login",
            "KAFKA_SASL_USERNAME",
        ),
        "another authority": Rejection(
            Way("SASL_SSL", {**tls, **right}, authority="untrusted"), "trusted CA", "KAFKA_SSL_CAFILE"
        ),
        "the system's authorities": Rejection(
            Way("SSL", TLS, authority=None), "trusted CA", "KAFKA_SSL_CAFILE"
        ),
        "another host's certificate": Rejection(
            Way("ELSEWHERE", TLS), "a different host", "KAFKA_BOOTSTRAP_SERVERS"
        ),
        "an expired certificate": Rejection(
            Way("EXPIRED", TLS), "certificate has expired", "renew the certificate"
        ),
        "plain, where TLS is spoken": Rejection(
            Way("SSL", {}, authority=None), "the server uses TLS", "KAFKA_SECURITY_PROTOCOL"
        ),
        "a login in the clear, where TLS is spoken": Rejection(
            Way("SASL_SSL", {**clear, **right}, authority=None),
            "the server uses TLS",
            "KAFKA_SECURITY_PROTOCOL",
        ),
        "TLS, where it is not spoken": Rejection(
            Way("PLAINTEXT", TLS), "does not use TLS", "KAFKA_SECURITY_PROTOCOL"
        ),
        "no login, where one is wanted": Rejection(
            Way("SASL_SSL", TLS),
            "requires a login (PLAIN, SCRAM-SHA-256, SCRAM-SHA-512)",
            "KAFKA_SASL_USERNAME",
        ),
        "a login, where there is none": Rejection(
            Way("SSL", {**tls, **right}), "does not accept logins on this port", "KAFKA_SECURITY_PROTOCOL"
        ),
        "no client certificate": Rejection(
            Way("MUTUAL", TLS), "requires a client certificate", "KAFKA_SSL_CERTFILE"
        ),
        "a stranger's client certificate": Rejection(
            Way("MUTUAL", TLS, client=("worker", None, False)),
            "rejects the client certificate",
            "KAFKA_SSL_CERTFILE",
        ),
    }


def assert_reported(line: str, rejection: Rejection) -> None:
    assert rejection.reported in line, line
    assert rejection.setting in line, line


@pytest.mark.parametrize("name", rejections())
async def test_what_is_wrong_is_reported_in_one_line(
    name: str,
    *,
    kafka: ApacheKafka,
    certificates: Certificates,
    database: Database,
    channel: Channel,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    """By a command, and by a worker, which does not start: who runs it sees at once that it has to be mended."""
    rejection = rejections()[name]
    settings = rejection.way.environment(kafka, certificates, tmp_path)
    worker = start_worker(database.worker, **settings)
    done = await asyncio.to_thread(anabranch, "topics", channel=channel, **settings)
    code = await worker.ended(seconds=30)
    for status, output in ((done.returncode, done.stdout + done.stderr), (code, worker.log)):
        assert status == 1
        [line] = output.splitlines()
        assert_reported(line, rejection)
        silent(output)


@pytest.mark.parametrize("name", ["wrong password, PLAIN", "another authority"])
async def test_every_command_tells_it(
    name: str,
    *,
    kafka: ApacheKafka,
    certificates: Certificates,
    database: Database,
    channel: Channel,
    tmp_path: Path,
) -> None:
    rejection = rejections()[name]
    settings = rejection.way.environment(kafka, certificates, tmp_path)
    event = json.dumps(query(VECTOR))
    golden = json.dumps(
        {"embedding": list(map(float, VECTOR)), "principals": ["a"], "expected": [{"source_url_glob": "*"}]}
    )
    for arguments, given in (
        (("publish",), event),
        (("tail",), ""),
        (("validate", "-"), golden),
        (("replay",), ""),
        (("check", "--json"), ""),
    ):
        done = await asyncio.to_thread(
            anabranch, *arguments, channel=channel, dsn=database.worker, given=given, **settings
        )
        assert done.returncode == 1, arguments
        silent(done.stdout, done.stderr)
        if arguments[0] == "check":
            [found] = [each for each in json.loads(done.stdout) if each["check"] == "broker"]
            assert found["level"] == "refused"
            assert_reported(f"{found['detail']} {found['remedy']}", rejection)
            assert done.stderr == ""
        else:
            [line] = done.stderr.splitlines()
            assert_reported(line, rejection)
    async with Client.from_environment({**settings, **client_environment(channel)}) as client:
        with pytest.raises(ConnectionFailed) as caught:
            await client.retrieve(embedding=VECTOR, principals=["user:1"])
        assert_reported(str(caught.value), rejection)
        silent(str(caught.value), repr(caught.value.__cause__))


async def test_a_password_that_is_changed_while_a_worker_runs_is_waited_for(
    *,
    kafka: ApacheKafka,
    certificates: Certificates,
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    """It has worked with these settings: what is wrong now may be mended on the other side, and nothing is lost."""
    await load(database.writer, tiny_corpus())
    worker = start_worker(
        database.worker, **SCRAM.environment(kafka, certificates, tmp_path), ANABRANCH_RETRY_MAX_SECONDS="1"
    )
    await worker.until_ready()
    first = query(VECTOR)
    await channel.send(as_avro(first))
    await output_reader.until_answered({first["event_id"]}, seconds=30)

    reported = "the server rejects the SCRAM-SHA-512 login; check KAFKA_SASL_USERNAME and KAFKA_SASL_PASSWORD"
    await asyncio.to_thread(kafka.set_password, WRONG)
    try:
        await asyncio.to_thread(kafka.restart)  # else who is in stays in
        second = query(VECTOR)
        await channel.send(as_avro(second))
        await worker.until_ready(ready=False)
        await until(lambda: reported in worker.log, lambda: worker.log, seconds=30)
        await asyncio.sleep(6)  # it is asked again meanwhile, and has the same to say
        assert worker.log.count(reported) == 1
        assert worker.process.poll() is None
        assert await asyncio.to_thread(worker.is_live)
    finally:
        await asyncio.to_thread(kafka.set_password, PASSWORD)
    await output_reader.until_answered({second["event_id"]}, seconds=60)
    await worker.until_ready(seconds=60)
    silent(worker.log)


_EVERYTHING = """\
import logging
import streams.telemetry.logs

streams.telemetry.logs._QUIET_SECONDS = 0.0
at = logging.Logger.setLevel
logging.Logger.setLevel = lambda self, level: at(self, logging.DEBUG)
"""


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_nothing_secret_is_logged_at_any_level(
    mechanism: str,
    *,
    kafka: ApacheKafka,
    certificates: Certificates,
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    """With every logger at DEBUG, the libraries' too; nobody can set that, but somebody may while searching."""
    await load(database.writer, tiny_corpus())
    (tmp_path / "sitecustomize.py").write_text(_EVERYTHING)
    way = Way(
        "SASL_PLAINTEXT",
        {**login(mechanism, "SASL_PLAINTEXT"), "KAFKA_SASL_PASSWORD": PASSWORD},
        authority=None,
    )
    worker = start_worker(
        database.worker,
        **way.environment(kafka, certificates, tmp_path),
        PYTHONPATH=str(tmp_path),
        PYTHONASYNCIODEBUG="1",
    )
    await worker.until_ready(seconds=60)
    event = query(VECTOR)
    await channel.send(as_avro(event))
    await output_reader.until_answered({event["event_id"]}, seconds=30)
    await worker.terminate()
    assert re.search(r"DEBUG +Request to .*: Metadata", worker.log), worker.log[:2000]
    assert "SaslHandShakeRequest" in worker.log
    assert_silent((*SECRETS, "correct horse"), worker.log)  # PostgreSQL's password too, or half of it
