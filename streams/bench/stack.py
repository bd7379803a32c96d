"""An embedded store and broker with a world in them, and real workers on both."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import asyncpg

from streams.bench import BenchError
from streams.broker.topics import create_topics, topic_specs
from streams.embedded.broker import EmbeddedBroker
from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres
from streams.settings import Settings, load
from streams.store.migrate import migrate

__all__ = ["Stack", "Topics", "Worker", "open_stack"]

PRINCIPALS_SETTING: Final = "anabranch.principals"
_PARTITIONS: Final = 3
_READY_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 15.0
# The whole world fits into memory, as a store that is searched all day does.
_SERVER: Final = {**THROW_AWAY, "shared_buffers": "1GB", "max_connections": "200", "autovacuum": "off"}
# The embedded broker answers a join only after the rebalance timeout, and delays an empty fetch for the full wait.
_BROKER: Final = {
    "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": "2",
    "ANABRANCH_SESSION_TIMEOUT_SECONDS": "6",
    "ANABRANCH_FETCH_MAX_WAIT_SECONDS": "0.02",
    "ANABRANCH_GRACE_PERIOD_SECONDS": "3",
}


@dataclass(frozen=True)
class Topics:
    """One contestant's topics; its consumer group has the input topic's name."""

    input: str
    output: str
    dead_letters: str


class Worker:
    """A worker process.

    Attributes:
        process: the process; its id is that of the Python interpreter.
        port: of its web pages.
    """

    def __init__(
        self, environment: Mapping[str, str], log_file: Path, *, program: Sequence[str], port: int
    ) -> None:
        self._log_file = log_file
        self.port = port
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603  # a trusted module
                [sys.executable, *program],
                env={"PATH": os.environ.get("PATH", ""), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    async def until_ready(self) -> None:
        """Wait until the worker has joined its group and can search.

        Raises:
            BenchError: it ended, or is not ready in time.
        """
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise BenchError(
                    f"the worker exited with code {self.process.returncode}: {self._last_line()}"
                )
            if await asyncio.to_thread(self._is_ready):
                return
            await asyncio.sleep(0.05)
        raise BenchError(f"the worker was not ready within {_READY_SECONDS:.0f} s: {self._last_line()}")

    async def stop(self) -> None:
        """Stop it by SIGTERM, so that it commits what it has answered."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                await asyncio.to_thread(self.process.wait, _STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _is_ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.port}/healthz/ready"
            with urllib.request.urlopen(url, timeout=2) as answer:  # a local http URL
                return bool(answer.status == HTTPStatus.OK)
        except (urllib.error.URLError, OSError):
            return False

    def _last_line(self) -> str:
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


class Stack:
    """Addresses and processes of the embedded servers.

    Attributes:
        postgres: the server; its databases belong to the caller.
        broker: the broker.
        directory: for logs and recordings; removed at the end.
    """

    def __init__(self, postgres: EmbeddedPostgres, broker: EmbeddedBroker, directory: Path) -> None:
        self.postgres = postgres
        self.broker = broker
        self.directory = directory
        self._password = secrets.token_urlsafe(16)

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
    ) -> Worker:
        """Start a worker; `Worker.until_ready` waits for it.

        Args:
            topics: what it reads and writes.
            database: where it searches.
            settings: over the defaults.
            record: where it records each event; None: it does not.
            delay_while: while this file exists, each event takes longer; None: never.
        """
        port = _free_port()
        environment = {
            "DATABASE_CONNECTION_STRING": self.dsn("bench_worker", database),
            "KAFKA_BOOTSTRAP_SERVERS": self.broker.bootstrap_servers,
            "ANABRANCH_INPUT_TOPIC": topics.input,
            "ANABRANCH_OUTPUT_TOPIC": topics.output,
            "ANABRANCH_DEAD_LETTER_TOPIC": topics.dead_letters,
            "ANABRANCH_CONSUMER_GROUP": topics.input,
            "ANABRANCH_WEB_PORT": str(port),
            "ANABRANCH_WEB_BIND_ADDRESS": "127.0.0.1",
            "ANABRANCH_PRINCIPALS_SETTING": PRINCIPALS_SETTING,
            **_BROKER,
            **(settings or {}),
        }
        program = ["-m", "streams.bench.worker"]
        if record is not None:
            program += ["--record", str(record)]
        if delay_while is not None:
            program += ["--delay-while", str(delay_while)]
        return Worker(environment, self.directory / f"worker-{port}.log", program=program, port=port)

    async def _execute(self, statements: str) -> None:
        connection = await asyncpg.connect(self.admin_dsn())
        try:
            await connection.execute(statements)
        finally:
            await connection.close()


@asynccontextmanager
async def open_stack(settings: Mapping[str, str] | None = None) -> AsyncIterator[Stack]:
    """Start the servers, with roles and without a store; stop them at the end.

    Args:
        settings: of PostgreSQL, over the defaults.

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
        broker = EmbeddedBroker(directory / "broker")
        resources.callback(broker.stop)
        resources.callback(postgres.close)
        await asyncio.gather(asyncio.to_thread(postgres.start), asyncio.to_thread(broker.start))
        stack = Stack(postgres, broker, directory)
        await stack.create_roles()
        yield stack


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
