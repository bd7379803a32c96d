"""Topics that do not exist, on a broker that creates whatever a client asks for: nobody here asks.

Only `anabranch topics` creates topics. A topic that another client creates has one partition and no limits of ours, and
a mistyped name would take events in silence.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import UnknownTopicOrPartitionError

from streams.broker.clients import running_consumer, running_producer
from tests.conftest import Database
from tests.integration.corpora import unit_vectors
from tests.integration.harness import (
    Channel,
    Worker,
    anabranch,
    as_json,
    command_seconds,
    query,
    until,
)
from tests.integration.kafka.apache_kafka import ApacheKafka

VECTOR = unit_vectors(1, 3)[0]
# What is asked of a command; it takes about a second. On a slow machine: so many times what the shortest command takes.
_SECONDS = 5
_TIMES = 12


@pytest.fixture(scope="module")
def creating_kafka(kafka_jars: Path) -> Iterator[ApacheKafka]:
    """One broker that creates topics by itself, as Kafka does unless it is configured otherwise."""
    with ApacheKafka(kafka_jars, settings={"auto.create.topics.enable": "true"}) as started:
        yield started


@pytest.fixture
def broker(creating_kafka: ApacheKafka) -> ApacheKafka:
    return creating_kafka


@pytest.fixture
def missing(broker: ApacheKafka) -> Channel:
    """Names of topics that do not exist."""
    return Channel(broker.bootstrap_servers, f"t{uuid4().hex[:8]}", producer=None)


@pytest.mark.parametrize(
    ("command", "topic"),
    [
        (("publish", "-"), "input"),
        (("tail",), "output"),
        (("tail", "--dead-letters"), "dead_letters"),
        (("validate", "--sample"), "dead_letters"),
        (("replay",), "dead_letters"),
        (("replay", "--apply"), "dead_letters"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
async def test_a_command_says_which_topic_is_missing_and_does_not_create_it(
    missing: Channel, figures: Callable[[str], None], command: tuple[str, ...], topic: str
) -> None:
    began = time.monotonic()
    done = anabranch(*command, channel=missing, given=as_json(query(VECTOR)).decode() + "\n")
    seconds = time.monotonic() - began
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(
        (f"anabranch {command[0]}: missing topic: ", f"anabranch {command[0]}: missing topics: ")
    )
    assert getattr(missing, topic) in line
    assert "; run `anabranch topics` to create " in line
    assert seconds <= max(_SECONDS, _TIMES * command_seconds()), f"{seconds:.1f} s"
    assert await topics_of(missing) == set()
    figures(f"{' '.join(command)}: {seconds:.1f} s")


async def test_a_worker_does_not_create_its_topics(
    database: Database, missing: Channel, tmp_path: Path
) -> None:
    worker = Worker(tmp_path / "worker.log", missing, database.worker, {})
    try:
        await until(worker.is_live, lambda: worker.log, seconds=20)
        await until(lambda: "missing topic" in worker.log, lambda: worker.log, seconds=20)
        # A broker says that it does not know a topic, and creates it a moment later.
        await asyncio.sleep(3)
        assert await topics_of(missing) == set()
        assert not worker.is_ready()
    finally:
        worker.end()


async def test_a_client_creates_no_topics_and_others_of_its_process_do(missing: Channel) -> None:
    options = {"bootstrap_servers": missing.bootstrap_servers, "request_timeout_ms": 3000}
    async with running_producer(options) as producer, AIOKafkaProducer(**options) as other:
        with pytest.raises(UnknownTopicOrPartitionError):
            await producer.partitions_for(missing.input)
        with pytest.raises(UnknownTopicOrPartitionError):
            async with running_consumer(options, missing.output):
                pass
        assert await topics_of(missing) == set()
        async with asyncio.timeout(30):
            assert await other.partitions_for(missing.replies) == {0}
        assert await topics_of(missing) == {missing.replies}


async def topics_of(channel: Channel) -> set[str]:
    """Those of the channel's topics that exist."""
    client = AIOKafkaAdminClient(bootstrap_servers=channel.bootstrap_servers)
    await client.start()
    try:
        return {topic for topic in await client.list_topics() if topic.startswith(channel.name)}
    finally:
        await client.close()
