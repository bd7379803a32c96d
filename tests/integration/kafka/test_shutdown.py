"""SIGTERM ends a worker in time, whatever is broken."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, query
from tests.integration.kafka.apache_kafka import ApacheKafka

GRACE_SECONDS = 3.0
# What is promised beyond the grace period.
_MARGIN_SECONDS = 5.0


@contextmanager
def frozen(broker: ApacheKafka) -> Iterator[None]:
    """Every connection stands, and nothing is answered."""
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        broker.restart(kill=True)  # thawed, it would take a while until it serves


@contextmanager
def killed(broker: ApacheKafka) -> Iterator[None]:
    broker.stop(kill=True)
    try:
        yield
    finally:
        broker.start()


@pytest.mark.xfail(strict=True, reason="a frozen broker keeps a worker from ending within its grace period")
@pytest.mark.parametrize("is_busy", [False], ids=["idle"])
@pytest.mark.parametrize("outage", [frozen])
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
    assert seconds < GRACE_SECONDS + _MARGIN_SECONDS
    assert code == 0
    assert "Traceback" not in worker.log
