"""One deadline for a whole arm, and a server that computes no further once nobody waits for the answer.

An arm is one call. A worker that waits no longer asks the server to cancel it; if the network lost that request too,
the call ends by itself. On the newest and on an older server.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from pgvector.asyncpg import register_vector

from streams.core.errors import SearchTimeout, StoreUnavailable
from streams.core.messages import QueryEmbedding
from streams.embedded.postgres import EmbeddedPostgres
from streams.retrieval import Search, unit_vector
from streams.store.error_translation import translate
from streams.store.migrate import migrate
from streams.store.postgres import PooledConnection, PostgresStore
from tests.conftest import SETTING
from tests.integration.connections import opened_store
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors
from tests.integration.harness import query

# Every statement that reads chunks waits: by the first row that the vector index returned, and before it.
SLOW = """
    CREATE TABLE public.delays (kind text PRIMARY KEY, seconds float);
    CREATE SEQUENCE public.statements;
    CREATE FUNCTION public.wait_a_little() RETURNS boolean LANGUAGE plpgsql VOLATILE SECURITY DEFINER AS $$
    BEGIN
      PERFORM nextval('public.statements');  -- which a rollback does not undo
      PERFORM pg_sleep(d.seconds) FROM public.delays d
      WHERE d.kind = CASE WHEN pg_stat_get_xact_numscans('public.document_chunks_embedding_halfvec'::regclass) > 0
                          THEN 'approximate' ELSE 'exact' END;
      RETURN true;
    END $$;
    CREATE POLICY slow ON public.document_chunks AS RESTRICTIVE FOR SELECT TO anabranch_reader
      USING ((SELECT public.wait_a_little()));
"""


@pytest.fixture(scope="module", params=[None, 16], ids=["newest", "16"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(version=request.param) if request.param else EmbeddedPostgres() as started:
        yield started


@pytest.fixture
async def admin(server: EmbeddedPostgres) -> AsyncIterator[asyncpg.Connection]:
    """A superuser, in a store whose searches are slow."""
    connection = await asyncpg.connect(server.dsn())
    try:
        if not await connection.fetchval("SELECT to_regclass('public.delays') IS NOT NULL"):
            await migrate(server.dsn(), principals_setting=SETTING)
            await connection.execute("CREATE ROLE worker LOGIN PASSWORD 'w' IN ROLE anabranch_reader")
            document = Document(document_id := UUID(int=1), frozenset({"public"}))
            chunks = [
                Chunk(UUID(int=number + 10), document_id, "text", vector)
                for number, vector in enumerate(unit_vectors(20, 1))
            ]
            await load(server.dsn(), Corpus.of([document], chunks))
            await connection.execute(SLOW)
        await connection.execute("TRUNCATE public.delays")
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'worker'"
        )
        yield connection
    finally:
        await connection.close()


def opened(
    server: EmbeddedPostgres, *, timeout_seconds: float
) -> contextlib.AbstractAsyncContextManager[PostgresStore]:
    return opened_store(
        server.dsn("worker", "postgres", "w"),
        search_timeout_seconds=timeout_seconds,
        small_scope_rows=5,  # so that a search takes more than one statement
        warm=True,
    )


def search(limit: int = 5) -> Search:
    event = QueryEmbedding.parse(query(unit_vectors(1, 2)[0]))
    return Search(
        unit_vector(event.embedding), ["public"], None, None, None, expand_parents=False, limit=limit
    )


async def searching(admin: asyncpg.Connection) -> list[str]:
    return [
        row["query"]
        for row in await admin.fetch(
            "SELECT query FROM pg_stat_activity WHERE usename = 'worker' AND state = 'active'"
        )
    ]


async def until_searching(admin: asyncpg.Connection) -> None:
    async with asyncio.timeout(10):
        while not await searching(admin):  # noqa: ASYNC110  # what is waited for is another process
            await asyncio.sleep(0.02)


async def until_nothing_is_searched(admin: asyncpg.Connection) -> None:
    """A second by the server's clock, and what the machine takes for a few of these statements."""
    began = last = await admin.fetchval("SELECT clock_timestamp()")
    longest = timedelta(0)
    while await searching(admin):
        now = await admin.fetchval("SELECT clock_timestamp()")
        longest = max(longest, now - last)
        assert now - began < timedelta(seconds=1) + 5 * longest
        last = now
        await asyncio.sleep(0.02)


async def test_a_second_after_a_timeout_nothing_is_searched(
    server: EmbeddedPostgres, admin: asyncpg.Connection
) -> None:
    await admin.execute("INSERT INTO public.delays VALUES ('exact', 2.5), ('approximate', 60)")
    async with opened(server, timeout_seconds=3) as store:
        with pytest.raises(SearchTimeout):
            await store.search(search())
        await until_nothing_is_searched(admin)


async def test_a_second_after_a_cancellation_nothing_is_searched(
    server: EmbeddedPostgres, admin: asyncpg.Connection
) -> None:
    await admin.execute("INSERT INTO public.delays VALUES ('exact', 60)")
    async with opened(server, timeout_seconds=30) as store:
        asking = asyncio.create_task(store.search(search()))
        await until_searching(admin)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until_nothing_is_searched(admin)


async def test_a_second_after_the_worker_disappeared_nothing_is_searched(
    server: EmbeddedPostgres, admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request to cancel: the server notices that the connection is closed."""
    await admin.execute("INSERT INTO public.delays VALUES ('exact', 60)")
    opened_ones: list[asyncpg.Connection] = []
    connect = asyncpg.connect

    async def remember(*args: Any, **options: Any) -> asyncpg.Connection:
        opened_ones.append(await connect(*args, **options))
        return opened_ones[-1]

    monkeypatch.setattr(asyncpg, "connect", remember)
    async with opened(server, timeout_seconds=30) as store:
        asking = asyncio.create_task(store.search(search()))
        await until_searching(admin)
        for connection in opened_ones:
            connection.terminate()
        await until_nothing_is_searched(admin)
        with pytest.raises(StoreUnavailable):
            await asking


async def test_the_server_ends_a_search_that_the_worker_no_longer_can(
    server: EmbeddedPostgres, admin: asyncpg.Connection
) -> None:
    """A second after the deadline, also if the connection stays open and no request to cancel arrives."""
    del admin  # which makes the store and the role
    async with opened(server, timeout_seconds=0.5) as store:

        async def limit(connection: PooledConnection) -> str:
            return str(await connection.fetchval("SELECT current_setting('statement_timeout')"))

        assert await store.inspect(limit) == "1500ms"


async def test_fifty_cancellations_leave_nothing_behind(
    server: EmbeddedPostgres, admin: asyncpg.Connection
) -> None:
    await admin.execute("INSERT INTO public.delays VALUES ('exact', 60)")
    before = asyncio.all_tasks()
    async with opened(server, timeout_seconds=30) as store:
        for number in range(50):
            asking = asyncio.create_task(store.search(search()))
            if number % 5:
                await until_searching(admin)
            else:  # while it connects, or has just begun
                await asyncio.sleep(number / 5000)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await until_nothing_is_searched(admin)
        async with asyncio.timeout(5):
            while dict(store.connections())["busy"] or asyncio.all_tasks() != before:  # noqa: ASYNC110  # tasks end by themselves
                await asyncio.sleep(0.02)
        await admin.execute("TRUNCATE public.delays")
        await store.warm_up()  # all connections at once
        assert dict(store.connections()) == {"idle": 2, "busy": 0}
        assert len((await store.search(search())).candidates) == 5
        assert await sessions(admin) == 2
    async with asyncio.timeout(5):
        while await sessions(admin):  # noqa: ASYNC110  # what is waited for is another process
            await asyncio.sleep(0.02)


async def sessions(admin: asyncpg.Connection) -> int:
    return int(await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE usename = 'worker'"))


# Behind a network that lost the client, only the server ends a search.


@pytest.fixture
async def worker(server: EmbeddedPostgres, admin: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    """A client that never gives up."""
    del admin  # which makes the store and the role
    connection = await asyncpg.connect(server.dsn("worker", "postgres", "w"))
    try:
        await register_vector(connection)
        yield connection
    finally:
        await connection.close()


async def call(worker: asyncpg.Connection, *, milliseconds: int, limit: int = 15) -> asyncpg.Record | None:
    """More rows than there are, so that the index does not find enough, and the search goes on."""
    return await worker.fetchrow(
        "SELECT * FROM public.anabranch_search($1, $2, NULL, NULL, NULL, NULL, NULL, NULL, $3, false, 5, 10000, true,"
        " 100, $4)",
        '["public"]',
        unit_vectors(1, 2)[0],
        limit,
        milliseconds,
    )


async def test_a_search_ends_by_itself_between_statements(
    admin: asyncpg.Connection, worker: asyncpg.Connection
) -> None:
    await admin.execute("INSERT INTO public.delays VALUES ('exact', 0.5), ('approximate', 0.5)")

    async def statements() -> int:
        """So far."""
        return int(await admin.fetchval("SELECT nextval('public.statements')"))

    before = await statements()
    found = await call(worker, milliseconds=60_000)
    assert found is not None
    assert len(found["ids"]) == 15
    whole = await statements() - before - 1
    assert whole >= 4, "counted, searched by the index, counted again, searched exactly"
    before = await statements()
    with pytest.raises(asyncpg.QueryCanceledError) as raised:
        await call(worker, milliseconds=600)
    assert 1 <= await statements() - before - 1 < whole
    assert isinstance(translate(raised.value), SearchTimeout)


@pytest.mark.parametrize("table", ["document_chunks", "access_sets"])
async def test_a_search_does_not_wait_longer_for_a_lock(
    admin: asyncpg.Connection, worker: asyncpg.Connection, table: str
) -> None:
    loop = asyncio.get_running_loop()
    async with admin.transaction():
        await admin.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        began = loop.time()
        with pytest.raises(asyncpg.LockNotAvailableError) as raised:
            async with asyncio.timeout(20):
                await call(worker, milliseconds=500)
        assert loop.time() - began > 0.5
    assert isinstance(translate(raised.value), StoreUnavailable)
    assert await call(worker, milliseconds=20_000) is not None
    assert await worker.fetchval("SHOW lock_timeout") == "0"
