"""Live recall on a real store: it measures what is true, of rows that the caller may read, and survives faults."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import cycle
from time import perf_counter
from typing import Any
from uuid import UUID

import asyncpg
import numpy as np
import pytest

from streams.core.live_recall import ALL_ROWS, Budget
from streams.core.messages import Filters, QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, resolve_params
from streams.embedded.postgres import EmbeddedPostgres
from streams.retrieval import ArmResult, Retrieved, Search, retrieve
from streams.store.postgres import PostgresStore
from streams.telemetry.metrics import Metrics
from streams.tokens import count_tokens
from streams.worker.live_recall import LiveRecall
from tests.conftest import Database, PostgresServer
from tests.integration.connections import connected, execute
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.harness import query

SESSION, TOPIC = UUID(int=1), UUID(int=2)
CHUNKS = 1500
NAME = "live recall"

# So few edges, found among so few candidates, that searches miss many rows.
DEGRADED = """
    DROP INDEX document_chunks_embedding_halfvec; SET search_path = public;
    CREATE INDEX document_chunks_embedding_halfvec ON document_chunks USING hnsw
      ((l2_normalize(embedding)::halfvec(768)) halfvec_cosine_ops) WITH (m = 4, ef_construction = 8);
"""


def corpus() -> Corpus:
    """Chunks in all directions, in turn of a reader's own, of another's, and of both."""
    rng = random.Random(5)
    documents = [
        Document(
            random_uuid(rng),
            frozenset(readers),
            session_id=SESSION,
            document_type="memo" if number < 3 else "statute",
        )
        for number, readers in enumerate(2 * [{"user:1"}, {"user:2"}, {"user:1", "user:2"}])
    ]
    return Corpus.of(
        documents,
        [
            Chunk(
                random_uuid(rng),
                documents[number % 6].id,
                "text",
                vector,
                session_id=SESSION,
                related_topic_ids=[TOPIC] if number % 4 else [],
                token_count=1,
            )
            for number, vector in enumerate(unit_vectors(CHUNKS, 6))
        ],
    )


@pytest.fixture(scope="module")
def held() -> Corpus:
    return corpus()


@pytest.fixture(scope="module")
def loaded(postgres: PostgresServer, held: Corpus) -> Iterator[Database]:
    async def fill(database: Database) -> None:
        await execute(database.owner, DEGRADED)
        await load(database.writer, held)
        await execute(database.owner, "VACUUM ANALYZE documents, document_chunks, chunk_topics, access_sets")

    database = postgres.database()
    asyncio.run(fill(database))
    yield database
    postgres.drop(database)


@asynccontextmanager
async def opened(dsn: str, **arguments: Any) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(
        dsn, **{"connections": 1, "search_timeout_seconds": 20, "exact_scan_rows": 20_000} | arguments
    )
    await store.open()
    try:
        yield store
    finally:
        await store.close(timeout_seconds=3)


class Bench:
    """Events that are answered by the vector index, and live recall with as much time as it needs."""

    def __init__(self, searched: PostgresStore, exact: PostgresStore, chance: Callable[[], float]) -> None:
        self.metrics = Metrics()
        self._store = searched
        self.budget = Budget(1)
        self.live_recall = LiveRecall(
            exact, self.budget, paused=lambda: False, metrics=self.metrics, chance=chance
        )

    async def answer(self, vector: np.ndarray, **fields: Any) -> Retrieved:
        event = QueryEmbedding.parse(query(vector, **fields))
        params = resolve_params(event, BUILTIN_PROFILES, "extraction")
        retrieved = await retrieve(event, params, self._store, count_tokens, started=perf_counter())
        assert not any(found.exact for _, found in retrieved.searches.values())
        return retrieved

    async def offer(self, retrieved: Retrieved) -> None:
        self.budget.earn(100)
        self.live_recall.offer(retrieved)
        if (running := self.live_recall._running) is not None:
            await asyncio.wait([running])
            await asyncio.sleep(0)  # callbacks

    async def ask(self, vector: np.ndarray, **fields: Any) -> dict[str, list[UUID]]:
        """Answer an event and offer it; returns the chunks that each arm found."""
        retrieved = await self.answer(vector, **fields)
        await self.offer(retrieved)
        return {
            scope: [candidate.chunk_id for candidate in found.candidates[:15]]
            for scope, (_, found) in retrieved.searches.items()
        }

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"anabranch_live_recall{name}", labels)
        assert found is not None
        return found

    @property
    def measured(self) -> float:
        return self.value("_total", size="normal")


@asynccontextmanager
async def measuring(dsn: str, chance: Callable[[], float] = lambda: 0.0) -> AsyncIterator[Bench]:
    async with (
        opened(dsn, connections=2, small_scope_rows=10, exact_scan_rows=10) as searched,
        opened(dsn, application_name=NAME) as exact,
    ):
        yield Bench(searched, exact, chance)


class Truth:
    """Recall by brute force, of the rows that a caller may read."""

    def __init__(self, held: Corpus, principal: str, *, topic: bool = False) -> None:
        self._chunks = [
            chunk
            for chunk in held.chunks.values()
            if principal in held.documents[chunk.document_id].readers
            and (not topic or TOPIC in chunk.related_topic_ids)
        ]
        self._vectors = np.stack([np.asarray(chunk.embedding) for chunk in self._chunks])

    def recall(self, found: list[UUID], vector: np.ndarray) -> float:
        order = np.argsort(-(self._vectors @ vector), kind="stable")
        return len({self._chunks[number].id for number in order[:15]} & set(found)) / 15


@pytest.mark.slow
async def test_the_truth_is_inside_the_interval_of_400_samples(
    loaded: Database, held: Corpus, monkeypatch: pytest.MonkeyPatch, figures: Callable[[str], None]
) -> None:
    """Of 500 events: so the interval, which is that of endless traffic, misses the truth once in 100,000 runs."""
    monkeypatch.setattr("streams.store.postgres.EF_SEARCH", 60)
    rng = random.Random(7)
    whole = Truth(held, "user:1")
    truths: list[float] = []
    async with measuring(loaded.worker, chance=lambda: 0.3125 * rng.random()) as bench:
        for vector in unit_vectors(500, 8):
            found = (await bench.ask(vector))["global"]
            truths.append(whole.recall(found, vector))
    count, total = bench.measured, bench.value("_sum", size="normal")
    mean = total / count
    # As docs/metrics.md has it.
    error = math.sqrt((bench.value("_squares_sum", size="normal") - count * mean**2) / (count * (count - 1)))
    truth = sum(truths) / len(truths)
    figures(f"recall@15 {truth:.3f}, {count:.0f} samples: {mean:.3f} ± {1.96 * error:.3f}")
    assert 370 < count < 430
    assert truth < 0.95, "the index is not degraded"
    assert mean - 1.96 * error < truth < mean + 1.96 * error
    assert count + bench.value("_skipped_total", reason="not_drawn") == 500


@pytest.mark.parametrize("principal", ["user:1", "user:2"])
async def test_each_arm_is_compared_with_the_rows_that_the_caller_may_read(
    loaded: Database, held: Corpus, monkeypatch: pytest.MonkeyPatch, principal: str
) -> None:
    monkeypatch.setattr("streams.store.postgres.EF_SEARCH", 60)
    truths = {arm: Truth(held, principal, topic=arm == "local") for arm in ("local", "global")}
    recalls: dict[str, list[float]] = {arm: [] for arm in truths}
    # In turn the arm that was searched first, and the other.
    chances = cycle([0.0, 0.25])
    async with measuring(loaded.worker, chance=lambda: next(chances)) as bench:
        for number, vector in enumerate(unit_vectors(30, 9)):
            found = await bench.ask(vector, principals=[principal], session_id=SESSION, topic_id=TOPIC)
            arm = list(found)[number % 2]
            recalls[arm].append(truths[arm].recall(found[arm], vector))
    assert all(len(of_arm) > 3 for of_arm in recalls.values())
    assert bench.measured == 30
    assert bench.value("_sum", size="normal") == pytest.approx(sum(map(sum, recalls.values())))


def search(limit: int = 15, **fields: Any) -> Search:
    whole = Search(unit_vectors(1, 10)[0], ["user:1"], None, None, None, expand_parents=False, limit=limit)
    return replace(whole, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"session_id": SESSION},
        {"session_id": SESSION, "topic_id": TOPIC},
        {"filters": Filters(document_type="memo")},
        {"session_id": SESSION, "topic_id": TOPIC, "filters": Filters(document_type="memo")},
    ],
)
async def test_a_scope_is_searched_exactly_up_to_so_many_rows(
    loaded: Database, fields: dict[str, Any]
) -> None:
    async with opened(loaded.worker, small_scope_rows=20_000) as store:
        wanted = await store.search(search(**fields))
        rows = len((await store.search(search(limit=CHUNKS, **fields))).candidates)
    assert wanted.exact
    assert rows > 15
    async with opened(loaded.worker, small_scope_rows=10, exact_scan_rows=10) as store:
        for with_passages in (False, True):
            by_index = await store.search(search(with_passages=with_passages, **fields))
            assert not by_index.exact
        for max_rows in (rows, ALL_ROWS):
            found = await store.search_exactly(search(**fields), max_rows=max_rows, timeout_seconds=20)
            assert found == wanted
        fewer = await store.search_exactly(search(**fields), max_rows=rows - 1, timeout_seconds=20)
        assert fewer == ArmResult([], complete=False, truncated=True, exact=False)


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


@pytest.fixture
async def obstructed(loaded: Database) -> AsyncIterator[Database]:
    await execute(loaded.admin, OBSTACLE)
    yield loaded
    await execute(
        loaded.admin,
        "DROP POLICY obstacle ON public.document_chunks; DROP FUNCTION public.wait_for_obstacle()",
    )


async def until_active(admin: asyncpg.Connection, number: int) -> None:
    """Wait until so many searches of live recall run on the server."""
    async with asyncio.timeout(10):
        while number != await admin.fetchval(  # noqa: ASYNC110  # what is waited for is another process
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND state = 'active'", NAME
        ):
            await asyncio.sleep(0.02)


async def test_a_search_that_takes_too_long_ends_on_the_server_too(obstructed: Database) -> None:
    async with connected(obstructed.admin) as admin, measuring(obstructed.worker) as bench:
        for vector in unit_vectors(2, 11):
            await bench.ask(vector)
        assert bench.value("_skipped_total", reason="timeout") == 2
        assert bench.value("_seconds_total") >= 0.25 + 0.5
        await until_active(admin, 0)


async def test_a_search_that_is_cancelled_ends_on_the_server_too(obstructed: Database) -> None:
    async with connected(obstructed.admin) as admin, measuring(obstructed.worker) as bench:
        retrieved = await bench.answer(unit_vectors(1, 11)[0])
        for _ in range(4):
            await bench.offer(retrieved)  # times out, so that the next time limit is longer
        offering = asyncio.create_task(bench.offer(retrieved))
        await until_active(admin, 1)
        bench.live_recall.end()
        await offering
        await until_active(admin, 0)
        assert bench.value("_skipped_total", reason="timeout") == 4


async def test_an_outage_of_the_store_is_counted_and_survived(held: Corpus) -> None:
    few = Corpus(held.documents, dict(list(held.chunks.items())[:300]))
    with EmbeddedPostgres() as embedded:
        database = PostgresServer(embedded).database()
        await execute(database.owner, DEGRADED)
        await load(database.writer, few)
        async with measuring(database.worker) as bench:
            retrieved = await bench.answer(unit_vectors(1, 12)[0])
            await bench.offer(retrieved)
            await asyncio.to_thread(embedded.stop, "immediate")
            for _ in range(2):
                await bench.offer(retrieved)
            assert (bench.measured, bench.value("_skipped_total", reason="failed")) == (1, 2)
            await asyncio.to_thread(embedded.start)
            await bench.offer(retrieved)
            assert (bench.measured, bench.value("_skipped_total", reason="failed")) == (2, 2)


async def test_there_is_one_connection_for_it(loaded: Database) -> None:
    async with connected(loaded.admin) as admin, measuring(loaded.worker) as bench:
        for vector in unit_vectors(5, 13):
            await bench.ask(vector)
        names = await admin.fetch(
            "SELECT application_name FROM pg_stat_activity"
            " WHERE datname = current_database() AND usename = 'worker'"
        )
    assert Counter(row[0] for row in names)[NAME] == 1
