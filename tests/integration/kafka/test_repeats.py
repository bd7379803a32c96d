"""Repeats, seen from a consumer: harmless by the contract's recipe, and not to be had away by transactions."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, account, as_avro, query, until
from tests.integration.kafka import act_once


async def test_a_consumer_acts_once_on_each_answer(
    *,
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
    figures: Callable[[str], None],
) -> None:
    """Workers and the consumer are killed in turn, in the middle of their work."""
    await load(database.writer, tiny_corpus())
    vector = unit_vectors(1, 2)[0]
    asked = {(event := query(vector, profile="docs", k=1))["event_id"]: as_avro(event) for _ in range(1500)}
    own = await asyncpg.connect(database.admin)
    await own.execute(act_once.block("sql"))
    await own.execute(
        "CREATE TABLE acts (event_id uuid NOT NULL); CREATE TABLE deliveries (result_id uuid NOT NULL)"
    )
    log_file = tmp_path / "consumer.log"

    def start_consumer() -> subprocess.Popen[bytes]:
        arguments = [channel.bootstrap_servers, channel.output, f"{channel.name}.readers", database.admin]
        with log_file.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", act_once.__name__, *arguments],
                cwd=act_once.ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    worker, consumer = start_worker(database.worker), start_consumer()
    acts: set[UUID] = set()
    try:
        await worker.until_ready()
        await channel.send_all([(value, event_id.encode()) for event_id, value in asked.items()])
        for killed in range(1, 5):
            await output_reader.until(results=200 * killed)
            worker.kill()
            worker = start_worker(database.worker)
            consumer.kill()
            consumer.wait()
            consumer = start_consumer()
        await output_reader.until_answered(set(asked), seconds=120)
        deadline = asyncio.get_running_loop().time() + 90
        while {str(event_id) for event_id in acts} != set(asked):
            assert consumer.poll() is None, log_file.read_text()
            assert asyncio.get_running_loop().time() < deadline, (
                f"{len(acts)} acts\n{log_file.read_text()[-4000:]}"
            )
            await asyncio.sleep(0.2)
            acts = {row[0] for row in await own.fetch("SELECT event_id FROM acts")}
        # To the end of the topic: the last repeats may come after the last act.
        seen = {row[0] for row in await own.fetch("SELECT result_id FROM deliveries")}
        assert len(seen) == len(asked)
        outcome = account(asked, output_reader.results)
        total, deliveries = await own.fetchrow(
            "SELECT (SELECT count(*) FROM acts), (SELECT count(*) FROM deliveries)"
        ) or (0, 0)
    finally:
        consumer.kill()
        consumer.wait()
        await own.close()

    figures(f"{outcome}; {deliveries} deliveries to a consumer that was killed 4 times, {total} acts")
    assert outcome.lost == []
    assert deliveries > len(asked)  # else nothing was shown
    assert total == len(asked)


async def test_a_transaction_does_not_keep_a_stranger_from_committing(channel: Channel) -> None:
    """Why results are not published in transactions: their offsets are taken from somebody who left the group."""
    group = f"{channel.name}.group"
    for _ in range(5):
        await channel.send(b"{}", partition=0)
    partition = TopicPartition(channel.input, 0)

    def member() -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            channel.input,
            bootstrap_servers=channel.bootstrap_servers,
            group_id=group,
            enable_auto_commit=False,
            session_timeout_ms=6000,
        )

    former, owner = member(), member()
    producer = AIOKafkaProducer(
        bootstrap_servers=channel.bootstrap_servers, transactional_id=f"{channel.name}.former"
    )
    admin = AIOKafkaAdminClient(bootstrap_servers=channel.bootstrap_servers)
    await former.start()
    await producer.start()
    try:
        await former.stop()
        await owner.start()
        await until(lambda: partition in owner.assignment(), lambda: "not assigned", seconds=30)
        await owner.commit({partition: 4})
        async with producer.transaction():
            await producer.send_offsets_to_transaction({partition: 1}, group)
        # The owner's commit is undone: what it had finished is asked again. A later offset would have lost events.
        await admin.start()
        deadline = asyncio.get_running_loop().time() + 30
        while (await admin.list_consumer_group_offsets(group))[partition].offset != 1:
            assert asyncio.get_running_loop().time() < deadline, "the owner's offset stands"
            await asyncio.sleep(0.1)
    finally:
        await admin.close()
        await producer.stop()
        await owner.stop()
