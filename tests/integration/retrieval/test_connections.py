"""The two arms run at the same time, and nobody's principals outlive their transaction on a pooled connection.

Searches are slowed down, or made to fail, by a policy on the table: the statements are the worker's own.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from streams.core.errors import SearchTimeout, StoreUnavailable
from streams.core.messages import QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, resolve_params
from streams.retrieval import ArmResult, Retrieved, Search, retrieve
from streams.store.postgres import PostgresStore
from streams.tokens import count_tokens
from tests.conftest import SETTING, Database, PostgresServer
from tests.integration.connections import opened_store
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors
from tests.integration.harness import query, until

SESSION = UUID("0b8d7c1a-55e4-4c2f-8f7e-9a1b2c3d4e5f")
TOPIC = UUID("c0ffee00-1234-4abc-8def-0123456789ab")
SECRET = "user:whose-principals-must-not-survive"

# Run once a statement, as an InitPlan, before any row is looked at.
OBSTACLE = """
    CREATE TABLE public.obstacle (kind text);
    INSERT INTO public.obstacle VALUES ('none');
    CREATE FUNCTION public.meet_obstacle() RETURNS boolean LANGUAGE plpgsql VOLATILE SECURITY DEFINER AS $$
    DECLARE kind text := (SELECT o.kind FROM public.obstacle o);
    BEGIN
      IF kind = 'slow' THEN PERFORM pg_sleep(1); END IF;
      IF kind = 'hang' THEN PERFORM pg_sleep(60); END IF;
      IF kind = 'fail' THEN RAISE EXCEPTION 'broken'; END IF;
      IF kind = 'crash' THEN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60); END IF;
      RETURN true;
    END $$;
    CREATE POLICY obstacle ON public.document_chunks AS RESTRICTIVE FOR SELECT TO anabranch_reader
      USING ((SELECT public.meet_obstacle()));
"""


@pytest.fixture
async def admin(database: Database) -> AsyncIterator[asyncpg.Connection]:
    """A superuser, in a database with an obstacle in the way of every search."""
    document = Document(UUID(int=1), frozenset({SECRET}))
    chunks = [
        Chunk(
            UUID(int=number + 10),
            document.id,
            "text",
            vector,
            session_id=SESSION,
            related_topic_ids=[TOPIC] if number % 2 else [],
        )
        for number, vector in enumerate(unit_vectors(20, 1))
    ]
    await load(database.writer, Corpus.of([document], chunks))
    connection = await asyncpg.connect(database.admin)
    try:
        await connection.execute(OBSTACLE)
        yield connection
    finally:
        await connection.close()


def opened(
    database: Database, *, connections: int, timeout_seconds: float
) -> AbstractAsyncContextManager[PostgresStore]:
    return opened_store(
        database.worker, connections=connections, search_timeout_seconds=timeout_seconds, warm=True
    )


async def ask(store: Any) -> Retrieved:
    event = QueryEmbedding.parse(
        query(unit_vectors(1, 2)[0], principals=[SECRET], session_id=SESSION, topic_id=TOPIC)
    )
    rules = resolve_params(event, BUILTIN_PROFILES, "extraction")
    return await retrieve(event, rules, store, count_tokens, started=perf_counter())


async def put(admin: asyncpg.Connection, obstacle: str) -> None:
    await admin.execute("UPDATE public.obstacle SET kind = $1", obstacle)


# Side by side


@dataclass
class Recording:
    """A store that writes down when each search ran."""

    store: PostgresStore
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)

    async def search(self, search: Search) -> ArmResult:
        began = perf_counter()
        found = await self.store.search(search)
        self.spans["global" if search.topic_id is None else "local"] = (began, perf_counter())
        return found

    async def passages(self, *arguments: Any) -> Any:
        return await self.store.passages(*arguments)


async def test_both_arms_search_at_the_same_time(database: Database, admin: asyncpg.Connection) -> None:
    await put(admin, "slow")
    async with opened(database, connections=2, timeout_seconds=10) as store:
        recording = Recording(store)
        asking = asyncio.create_task(ask(recording))
        together: set[frozenset[int]] = set()
        while not asking.done():
            rows = await admin.fetch(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'anabranch' AND state = 'active' AND wait_event = 'PgSleep'"
            )
            together.add(frozenset(row["pid"] for row in rows))
            await asyncio.sleep(0.01)
        retrieved = await asking
    # As the server saw it: two backends in the middle of a search at one moment.
    assert max(map(len, together)) == 2
    # As the worker saw it: neither began after the other had ended.
    (local_from, local_to), (global_from, global_to) = recording.spans["local"], recording.spans["global"]
    assert min(local_to, global_to) - max(local_from, global_from) > 0.5
    assert min(retrieved.arm_seconds.values()) >= 1
    assert retrieved.result.k_returned == 15


# Nothing is left behind


async def none_survives(store: PostgresStore, connections: int) -> None:
    """Looks at every connection of the pool, at once, so that none is missed."""
    everyone = asyncio.Barrier(connections)

    async def check() -> tuple[str | None, int, int]:
        async with store._connection() as connection:
            await everyone.wait()
            [(principals, sets, pid)] = await connection.fetch(
                f"SELECT current_setting('{SETTING}', true), (SELECT count(*) FROM access_sets)::int,"
                " pg_backend_pid()"
            )
            return principals, sets, pid

    seen = await asyncio.gather(*(check() for _ in range(connections)))
    assert len({pid for _, _, pid in seen}) == connections
    for principals, visible, _ in seen:
        assert principals in (None, "")
        assert visible == 0


async def test_no_principal_survives(database: Database, admin: asyncpg.Connection) -> None:
    connections = 2
    async with opened(database, connections=connections, timeout_seconds=3) as store:
        # Success.
        assert (await ask(store)).result.k_returned == 15
        await none_survives(store, connections)

        # A timeout, the server's or ours, whichever is first.
        await put(admin, "hang")
        with pytest.raises(SearchTimeout):
            await ask(store)
        await put(admin, "none")
        await none_survives(store, connections)

        # Cancellation in the middle of the search, at many moments.
        for milliseconds in (0, 1, 2, 3, 5, 8, 13, 21, 34, 200):
            await put(admin, "hang" if milliseconds > 100 else "none")
            asking = asyncio.create_task(ask(store))
            await asyncio.sleep(milliseconds / 1000)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await put(admin, "none")
            await none_survives(store, connections)

        # An error in the statement, of a kind that nobody foresaw.
        await put(admin, "fail")
        with pytest.raises(asyncpg.RaiseError):
            await ask(store)
        await put(admin, "none")
        await none_survives(store, connections)

        # The backend is ended under us.
        await put(admin, "crash")
        with pytest.raises(StoreUnavailable):
            await ask(store)
        await put(admin, "none")
        await none_survives(store, connections)
        assert (await ask(store)).result.k_returned == 15


async def test_a_session_that_the_servers_transaction_timeout_ends_is_a_timeout(
    database: Database, admin: asyncpg.Connection
) -> None:
    """The server closes the connection; asyncpg then raises an error of its own, with the server's as its cause."""
    await put(admin, "hang")
    await admin.execute(
        f"ALTER ROLE worker IN DATABASE {database.name} SET transaction_timeout = '500ms'"  # PostgreSQL 17
    )
    async with opened(database, connections=2, timeout_seconds=30) as store:
        with pytest.raises(SearchTimeout, match="transaction timeout"):
            await ask(store)
        await put(admin, "none")
        assert (await ask(store)).result.k_returned == 15
        await none_survives(store, 2)


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyError])
async def test_a_lost_connection_does_not_hide_why_it_is_closed(
    database: Database, admin: asyncpg.Connection, error: type[BaseException]
) -> None:
    async def lose_connection(store: PostgresStore) -> None:
        async with store._connection() as connection:
            pid = connection.get_server_pid()
            sleeping = asyncio.create_task(connection.execute("SELECT pg_sleep(60)"))
            while not await admin.fetchval(  # noqa: ASYNC110  # what is waited for is another process
                "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'PgSleep')", pid
            ):
                await asyncio.sleep(0.02)
            await admin.execute("SELECT pg_terminate_backend($1)", pid)
            with pytest.raises(asyncpg.ConnectionDoesNotExistError):
                await sleeping
            raise error

    async with opened(database, connections=1, timeout_seconds=30) as store:
        with pytest.raises(error):
            await lose_connection(store)
        await none_survives(store, 1)


async def test_a_pool_that_is_closed_under_a_search_is_no_defect(
    database: Database, admin: asyncpg.Connection
) -> None:
    """At the end of a worker; an exception of another kind would pass for a bug, or hide a cancellation."""
    await put(admin, "hang")
    async with opened(database, connections=2, timeout_seconds=30) as store:
        asking = asyncio.create_task(ask(store))
        await asyncio.sleep(0.3)
        await store.close(timeout_seconds=0.1)
        with pytest.raises(StoreUnavailable):
            await asking


async def test_warming_up_keeps_no_connection_where_not_all_can_be_had(
    database: Database, postgres: PostgresServer, admin: asyncpg.Connection
) -> None:
    await admin.execute("CREATE ROLE few LOGIN PASSWORD 'test' CONNECTION LIMIT 3 IN ROLE anabranch_reader")
    store = PostgresStore(
        postgres.login("few", database),
        connections=8,
        search_timeout_seconds=30,
        exact_scan_rows=20_000,
    )
    await store.open()
    try:
        with pytest.raises(StoreUnavailable):
            await store.warm_up()
        # Whoever is not told waits for the search timeout.
        await until(
            lambda: dict(store.connections())["busy"] == 0, lambda: f"{store.connections()}", seconds=10
        )
        assert 0 < dict(store.connections())["idle"] <= 3
        assert (await ask(store)).result.k_returned > 0
    finally:
        await store.close(timeout_seconds=3)
        await admin.execute("DROP ROLE few")
