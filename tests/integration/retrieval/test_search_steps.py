"""A search runs the steps in the head of `anabranch_search`, with their bounds.

Which steps ran shows in what they read: the rows of a session are counted, and read, by the session's index; the vector
index is scanned at most twice.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
import numpy as np
import pytest
from pgvector.asyncpg import register_vector

from tests.conftest import Database, PostgresServer
from tests.evaluate.plans import VECTOR_INDEX
from tests.integration.connections import connected, execute
from tests.integration.corpora import Chunk, Corpus, Document, load_indexed, random_uuid, unit_vectors

pytestmark = pytest.mark.slow

SESSION, TOPIC = UUID(int=1), UUID(int=2)
NEAR, SCOPE, OF_TOPIC = 3000, 300, 40
# Of user:2: so many close to another direction, and all others on its other side.
CLOSE, REMOTE = 130, 6500
AXIS, OTHER_AXIS = unit_vectors(2, 1)

# Reports the settings with which each statement reads chunks, once a statement.
REPORT = """
    CREATE FUNCTION public.report_settings() RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
    BEGIN
      RAISE NOTICE 'index % tuples % ef_search %', pg_stat_get_xact_numscans('public.{index}'::regclass),
        current_setting('hnsw.max_scan_tuples'), current_setting('hnsw.ef_search');
      RETURN true;
    END $$;
    CREATE POLICY report ON public.document_chunks AS RESTRICTIVE FOR SELECT TO anabranch_reader
      USING ((SELECT public.report_settings()));
"""


def corpus() -> Corpus:
    """Many chunks around the query, and on the other side, where the index comes last, those of a session.

    Apart from them, those of another user, a few of them close to another query.
    """
    rng = random.Random(3)
    near = Document(random_uuid(rng), frozenset({"user:1"}))
    far = Document(random_uuid(rng), frozenset({"user:1"}), session_id=SESSION)
    sparse = Document(random_uuid(rng), frozenset({"user:2"}))
    noise = unit_vectors(NEAR + SCOPE, 2)
    return Corpus.of(
        [near, far, sparse],
        [
            *(
                Chunk(random_uuid(rng), sparse.id, "text", each + (2 if n < CLOSE else -2) * OTHER_AXIS)
                for n, each in enumerate(unit_vectors(CLOSE + REMOTE, 4))
            ),
            *(Chunk(random_uuid(rng), near.id, "text", noise[n] + 2 * AXIS) for n in range(NEAR)),
            *(
                Chunk(
                    random_uuid(rng),
                    far.id,
                    "text",
                    noise[NEAR + n] - 2 * AXIS,
                    session_id=SESSION,
                    related_topic_ids=[TOPIC] if n < OF_TOPIC else [],
                )
                for n in range(SCOPE)
            ),
        ],
    )


@pytest.fixture(scope="module")
def loaded(postgres: PostgresServer) -> Iterator[Database]:
    """One database for the module: nothing is written to it but this."""
    database = postgres.database()
    asyncio.run(load_indexed(database, corpus()))
    yield database
    postgres.drop(database)


@pytest.fixture
async def worker(loaded: Database) -> AsyncIterator[asyncpg.Connection]:
    async with connected(loaded.worker) as connection:
        await register_vector(connection)
        yield connection


@dataclass(frozen=True)
class Steps:
    """What a search read of a session.

    Attributes:
        index_scans: of the vector index.
        rows: those of the session that were counted, and read.
        found: how many rows it returned.
        complete: as returned.
        truncated: as returned.
        exact: as returned.
    """

    index_scans: int
    rows: int
    found: int
    complete: bool
    truncated: bool
    exact: bool


async def steps_of(
    worker: asyncpg.Connection, *, index: str = "document_chunks_searchable_session", **asked: Any
) -> Steps:
    async with worker.transaction():
        before = await counters(worker, index)
        answer = await search(worker, **asked)
        index_scans, _, rows = await counters(worker, index) - before
    return Steps(
        int(index_scans),
        int(rows),
        len(answer["ids"] or ()),
        answer["complete"],
        answer["truncated"],
        answer["exact"],
    )


async def counters(worker: asyncpg.Connection, indexes: str = "") -> np.ndarray:
    """The vector index's scans and rows, and the rows from indexes whose names begin like this."""
    row = await worker.fetchrow(
        "SELECT pg_stat_get_xact_numscans($1::text::regclass), pg_stat_get_xact_tuples_returned($1::text::regclass),"
        " (SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class"
        "  WHERE relnamespace = 'public'::regnamespace AND relkind = 'i' AND starts_with(relname, $2))::int",
        VECTOR_INDEX,
        indexes,
    )
    assert row is not None
    return np.array(tuple(row))


async def search(
    worker: asyncpg.Connection,
    *,
    small: int = 10,
    exact: int = 800,
    limit: int = 15,
    session: UUID | None = SESSION,
    topic: UUID | None = None,
    principals: tuple[str, ...] = ("user:1",),
    by_halfvec: bool | None = True,
    ef_search: int = 20,
    query: np.ndarray = AXIS,
) -> Any:
    return await worker.fetchrow(
        "SELECT * FROM public.anabranch_search($1, $2, $3, $4, NULL, NULL, NULL, NULL, $5, false, $6, $7, $8, $9,"
        " 20000)",
        json.dumps(principals),
        query.astype(np.float32),
        session,
        topic,
        limit,
        small,
        exact,
        by_halfvec,
        ef_search,
    )


# small_scope, exact_scope, limit and the server's hnsw.max_scan_tuples, for a scope of 300 rows; then how often the
# vector index is scanned, how many rows are counted and read, how many are found, and whether the result is truncated,
# and exact. The first scan finds none of them. The index has to find eight times the limit, but at most 120 more.
@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        pytest.param((1000, 20_000, 15, 20_000), (0, 300 + 300, 15, False, True), id="1: well below"),
        pytest.param((60, 20_000, 15, 20_000), (0, 300 + 300, 15, False, True), id="1: at five times the bound"),
        pytest.param((60, 299, 15, 20_000), (2, 300, 15, False, False), id="4: bounded by the larger"),
        pytest.param((59, 300, 15, 20_000), (1, 296 + 300 + 300, 15, False, True), id="3: at the larger bound"),
        pytest.param((59, 1200, 15, 99), (1, 296 + 300 + 300, 15, False, True), id="3: at a quarter of it"),
        pytest.param((59, 1199, 15, 100), (1, 296 + 300 + 300, 15, False, True), id="3: at three rows a tuple"),
        pytest.param((59, 1199, 15, 99), (2, 296 + 300 + 300 + 300, 15, False, True), id="5: above both"),
        pytest.param((59, 300, 15, 99), (2, 296 + 298 + 300 + 300, 15, False, True), id="5: at the bound"),
        pytest.param((59, 299, 15, 99), (2, 296 + 298 + 300, 0, True, False), id="6: above the bound"),
        pytest.param((0, 0, 15, 20_000), (2, 1, 15, False, False), id="4: nothing is read exactly"),
        pytest.param((0, 0, 280, 20_000), (2, 1, 280, True, False), id="6: the index found fewer than wanted"),
    ],
)  # fmt: skip
async def test_it_tries_the_steps_in_order(
    worker: asyncpg.Connection, asked: tuple[int, int, int, int], steps: tuple[int, int, int, bool, bool]
) -> None:
    small, exact, limit, max_tuples = asked
    index_scans, rows, found, truncated, is_exact = steps
    await worker.execute(f"SET hnsw.max_scan_tuples = {max_tuples}")
    assert await steps_of(worker, small=small, exact=exact, limit=limit) == Steps(
        index_scans, rows, found, complete=False, truncated=truncated, exact=is_exact
    )


async def test_the_scan_goes_on_if_it_found_almost_enough(worker: asyncpg.Connection) -> None:
    """It finds 220 to 270 rows among 1,000: most of the 320 that it has to find for 200, but few of the 920 for 800.

    How many depends on the index, which is another one each time it is built. It would go on from 145, and from 416.
    """
    asked: dict[str, Any] = {"session": None, "principals": ("user:2",), "query": OTHER_AXIS}
    by_access_set = "document_chunks_searchable_access_set"
    found = await steps_of(worker, small=1000, exact=20_000, limit=200, index=by_access_set, **asked)
    assert (found.index_scans, found.found, found.truncated, found.exact) == (2, 200, False, False)
    assert found.rows < 1001 + CLOSE + REMOTE
    found = await steps_of(worker, small=1000, exact=20_000, limit=800, index=by_access_set, **asked)
    assert found == Steps(1, 1001 + CLOSE + REMOTE, 800, complete=False, truncated=False, exact=True)


async def test_the_index_suffices_where_it_finds_all_wanted_at_once(worker: asyncpg.Connection) -> None:
    found = await steps_of(
        worker, small=1000, exact=1200, session=None, index="document_chunks_searchable_access_set"
    )
    assert found == Steps(1, 1001, 15, complete=False, truncated=False, exact=False)


@pytest.mark.parametrize(
    ("topic", "index", "rows"),
    [(None, "document_chunks_searchable_session", SCOPE), (TOPIC, "chunk_topics", OF_TOPIC)],
    ids=["session", "topic"],
)
async def test_without_an_index_it_is_exact_or_finds_nothing(
    worker: asyncpg.Connection, topic: UUID | None, index: str, rows: int
) -> None:
    asked: dict[str, Any] = {"small": rows - 1, "exact": rows - 1, "topic": topic, "index": index}
    by_index = await steps_of(worker, **asked)
    assert (by_index.index_scans, by_index.exact) == (2, False)
    nothing = Steps(0, rows, 0, complete=False, truncated=True, exact=False)
    assert await steps_of(worker, by_halfvec=None, **asked) == nothing
    exactly = Steps(0, 2 * rows, 15, complete=False, truncated=False, exact=True)
    assert await steps_of(worker, by_halfvec=None, **asked | {"small": rows, "exact": rows}) == exactly


@pytest.mark.parametrize(("limit", "complete"), [(299, False), (300, True), (301, True)])
async def test_a_result_is_complete_if_the_scope_has_no_more_rows(
    worker: asyncpg.Connection, limit: int, *, complete: bool
) -> None:
    assert await steps_of(worker, small=300, limit=limit) == Steps(
        0, 600, min(limit, 300), complete=complete, truncated=False, exact=True
    )
    # After the index has found too few, too.
    found = await steps_of(worker, small=10, exact=1200, limit=limit)
    assert (found.index_scans, found.found, found.complete) == (1, min(limit, 300), complete)


async def test_a_scope_without_rows_is_complete(worker: asyncpg.Connection) -> None:
    for small in (0, 1000):
        found = await steps_of(worker, small=small, session=UUID(int=9))
        assert found == Steps(0, 0, 0, complete=True, truncated=False, exact=True)
        found = await steps_of(worker, small=small, principals=("nobody",))
        assert (found.index_scans, found.found, found.complete, found.truncated) == (0, 0, True, False)


async def test_a_topic_is_counted_in_its_own_table(worker: asyncpg.Connection) -> None:
    found = await steps_of(worker, small=OF_TOPIC, topic=TOPIC, index="chunk_topics")
    assert (found.index_scans, found.rows, found.complete) == (0, 2 * OF_TOPIC, False)
    found = await steps_of(worker, small=OF_TOPIC - 1, exact=OF_TOPIC - 1, topic=TOPIC, index="chunk_topics")
    assert (found.index_scans, found.rows, found.truncated) == (2, OF_TOPIC, True)


@pytest.mark.parametrize("servers", [(20_000, [1000, 20_000]), (900, [900, 900])], ids=str)
@pytest.mark.parametrize(
    ("limit", "ef_search"), [(1, 20), (2, 20), (3, 24), (17, 136), (18, 138), (1000, 1000)]
)
async def test_the_index_has_its_limits_and_enough_candidates(
    loaded: Database, servers: tuple[int, list[int]], limit: int, ef_search: int
) -> None:
    """The first scan is limited to 1,000 tuples; no scan to more than the server's limit."""
    max_tuples, limits = servers
    await execute(loaded.admin, f"SET search_path = public; {REPORT.format(index=VECTOR_INDEX)}")
    notices: list[str] = []
    try:
        async with connected(loaded.worker) as worker:
            await register_vector(worker)
            worker.add_log_listener(lambda _, message: notices.append(message.message))
            await worker.execute(f"SET hnsw.max_scan_tuples = {max_tuples}")
            # Nothing is near enough to be found by the first scan, and nothing is read exactly.
            await search(worker, limit=limit, small=0, exact=0)
            assert await worker.fetchval("SELECT current_setting('hnsw.max_scan_tuples')") == str(max_tuples)
    finally:
        await execute(
            loaded.admin,
            "DROP POLICY report ON public.document_chunks; DROP FUNCTION public.report_settings()",
        )
    settings = [list(map(int, notice.split()[1::2])) for notice in notices if notice.startswith("index ")]
    # A statement reports after its first row: those that have just scanned the vector index.
    scans = [
        (tuples, candidates)
        for (before, *_), (scanned, tuples, candidates) in zip([[0], *settings], settings, strict=False)
        if scanned > before
    ]
    assert scans == [(tuples, ef_search) for tuples in limits]


async def test_the_index_has_to_find_more_rows_than_the_limit(worker: asyncpg.Connection) -> None:
    """Eight times as many, but at most 120 more."""

    async def read(limit: int) -> int:
        async with worker.transaction():
            before = await counters(worker)
            await search(worker, session=None, limit=limit, small=0, exact=10, ef_search=1000)
            _, rows, _ = await counters(worker) - before
        return int(rows)

    # The scan may read one more, to see that it is not as near as the last.
    further = await read(1) - 8
    assert further in (0, 1)
    assert [await read(limit) - further for limit in (15, 17, 18, 100)] == [120, 136, 138, 220]
