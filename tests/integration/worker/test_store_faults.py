"""What becomes of an event when the store fails it: each fault has its own answer, through a real worker.

Once, on the embedded broker: it only carries the events. An outage under load is in ``test_observed``, on both.
"""

import asyncio
from collections.abc import Callable, Iterable

import asyncpg
import pytest

from tests.conftest import Database
from tests.integration.connections import execute
from tests.integration.corpora import SLOW_ASKERS, load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, account, as_avro, query

pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)

VECTOR = unit_vectors(1, 1)[0]
QUICK = {"ANABRANCH_RETRY_BASE_SECONDS": "0.2", "ANABRANCH_RETRY_MAX_SECONDS": "0.5"}


def code_of(headers: Iterable[tuple[str, bytes]]) -> str:
    return dict(headers)["anabranch.error.code"].decode()


async def test_one_event_that_always_times_out_is_dead_lettered(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    await execute(database.admin, SLOW_ASKERS)
    worker = start_worker(database.worker, ANABRANCH_SEARCH_TIMEOUT_SECONDS="1", **QUICK)
    await worker.until_ready()
    slow = as_avro(query(VECTOR, principals=["user:slow"]))
    asked = set()
    for number in range(90):
        if number == 30:
            await channel.send(slow, b"slow", partition=1)
        event = query(VECTOR)
        asked.add(event["event_id"])
        await channel.send(as_avro(event), partition=number % 3)
        await asyncio.sleep(0.05)  # others succeed all the while
    await output_reader.until_answered(asked, seconds=30)
    await output_reader.until(dead_letters=1, seconds=15)
    assert account(asked, output_reader.results).repeats == 0
    assert [(record.key, record.value) for record in output_reader.dead_letters] == [(b"slow", slow)]
    assert code_of(output_reader.dead_letters[0].headers) == "search_timeout"
    samples = await worker.scrape()
    assert samples.value("anabranch_retries_total", cause="search_timeout") >= 3  # more where a ping is late
    assert samples.value("anabranch_dead_letters_total", code="search_timeout") == 1
    assert worker.is_ready()


async def test_a_misconfigured_store_holds_events_back_until_it_is_fixed(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker, **QUICK)
    await worker.until_ready()
    admin = await asyncpg.connect(database.admin)
    try:
        await admin.execute("ALTER TABLE document_chunks RENAME TO mislaid")
        asked = set()
        for _ in range(20):
            event = query(VECTOR)
            asked.add(event["event_id"])
            await channel.send(as_avro(event))
        await worker.until_ready(ready=False, seconds=10)
        await asyncio.sleep(2)
        assert worker.is_live()
        assert (output_reader.results, output_reader.dead_letters) == ([], [])
        await admin.execute("ALTER TABLE mislaid RENAME TO document_chunks")
    finally:
        await admin.close()
    await output_reader.until_answered(asked, seconds=20)
    await worker.until_ready(seconds=10)
    assert output_reader.dead_letters == []
    assert account(asked, output_reader.results).repeats == 0
    lines = [line for line in worker.log.splitlines() if "misconfigured" in line]
    assert len(lines) == 1, worker.log
    assert "anabranch migrate" in lines[0]


async def test_nothing_is_answered_while_row_level_security_is_off(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker, **QUICK)
    await worker.until_ready()
    asked: set[str] = set()

    async def ask(number: int) -> None:
        for _ in range(number):
            event = query(VECTOR)
            asked.add(event["event_id"])
            await channel.send(as_avro(event))
            await asyncio.sleep(0.05)

    await ask(20)
    await output_reader.until_answered(asked, seconds=20)
    tables = ["document_chunks", "documents", "chunk_topics", "chunk_metadata", "access_sets"]
    for number, table in enumerate(tables, start=1):
        answered = len(output_reader.results)
        await execute(database.owner, f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
        await ask(20)
        await worker.until_ready(ready=False, seconds=10)
        await ask(20)
        await asyncio.sleep(2)
        assert worker.is_live(), table
        assert len(output_reader.results) == answered, table
        await execute(database.owner, f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        await output_reader.until_answered(asked, seconds=20)
        await worker.until_ready(seconds=10)
        lines = [line for line in worker.log.splitlines() if "misconfigured" in line]
        assert len(lines) == number, worker.log
        assert "row-level security" in lines[-1]
        assert "anabranch migrate" in lines[-1]
    assert output_reader.dead_letters == []
    assert account(asked, output_reader.results).repeats == 0


async def test_an_outage_becomes_dead_letters_where_the_operator_says_so(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker, ANABRANCH_STORE_OUTAGE="dead_letter", **QUICK)
    await worker.until_ready()
    admin = await asyncpg.connect(database.admin.rpartition("/")[0] + "/postgres")
    try:
        # Nobody may connect, and whoever is connected is sent away: an outage for this database alone.
        await admin.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS false")
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", database.name
        )
        values = [as_avro(query(VECTOR)) for _ in range(10)]
        for value in values:
            await channel.send(value, b"key")
        await output_reader.until(dead_letters=10, seconds=30)
        await admin.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS true")
    finally:
        await admin.close()
    assert {code_of(record.headers) for record in output_reader.dead_letters} == {"store_unavailable"}
    assert sorted(record.value for record in output_reader.dead_letters) == sorted(values)
    await worker.until_ready(seconds=10)
    event = query(VECTOR)
    await channel.send(as_avro(event))
    await output_reader.until_answered({event["event_id"]}, seconds=20)
    samples = await worker.scrape()
    assert samples.value("anabranch_retries_total", cause="store_unavailable") == pytest.approx(30, abs=5)
