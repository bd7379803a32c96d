"""Topics that appear after the worker has started, or that are deleted and created again under it."""

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from streams.broker.topics import create_topics
from streams.embedded.broker import EmbeddedBroker
from tests.conftest import Database
from tests.integration.corpora import unit_vectors
from tests.integration.harness import (
    PARTITIONS,
    Channel,
    OutputReader,
    Worker,
    as_json,
    query,
    topic_specs_of,
    until,
)
from tests.integration.kafka.apache_kafka import ApacheKafka

VECTOR = unit_vectors(1, 3)[0]
# What is asked of a worker; it looks every five seconds.
_SECONDS = 15


@pytest.fixture
async def channel(broker: EmbeddedBroker | ApacheKafka) -> AsyncIterator[Channel]:
    """Names of topics that do not exist yet, and a producer that finds them as soon as they do."""
    producer = AIOKafkaProducer(
        bootstrap_servers=broker.bootstrap_servers, acks="all", linger_ms=5, metadata_max_age_ms=500
    )
    await producer.start()
    try:
        yield Channel(broker.bootstrap_servers, f"t{uuid4().hex[:8]}", producer)
    finally:
        await producer.stop()


@pytest.mark.xfail(strict=True, reason="topics that appear late are noticed after five minutes")
@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
async def test_topics_that_appear_late_are_read_within_fifteen_seconds(
    database: Database,
    channel: Channel,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    worker = start_worker(database.worker)
    missing = sorted([channel.input, channel.output, channel.dead_letters])
    await until_missing(worker, missing)
    assert f"missing topics: {', '.join(missing)}; run `anabranch topics` to create them" in worker.log
    assert not worker.is_ready()

    await create(channel, channel.output, channel.dead_letters)
    await until_missing(worker, [channel.input])
    await create(channel, channel.input)
    created = time.monotonic()
    async with OutputReader(channel) as output_reader:
        asked = await ask(channel, 20)
        await output_reader.until_answered(asked, seconds=60)
        seconds = time.monotonic() - created
    assert seconds <= _SECONDS, f"{seconds:.1f} s"
    await worker.until_ready()
    assert json.loads(worker.page("/healthz/ready")[1])["missing_topics"] == []
    figures(f"answers {seconds:.1f} s after the topic was created")


async def create(channel: Channel, *topics: str) -> None:
    """Those of the channel's topics, as `anabranch topics` does."""
    specs = [spec for spec in topic_specs_of(channel) if spec.name in topics]
    await create_topics({"bootstrap_servers": channel.bootstrap_servers}, specs)


async def delete(channel: Channel, topic: str) -> None:
    client = AIOKafkaAdminClient(bootstrap_servers=channel.bootstrap_servers)
    await client.start()
    try:
        [(_, code)] = (await client.delete_topics([topic])).topic_error_codes
        assert code == 0
    finally:
        await client.close()


@asynccontextmanager
async def member(channel: Channel) -> AsyncIterator[AIOKafkaConsumer]:
    """A consumer of the worker's group that joins nothing."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=channel.bootstrap_servers, group_id=channel.name, enable_auto_commit=False
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


async def ask(channel: Channel, count: int) -> set[str]:
    """Publishes so many events, to each partition in turn; returns their ids."""
    asked = set()
    for number in range(count):
        event = query(VECTOR)
        asked.add(event["event_id"])
        await channel.send(as_json(event), partition=number % PARTITIONS)
    return asked


async def until_missing(worker: Worker, topics: list[str]) -> None:
    """Waits until the readiness page names exactly these."""

    def named() -> list[str] | None:
        status, body = worker.page("/healthz/ready")
        return json.loads(body).get("missing_topics") if status == 503 else None

    await until(lambda: named() == topics, lambda: worker.log, seconds=_SECONDS)
