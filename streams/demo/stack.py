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

from streams.broker.topics import create_topics
from streams.configured import required_topics
from streams.demo.corpus import load_corpus
from streams.embedded.broker import EmbeddedBroker
from streams.embedded.ports import HOST, free_port
from streams.embedded.postgres import EmbeddedPostgres
from streams.embedded.worker import WorkerProcess
from streams.sample import Corpus
from streams.settings import (
    EmbeddingSettings,
    Settings,
    environment_names,
    load,
    load_embedding_if_set,
    secret_names,
)
from streams.store.migrate import migrate

__all__ = [
    "DemoError",
    "Stack",
    "client_environment",
    "demo_settings",
    "embedding_environment",
    "start_stack",
    "worker_environment",
]

# The embedded broker answers a join only after the rebalance timeout; a real one as soon as all members have joined.
_REBALANCE_TIMEOUT_SECONDS = 2
_PARTITIONS = 3
_MAX_EVENT_BYTES = 1024 * 1024
# The embedded broker always delays an empty fetch response for the full wait, even if a record arrives.
_FETCH_MAX_WAIT_SECONDS = "0.02"

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
        DemoError: the settings name another model than the corpus's.
        WorkerError: the worker does not become ready.
        SettingsError: a setting that the demo uses is invalid.
        EmbeddedPostgresError, EmbeddedBrokerError: a wheel is missing, or its server does not start.
    """
    settings = demo_settings()
    if settings.anabranch_embedding_model not in {None, corpus.embedding_model}:
        raise DemoError(
            f"the sample was embedded with {corpus.embedding_model}; set ANABRANCH_EMBEDDING_MODEL to this name, or"
            " unset it for the demo"
        )
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
        password = secrets.token_urlsafe(16)
        admin_dsn = postgres.dsn()
        await migrate(admin_dsn, principals_setting=settings.anabranch_principals_setting)
        await _create_login(admin_dsn, password)
        topics = required_topics(
            settings, None, partitions=_PARTITIONS, replication_factor=1, max_event_bytes=_MAX_EVENT_BYTES
        )
        await create_topics({"bootstrap_servers": broker.bootstrap_servers}, topics)

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
        "ANABRANCH_FETCH_MAX_WAIT_SECONDS": _FETCH_MAX_WAIT_SECONDS,
        "ANABRANCH_RESULT_CONTRACT": "1.1.0",  # so that `anabranch ask` can explain an answer
        "ANABRANCH_GRACE_PERIOD_SECONDS": "3",
        "ANABRANCH_LOG_FORMAT": "console",
    }
    settings = stack.settings
    if settings.anabranch_profiles_file is not None:  # the worker runs in another directory
        environment["ANABRANCH_PROFILES_FILE"] = str(settings.anabranch_profiles_file.absolute())
    if settings.anabranch_embedding_model is not None:
        environment["ANABRANCH_EMBEDDING_MODEL"] = settings.anabranch_embedding_model
    return environment


def client_environment(stack: Stack) -> dict[str, str]:
    """The settings with which other commands reach the components."""
    return {
        "KAFKA_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "DATABASE_CONNECTION_STRING": stack.worker_dsn,
        "DATABASE_ADMIN_CONNECTION_STRING": stack.admin_dsn,
        "DATABASE_INGESTION_CONNECTION_STRING": stack.admin_dsn,  # writes as anabranch_writer
        "ANABRANCH_FETCH_MAX_WAIT_SECONDS": _FETCH_MAX_WAIT_SECONDS,
        "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": str(_REBALANCE_TIMEOUT_SECONDS),  # for an embedding stage
    }


def embedding_environment() -> dict[str, str]:
    """The settings of this process for embedding texts, valid in any directory; empty if no provider is set.

    Raises:
        SettingsError: one of them is invalid or missing.
    """
    if load_embedding_if_set() is None:
        return {}
    files = {"ANABRANCH_EMBEDDING_PATH", *(f"{name}_FILE" for name in secret_names(EmbeddingSettings))}
    return {
        name: str(Path(value).absolute()) if name in files else value
        for name in sorted(environment_names(EmbeddingSettings) | files)
        if (value := os.environ.get(name))
    }
