"""The lag gauge says what the broker would say, and the other one how long the oldest event has been waiting."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import (
    PARTITIONS,
    Channel,
    OutputReader,
    Samples,
    Worker,
    as_avro,
    query,
    until,
)

_VECTOR = unit_vectors(1, 2)[0]
NONE: dict[tuple[str, ...], float] = {(str(number),): 0.0 for number in range(PARTITIONS)}


def partitions(channel: Channel) -> list[TopicPartition]:
    return [TopicPartition(channel.input, number) for number in range(PARTITIONS)]


async def lag_of(channel: Channel) -> dict[tuple[str, ...], float]:
    """Partition to lag, as the broker knows it."""
    reader = AIOKafkaConsumer(bootstrap_servers=channel.bootstrap_servers)
    admin = AIOKafkaAdminClient(bootstrap_servers=channel.bootstrap_servers)
    await reader.start()
    await admin.start()
    try:
        ends = await reader.end_offsets(partitions(channel))
        committed = await admin.list_consumer_group_offsets(channel.name)
    finally:
        await admin.close()
        await reader.stop()
    return {(str(tp.partition),): end - max(0, committed[tp].offset) for tp, end in ends.items()}


async def send(channel: Channel, count: int) -> None:
    await channel.send_all(
        [(as_avro(query(_VECTOR, profile="docs", k=1)), b"%d" % number) for number in range(count)]
    )


async def until_reported(worker: Worker, expected: dict[tuple[str, ...], float]) -> None:
    reported: dict[tuple[str, ...], float] = {}
    for _ in range(100):
        reported = (await worker.scrape()).all("anabranch_consumer_lag")
        if reported == expected:
            return
        await asyncio.sleep(0.1)
    assert reported == expected


@asynccontextmanager
async def locked(database: Database) -> AsyncIterator[None]:
    """No search ends."""
    maintenance = await asyncpg.connect(database.admin)
    try:
        async with maintenance.transaction():
            await maintenance.execute("LOCK TABLE document_chunks IN ACCESS EXCLUSIVE MODE")
            yield
    finally:
        await maintenance.close()


async def test_the_lag_grows_while_the_store_is_frozen(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    await send(channel, 50)
    await output_reader.until(results=50)
    async with locked(database):
        before = time.time()
        await send(channel, 300)
        sent = time.time()
        for _ in range(2):
            await asyncio.sleep(1)
            await send(channel, 300)
        true = await lag_of(channel)
        assert sum(true.values()) == 900
        await until_reported(worker, true)
        for _ in range(2):
            asked = time.time()
            waiting = (await worker.scrape()).all("anabranch_oldest_waiting_seconds")
            answered = time.time()
            assert waiting.keys() == NONE.keys()
            # A timestamp is in milliseconds.
            assert all(asked - sent <= seconds <= answered - before + 0.001 for seconds in waiting.values())
            await asyncio.sleep(1)
        figures(f"{sum(true.values()):.0f} events behind, by the broker and by the gauge, for {waiting} s")
    await output_reader.until(results=950, seconds=60)
    await until_reported(worker, NONE)
    assert (await worker.scrape()).all("anabranch_oldest_waiting_seconds") == NONE


async def test_a_worker_that_starts_reports_how_long_events_have_really_been_waiting(
    database: Database, channel: Channel, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    before = time.time()
    await send(channel, 60)
    sent = time.time()
    await asyncio.sleep(5)
    worker = start_worker(database.worker)
    async with locked(database):
        deadline = time.monotonic() + 30
        while True:
            asked = time.time()
            waiting = (await scrape_when_live(worker)).all("anabranch_oldest_waiting_seconds")
            answered = time.time()
            if waiting.keys() == NONE.keys() and all(asked - sent <= value for value in waiting.values()):
                break
            assert time.monotonic() < deadline, waiting
            await asyncio.sleep(0.1)
        assert all(seconds <= answered - before + 0.001 for seconds in waiting.values())


async def scrape_when_live(worker: Worker) -> Samples:
    await until(worker.is_live, lambda: worker.log, seconds=30)
    return await worker.scrape()


async def test_the_marker_that_ends_a_transaction_is_no_lag(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    """It has an offset of its own, and the broker counts it."""
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    producer = AIOKafkaProducer(bootstrap_servers=channel.bootstrap_servers, transactional_id=channel.name)
    await producer.start()
    try:
        async with producer.transaction():
            for number in range(30):
                value = as_avro(query(_VECTOR, profile="docs", k=1))
                await producer.send_and_wait(channel.input, value, partition=number % PARTITIONS)
    finally:
        await producer.stop()
    await output_reader.until(results=30)
    await until_reported(worker, NONE)
    assert await lag_of(channel) == dict.fromkeys(NONE, 1.0)
    assert (await worker.scrape()).all("anabranch_oldest_waiting_seconds") == NONE
    await send(channel, 30)
    await output_reader.until(results=60)
    await until_reported(worker, NONE)
    assert await lag_of(channel) == NONE


async def test_an_emptied_log_has_no_lag(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    """Retention has deleted everything before the group read anything."""
    await load(database.writer, tiny_corpus())
    await send(channel, 60)
    admin = AIOKafkaAdminClient(bootstrap_servers=channel.bootstrap_servers)
    await admin.start()
    try:
        await admin.delete_records({tp: RecordsToDelete(-1) for tp in partitions(channel)})
    finally:
        await admin.close()
    worker = start_worker(database.worker)
    await worker.until_ready()
    await until_reported(worker, NONE)
    await send(channel, 5)
    await output_reader.until(results=5)
    await until_reported(worker, NONE)
