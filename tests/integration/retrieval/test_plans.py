"""Every combination of scope and filters keeps its plan, however often the statement was executed before.

PostgreSQL makes a generic plan after five executions where it may, and a generic plan knows neither which filters are
asked for nor how many rows they keep.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from uuid import UUID

import asyncpg
import pytest

from streams.store.postgres import PostgresStore
from tests.conftest import SETTING, Database, PostgresServer
from tests.evaluate.plans import SEARCHES, Asked, combinations_of, indexes_in, nodes_of, plan_of, plans_of
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors

pytestmark = pytest.mark.slow

SESSION, TOPIC = UUID(int=1), UUID(int=2)
COMBINATIONS = list(
    combinations_of(
        session=SESSION,
        topic=TOPIC,
        section="1",
        document_type="memo",
        prefix="https://example.org/1",
        metadata={"year": "2020"},
    )
)
VECTOR = unit_vectors(1, 5)[0].tolist()


def corpus() -> Corpus:
    """2,000 chunks, of which each filter keeps a few."""
    rng = random.Random(4)
    documents = [
        Document(
            random_uuid(rng),
            frozenset({"user:1", f"user:{number}"}),
            session_id=SESSION if number % 4 == 0 else None,
            source_url=f"https://example.org/{number}",
            document_type="memo" if number % 10 == 0 else "statute",
            metadata={"year": 2000 + number % 25},
        )
        for number in range(100)
    ]
    vectors = unit_vectors(2000, 4)
    return Corpus.of(
        documents,
        [
            Chunk(
                random_uuid(rng),
                documents[number % 100].id,
                "text",
                vectors[number],
                session_id=documents[number % 100].session_id,
                related_topic_ids=[TOPIC] if number % 20 == 0 else [],
                section=str(number % 50),
            )
            for number in range(2000)
        ],
    )


@pytest.fixture(scope="module")
def loaded(postgres: PostgresServer) -> Iterator[Database]:
    """One database for the module: nothing is written to it but this."""

    async def fill(database: Database) -> None:
        await load(database.writer, corpus())
        owner = await asyncpg.connect(database.owner)
        try:
            await owner.execute(
                "ANALYZE documents, document_chunks, access_sets, chunk_topics, chunk_metadata"
            )
        finally:
            await owner.close()

    database = postgres.database()
    asyncio.run(fill(database))
    yield database
    postgres.drop(database)


@pytest.fixture
async def store(loaded: Database) -> AsyncIterator[PostgresStore]:
    opened = PostgresStore(
        loaded.worker,
        connections=1,
        search_timeout_seconds=20,
        exact_scan_rows=20_000,
    )
    await opened.open()
    try:
        yield opened
    finally:
        await opened.close(timeout_seconds=3)


@pytest.mark.parametrize("search", SEARCHES)
async def test_each_combination_is_planned_alike_whenever_it_is_executed(
    store: PostgresStore, search: str
) -> None:
    assert len(COMBINATIONS) == 3 * 2**4
    for asked in COMBINATIONS:
        async with asyncio.timeout(60) as limit, store._transaction_as(["user:1"], limit) as connection:
            plans = await plans_of(connection, search, asked, VECTOR, executions=(1, 6, 12))
        assert plans.stable, asked
        assert (plans.custom, plans.generic) == (12, 0)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("number", [0, 31, 47], ids=lambda number: str(COMBINATIONS[number]))
async def test_the_thousandth_execution_is_planned_as_the_first(
    store: PostgresStore, search: str, number: int
) -> None:
    async with asyncio.timeout(60) as limit, store._transaction_as(["user:1"], limit) as connection:
        plans = await plans_of(connection, search, COMBINATIONS[number], VECTOR)
    assert plans.stable
    assert (plans.custom, plans.generic) == (1000, 0)


@pytest.mark.parametrize("search", SEARCHES)
async def test_a_parent_and_its_document_are_looked_up_by_their_keys(
    store: PostgresStore, search: str
) -> None:
    """Whatever a parent has to meet: it is one row, and its document is another."""
    for asked in COMBINATIONS:
        async with asyncio.timeout(60) as limit, store._transaction_as(["user:1"], limit) as connection:
            plan = await plan_of(connection, search, asked, VECTOR, expand_parents=True)
        of_parents = [below for below in plan["Plans"] if not below.get("Subplan Name", "").startswith("CTE")]
        indexes = Counter(
            (node["Relation Name"], node.get("Index Name"), "Index Cond" in node)
            for below in of_parents
            for node in nodes_of(below)
            if node.get("Relation Name") in ("document_chunks", "documents")
        )
        wanted = Counter([("document_chunks", "document_chunks_pkey", True)])
        if {"document type", "URL prefix", "metadata"} & {*asked.filters}:
            wanted["documents", "documents_pkey", True] += 1
        assert indexes == wanted, asked


async def test_it_would_see_a_generic_plan(store: PostgresStore) -> None:
    asked = Asked("everything", ("section",), (None, None, "1", None, None, None))
    shapes = {}
    for mode in ("force_custom_plan", "force_generic_plan"):
        async with asyncio.timeout(60) as limit, store._transaction_as(["user:1"], limit) as connection:
            await connection.execute(f"SET LOCAL plan_cache_mode = {mode}")
            plans = await plans_of(connection, "search_exactly", asked, VECTOR, executions=(1, 6))
        shapes[mode] = plans.shapes[6]
        assert plans.stable == (mode == "force_custom_plan")
        assert plans.generic == (0 if mode == "force_custom_plan" else 2 + 4)
    assert "document_chunks_section" in indexes_in(shapes["force_custom_plan"])
    assert "document_chunks_section" not in indexes_in(shapes["force_generic_plan"])
