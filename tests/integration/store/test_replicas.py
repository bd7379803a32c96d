"""A replica that lags does not answer: on it, what has been revoked is still readable."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from uuid import UUID

import asyncpg
import psutil
import pytest

from streams.cli.check import _store
from streams.core.errors import StoreUnavailable
from streams.retrieval import Search
from streams.settings import load as load_settings
from streams.store.postgres import PostgresStore
from streams.store.replication import LAG_SECONDS, LagLimit, lag_seconds
from tests.conftest import Database
from tests.integration.connections import connected, execute, opened_store
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, query, read_result
from tests.integration.standby import Pair, pair

pytestmark = pytest.mark.slow

VECTOR = unit_vectors(1, 1)[0]
DOCUMENT = Document(UUID(int=1), frozenset({"user:1"}))
CORPUS = Corpus.of([DOCUMENT], [Chunk(UUID(int=2), DOCUMENT.id, "text", VECTOR)])
REVOKE = "DELETE FROM document_grants"


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    with pair() as started:
        yield started


@pytest.fixture
async def primary(servers: Pair) -> AsyncIterator[Database]:
    database = servers.primary.database()
    await load(database.writer, CORPUS)
    await caught_up(servers)
    yield database
    await execute(servers.standby.dsn(), "SELECT pg_wal_replay_resume()")
    servers.primary.drop(database)


@pytest.fixture
def standby(servers: Pair, primary: Database) -> Database:
    return servers.on_standby(primary)


@pytest.fixture
async def may_read_statistics(servers: Pair, primary: Database) -> AsyncIterator[None]:
    await execute(primary.admin, "GRANT pg_read_all_stats TO worker")
    await caught_up(servers)
    yield
    await execute(primary.admin, "REVOKE pg_read_all_stats FROM worker")


async def commit(primary: Database) -> None:
    """The least that proves to a replica how old its data is."""
    await execute(primary.writer, "SELECT pg_current_xact_id()")


async def caught_up(servers: Pair) -> None:
    async with connected(servers.primary.embedded.dsn()) as writing:
        position = await writing.fetchval("SELECT pg_current_wal_insert_lsn()::text")
    async with connected(servers.standby.dsn()) as reading:
        await until(lambda: reading.fetchval("SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn", position))


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 15) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110  # what is waited for is another process
            await asyncio.sleep(0.05)


def opened(dsn: str, max_lag: float = 60) -> AbstractAsyncContextManager[PostgresStore]:
    return opened_store(dsn, search_timeout_seconds=5, max_replication_lag_seconds=max_lag)


async def found(store: PostgresStore) -> int:
    search = Search(
        principals=["user:1"],
        vector=VECTOR,
        session_id=None,
        topic_id=None,
        filters=None,
        limit=5,
        expand_parents=False,
    )
    return len((await store.search(search)).candidates)


async def refuses(store: PostgresStore) -> bool:
    """Whether neither a search nor a probe gets through."""
    outcomes = []
    for attempt in (found(store), store.probe(timeout_seconds=2)):
        try:
            await attempt
        except StoreUnavailable as error:
            outcomes.append("ANABRANCH_MAX_REPLICATION_LAG_SECONDS" in str(error))
        else:
            outcomes.append(False)
    return all(outcomes)


async def test_a_primary_has_no_lag(primary: Database) -> None:
    async with opened(primary.worker, max_lag=0) as store:
        assert math.isnan(store.replication_lag_seconds())
        await store.probe(timeout_seconds=2)
        assert store.replication_lag_seconds() == 0
        assert await found(store) == 1


async def test_a_replica_is_searched(primary: Database, standby: Database, servers: Pair) -> None:
    async with opened(standby.worker) as store:
        assert await found(store) == 1
        await execute(primary.writer, REVOKE)
        await caught_up(servers)
        assert await found(store) == 0
        await store.probe(timeout_seconds=2)
        assert 0 < store.replication_lag_seconds() < 30


async def test_what_is_revoked_is_not_answered_by_a_replica_that_lags(
    servers: Pair, primary: Database, standby: Database
) -> None:
    async with opened(standby.worker, max_lag=2) as strict, opened(standby.worker, max_lag=1000) as lenient:
        await execute(servers.standby.dsn(), "SELECT pg_wal_replay_pause()")
        await execute(primary.writer, REVOKE)
        await until(lambda: refuses(strict))
        assert strict.replication_lag_seconds() > 2
        # What it would have answered.
        assert await found(lenient) == 1
        await execute(servers.standby.dsn(), "SELECT pg_wal_replay_resume()")
        await commit(primary)
        await caught_up(servers)
        assert await found(strict) == 0
        await strict.probe(timeout_seconds=2)


async def test_a_connection_that_has_been_used_is_checked_again(
    servers: Pair, primary: Database, standby: Database
) -> None:
    async with opened(standby.worker, max_lag=2) as store:
        await execute(servers.standby.dsn(), "SELECT pg_wal_replay_pause()")
        assert await found(store) == 1
        await execute(primary.writer, REVOKE)
        answered = []

        async def refused() -> bool:
            try:
                answered.append(await found(store))
            except StoreUnavailable:
                return True
            return False

        await until(refused)
        assert set(answered) == {1}  # less than two seconds old


async def test_an_idle_primary_counts_as_lag_without_a_proof(primary: Database, standby: Database) -> None:
    async with opened(standby.worker, max_lag=1) as store:
        await until(lambda: refuses(store))
        # Any commit is one.
        await commit(primary)
        await until(lambda: _answers(store))


@pytest.mark.usefixtures("may_read_statistics")
async def test_a_primary_s_messages_are_a_proof(standby: Database) -> None:
    async with opened(standby.worker, max_lag=4) as store:
        for _ in range(60):
            await store.probe(timeout_seconds=2)
            assert await found(store) == 1
            await asyncio.sleep(0.1)


@pytest.mark.usefixtures("may_read_statistics")
async def test_a_primary_that_sends_nothing_proves_nothing(servers: Pair, standby: Database) -> None:
    """The walreceiver exists, is connected and later connects again, and receives no messages."""
    postmaster = psutil.Process(servers.primary.embedded.pid)
    [sender] = [child for child in postmaster.children() if "walsender" in " ".join(child.cmdline())]
    async with opened(standby.worker, max_lag=3) as store:
        for process in (postmaster, sender):
            process.suspend()
        try:
            await until(lambda: refuses(store))
            await asyncio.sleep(1)
            assert await refuses(store)
        finally:
            for process in (sender, postmaster):
                process.resume()
        await until(lambda: _answers(store))


async def test_a_replica_without_any_proof_is_not_searched(
    servers: Pair, primary: Database, standby: Database
) -> None:
    """It was restarted after a checkpoint: it has replayed no commit, and its role may not see the messages."""
    await execute(primary.admin, "CHECKPOINT")
    await caught_up(servers)
    await execute(servers.standby.dsn(), "CHECKPOINT")
    servers.standby.stop()
    servers.standby.start()
    async with connected(standby.worker) as connection:
        assert await connection.fetchval("SELECT pg_last_xact_replay_timestamp()") is None
        assert await lag_seconds(connection) == math.inf
    async with opened(standby.worker, max_lag=1e9) as store:
        assert await refuses(store)


async def test_a_replica_whose_clock_is_behind_is_not_a_primary(standby: Database) -> None:
    last_commit = "pg_catalog.pg_last_xact_replay_timestamp()"
    assert last_commit in LAG_SECONDS
    expression = LAG_SECONDS.replace(
        last_commit, "(pg_catalog.clock_timestamp() + '1 hour'::pg_catalog.interval)"
    )
    async with connected(standby.worker) as connection:
        seconds = float(await connection.fetchval(f"SELECT {expression}"))
    assert 0 < seconds < 1
    with pytest.raises(StoreUnavailable):
        LagLimit(0).check(seconds, 0)


async def _answers(store: PostgresStore) -> bool:
    try:
        return await found(store) == 1
    except StoreUnavailable:
        return False


async def test_check_reports_the_lag(servers: Pair, primary: Database, standby: Database) -> None:
    async def findings(dsn: str, limit: int) -> list[tuple[str, str]]:
        settings = load_settings(
            {"DATABASE_CONNECTION_STRING": dsn, "ANABRANCH_MAX_REPLICATION_LAG_SECONDS": str(limit)}
        )
        found, _ = await _store(settings)
        return [(each.level, each.detail) for each in found if each.check == "replica"]

    assert await findings(primary.worker, 60) == []
    await commit(primary)
    await caught_up(servers)
    [(level, detail)] = await findings(standby.worker, 60)
    assert (level, "s behind its primary; the limit is 60 s" in detail) == ("ok", True)
    await asyncio.sleep(1.1)
    [(level, detail)] = await findings(standby.worker, 1)
    assert (level, "the limit is 1 s" in detail) == ("unready", True)


async def test_one_of_several_hosts_is_enough(primary: Database, servers: Pair) -> None:
    async with opened(servers.several_hosts(primary)) as store:

        async def on_replica(connection: asyncpg.pool.PoolConnectionProxy) -> bool:
            return bool(await connection.fetchval("SELECT pg_is_in_recovery()"))

        assert await store.inspect(on_replica)
        assert await found(store) == 1
        servers.standby.stop()
        try:

            async def on_primary() -> bool:
                try:
                    return await found(store) == 1 and not await store.inspect(on_replica)
                except StoreUnavailable:
                    return False

            await until(on_primary)
            await store.probe(timeout_seconds=2)
            assert await found(store) == 1
        finally:
            servers.standby.start()
        await caught_up(servers)


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
@pytest.mark.usefixtures("may_read_statistics")
async def test_a_worker_is_not_ready_while_its_replica_lags(
    servers: Pair,
    primary: Database,
    standby: Database,
    *,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker(
        standby.worker,
        ANABRANCH_MAX_REPLICATION_LAG_SECONDS="4",
        ANABRANCH_RETRY_BASE_SECONDS="0.2",
        ANABRANCH_RETRY_MAX_SECONDS="0.5",
    )
    await worker.until_ready()
    await channel.send(as_avro(query(VECTOR)))
    await output_reader.until(results=1)
    assert (await worker.scrape()).value("anabranch_store_replication_lag_seconds") <= 4
    await execute(servers.standby.dsn(), "SELECT pg_wal_replay_pause()")
    await execute(primary.writer, REVOKE)
    await worker.until_ready(ready=False)
    assert (await worker.scrape()).value("anabranch_store_replication_lag_seconds") > 4
    await channel.send(as_avro(query(VECTOR)))
    await asyncio.sleep(2)
    assert len(output_reader.results) == 1
    await execute(servers.standby.dsn(), "SELECT pg_wal_replay_resume()")
    await worker.until_ready()
    await output_reader.until(results=2)
    returned = [read_result(record.value)["k_returned"] for record in output_reader.results]
    assert returned == [1, 0]
    assert worker.log.count("store is down: the replica may be") == 1
    assert output_reader.dead_letters == []
