"""Topics that appear after the worker has started, or that are deleted and created again under it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
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
# What is asked of a worker; it looks every three seconds.
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

    await create(channel, channel.output, channel.dead_letters, channel.replies)
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


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
async def test_a_topic_that_was_created_again_is_read_from_its_beginning(
    database: Database,
    channel: Channel,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
    *,
    at_once: bool,
) -> None:
    await create(channel, channel.input, channel.output, channel.dead_letters, channel.replies)
    worker = start_worker(database.worker)
    await worker.until_ready()
    async with OutputReader(channel) as output_reader:
        await output_reader.until_answered(await ask(channel, 30), seconds=30)
        await asyncio.sleep(1)  # for the commit

        await delete(channel, channel.input)
        if not at_once:
            await until_missing(worker, [channel.input])
            assert f"missing topic: {channel.input}; run `anabranch topics` to create it" in worker.log
        await create(channel, channel.input)
        created = time.monotonic()
        # Fewer than before: what the worker had read of the old topic lies beyond the end of the new one.
        asked = await ask(channel, 15)
        await output_reader.until_answered(asked, seconds=60)
        seconds = time.monotonic() - created
        # More than before, at offsets that the old topic had, too.
        await output_reader.until_answered(await ask(channel, 60), seconds=30)
    assert seconds <= _SECONDS, f"{seconds:.1f} s"
    await until(
        lambda: f"{channel.input} was deleted and created again" in worker.log,
        lambda: worker.log,
        seconds=_SECONDS,
    )
    await worker.until_ready()
    figures(f"answers {seconds:.1f} s after the topic was created again")


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)  # the embedded one takes commits of members only
async def test_an_offset_of_the_deleted_topic_counts_for_nothing_in_its_successor(
    database: Database, channel: Channel, start_worker: Callable[..., Worker]
) -> None:
    """As a worker commits that has not heard of it yet, while the new topic grows longer than the old one was."""
    await create(channel, channel.input, channel.output, channel.dead_letters, channel.replies)
    async with OutputReader(channel) as output_reader:
        worker = start_worker(database.worker)
        await output_reader.until_answered(await ask(channel, 30), seconds=30)
        await worker.terminate()

        async with member(channel) as consumer:
            partitions = [TopicPartition(channel.input, number) for number in range(PARTITIONS)]
            consumer.assign(partitions)
            offsets = await consumer._coordinator.fetch_committed_offsets(partitions)
            assert sum(offset.offset for offset in offsets.values()) == 30
            await delete(channel, channel.input)
            await create(channel, channel.input)
            await consumer.commit(offsets)
        asked = await ask(channel, 60)
        start_worker(database.worker)
        await output_reader.until_answered(asked, seconds=60)


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
