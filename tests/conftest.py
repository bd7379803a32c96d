"""What every test stands on.

* The environment is scrubbed of whatever would configure a worker or a driver: a test sees only what it sets. No
  library reports usage.
* ``postgres`` is one server for the whole run. It has login roles as an installation has: an owner, who is
  no superuser; a back end, which writes; a worker, which may read by policy and nothing else.
* ``database`` is a database of its own for each test, cloned from one that was migrated once, by the owner.
  ``empty_database`` is one that has the extension and nothing else.
* ``model_folder`` is an embedding model, beside the checkout. Without it its tests are skipped, but for CI=true.
* ``browser`` is a Chromium without a window. Without one its tests are skipped, but for CI=true.
* ``kafka_jars`` is what Apache Kafka is started from. Where it cannot be had its tests are skipped, but for CI=true.

Tests may be coroutines (pytest-asyncio, auto mode).
"""

import asyncio
import os
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import asyncpg
import hypothesis
import pytest

from streams.embedded.postgres import EmbeddedPostgres
from streams.store.migrate import migrate
from tests.browser import Browser, BrowserUnavailable
from tests.integration.kafka.apache_kafka import KafkaUnavailable, jars
from tests.left_out import left_out_lines, unavailable, why_not

# A shell's background job ignores interrupts, and so would every process that a test starts there.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example has no time limit: other work may share the machine.
hypothesis.settings.register_profile("anabranch", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("anabranch")

SETTING: Final = "anabranch.principals"

MODEL: Final = Path(__file__).resolve().parents[2] / "shared/model"  # beside the checkout

_LONG_SECONDS: Final = 60

_SCRUBBED: Final = ("ANABRANCH_", "KAFKA_", "DATABASE_", "SCHEMA_REGISTRY_", "PG", "LANGCHAIN_", "LANGSMITH_")
_PASSWORD: Final = "correct horse, battery & staple"  # with characters that a URI has to escape
_ROLES: Final = f"""
    CREATE ROLE anabranch_reader NOLOGIN;
    CREATE ROLE anabranch_writer NOLOGIN;
    CREATE ROLE store_owner LOGIN PASSWORD '{_PASSWORD}';
    CREATE ROLE back_end LOGIN PASSWORD '{_PASSWORD}' IN ROLE anabranch_writer;
    CREATE ROLE worker LOGIN PASSWORD '{_PASSWORD}' IN ROLE anabranch_reader;
"""

T = TypeVar("T")


_DESELECTED: Final = pytest.StashKey[Mapping[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out what is slow or needs another server than PostgreSQL"
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="also what is marked as long, and each broker where either would do",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_DESELECTED] = {}
    for name in [name for name in os.environ if name.startswith(_SCRUBBED)]:
        del os.environ[name]
    os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fast, long = config.getoption("fast"), config.getoption("long")
    reasons = [(item, why_not(item, fast=fast, long=long)) for item in items]
    counted: Mapping[str, int] = Counter(why for _, why in reasons if why)
    config.stash[_DESELECTED] = counted
    if counted:
        config.hook.pytest_deselected(items=[item for item, why in reasons if why])
    items[:] = [item for item, why in reasons if not why]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist's; each has seen every test
        deselected = session.config.stash[_DESELECTED]
        session.config.workeroutput["deselected"] = dict(deselected)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    _show_figures(terminalreporter)
    _show_seconds(terminalreporter)
    skipped = terminalreporter.stats.get("skipped", [])
    if lines := left_out_lines(skipped, config.stash[_DESELECTED]):
        terminalreporter.section("left out")
        for line in lines:
            terminalreporter.write_line(line)


def _show_seconds(terminalreporter: pytest.TerminalReporter) -> None:
    """By folder, for the table in docs/development.md; of a run that took long."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    if sum(seconds.values()) > _LONG_SECONDS:
        terminalreporter.section("seconds, of all processes together")
        for folder, spent in sorted(seconds.items(), key=itemgetter(1), reverse=True):
            terminalreporter.write_line(f"{spent:7.1f}  {folder}")


def _show_figures(terminalreporter: pytest.TerminalReporter) -> None:
    # Carried by the reports, which come from other processes too.
    lines = [
        str(line)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, line in report.user_properties
        if name == "figure"
    ]
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)


@dataclass(frozen=True)
class Database:
    """Connection strings of one database, by role."""

    name: str
    admin: str  # superuser
    owner: str  # owns the tables, no superuser
    writer: str  # a back end: member of anabranch_writer
    worker: str  # member of anabranch_reader


class PostgresServer:
    """The embedded server, and databases on it."""

    def __init__(self, embedded: EmbeddedPostgres) -> None:
        self.embedded = embedded
        self._numbers = count(1)
        self._execute(embedded.dsn(), _ROLES)
        self._empty = self.create("template0")
        self._execute(
            self._empty.admin, "CREATE EXTENSION vector; GRANT CREATE ON SCHEMA public TO store_owner"
        )
        self._migrated = self.create(self._empty.name)
        _run(migrate(self._migrated.owner, principals_setting=SETTING))

    def database(self) -> Database:
        """A new database, migrated."""
        return self.create(self._migrated.name)

    def empty_database(self) -> Database:
        """A new database with the extension, and the owner's right to create tables."""
        return self.create(self._empty.name)

    def create(self, template: str) -> Database:
        name = f"test_{next(self._numbers)}"
        self._execute(self.embedded.dsn(), f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        dsn = self.embedded.dsn
        return Database(
            name=name,
            admin=dsn(database=name),
            owner=dsn("store_owner", name, _PASSWORD),
            writer=dsn("back_end", name, _PASSWORD),
            worker=dsn("worker", name, _PASSWORD),
        )

    def drop(self, database: Database) -> None:
        self._execute(self.embedded.dsn(), f"DROP DATABASE {database.name} WITH (FORCE)")

    def login(self, role: str, database: Database) -> str:
        """A connection string for a role that a test has made with ``PASSWORD 'test'``."""
        return self.embedded.dsn(role, database.name, "test")

    @staticmethod
    def _execute(dsn: str, statements: str) -> None:
        async def execute() -> None:
            connection = await asyncpg.connect(dsn)
            try:
                await connection.execute(statements)
            finally:
                await connection.close()

        _run(execute())


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with _fast_folder() as folder, EmbeddedPostgres(folder) as embedded:
        yield PostgresServer(embedded)


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    created = postgres.database()
    yield created
    postgres.drop(created)


@pytest.fixture
def empty_database(postgres: PostgresServer) -> Iterator[Database]:
    created = postgres.empty_database()
    yield created
    postgres.drop(created)


@pytest.fixture(scope="session")
def kafka_jars() -> Path:
    """Apache Kafka's jars; resolved where nobody has done so yet."""
    try:
        return jars()
    except KafkaUnavailable as error:
        unavailable(error, enable="install Java 17 or newer, and Maven (mvn) with access to Maven Central")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """all-mpnet-base-v2, exported to ONNX; with it, the sample's embeddings were computed."""
    if not (MODEL / "tokenizer.json").is_file():
        unavailable(f"no embedding model in {MODEL}", enable="export all-mpnet-base-v2 to ONNX there")
    return MODEL


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        found = Browser()
    except BrowserUnavailable as error:
        unavailable(
            error, enable="on Debian: apt-get install --no-install-recommends chromium-headless-shell"
        )
    with found:
        yield found


@contextmanager
def _fast_folder() -> Iterator[Path | None]:
    """Memory, where there is enough: a clone is 300 new files, 10 ms there and 250 ms on a slow disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 2 << 30:
        yield None
        return
    with TemporaryDirectory(prefix="anabranch-postgres-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine from a fixture, out of the way of the test's own event loop."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
