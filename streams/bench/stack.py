"""An embedded store and broker with a world in them, and real workers on both."""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol

import asyncpg

from streams.broker.topics import create_topics, topic_specs
from streams.embedded.broker import EmbeddedBroker
from streams.embedded.ports import free_port
from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres
from streams.embedded.worker import WorkerProcess
from streams.settings import Settings, load
from streams.store.migrate import migrate

__all__ = ["Stack", "Topics", "open_stack"]

PRINCIPALS_SETTING: Final = "anabranch.principals"
_PARTITIONS: Final = 3
# The whole world fits into memory, as a store that is searched all day does.
_SERVER: Final = {**THROW_AWAY, "shared_buffers": "1GB", "max_connections": "200", "autovacuum": "off"}
# The embedded broker answers a join only after the rebalance timeout, and delays an empty fetch for the full wait.
_FOR_THE_EMBEDDED_BROKER: Final = {
    "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": "2",
    "ANABRANCH_SESSION_TIMEOUT_SECONDS": "6",
    "ANABRANCH_FETCH_MAX_WAIT_SECONDS": "0.02",
}


class Broker(Protocol):
    """A broker process on this machine."""

    @property
    def bootstrap_servers(self) -> str: ...

    @property
    def pid(self) -> int: ...


@dataclass(frozen=True)
class Topics:
    """One contestant's topics; its consumer group has the input topic's name."""

    input: str
    output: str
    dead_letters: str


class Stack:
    """Addresses and processes of the embedded servers.

    Attributes:
        postgres: the server; its databases belong to the caller.
        broker: the broker.
        directory: for logs and recordings; removed at the end.
    """

    def __init__(self, postgres: EmbeddedPostgres, broker: Broker, directory: Path) -> None:
        self.postgres = postgres
        self.broker = broker
        self.directory = directory
        self._password = secrets.token_urlsafe(16)

    @property
    def fetch_waits_fully(self) -> bool:
        """Whether the broker delays an empty fetch for its full wait, even if a record arrives meanwhile."""
        return isinstance(self.broker, EmbeddedBroker)

    @property
    def client_options(self) -> dict[str, Any]:
        return {"bootstrap_servers": self.broker.bootstrap_servers}

    @property
    def processes(self) -> dict[str, int]:
        return {"postgres": self.postgres.pid, "broker": self.broker.pid, "generator": os.getpid()}

    def dsn(self, role: str, database: str) -> str:
        return self.postgres.dsn(role, database, self._password)

    def admin_dsn(self, database: str = "postgres") -> str:
        return self.postgres.dsn(database=database)

    def worker_settings(self, database: str) -> Settings:
        """The settings of a worker without others than the addresses."""
        return load(
            {
                "DATABASE_CONNECTION_STRING": self.dsn("bench_worker", database),
                "KAFKA_BOOTSTRAP_SERVERS": self.broker.bootstrap_servers,
                "ANABRANCH_PRINCIPALS_SETTING": PRINCIPALS_SETTING,
            }
        )

    async def create_roles(self) -> None:
        """A worker's role, and one that bypasses row-level security, to measure what access control costs."""
        await self._execute(
            f"""CREATE ROLE anabranch_reader NOLOGIN; CREATE ROLE anabranch_writer NOLOGIN;
            CREATE ROLE bench_worker LOGIN PASSWORD '{self._password}' IN ROLE anabranch_reader;
            CREATE ROLE bench_unguarded LOGIN BYPASSRLS PASSWORD '{self._password}' IN ROLE anabranch_reader;"""
        )

    async def create_store(self, database: str) -> None:
        """A database with the reference schema."""
        await self._execute(f"CREATE DATABASE {database}")
        await migrate(self.admin_dsn(database), principals_setting=PRINCIPALS_SETTING)

    async def create_topics(self, name: str, *, partitions: int = _PARTITIONS) -> Topics:
        """Topics of their own for one contestant."""
        topics = Topics(f"bench.{name}.in", f"bench.{name}.out", f"bench.{name}.dead")
        await create_topics(
            self.client_options,
            topic_specs(
                input_topic=topics.input,
                output_topic=topics.output,
                dead_letter_topic=topics.dead_letters,
                partitions=partitions,
                replication_factor=1,
                max_event_bytes=1024 * 1024,
            ),
        )
        return topics

    def start_worker(
        self,
        topics: Topics,
        *,
        database: str,
        settings: Mapping[str, str] | None = None,
        record: Path | None = None,
        delay_while: Path | None = None,
    ) -> WorkerProcess:
        """Start a worker; `WorkerProcess.until_ready` waits for it.

        Args:
            topics: what it reads and writes.
            database: where it searches.
            settings: over the defaults.
            record: where it records each event; None: it does not.
            delay_while: while this file exists, each event takes longer; None: never.
        """
        port = free_port()
        environment = {
            "DATABASE_CONNECTION_STRING": self.dsn("bench_worker", database),
            "KAFKA_BOOTSTRAP_SERVERS": self.broker.bootstrap_servers,
            "ANABRANCH_INPUT_TOPIC": topics.input,
            "ANABRANCH_OUTPUT_TOPIC": topics.output,
            "ANABRANCH_DEAD_LETTER_TOPIC": topics.dead_letters,
            "ANABRANCH_CONSUMER_GROUP": topics.input,
            "ANABRANCH_PRINCIPALS_SETTING": PRINCIPALS_SETTING,
            "ANABRANCH_GRACE_PERIOD_SECONDS": "3",
            **(_FOR_THE_EMBEDDED_BROKER if self.fetch_waits_fully else {}),
            **(settings or {}),
        }
        program = ["-m", "streams.bench.worker"]
        if record is not None:
            program += ["--record", str(record)]
        if delay_while is not None:
            program += ["--delay-while", str(delay_while)]
        return WorkerProcess(program, environment, self.directory / f"worker-{port}.log", port=port)

    async def _execute(self, statements: str) -> None:
        connection = await asyncpg.connect(self.admin_dsn())
        try:
            await connection.execute(statements)
        finally:
            await connection.close()


@asynccontextmanager
async def open_stack(
    settings: Mapping[str, str] | None = None, *, broker: Broker | None = None
) -> AsyncIterator[Stack]:
    """Start the servers, with roles and without a store; stop them at the end.

    Args:
        settings: of PostgreSQL, over the defaults.
        broker: a running one, which is not stopped; None: an embedded one.

    Raises:
        EmbeddedPostgresError, EmbeddedBrokerError: a wheel is missing, or its server does not start.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    with ExitStack() as resources:
        if (
            task is not None
        ):  # otherwise SIGTERM would leave the servers running; SIGINT already cancels the task
            loop.add_signal_handler(signal.SIGTERM, task.cancel)
            resources.callback(loop.remove_signal_handler, signal.SIGTERM)
        directory = Path(
            resources.enter_context(TemporaryDirectory(prefix="anabranch-bench-", ignore_cleanup_errors=True))
        )
        postgres = EmbeddedPostgres(settings={**_SERVER, **(settings or {})})
        embedded = EmbeddedBroker(directory / "broker")
        resources.callback(embedded.stop)
        resources.callback(postgres.close)
        starts = [postgres.start] if broker is not None else [postgres.start, embedded.start]
        await asyncio.gather(*(asyncio.to_thread(start) for start in starts))
        stack = Stack(postgres, embedded if broker is None else broker, directory)
        await stack.create_roles()
        yield stack
