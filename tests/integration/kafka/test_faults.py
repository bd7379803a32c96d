"""A worker dies, with the clocks that an installation has: another one serves its partitions in time."""

import asyncio
import time
from collections.abc import Callable

from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus
from tests.integration.harness import Channel, OutputReader, Worker, account, events

# What an installation has that sets nothing.
_DEFAULT_CLOCKS = {
    "ANABRANCH_SESSION_TIMEOUT_SECONDS": "10",
    "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": "40",
    "ANABRANCH_GRACE_PERIOD_SECONDS": "25",
}


async def send(channel: Channel, asked: dict[str, bytes]) -> None:
    await channel.send_all([(value, event_id.encode()) for event_id, value in asked.items()])


async def test_another_worker_joins_and_takes_over_in_time(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """With the timeouts that are the default, under load: one of two is killed, the other serves all partitions."""
    await load(database.writer, tiny_corpus())
    asked: dict[str, bytes] = {}
    over = asyncio.Event()

    async def keep_busy() -> None:
        while not over.is_set():
            if len(asked) - len(output_reader.results) < 200:
                more = events(100)
                asked.update(more)
                await send(channel, more)
            await asyncio.sleep(0.05)

    first = start_worker(database.worker, **_DEFAULT_CLOCKS)
    await first.until_ready()
    busy = asyncio.create_task(keep_busy())
    await output_reader.until(results=100)
    second = start_worker(database.worker, **_DEFAULT_CLOCKS)
    await second.until_ready()
    joined = len(output_reader.results)
    await output_reader.until(results=joined + 200)
    for worker in (first, second):
        assert (await worker.scrape()).value("anabranch_events_total", outcome="answered") > 0
    by_joining = account(asked, output_reader.results).repeats
    began = time.monotonic()
    first.kill()  # while events are waiting: the workers answer them faster than a load that has ended lets them wait
    over.set()
    await busy
    # It may have answered all of its events just before. These wait in its partitions until the other has taken over.
    asked.update(late := events(100))
    await send(channel, late)
    await output_reader.until_answered(set(asked), seconds=40)
    seconds = time.monotonic() - began

    outcome = account(asked, output_reader.results)
    figures(
        f"{outcome}, {by_joining} of them by joining; joined after {joined} results;"
        f" everything answered {seconds:.1f} s after kill -9 (promised: 15 s)"
    )
    assert outcome.lost == []
    assert outcome.strange == []
    assert by_joining <= 8  # what was in work, and not what had been acknowledged before
    assert outcome.repeats <= 200
    assert seconds > 5  # its partitions were not free at once
    assert seconds < 25  # what is promised, and what a busy machine may add
    assert output_reader.dead_letters == []
