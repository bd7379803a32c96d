"""The broker dies, the worker dies: every event that was asked has a result. Repeats are allowed, and counted."""

import asyncio
import time
from collections.abc import Callable

from apache_kafka import ApacheKafka
from corpora import load, tiny_corpus, unit_vectors
from harness import Channel, Outbox, Worker, account, as_avro, query

from tests.conftest import Database

# What an installation has that sets nothing.
_DEFAULT_CLOCKS = {
    "ANABRANCH_SESSION_TIMEOUT_SECONDS": "10",
    "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": "40",
    "ANABRANCH_GRACE_PERIOD_SECONDS": "25",
}


def events(count: int) -> dict[str, bytes]:
    """Event id to value."""
    vectors = unit_vectors(16, 2)
    asked = (
        query(vectors[number % 16], profile="docs", k=1, similarity_threshold=0) for number in range(count)
    )
    return {event["event_id"]: as_avro(event) for event in asked}


async def send(channel: Channel, asked: dict[str, bytes]) -> None:
    await channel.send_all([(value, event_id.encode()) for event_id, value in asked.items()])


async def test_a_broker_that_is_killed_and_comes_back_loses_nothing(
    *,
    database: Database,
    broker: ApacheKafka,
    channel: Channel,
    outbox: Outbox,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    asked = events(1000)
    await send(channel, asked)
    await outbox.until(results=200)
    pid = broker.pid
    broker.stop(kill=True)
    before = len(outbox.results)
    assert before < 1000
    await asyncio.sleep(1)
    assert await asyncio.to_thread(worker.is_live)
    start = await asyncio.to_thread(broker.start)
    assert broker.pid != pid
    began = time.monotonic()
    await outbox.until_answered(set(asked), seconds=60)
    answered = time.monotonic() - began
    await worker.until_ready(seconds=60)
    ready = time.monotonic() - began
    # And it goes on.
    more = events(100)
    await send(channel, more)
    await outbox.until_answered(set(more), seconds=30)

    outcome = account(asked | more, outbox.results)
    figures(
        f"{outcome}; killed after {before} results, up again in {start:.1f} s,"
        f" all answered {answered:.1f} s and ready {ready:.1f} s after that"
    )
    assert worker.process.poll() is None
    assert outcome.lost == []
    assert outcome.strange == []
    assert outcome.repeats <= 100
    assert outbox.dead_letters == []


async def test_a_worker_that_is_killed_or_told_to_end_loses_nothing(
    database: Database,
    channel: Channel,
    outbox: Outbox,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    await load(database.writer, tiny_corpus())
    asked = events(900)
    first = start_worker(database.worker)
    await first.until_ready()
    await send(channel, asked)
    await outbox.until(results=200)
    first.kill()
    await asyncio.sleep(0.5)  # what it had sent arrives
    killed_at = len(outbox.results)
    second = start_worker(database.worker)
    back = await second.until_ready()
    await outbox.until(results=killed_at + 200)
    code, seconds = await second.terminate()
    ended_at = len(outbox.results)
    assert ended_at < len(asked)
    third = start_worker(database.worker)
    await third.until_ready()
    await outbox.until_answered(set(asked), seconds=60)

    outcome = account(asked, outbox.results)
    figures(
        f"{outcome}; kill -9 after {killed_at} results, ready again in {back:.1f} s;"
        f" SIGTERM after {ended_at}: exit code {code} in {seconds:.1f} s"
    )
    assert code == 0
    assert outcome.lost == []
    assert outcome.strange == []
    assert outcome.repeats <= 500  # a quarter of a second's worth; nothing from SIGTERM
    assert outbox.dead_letters == []


async def test_another_worker_joins_and_takes_over_in_time(
    database: Database,
    channel: Channel,
    outbox: Outbox,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """With the timeouts that are the default, under load: one of two is killed, the other serves all partitions."""
    await load(database.writer, tiny_corpus())
    asked: dict[str, bytes] = {}
    over = asyncio.Event()

    async def keep_busy() -> None:
        while not over.is_set():
            if len(asked) - len(outbox.results) < 200:
                more = events(100)
                asked.update(more)
                await send(channel, more)
            await asyncio.sleep(0.05)

    first = start_worker(database.worker, **_DEFAULT_CLOCKS)
    await first.until_ready()
    busy = asyncio.create_task(keep_busy())
    await outbox.until(results=100)
    second = start_worker(database.worker, **_DEFAULT_CLOCKS)
    await second.until_ready()
    joined = len(outbox.results)
    await outbox.until(results=joined + 200)
    for worker in (first, second):
        assert (await worker.scrape()).value("anabranch_events_total", outcome="answered") > 0
    by_joining = account(asked, outbox.results).repeats
    over.set()
    await busy
    began = time.monotonic()
    first.kill()
    await outbox.until_answered(set(asked), seconds=40)
    seconds = time.monotonic() - began

    outcome = account(asked, outbox.results)
    figures(
        f"{outcome}, {by_joining} of them by joining; joined after {joined} results;"
        f" everything answered {seconds:.1f} s after kill -9 (promised: 15 s)"
    )
    assert outcome.lost == []
    assert outcome.strange == []
    assert by_joining <= 8  # what was in work, and not what had been acknowledged before
    assert outcome.repeats <= 200
    assert seconds > 5  # it was in the middle of its work
    assert seconds < 25  # what is promised, and what a busy machine may add
    assert outbox.dead_letters == []
