"""The aiokafka clients of this project: the only place that creates a producer, a consumer or an admin client.

Faust creates the worker's consumer (`streams.worker.faust_internals`).
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from streams.broker.aiokafka_internals import OwnConsumer, OwnProducer
from streams.broker.records import fetched_records

__all__ = [
    "MAX_BATCH_BYTES",
    "new_consumer",
    "new_producer",
    "running_admin",
    "running_consumer",
    "running_producer",
]

# The broker decides what is too large. This limit only has to exceed what any topic accepts.
_MAX_REQUEST_BYTES: Final = 64 * 1024 * 1024
MAX_BATCH_BYTES: Final = 16 * 1024
"""A larger record has a batch of its own.

A topic's limit applies to batches. Larger batches than this could be rejected although each record fits alone."""
_LINGER_MS: Final = 5


def new_producer(options: Mapping[str, Any], **overrides: Any) -> AIOKafkaProducer:
    """A producer that is not started yet; a send is acknowledged when all in-sync replicas have the record.

    Args:
        options: from `BrokerConnection.client_options`.
        overrides: further keyword arguments of `AIOKafkaProducer`.
    """
    defaults = {
        "acks": "all",
        "linger_ms": _LINGER_MS,
        "max_batch_size": MAX_BATCH_BYTES,
        "max_request_size": _MAX_REQUEST_BYTES,
    }
    return OwnProducer(**{**defaults, **options, **overrides})


def new_consumer(options: Mapping[str, Any], *topics: str, **overrides: Any) -> AIOKafkaConsumer:
    """A consumer that is not started yet, does not commit automatically, and continues after unreadable batches.

    Args:
        options: from `BrokerConnection.client_options`.
        topics: the topics to subscribe to.
        overrides: further keyword arguments of `AIOKafkaConsumer`.
    """
    return OwnConsumer(
        *topics,
        fetched_records=fetched_records(),
        **{"enable_auto_commit": False, **options, **overrides},
    )


@asynccontextmanager
async def running_producer(options: Mapping[str, Any], **overrides: Any) -> AsyncIterator[AIOKafkaProducer]:
    """A producer that is started here and stopped at the end.

    Raises:
        KafkaError: the broker cannot be reached or rejects the client.
    """
    producer = new_producer(options, **overrides)
    try:
        await producer.start()
        yield producer
    finally:
        await producer.stop()


@asynccontextmanager
async def running_consumer(
    options: Mapping[str, Any], *topics: str, **overrides: Any
) -> AsyncIterator[AIOKafkaConsumer]:
    """A consumer that is started here and stopped at the end.

    Raises:
        KafkaError: the broker cannot be reached or rejects the client.
    """
    consumer = new_consumer(options, *topics, **overrides)
    try:
        await consumer.start()
        yield consumer
    finally:
        await consumer.stop()


@asynccontextmanager
async def running_admin(options: Mapping[str, Any]) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client that is started here and closed at the end.

    Raises:
        KafkaError: the broker cannot be reached or rejects the client.
    """
    client = AIOKafkaAdminClient(**options)
    try:
        await client.start()
        yield client
    finally:
        await client.close()
