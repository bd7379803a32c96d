"""Live recall in a real worker: within its share, on a connection of its own, and nothing waits for it."""

import asyncio
import random
from collections.abc import Callable

import pytest

from tests.conftest import Database
from tests.integration.connections import connected, execute
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, check_end, query

pytestmark = pytest.mark.parametrize("broker", ["either"], indirect=True)

NAME = "anabranch live recall"
GRACE_SECONDS = 3.0

# Each statement of live recall waits before it reads chunks; those of events do not.
OBSTACLE = f"""
    CREATE FUNCTION public.wait_for_obstacle() RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
    BEGIN
      IF current_setting('application_name') = '{NAME}' THEN PERFORM pg_sleep(60); END IF;
      RETURN true;
    END $$;
    CREATE POLICY obstacle ON public.document_chunks AS RESTRICTIVE FOR SELECT TO anabranch_reader
      USING ((SELECT public.wait_for_obstacle()));
"""


def corpus() -> Corpus:
    """More chunks than are always searched exactly."""
    rng = random.Random(1)
    document = Document(random_uuid(rng), frozenset({"user:1"}))
    return Corpus.of(
        [document],
        [
            Chunk(random_uuid(rng), document.id, "text", vector, token_count=1)
            for vector in unit_vectors(1200, 1)
        ],
    )


async def ask(channel: Channel, output_reader: OutputReader, count: int) -> None:
    asked = set()
    for vector in unit_vectors(count, 2):
        event = query(vector)
        asked.add(event["event_id"])
        await channel.send(as_avro(event))
        await asyncio.sleep(0.005)
    await output_reader.until_answered(asked, seconds=60)


async def connections(database: Database, state: str = "%") -> int:
    """How many there are for live recall, in this state."""
    async with connected(database.admin) as admin:
        return int(
            await admin.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND state LIKE $2",
                NAME,
                state,
            )
        )


async def test_it_measures_within_its_share(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    await load(database.writer, corpus())
    worker = start_worker(database.worker, ANABRANCH_LIVE_RECALL_SHARE="0.5")
    await worker.until_ready()
    await ask(channel, output_reader, 600)
    async with asyncio.timeout(10):
        while True:
            samples = await worker.scrape()
            skipped = samples.nonzero("anabranch_live_recall_skipped_total")
            measured = samples.value("anabranch_live_recall_total", size="normal")
            if measured + sum(skipped.values()) == 600:
                break
            await asyncio.sleep(0.1)
    searched = samples.total("anabranch_search_duration_seconds_sum")
    spent = samples.value("anabranch_live_recall_seconds_total")
    figures(
        f"{measured:.0f} samples in {spent:.3f} s, while events' searches took {searched:.3f} s; {skipped}"
    )
    assert measured > 5
    assert skipped.keys() <= {("not_drawn",), ("paused",), ("timeout",)}
    assert 0 < spent < 0.5 * searched
    total = samples.value("anabranch_live_recall_sum", size="normal")
    assert (
        0.5 * measured
        < samples.value("anabranch_live_recall_squares_sum", size="normal")
        <= total
        <= measured
    )
    assert await connections(database) == 1
    # While events wait for their turn, it does nothing.
    await channel.send_all((as_avro(query(vector)), None) for vector in unit_vectors(300, 3))
    await output_reader.until(results=900)
    paused = (await worker.scrape()).value("anabranch_live_recall_skipped_total", reason="paused")
    assert paused > skipped.get(("paused",), 0)


async def test_without_a_share_there_is_no_connection(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, corpus())
    worker = start_worker(database.worker, ANABRANCH_LIVE_RECALL_SHARE="0")
    await worker.until_ready()
    await ask(channel, output_reader, 200)
    samples = await worker.scrape()
    assert samples.total("anabranch_live_recall_total") == 0
    assert samples.value("anabranch_live_recall_seconds_total") == 0
    assert await connections(database) == 0


async def test_a_shutdown_does_not_wait_for_it(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, corpus())
    await execute(database.admin, OBSTACLE)
    worker = start_worker(
        database.worker,
        ANABRANCH_LIVE_RECALL_SHARE="1",
        ANABRANCH_GRACE_PERIOD_SECONDS=str(GRACE_SECONDS),
    )
    await worker.until_ready()
    # After the first timeouts, a search of live recall runs for a second or two.
    async with asyncio.timeout(60):
        while (await worker.scrape()).value("anabranch_live_recall_skipped_total", reason="timeout") < 2:
            await ask(channel, output_reader, 50)
        while not await connections(database, "active"):
            await ask(channel, output_reader, 10)
    code, seconds = await worker.terminate()
    check_end(worker, code, seconds, grace_seconds=GRACE_SECONDS)
    async with asyncio.timeout(10):
        while await connections(database):  # noqa: ASYNC110  # what is waited for is another process
            await asyncio.sleep(0.02)
