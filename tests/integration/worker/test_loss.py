"""Slow events when a worker ends, dies or shares its partitions: none is lost, and none is committed past.

What happens to workers under steady load is in ``tests/faults``.
"""

import asyncio
import time
from collections.abc import Callable

import asyncpg

from tests.conftest import Database
from tests.integration.connections import execute
from tests.integration.corpora import SLOW_ASKERS, load, tiny_corpus, unit_vectors
from tests.integration.harness import (
    Channel,
    OutputReader,
    Worker,
    account,
    as_avro,
    check_end,
    events,
    query,
    until,
)


async def test_sigterm_gives_up_on_what_does_not_end_and_loses_nothing(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """Some events finish and some hang when the signal comes; the grace period ends, and so does the worker."""
    await load(database.writer, tiny_corpus())
    asked = events(400)
    first = start_worker(database.worker)
    await first.until_ready()
    records = [(value, event_id.encode()) for event_id, value in asked.items()]
    await channel.send_all(records[:100])
    await output_reader.until(results=100)
    maintenance = await asyncpg.connect(database.admin)
    try:
        async with maintenance.transaction():
            await maintenance.execute("LOCK TABLE document_chunks IN ACCESS EXCLUSIVE MODE")
            await channel.send_all(records[100:])
            samples = await first.scrape()
            deadline = time.monotonic() + 10
            while samples.value("anabranch_in_flight_events") < 8:
                assert time.monotonic() < deadline
                samples = await first.scrape()
            code, seconds = await first.terminate()
    finally:
        await maintenance.close()
    answered = len(output_reader.results)
    second = start_worker(database.worker)
    await second.until_ready()
    await output_reader.until_answered(set(asked), seconds=60)
    await until(lambda: len(output_reader.results) >= 400, lambda: "", seconds=5)

    outcome = account(asked, output_reader.results)
    figures(f"{outcome}; exit code {code} {seconds:.1f} s after SIGTERM, with eight searches that hang")
    assert answered == 100
    assert seconds >= 3
    check_end(first, code, seconds, grace_seconds=3)
    assert outcome.lost == []
    assert outcome.repeats == 0


async def test_an_event_that_is_overtaken_is_not_committed_past(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """The first event of each partition is slow; those behind it are answered, and then comes kill -9."""
    await load(database.writer, tiny_corpus())
    await execute(database.admin, SLOW_ASKERS)
    first = start_worker(database.worker)
    await first.until_ready()
    asked = set()
    for number in range(60):
        slow = number < 3
        event = query(unit_vectors(1, 1)[0], principals=["user:slow"] if slow else ["user:1"], profile="docs")
        asked.add(event["event_id"])
        await channel.send(as_avro(event), partition=number % 3)
    # All but the first of each partition can be done.
    await output_reader.until(results=5, seconds=4)
    await asyncio.sleep(1)  # several commits
    done = len(output_reader.results)
    first.kill()
    second = start_worker(database.worker)
    await second.until_ready()
    await output_reader.until_answered(asked, seconds=30)

    outcome = account(asked, output_reader.results)
    figures(f"{outcome}")
    assert outcome.lost == []
    assert 5 <= done <= 57
    assert outcome.repeats == done  # all that was done, since none of it could be committed


async def test_a_rebalance_gives_up_on_what_does_not_end_and_loses_nothing(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """Slow events are in work when another member joins; the group does not wait for them to end."""
    await load(database.writer, tiny_corpus())
    await execute(database.admin, SLOW_ASKERS)
    first = start_worker(database.worker)
    await first.until_ready()
    asked = set()
    slow = 0
    for number in range(60):
        # Every thirtieth in each partition: some are in work whenever the rebalance comes.
        is_slow = number % 30 < 3
        slow += is_slow
        event = query(
            unit_vectors(1, 1)[0], principals=["user:slow"] if is_slow else ["user:1"], profile="docs"
        )
        asked.add(event["event_id"])
        await channel.send(as_avro(event), partition=number % 3)
    await output_reader.until(results=5, seconds=4)
    second = start_worker(database.worker)
    joined = await second.until_ready()
    await output_reader.until_answered(asked, seconds=60)

    outcome = account(asked, output_reader.results)
    figures(f"{outcome}; {slow} of them slower than the drain; the other member joined in {joined:.1f} s")
    assert outcome.lost == []
    assert output_reader.dead_letters == []
    assert outcome.repeats < 60  # what had begun behind the slow ones
