"""A search notices by itself that row-level security does not hold, whatever was true when the worker started."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import count
from uuid import UUID

import asyncpg
import pytest

from streams.core.errors import StoreMisconfigured
from streams.core.messages import Filters
from streams.retrieval import Search
from streams.store.postgres import PostgresStore
from tests.conftest import Database
from tests.integration.connections import connected, opened_store
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors

TABLES = ("document_chunks", "documents", "chunk_topics", "chunk_metadata", "access_sets")
VECTOR = unit_vectors(1, 3)[0]
CHANGES = 60


def corpus() -> Corpus:
    """Two readers' documents, in turn; everything is as near to one query as to the next."""
    rng = random.Random(8)
    documents = [Document(random_uuid(rng), frozenset({f"user:{number % 2}"})) for number in range(20)]
    return Corpus.of(
        documents,
        [
            Chunk(random_uuid(rng), documents[number % 20].id, "text", vector, token_count=1)
            for number, vector in enumerate(unit_vectors(200, 8))
        ],
    )


def search_for(principal: str, *, with_passages: bool = False) -> Search:
    return Search(
        vector=VECTOR,
        principals=[principal],
        session_id=None,
        topic_id=None,
        filters=None,
        expand_parents=False,
        limit=15,
        with_passages=with_passages,
    )


def opened(database: Database, *, small_scope_rows: int = 1000) -> AbstractAsyncContextManager[PostgresStore]:
    return opened_store(database.worker, connections=3, small_scope_rows=small_scope_rows)


@pytest.mark.parametrize("table", TABLES)
async def test_no_statement_returns_rows_that_a_table_without_row_level_security_has_part_in(
    database: Database, table: str
) -> None:
    await load(database.writer, corpus())
    owner = await asyncpg.connect(database.owner)
    try:
        async with opened(database) as exact, opened(database, small_scope_rows=0) as by_the_index:
            found = await exact.search(search_for("user:1"))
            with_passages = await exact.search(search_for("user:1", with_passages=True))
            assert len(found.candidates) == len(with_passages.passages) == 15
            ids = [candidate.chunk_id for candidate in found.candidates]
            await owner.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
            for store in (exact, by_the_index):
                with pytest.raises(StoreMisconfigured, match=r"row-level security .* `anabranch migrate`"):
                    await store.search(search_for("user:1"))
                with pytest.raises(StoreMisconfigured, match="row-level security"):
                    await store.search(search_for("user:1", with_passages=True))
                with pytest.raises(StoreMisconfigured, match="row-level security"):
                    await store.search(replace(search_for("user:1"), expand_parents=True))
            with pytest.raises(StoreMisconfigured, match="row-level security"):
                await exact.passages(["user:1"], ids)
            with pytest.raises(StoreMisconfigured, match="row-level security"):
                await exact.sizes(["user:1"], ids)
            await owner.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            assert await exact.search(search_for("user:1")) == found
            assert await exact.search(search_for("user:1", with_passages=True)) == with_passages
            assert (await exact.passages(["user:1"], ids)).keys() == set(ids)
            assert (await exact.sizes(["user:1"], ids)).keys() == set(ids)
    finally:
        await owner.close()


async def test_a_role_that_row_level_security_does_not_hold_gets_no_row(database: Database) -> None:
    await load(database.writer, corpus())
    admin = await asyncpg.connect(database.admin)
    try:
        async with opened(database) as store:
            await store.search(search_for("user:1"))
            await admin.execute("ALTER ROLE worker BYPASSRLS")
            for with_passages in (False, True):
                with pytest.raises(StoreMisconfigured, match="row-level security"):
                    await store.search(search_for("user:1", with_passages=with_passages))
    finally:
        await admin.execute("ALTER ROLE worker NOBYPASSRLS")
        await admin.close()


@pytest.mark.slow
async def test_no_search_slips_through_while_it_is_switched_off_and_on(
    database: Database, figures: Callable[[str], None]
) -> None:
    """The answer and the look at row-level security are of one transaction, which holds the tables' locks."""
    held = corpus()
    await load(database.writer, held)
    mine = {
        principal: {
            chunk.id
            for chunk in held.chunks.values()
            if principal in held.documents[chunk.document_id].readers
        }
        for principal in ("user:0", "user:1")
    }
    seen: Counter[str] = Counter()
    done = asyncio.Event()

    async def keep_searching(store: PostgresStore, principal: str) -> None:
        while not done.is_set():
            try:
                found = await store.search(search_for(principal))
                both = await store.search(search_for(principal, with_passages=True))
                passages = await store.passages([principal], list(held.chunks))
            except StoreMisconfigured:
                seen["refused"] += 1
                continue
            returned: set[UUID] = {one.chunk_id for one in (*found.candidates, *both.candidates)}
            returned |= passages.keys() | both.passages.keys()
            assert returned <= mine[principal]
            seen["answered"] += len(found.candidates) == 15

    owner = await asyncpg.connect(database.owner)
    try:
        async with (
            opened(database) as exact,
            opened(database, small_scope_rows=0) as by_the_index,
            asyncio.TaskGroup() as group,
        ):
            for store in (exact, by_the_index):
                for principal in mine:
                    group.create_task(keep_searching(store, principal))
            try:
                # As many changes as it takes on this machine until there were enough searches of both kinds.
                async with asyncio.timeout(300):
                    for number in count():
                        if number >= CHANGES and min(seen["answered"], seen["refused"]) > 20:
                            break
                        await owner.execute(f"ALTER TABLE {TABLES[number % 5]} DISABLE ROW LEVEL SECURITY")
                        await asyncio.sleep(0.01)
                        await owner.execute(f"ALTER TABLE {TABLES[number % 5]} ENABLE ROW LEVEL SECURITY")
                        await asyncio.sleep(0.02)
            finally:
                done.set()
    finally:
        await owner.close()
    figures(f"{number} changes, {dict(seen)}")
    assert min(seen["answered"], seen["refused"]) > 20


# For each function, others with as many parameters, and with one less, all of type text.
PLANTED = """
    DO $$
    DECLARE
      f record;
    BEGIN
      FOR f IN SELECT DISTINCT proname AS name, n
               FROM pg_proc, generate_series(greatest(pronargs - 1, 1), pronargs) n
               WHERE proname LIKE 'anabranch_%' AND prokind = 'f' AND prorettype <> 'trigger'::regtype LOOP
        BEGIN
          EXECUTE format(
            'CREATE FUNCTION public.%I(%s) RETURNS record LANGUAGE plpgsql AS $f$ BEGIN RAISE ''planted''; END $f$',
            f.name, (SELECT string_agg('text', ', ') FROM generate_series(1, f.n)));
        EXCEPTION WHEN duplicate_function THEN NULL;
        END;
      END LOOP;
    END
    $$;
"""


@pytest.mark.parametrize("small_scope_rows", [1000, 0])
async def test_no_overload_is_called(database: Database, small_scope_rows: int) -> None:
    """PostgreSQL prefers text for parameters of unknown type, and fewer parameters to ones with a default."""
    await load(database.writer, corpus())
    async with connected(database.admin) as admin:
        await admin.execute("GRANT CREATE ON SCHEMA public TO back_end; SET ROLE back_end")
        before = await admin.fetchval("SELECT count(*) FROM pg_proc")
        await admin.execute(PLANTED)
        assert await admin.fetchval("SELECT count(*) FROM pg_proc") > before + 10
    async with opened(database, small_scope_rows=small_scope_rows) as store:
        for filters in (None, Filters(metadata={"a": "b", "c": "d", "e": "f"})):
            everything = replace(search_for("user:1"), filters=filters)
            for search in (
                everything,
                replace(everything, expand_parents=True),
                replace(everything, with_passages=True),
                replace(everything, session_id=UUID(int=1), topic_id=UUID(int=2)),
            ):
                found = await store.search(search)
                expected = 15 if search.session_id is None and filters is None else 0
                assert len(found.candidates) == expected
        ids = [candidate.chunk_id for candidate in (await store.search(search_for("user:1"))).candidates]
        assert set(await store.passages(["user:1"], ids)) == set(ids)
        assert set(await store.sizes(["user:1"], ids)) == set(ids)
