"""Runs a command's work on Kafka or PostgreSQL, and reports why a server cannot be used."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import asyncpg
from aiokafka.errors import KafkaError

from streams.broker.diagnosis import diagnose
from streams.broker.topics import MissingTopics, TopicNotCreated
from streams.cli.errors import Failed
from streams.configured import broker_connection
from streams.network_errors import connection_problem, is_unreachable
from streams.settings import Settings
from streams.store.connect_errors import explain

__all__ = ["client_options", "run_on_kafka", "run_on_store", "silence_client_logs"]

T = TypeVar("T")


def client_options(settings: Settings) -> dict[str, Any]:
    """The options of aiokafka's clients."""
    return broker_connection(settings).client_options()


def silence_client_logs() -> None:
    """Without this, aiokafka also logs the errors that it raises."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def run_on_kafka(work: Coroutine[Any, Any, T], settings: Settings, *, texts: bool = False) -> T:
    """Run work that uses the brokers in the settings.

    Args:
        work: what to run.
        settings: the worker's, or an embedding stage's.
        texts: whether the work uses an embedding stage's topics.

    Raises:
        Failed: a topic is missing, or no broker can be used.
    """
    silence_client_logs()
    try:
        return asyncio.run(work)
    except MissingTopics as error:
        raise Failed(str(MissingTopics(error.topics, texts=texts))) from None
    except TopicNotCreated as error:
        raise Failed(f"Kafka at {settings.kafka_bootstrap_servers}: {error}") from None
    except KafkaError as error:
        diagnosis = asyncio.run(diagnose(broker_connection(settings)))
        raise Failed(
            f"Kafka at {settings.kafka_bootstrap_servers}: {type(error).__name__}: {error}"
            if diagnosis is None
            else str(diagnosis)
        ) from None


def run_on_store(work: Coroutine[Any, Any, T], setting: str = "DATABASE_ADMIN_CONNECTION_STRING") -> T:
    """Run work that uses the connection string of a setting, by default the owner's.

    Raises:
        Failed: PostgreSQL cannot be reached, or reports an error.
    """
    try:
        return asyncio.run(work)
    except Exception as error:
        if (refused := explain(error, setting)) is not None:
            raise Failed(str(refused)) from None
        # asyncpg also raises the third if a connection is lost at an unfortunate moment.
        if not isinstance(
            error, (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
        ):
            raise
        if is_unreachable(error):
            why = connection_problem(error)
            raise Failed(
                f"PostgreSQL: cannot connect ({why}); check {setting}, and that the server is running"
            ) from None
        raise Failed(f"PostgreSQL: {type(error).__name__}: {error}") from None
