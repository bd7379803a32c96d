"""One deadline for all statements of an arm, and a server that computes no further once nobody waits for the answer.

On the newest and on an older server: what ends a statement there is a setting of the server's.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest

from streams.core.errors import SearchTimeout
from streams.core.messages import QueryEmbedding
from streams.embedded.postgres import EmbeddedPostgres
from streams.retrieval import Search, unit_vector
from streams.store.migrate import migrate
from streams.store.postgres import PostgresStore
from tests.conftest import SETTING
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors
from tests.integration.harness import query

# Every statement that searches waits, and logs the server's own limit for it.
SLOW = """
    CREATE TABLE public.delays (kind text PRIMARY KEY, seconds float);
    CREATE FUNCTION public.wait_a_little() RETURNS boolean LANGUAGE plpgsql VOLATILE SECURITY DEFINER AS $$
    BEGIN
      RAISE LOG 'limit of % ms', (SELECT s.setting FROM pg_settings s WHERE s.name = 'statement_timeout');
      PERFORM pg_sleep(d.seconds) FROM public.delays d
      WHERE d.kind = CASE WHEN current_query() LIKE '%ORDER BY c.embedding%' THEN 'approximate' ELSE 'exact' END;
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


@contextlib.asynccontextmanager
async def opened(server: EmbeddedPostgres, *, timeout_seconds: float) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(
        server.dsn("worker", "postgres", "w"),
        connections=2,
        search_timeout_seconds=timeout_seconds,
        exact_scan_rows=20_000,
        small_scope_rows=5,  # so that a search takes more than one statement
    )
    await store.open()
    try:
        await store.warm_up()
        yield store
    finally:
        await store.close(timeout_seconds=3)


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


async def test_the_server_has_what_is_left_of_the_deadline(
    server: EmbeddedPostgres, admin: asyncpg.Connection
) -> None:
    """Behind a network that lost the client, only the server's own limit ends a search."""
    await admin.execute("INSERT INTO public.delays VALUES ('exact', 1), ('approximate', 1)")
    logged = server.log_file.stat().st_size
    async with opened(server, timeout_seconds=10) as store:
        await store.search(search(limit=15))
    with server.log_file.open(encoding="utf-8") as log:
        log.seek(logged)
        limits = [int(limit) for limit in re.findall(r"limit of (\d+) ms", log.read())]
    assert 5000 < limits[0] <= 10_000
    assert limits[-1] <= limits[0] - 2000, "the second transaction begins after two delays of a second"
