"""Behind PgBouncer in transaction mode, nothing of a search is left on a server connection.

With two releases: 1.18 cannot keep prepared statements, 1.24 can. Searches share three server connections, are slow or
fail because of a policy on the table, and are cancelled at any moment.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from time import perf_counter
from typing import Any, Final
from uuid import UUID

import asyncpg
import pytest

from streams.core.errors import StoreMisconfigured, TransientError
from streams.core.messages import QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, resolve_params
from streams.retrieval import Retrieved, retrieve
from streams.store.postgres import PostgresStore
from streams.store.preflight import inspect
from streams.tokens import count_tokens
from tests.conftest import SETTING, Database
from tests.integration.connections import execute, opened_store
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, query, until
from tests.integration.pgbouncer import POOL_SIZE, PgBouncer, program

pytestmark = pytest.mark.slow

SESSION = UUID("0b8d7c1a-55e4-4c2f-8f7e-9a1b2c3d4e5f")
TOPIC = UUID("c0ffee00-1234-4abc-8def-0123456789ab")
CALLERS: Final = [f"user:{number}" for number in range(12)]
KINDS: Final = ("slow", "fail", "crash", "hang")
CLIENTS: Final = 8
VECTORS = unit_vectors(20, 1)

# Each statement evaluates it once, before it reads a row.
OBSTACLE = """
    CREATE FUNCTION public.meet_obstacle() RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
    DECLARE principals text := current_setting('anabranch.principals', true);
    BEGIN
      IF principals LIKE '%slow%' THEN PERFORM pg_sleep(0.02); END IF;
      IF principals LIKE '%hang%' THEN PERFORM pg_sleep(60); END IF;
      IF principals LIKE '%fail%' THEN RAISE EXCEPTION 'broken'; END IF;
      IF principals LIKE '%crash%' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
      RETURN true;
    END $$;
    CREATE POLICY obstacle ON public.document_chunks AS RESTRICTIVE FOR SELECT TO anabranch_reader
      USING ((SELECT public.meet_obstacle()));
"""


@pytest.fixture
async def loaded(database: Database) -> Database:
    """Each caller may read one document, whose chunks name the caller."""
    documents = [
        Document(UUID(int=number + 1), frozenset({caller, *(f"{caller}:{kind}" for kind in KINDS)}), SESSION)
        for number, caller in enumerate(CALLERS)
    ]
    chunks = [
        Chunk(
            UUID(int=1000 * (number + 1) + count),
            document.id,
            CALLERS[number],
            vector,
            session_id=SESSION,
            related_topic_ids=[TOPIC] if count % 2 else [],
        )
        for number, document in enumerate(documents)
        for count, vector in enumerate(VECTORS)
    ]
    await load(database.writer, Corpus.of(documents, chunks))
    await execute(database.admin, OBSTACLE)
    return database


@pytest.fixture(
    params=[("1.18", None, 0), ("1.24", 0, 0), ("1.24", 200, 100)],
    ids=["1.18, no statement cache", "1.24, no statement cache", "1.24, statement cache"],
)
def pooler(request: pytest.FixtureRequest, loaded: Database) -> Iterator[tuple[PgBouncer, int]]:
    """A pooler, and the worker's setting that it needs."""
    version, max_prepared_statements, statement_cache_size = request.param
    with PgBouncer(program(version), loaded, max_prepared_statements) as started:
        yield started, statement_cache_size


def opened(dsn: str, statement_cache_size: int) -> AbstractAsyncContextManager[PostgresStore]:
    return opened_store(
        dsn, connections=CLIENTS, search_timeout_seconds=5, statement_cache_size=statement_cache_size
    )


async def ask(store: PostgresStore, caller: str) -> Retrieved:
    event = QueryEmbedding.parse(
        query(VECTORS[0], principals=[caller], session_id=SESSION, topic_id=TOPIC, profile="extraction")
    )
    rules = resolve_params(event, BUILTIN_PROFILES, "extraction")
    return await retrieve(event, rules, store, count_tokens, started=perf_counter())


async def left_behind(bouncer: PgBouncer) -> tuple[set[int], list[tuple[Any, ...]]]:
    """Every server connection's process id, and what has been set on any of them."""
    everyone = asyncio.Barrier(POOL_SIZE)

    async def inspected() -> tuple[int, list[tuple[Any, ...]]]:
        connection = await bouncer.connect()
        try:
            async with connection.transaction():
                await everyone.wait()  # all at once, so that each has a server connection of its own
                pid = await connection.fetchval("SELECT pg_backend_pid()")
                rows = await connection.fetch(
                    # What PgBouncer itself sets is for its client, not for a search.
                    "SELECT name, setting FROM pg_settings"
                    " WHERE source = 'session' AND setting <> reset_val"
                    " AND name NOT IN"
                    " ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'search_path',"
                    "  'standard_conforming_strings', 'IntervalStyle')"
                    " UNION ALL SELECT 'principals', current_setting($1, true)"
                    "   WHERE current_setting($1, true) <> ''"
                    " UNION ALL SELECT 'readable sets', count(*)::text FROM access_sets HAVING count(*) > 0",
                    SETTING,
                )
                await everyone.wait()
            return pid, [tuple(row) for row in rows]
        finally:
            await connection.close()

    async with asyncio.timeout(20):
        seen = await asyncio.gather(*(inspected() for _ in range(POOL_SIZE)))
    return {pid for pid, _ in seen}, [row for _, rows in seen for row in rows]


async def test_no_principal_survives(pooler: tuple[PgBouncer, int]) -> None:
    bouncer, statement_cache_size = pooler
    rng = random.Random(1)
    outcomes: Counter[str] = Counter()
    free = asyncio.Semaphore(CLIENTS // 2)  # a search has two arms

    async def one(store: PostgresStore) -> None:
        caller = rng.choice(CALLERS)
        kind = rng.choices(["plain", "slow", "fail", "crash", "cancelled"], [8, 4, 2, 1, 5])[0]
        who = caller if kind in ("plain", "cancelled") else f"{caller}:{kind}"
        async with free:
            asking = asyncio.create_task(ask(store, who))
            if kind == "cancelled":
                await asyncio.sleep(rng.uniform(0, 0.015))
                asking.cancel()
            await asyncio.wait([asking])
        if asking.cancelled():
            outcomes["cancelled"] += 1
        elif isinstance(asking.exception(), (TransientError, asyncpg.RaiseError)):
            # A cancel request at the wrong moment ends 1.18 itself ("bad client state"), with everything in flight.
            assert kind in ("fail", "crash") or bouncer.restart_if_crashed(), asking.exception()
            outcomes[kind] += 1
        else:
            passages = asking.result().result.results
            assert {passage.text_content for passage in passages} == {caller}
            assert len(passages) == 15
            outcomes["answered"] += 1

    async with opened(bouncer.dsn, statement_cache_size) as store:
        await store.warm_up()
        for _ in range(3):
            await asyncio.gather(*(one(store) for _ in range(50)))
            # The searches of disconnected clients have ended: the server notices within a quarter of a second.
            pids, left = await left_behind(bouncer)
            assert left == []
            assert len(pids) == POOL_SIZE
    assert outcomes["answered"] > 50
    assert min(outcomes[kind] for kind in ("fail", "crash", "cancelled")) > 2


async def test_a_search_whose_caller_gave_up_ends_on_the_server(
    pooler: tuple[PgBouncer, int], loaded: Database
) -> None:
    bouncer, statement_cache_size = pooler
    admin = await asyncpg.connect(loaded.admin)
    try:
        async with opened(bouncer.dsn, statement_cache_size) as store:
            asking = asyncio.create_task(ask(store, f"{CALLERS[0]}:hang"))
            running = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = 'worker'"
                " AND wait_event = 'PgSleep'"
            )
            async with asyncio.timeout(5):
                while await admin.fetchval(running) < 2:  # noqa: ASYNC110  # what is waited for is another process
                    await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.wait([asking])
            async with asyncio.timeout(2):
                while await admin.fetchval(running):  # noqa: ASYNC110  # as above
                    await asyncio.sleep(0.02)
            assert (await left_behind(bouncer))[1] == []
            assert (await ask(store, CALLERS[0])).result.k_returned == 15
    finally:
        await admin.close()


async def test_a_pooler_without_prepared_statements_needs_the_setting(loaded: Database) -> None:
    with PgBouncer(program("1.18"), loaded) as bouncer:
        async with opened(bouncer.dsn, 100) as store:
            with pytest.raises(StoreMisconfigured, match="ANABRANCH_STATEMENT_CACHE_SIZE=0"):
                await asyncio.gather(*(ask(store, caller) for caller in CALLERS for _ in range(10)))


async def test_the_preflight_passes(pooler: tuple[PgBouncer, int]) -> None:
    bouncer, statement_cache_size = pooler
    async with opened(bouncer.dsn, statement_cache_size) as store:
        for _ in range(2 * POOL_SIZE):
            findings = await store.inspect(lambda connection: inspect(connection, principals_setting=SETTING))
            assert {finding.level for finding in findings} <= {"ok", "warning"}, findings


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
async def test_a_worker_answers(
    pooler: tuple[PgBouncer, int],
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
) -> None:
    bouncer, statement_cache_size = pooler
    worker = start_worker(bouncer.dsn, ANABRANCH_STATEMENT_CACHE_SIZE=str(statement_cache_size))
    await worker.until_ready()
    for number in range(60):
        caller = CALLERS[number % len(CALLERS)]
        await channel.send(as_avro(query(VECTORS[0], principals=[caller], session_id=SESSION)))
    await output_reader.until(results=60)
    samples = await worker.scrape()
    assert samples.nonzero("anabranch_retries_total") == {}
    await until(worker.is_ready, lambda: worker.log[-4000:], seconds=5)
