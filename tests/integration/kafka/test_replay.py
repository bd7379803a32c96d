"""Replays on Apache Kafka: what only a broker with sizes, transactions and retention can show."""

import asyncio
import random
from collections.abc import Callable

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete

from streams.broker.topics import DEAD_LETTER_MARGIN_BYTES
from streams.core.errors import UnknownProfile
from streams.wire.deadletter import error_headers
from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, as_json, query
from tests.integration.kafka.test_sizes import set_most_bytes
from tests.integration.worker.test_replay import (  # noqa: F401  # a fixture
    STORE_OUTAGE,
    InputReader,
    input_reader,
    read_dead_letters,
    replay,
    until_dead_letters,
    write_dead_letter,
)

_MIB = 1024 * 1024
_MAX_OVERHEAD = 100
VECTOR = unit_vectors(1, 1)[0]


async def test_what_an_outage_dead_lettered_is_answered_after_it(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(
        database.worker,
        ANABRANCH_STORE_OUTAGE="dead_letter",
        ANABRANCH_RETRY_BASE_SECONDS="0.2",
        ANABRANCH_RETRY_MAX_SECONDS="0.5",
    )
    await worker.until_ready()
    asked = set()
    admin = await asyncpg.connect(database.admin.rpartition("/")[0] + "/postgres")
    try:
        await admin.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS false")
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", database.name
        )
        for _ in range(10):
            event = query(VECTOR)
            asked.add(event["event_id"])
            await channel.send(as_avro(event), b"key", [("traceparent", b"00-1-2-01")])
        await until_dead_letters(output_reader, 10)
        await admin.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS true")
    finally:
        await admin.close()
    await worker.until_ready(seconds=20)
    code, done = await replay(channel, "--apply", "--code", "store_unavailable", "--since", "10m")
    assert (code, done["replay"]) == (0, 10)
    await output_reader.until_answered(asked, seconds=30)
    assert len(output_reader.results) == len(asked)
    assert all(record.headers[0] == ("traceparent", b"00-1-2-01") for record in output_reader.results)
    code, again = await replay(channel, "--apply")
    assert (code, again["replay"], again["already"]) == (0, 0, 10)


async def test_the_largest_event_comes_back(
    channel: Channel,
    output_reader: OutputReader,
    input_reader: InputReader,  # noqa: F811  # the fixture
    start_worker: Callable[..., Worker],
) -> None:
    """Without its marks it filled what the input topic takes. Only noise has no room for them."""
    worker = start_worker("postgresql://worker@127.0.0.1:1/nowhere")
    await worker.until_ready(ready=False)
    largest = 4 * _MIB - _MAX_OVERHEAD
    event = as_json(query(VECTOR, k="x"))
    noise = random.Random(7).randbytes(largest)
    await channel.send(event + b" " * (largest - len(event)), partition=0)
    await channel.send(noise, partition=0)
    await channel.send(event, partition=0)
    await until_dead_letters(output_reader, 3)
    await worker.terminate()
    code, done = await replay(channel, "--apply")
    assert code == 1
    assert (done["replay"], done["too_large"]) == (2, 1)
    await input_reader.until(5)
    await set_most_bytes(channel, channel.input, 4 * _MIB + DEAD_LETTER_MARGIN_BYTES)
    code, done = await replay(channel, "--apply")
    assert (code, done["replay"], done["already"]) == (0, 1, 2)
    await input_reader.until(6)
    sent, came = input_reader.records[:3], input_reader.records[3:]
    assert sorted(record.value for record in sent) == sorted(record.value for record in came)
    assert set(input_reader.sources.values()) == {1}
    assert len(read_dead_letters(output_reader)) == 3


async def test_a_log_with_holes_is_read_to_its_end(
    channel: Channel,
    input_reader: InputReader,  # noqa: F811  # the fixture
) -> None:
    """Records that retention has removed, and a transaction's markers, which are no records but have offsets."""
    for number in range(10):
        await write_dead_letter(channel, STORE_OUTAGE, b"%d" % number, partition=0)
    code, _ = await replay(channel, "--apply", "--until", "0s")
    assert code == 0
    await input_reader.until(10)
    for number in range(10, 20):
        await write_dead_letter(channel, STORE_OUTAGE, b"%d" % number, partition=0)
    admin = AIOKafkaAdminClient(bootstrap_servers=channel.bootstrap_servers)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(channel.dead_letters, 0): RecordsToDelete(5)})
    finally:
        await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=channel.bootstrap_servers, transactional_id=channel.name)
    await producer.start()
    try:
        for topic, value in ((channel.dead_letters, b"20"), (channel.input, b"somebody else's")):
            async with producer.transaction():
                await producer.send_and_wait(
                    topic,
                    value,
                    headers=[
                        *error_headers(UnknownProfile("no such"), topic=channel.input, partition=0, offset=0)
                    ]
                    if topic == channel.dead_letters
                    else [],
                    partition=0,
                )
    finally:
        await producer.stop()
    code, shown = await replay(channel)
    assert (code, shown["replay"], shown["already"]) == (0, 11, 5)
    code, done = await replay(channel, "--apply", "--rate", "1000")
    assert (code, done["replay"], done["already"], done["gone"]) == (0, 11, 5, 0)
    await input_reader.until(10 + 1 + 11)
    assert sorted(
        int(record.value) for record in input_reader.records if record.value != b"somebody else's"
    ) == list(range(21))


@pytest.mark.parametrize("rate", [10.0])
async def test_no_faster_than_its_rate(
    channel: Channel,
    input_reader: InputReader,  # noqa: F811  # the fixture
    rate: float,
) -> None:
    """By the records' own timestamps: a lower bound, which a busy machine does not break."""
    for number in range(31):
        await write_dead_letter(channel, STORE_OUTAGE, b"%d" % number, partition=number % 3)
    code, done = await replay(channel, "--apply", "--rate", str(rate))
    assert (code, done["replay"]) == (0, 31)
    await input_reader.until(31)
    stamps = sorted(record.timestamp for record in input_reader.records)
    assert stamps[-1] - stamps[0] >= 30 / rate * 1000 - 100
    await asyncio.sleep(0)
