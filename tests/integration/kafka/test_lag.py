"""The lag gauge says what the broker would say."""

import asyncio
from collections.abc import Callable

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import PARTITIONS, Channel, OutputReader, Worker, as_avro, query

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
    maintenance = await asyncpg.connect(database.admin)
    try:
        async with maintenance.transaction():
            await maintenance.execute("LOCK TABLE document_chunks IN ACCESS EXCLUSIVE MODE")
            for _ in range(3):
                await send(channel, 300)
                await asyncio.sleep(1)
            true = await lag_of(channel)
            assert sum(true.values()) == 900
            await until_reported(worker, true)
            figures(f"{sum(true.values()):.0f} events behind, by the broker and by the gauge")
    finally:
        await maintenance.close()
    await output_reader.until(results=950, seconds=60)
    await until_reported(worker, NONE)


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
