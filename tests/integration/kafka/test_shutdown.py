"""SIGTERM ends a worker in time, whatever is broken."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from streams.embedded.postgres import EmbeddedPostgres
from tests.conftest import Database, PostgresServer
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, check_end, query, until
from tests.integration.kafka.apache_kafka import ApacheKafka
from tests.integration.kafka.outages import frozen, killed

GRACE_SECONDS = 3.0


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("outage", [frozen, killed])
async def test_a_worker_ends_in_time_during_a_kafka_outage(
    *,
    outage: Callable[[ApacheKafka], AbstractContextManager[None]],
    is_busy: bool,
    database: Database,
    broker: ApacheKafka,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker, ANABRANCH_GRACE_PERIOD_SECONDS=str(GRACE_SECONDS))
    await worker.until_ready()
    vector = unit_vectors(1, 2)[0]
    await channel.send_all([(as_avro(query(vector, profile="docs", k=1)), None) for _ in range(20)])
    await output_reader.until(results=20)
    await asyncio.sleep(1)
    if is_busy:
        # Some are published and not yet committed when it happens, and some are in flight.
        await channel.send_all([(as_avro(query(vector, profile="docs", k=1)), None) for _ in range(300)])
        await output_reader.until(results=40)
    with outage(broker):
        await asyncio.sleep(1)
        code, seconds = await worker.terminate(seconds=120)

    figures(f"exit code {code} {seconds:.1f} s after SIGTERM, grace period {GRACE_SECONDS:.0f} s")
    check_end(worker, code, seconds, grace_seconds=GRACE_SECONDS)
    assert "Traceback" not in worker.log


async def test_a_worker_ends_in_time_that_has_never_reached_kafka(
    database: Database, start_worker: Callable[..., Worker], figures: Callable[[str], None]
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(
        database.worker,
        KAFKA_BOOTSTRAP_SERVERS="127.0.0.1:1",
        ANABRANCH_GRACE_PERIOD_SECONDS=str(GRACE_SECONDS),
    )
    await until(worker.is_live, lambda: worker.log, seconds=30)
    await asyncio.sleep(3)
    code, seconds = await worker.terminate(seconds=60)

    figures(f"exit code {code} {seconds:.1f} s after SIGTERM, grace period {GRACE_SECONDS:.0f} s")
    check_end(worker, code, seconds, grace_seconds=GRACE_SECONDS)


async def test_events_that_only_wait_are_released_at_once(
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """The store is away; the events that wait for it would fill the grace period."""
    with EmbeddedPostgres() as embedded:
        database = PostgresServer(embedded).database()
        await load(database.writer, tiny_corpus())
        worker = start_worker(
            database.worker,
            ANABRANCH_GRACE_PERIOD_SECONDS="30",
            ANABRANCH_RETRY_BASE_SECONDS="20",
            ANABRANCH_RETRY_MAX_SECONDS="40",
        )
        await worker.until_ready()
        vector = unit_vectors(1, 2)[0]
        await channel.send(as_avro(query(vector, profile="docs", k=1)))
        await output_reader.until(results=1)
        await asyncio.to_thread(embedded.stop, "immediate")
        await channel.send_all([(as_avro(query(vector, profile="docs", k=1)), None) for _ in range(20)])
        await worker.until_ready(ready=False)
        await asyncio.sleep(2)
        code, seconds = await worker.terminate(seconds=60)

    figures(f"exit code {code} {seconds:.1f} s after SIGTERM, grace period 30 s")
    assert code == 0
    assert seconds < 15
