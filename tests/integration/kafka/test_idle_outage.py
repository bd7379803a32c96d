"""Kafka is away while nothing happens: an idle worker notices, says so, and comes back."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

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
from tests.integration.kafka.apache_kafka import ApacheKafka
from tests.integration.kafka.outages import frozen, killed

# What an installation has that sets nothing; with shorter ones the clients would notice earlier.
_DEFAULT_TIMEOUTS = {
    "ANABRANCH_SESSION_TIMEOUT_SECONDS": "10",
    "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": "40",
}
_PROMISED_SECONDS = 20.0


def state(samples: Samples) -> tuple[float, float, float]:
    return (
        samples.value("anabranch_ready"),
        samples.value("anabranch_kafka_up"),
        samples.value("anabranch_store_up"),
    )


@pytest.mark.parametrize("outage", [frozen, killed])
async def test_an_idle_worker_notices_that_kafka_is_away(
    *,
    outage: Callable[[ApacheKafka], AbstractContextManager[None]],
    database: Database,
    broker: ApacheKafka,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker, **_DEFAULT_TIMEOUTS)
    await until(lambda: " ready partitions=" in worker.log, lambda: worker.log, seconds=60)
    assert state(await worker.scrape()) == (1, 1, 1)
    assert (await worker.scrape()).value("anabranch_assigned_partitions") == PARTITIONS
    with outage(broker):
        began = time.monotonic()
        while state(samples := await worker.scrape()) != (0, 0, 1):
            assert time.monotonic() - began < 3 * _PROMISED_SECONDS, worker.log[-4000:]
            await asyncio.sleep(0.1)
        noticed = time.monotonic() - began
        assert noticed < _PROMISED_SECONDS
        assert await asyncio.to_thread(worker.is_live)
        # Whether events are waiting is not known: so it does not say that none is.
        while min((samples := await worker.scrape()).all("anabranch_oldest_waiting_seconds").values()) == 0:
            assert time.monotonic() - began < 3 * _PROMISED_SECONDS
            await asyncio.sleep(0.1)
        first = samples.all("anabranch_oldest_waiting_seconds")
        assert len(first) == PARTITIONS
        await asyncio.sleep(1)
        later = (await worker.scrape()).all("anabranch_oldest_waiting_seconds")
        assert all(later[partition] >= seconds + 1 for partition, seconds in first.items())
        assert state(await worker.scrape()) == (0, 0, 1)
    back = await worker.until_ready(seconds=90)
    figures(f"noticed after {noticed:.1f} s; ready {back:.1f} s after the broker was back")
    value = as_avro(query(unit_vectors(1, 2)[0], profile="docs", k=1))
    await channel.send_all([(value, b"%d" % number) for number in range(30)])
    await output_reader.until(results=30)
    assert "not ready reason=" in worker.log
    assert "cannot connect" in worker.log
