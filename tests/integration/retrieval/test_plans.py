"""Every combination of scope and filters reads the same rows by the same indexes, however often it was searched before.

A search runs inside a function: neither EXPLAIN nor pg_prepared_statements shows its plans. What they read does.
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import numpy as np
import pytest

from streams.core.messages import Filters, MetadataRange
from streams.embedded.postgres import EmbeddedPostgres
from streams.store.filters import conditions
from streams.store.postgres import PostgresStore
from tests.conftest import Database, PostgresServer
from tests.evaluate.plans import (
    SEARCHED_TABLES,
    SEARCHES,
    VECTOR_INDEX,
    Asked,
    Caller,
    Reads,
    Way,
    combinations_of,
    problems_of,
    reads_of,
    stability_of,
)
from tests.integration.connections import connected, execute, opened_store
from tests.integration.corpora import Chunk, Corpus, Document, load, load_indexed, random_uuid, unit_vectors

pytestmark = pytest.mark.slow

SESSION, TOPIC = UUID(int=1), UUID(int=2)
FIRST_DAY = datetime(2024, 1, 1, tzinfo=UTC)
COMBINATIONS = list(
    combinations_of(
        session=SESSION,
        topic=TOPIC,
        section="0",
        document_type="memo",
        prefix="https://example.org/2",
        metadata=Filters(
            metadata={"year": "2020"},
            metadata_contains={"tags": ("kept",)},
            metadata_any={"language": ("cs", "pl", "sk")},
            metadata_range={
                "size": MetadataRange(gte=0, lt=24),
                "day": MetadataRange(before=FIRST_DAY + timedelta(days=21)),
            },
        ),
    )
)
OF_A_SCOPE = len(COMBINATIONS) // 3
CALLER = Caller(["user:1"], unit_vectors(1, 5)[0])
CHUNKS = 2000


def corpus() -> Corpus:
    """2,000 chunks, of which each filter keeps a few; every third is a problem with a parent."""
    rng = random.Random(4)
    documents = [
        Document(
            random_uuid(rng),
            frozenset({"user:1", f"user:{number}"}),
            session_id=SESSION if number % 4 == 0 else None,
            source_url=f"https://example.org/{number}",
            document_type="memo" if number % 10 == 0 else "statute",
            metadata={
                "year": 2000 + number % 25,
                "tags": ["kept", "of all"] if number % 20 == 0 else ["of all"],
                "language": "pl" if number % 20 == 0 else "de",
                "size": number,
                "day": f"{FIRST_DAY + timedelta(days=number):%Y-%m-%d}",
            },
        )
        for number in range(100)
    ]
    vectors = unit_vectors(CHUNKS, 4)
    ids = [random_uuid(rng) for _ in range(CHUNKS)]
    return Corpus.of(
        documents,
        [
            Chunk(
                ids[number],
                documents[number % 100].id,
                "text",
                vectors[number],
                session_id=documents[number % 100].session_id,
                related_topic_ids=[TOPIC] if number % 20 == 0 else [],
                section=str(number % 50),
                chunk_type="problem" if number % 3 == 0 else "theory",
                parent_chunk_id=ids[(number + 100) % CHUNKS] if number % 3 == 0 else None,
            )
            for number in range(CHUNKS)
        ],
    )


@pytest.fixture(scope="module", params=[None, 16], ids=["newest", "16"])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    if request.param is None:
        yield request.getfixturevalue("postgres")
        return
    with EmbeddedPostgres(version=request.param) as embedded:
        yield PostgresServer(embedded)


@pytest.fixture(scope="module")
def loaded(server: PostgresServer) -> Iterator[Database]:
    """One database for the module: nothing is written to it but this."""
    database = server.database()
    asyncio.run(load_indexed(database, corpus()))
    yield database
    server.drop(database)


def opened(dsn: str) -> AbstractAsyncContextManager[PostgresStore]:
    return opened_store(dsn, connections=1)


@pytest.fixture
async def store(loaded: Database) -> AsyncIterator[PostgresStore]:
    async with opened(loaded.worker) as store:
        yield store


@pytest.mark.parametrize("way", SEARCHES)
async def test_each_combination_reads_the_same_whenever_it_is_executed(
    store: PostgresStore, way: Way
) -> None:
    assert len(COMBINATIONS) == 3 * (2**4 + 4 * 2)
    with_rows = 0
    for asked in COMBINATIONS:
        async with store._connection() as connection:
            found = await stability_of(connection, way, asked, CALLER, executions=(1, 6, 12))
        assert found.stable, (asked, found)
        reads = found.reads[1]
        assert problems_of(way, reads) == [], (asked, reads)
        assert reads.ids or len(asked.filters) > 1, "each filter alone keeps rows"
        with_rows += bool(reads.ids)
        if way == "exactly":
            # No scan of an index reads more than the largest part of a scope, a session, unless it has to.
            if asked.scope != "everything" or asked.filters:
                longest = max(
                    reads.rows[index] / scans
                    for index, scans in reads.scans.items()
                    if index.startswith("document_chunks")
                )
                assert 0 < longest <= CHUNKS / 4, (asked, reads)
        else:
            assert not reads.ids or reads.scans[VECTOR_INDEX] in (1, 2), (asked, reads)
            assert reads.rows.get(VECTOR_INDEX, 0) >= len(reads.ids)
    # In each scope: without a filter, by each of the four, by four of their pairs, and by one triple; by all others on
    # metadata, alone and with two more.
    assert with_rows == 3 * (1 + 4 + 4 + 1 + 4 * 2)


@pytest.mark.parametrize("way", SEARCHES)
@pytest.mark.parametrize(
    "number", [0, 1, 15, OF_A_SCOPE + 19, 3 * OF_A_SCOPE - 1], ids=lambda number: str(COMBINATIONS[number])
)
async def test_the_thousandth_execution_reads_what_the_first_did(
    store: PostgresStore, way: Way, number: int
) -> None:
    async with store._connection() as connection:
        found = await stability_of(connection, way, COMBINATIONS[number], CALLER)
    assert set(found.reads) == {1, 6, 12, 1000}
    assert found.stable
    assert problems_of(way, found.reads[1000]) == []


@pytest.mark.parametrize("way", SEARCHES)
async def test_a_parent_and_its_document_are_looked_up_by_their_keys(store: PostgresStore, way: Way) -> None:
    """Whatever a parent has to meet: it is one row, and its document is another."""
    looked_up = 0
    for asked in COMBINATIONS:
        async with store._connection() as connection:
            without = await reads_of(connection, way, asked, CALLER)
            found = await reads_of(connection, way, asked, CALLER, expand_parents=True)
        assert found.ids == without.ids
        parents = more(found, without)
        # Of the policies, at most once for each table.
        assert parents.pop("access_sets_principals", 0) <= 3
        _, _, parent_ids, parents_missing, *_ = found.answer
        wanted = sum(
            parent is not None or missing
            for parent, missing in zip(parent_ids or (), parents_missing or (), strict=True)
        )
        looked_up += wanted
        # The parents' metadata is looked up by chunk.
        for index in ("chunk_metadata_chunk_id", "chunk_metadata_pkey", "chunk_metadata_searchable"):
            parents.pop(index, 0)
        # PostgreSQL 16 also counts lookups without a key, which read nothing.
        assert wanted <= parents.pop("document_chunks_pkey", 0) <= max(wanted, len(found.ids)), asked
        assert (
            found.rows.get("document_chunks_pkey", 0) - without.rows.get("document_chunks_pkey", 0) == wanted
        )
        assert parents.pop("documents_pkey", 0) <= wanted, asked
        assert parents == {}, asked
    assert looked_up > 50


@pytest.mark.parametrize(
    ("key", "bounds", "index"),
    [
        ("size", MetadataRange(gte=10, lt=12), "chunk_metadata_number"),
        (
            "day",
            MetadataRange(after=FIRST_DAY, before=FIRST_DAY + timedelta(days=3)),
            "chunk_metadata_instant",
        ),
    ],
)
async def test_a_range_is_an_index_condition(
    store: PostgresStore, key: str, bounds: MetadataRange, index: str
) -> None:
    """Comparisons of these types are leakproof: row-level security does not keep them out of an index."""
    by_range = conditions(Filters(metadata_range={key: bounds}))[3]
    async with store._connection() as connection:
        for scope in ((None, None), (SESSION, None)):
            asked = Asked("", ("range",), (*scope, None, None, None, by_range))
            reads = await reads_of(connection, "exactly", asked, CALLER, limit=CHUNKS)
            # Two documents, counted and read.
            kept = 2 * CHUNKS // 100
            assert scope[0] or len(reads.ids) == kept
            assert 0 < reads.rows[index] <= 2 * kept


async def test_the_index_finds_rows_of_the_scope(store: PostgresStore) -> None:
    """As many as there are: the graph is small enough to be seen whole."""
    for asked in COMBINATIONS:
        async with store._connection() as connection:
            scope = await reads_of(connection, "exactly", asked, CALLER, limit=CHUNKS)
            found = await reads_of(connection, "by the index", asked, CALLER)
        assert set(found.ids) <= set(scope.ids), asked
        assert len(found.ids) == min(15, len(scope.ids)), asked


def more(reads: Reads, than: Reads) -> dict[str, int]:
    """The scans that one search made in addition to another."""
    return {
        relation: number
        for relation in {*reads.scans, *than.scans}
        if (number := reads.scans.get(relation, 0) - than.scans.get(relation, 0))
    }


# That it would see another plan


@pytest.fixture
async def copy(server: PostgresServer, loaded: Database) -> AsyncIterator[Database]:
    """A copy of the module's database, to break something in."""
    await execute(
        server.embedded.dsn(),
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{loaded.name}'",
    )
    database = await asyncio.to_thread(server.create, loaded.name)
    yield database
    await asyncio.to_thread(server.drop, database)


BY_SECTION = Asked("everything", ("section",), (None, None, "0", None, None, None))


async def reads_in(database: Database, way: Way, asked: Asked) -> Reads:
    async with opened(database.worker) as store, store._connection() as connection:
        return await reads_of(connection, way, asked, CALLER)


async def test_it_would_see_a_generic_plan(copy: Database) -> None:
    """A filtered scope's rows are counted by a plan for its filter; one plan for all filters cannot use its index."""
    before = await reads_in(copy, "exactly", BY_SECTION)
    async with connected(copy.admin) as admin:
        source = await admin.fetchval("SELECT pg_get_functiondef('anabranch_scope_size'::regproc)")
        static, replaced = re.subn(
            r"EXECUTE '.*?;",
            "SELECT count(*) INTO size FROM (SELECT FROM public.document_chunks c WHERE c.embedding IS NOT NULL"
            " AND (by_section IS NULL OR c.section OPERATOR(pg_catalog.=) by_section) LIMIT most) s;",
            source,
            count=1,
            flags=re.DOTALL,
        )
        assert replaced == 1
        await admin.execute(static)
    after = await reads_in(copy, "exactly", BY_SECTION)
    assert after.answer == before.answer
    assert after.scans["document_chunks_section"] < before.scans["document_chunks_section"]
    assert sum(after.rows.values()) > sum(before.rows.values()) + CHUNKS / 2


async def test_it_would_see_a_plan_that_changes(copy: Database) -> None:
    async with opened(copy.worker) as store, store._connection() as connection:
        found = await stability_of(connection, "exactly", BY_SECTION, CALLER, executions=(1, 6))
        assert found.stable
        before = found.reads[1]
        await execute(copy.owner, "DROP INDEX document_chunks_section")
        after = await reads_of(connection, "exactly", BY_SECTION, CALLER)
    assert after.answer == before.answer
    assert after != before


async def test_it_would_see_a_sequential_scan(copy: Database) -> None:
    async with connected(copy.owner) as owner:
        for row in await owner.fetch(
            "SELECT indexrelid::regclass::text AS name FROM pg_index"
            " WHERE indrelid = 'document_chunks'::regclass AND NOT indisprimary"
        ):
            await owner.execute(f"DROP INDEX {row['name']}")
    for way in SEARCHES:
        problems = problems_of(way, await reads_in(copy, way, COMBINATIONS[0]))
        assert any("sequential scans of document_chunks" in problem for problem in problems), problems


# Statistics and plans of another time


async def test_statistics_and_old_plans_change_no_answer(server: PostgresServer) -> None:
    """A connection that made its plans while the tables were empty reads and finds what a new one does."""
    database = await asyncio.to_thread(server.database)
    rows = corpus()
    few = Corpus.of(rows.documents.values(), list(rows.chunks.values())[:600])
    try:
        async with connected(database.owner) as owner:
            for table in (*SEARCHED_TABLES, "access_sets"):
                await owner.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")

        async def answers(connection: asyncpg.pool.PoolConnectionProxy) -> list[Reads]:
            return [
                await reads_of(connection, way, asked, CALLER, expand_parents=True)
                for way in SEARCHES
                for asked in COMBINATIONS
            ]

        async with opened(database.worker) as old, old._connection() as connection:
            assert not any(reads.ids for reads in await answers(connection))
            await load(database.writer, few)
            planned_empty = await answers(connection)
            await execute(
                database.owner,
                "ANALYZE documents, document_chunks, access_sets, chunk_topics, chunk_metadata",
            )
            analyzed = await answers(connection)
        async with opened(database.worker) as new, new._connection() as connection:
            planned_full = await answers(connection)
    finally:
        await asyncio.to_thread(server.drop, database)
    assert sum(bool(reads.ids) for reads in planned_empty) > len(COMBINATIONS) / 2
    for asked, way, *found in zip(
        COMBINATIONS * 2,
        np.repeat(SEARCHES, len(COMBINATIONS)),
        planned_empty,
        analyzed,
        planned_full,
        strict=True,
    ):
        assert all(reads.answer == found[0].answer for reads in found), (asked, way)
        for reads in found:
            assert problems_of(way, reads) == [], (asked, way, reads)
