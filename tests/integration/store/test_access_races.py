"""Races between writers of one document, stepped through with two connections; with foreign keys and without.

`test_access_random.py` looks for those that nobody thought of.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from streams.store.migrate import migrate
from tests.conftest import SETTING
from tests.integration.access_oracle import (
    assert_derived_is_true,
    chunk,
    document,
    drop_foreign_keys,
    grant,
    revoke,
    seen_by,
    until_blocked,
)
from tests.integration.connections import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.conftest import Database

    Connection = asyncpg.Connection[asyncpg.Record]

Pair = tuple["Connection", "Connection", "Connection", "Connection"]


@pytest.fixture
async def pair(database: Database) -> AsyncIterator[Pair]:
    """Two back ends, the owner, a worker."""
    async with (
        connected(database.writer) as one,
        connected(database.writer) as two,
        connected(database.owner) as owner,
        connected(database.worker) as worker,
    ):
        yield one, two, owner, worker


@asynccontextmanager
async def snapshot_taken(connection: Connection, isolation: Any) -> AsyncIterator[None]:
    """Inside a transaction that already has its snapshot, and that is rolled back at the end."""
    transaction = connection.transaction(isolation=isolation)
    await transaction.start()
    await connection.fetch("SELECT 1 FROM documents")
    try:
        yield
    finally:
        await transaction.rollback()


@pytest.fixture
async def without_keys(pair: Pair) -> Pair:
    """The same, over a back end's own tables: no foreign key joins them."""
    await drop_foreign_keys(pair[2])
    return pair


@pytest.mark.parametrize(
    "insert",
    [
        "INSERT INTO documents (id) VALUES ($1)",
        "INSERT INTO documents (id) VALUES ($1) ON CONFLICT (id) DO UPDATE SET title = 'again'",
        "INSERT INTO documents (id) VALUES ($1) ON CONFLICT DO NOTHING",
    ],
    ids=["plain", "upsert", "unless there"],
)
async def test_a_document_that_is_deleted_while_it_is_inserted_again(pair: Pair, insert: str) -> None:
    one, two, owner, worker = pair
    id_ = await document(one, "user:1")
    await chunk(one, id_)
    first = one.transaction()
    await first.start()
    await one.execute("DELETE FROM documents WHERE id = $1", id_)
    second = asyncio.create_task(two.execute(insert, id_))
    await until_blocked(owner, two.get_server_pid())
    await first.commit()
    await second
    await chunk(two, id_)
    assert await owner.fetchval("SELECT count(*) FROM document_grants") == 0
    assert await seen_by(worker, ["user:1"]) == set()
    await assert_derived_is_true(owner, worker)


async def test_a_document_that_takes_the_id_of_one_that_is_deleted(pair: Pair) -> None:
    one, two, owner, worker = pair
    id_, other = await document(one, "user:1"), await document(one)
    first = one.transaction()
    await first.start()
    await one.execute("DELETE FROM documents WHERE id = $1", id_)
    second = asyncio.create_task(two.execute("UPDATE documents SET id = $1 WHERE id = $2", id_, other))
    await until_blocked(owner, two.get_server_pid())
    await first.commit()
    await second
    await chunk(two, id_)
    assert await seen_by(worker, ["user:1"]) == set()
    await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_an_insert_with_an_old_snapshot_of_the_grants_fails(pair: Pair, isolation: Any) -> None:
    one, two, owner, worker = pair
    id_ = await document(one, "user:1")
    await document(one, "user:1")  # keeps their set of readers in use
    async with snapshot_taken(two, isolation):
        await one.execute("DELETE FROM documents WHERE id = $1", id_)
        with pytest.raises(asyncpg.SerializationError):
            await two.execute("INSERT INTO documents (id) VALUES ($1)", id_)
    await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_snapshot_that_holds_another_chunk_of_the_same_id(pair: Pair, isolation: Any) -> None:
    """The id is free by now, but the snapshot still shows the chunk that had it, beside the new one."""
    one, two, owner, worker = pair
    document_id = await document(one, "user:1")
    id_ = await chunk(one, document_id, [UUID(int=1)])
    for _ in range(20):  # which of the two is read first is chance
        async with snapshot_taken(two, isolation):
            await one.execute("UPDATE document_chunks SET id = gen_random_uuid() WHERE id = $1", id_)
            with pytest.raises(asyncpg.SerializationError):
                await two.execute(
                    "INSERT INTO document_chunks (id, document_id, text_content, related_topic_ids)"
                    " VALUES ($1, $2, 'c', $3)",
                    id_,
                    document_id,
                    [UUID(int=2)],
                )
        await one.execute("UPDATE document_chunks SET id = $1", id_)
        await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_snapshot_that_holds_another_document_of_the_same_id(
    without_keys: Pair, isolation: Any
) -> None:
    one, two, owner, worker = without_keys
    id_ = await document(one, "user:1")
    await grant(one, other := uuid4(), "user:1")
    await chunk(one, id_)
    async with snapshot_taken(two, isolation):
        await one.execute("UPDATE documents SET id = $2 WHERE id = $1", id_, other)
        with pytest.raises((asyncpg.SerializationError, asyncpg.FeatureNotSupportedError)):
            await two.execute("INSERT INTO documents (id) VALUES ($1)", id_)
    await assert_derived_is_true(owner, worker)


# Without foreign keys


async def test_a_revocation_while_its_document_is_inserted(without_keys: Pair) -> None:
    one, two, owner, worker = without_keys
    id_ = uuid4()
    await grant(one, id_, "user:1")
    first = one.transaction()
    await first.start()
    await one.execute("INSERT INTO documents (id) VALUES ($1)", id_)
    await chunk(one, id_)
    second = asyncio.create_task(revoke(two, id_, "user:1"))
    await until_blocked_or_done(owner, two, second)
    await first.commit()
    await second
    assert await seen_by(worker, ["user:1"]) == set()
    await assert_derived_is_true(owner, worker)


async def test_a_document_that_is_inserted_while_its_grant_is_revoked(without_keys: Pair) -> None:
    one, two, owner, worker = without_keys
    id_ = uuid4()
    await grant(one, id_, "user:1")
    first = one.transaction()
    await first.start()
    await revoke(one, id_, "user:1")
    second = asyncio.create_task(two.execute("INSERT INTO documents (id) VALUES ($1)", id_))
    await until_blocked_or_done(owner, two, second)
    await first.commit()
    await second
    await chunk(two, id_)
    assert await seen_by(worker, ["user:1"]) == set()
    await assert_derived_is_true(owner, worker)


async def test_a_chunk_that_is_inserted_while_its_document_is(without_keys: Pair) -> None:
    one, two, owner, worker = without_keys
    id_ = uuid4()
    await grant(one, id_, "user:1")
    first = one.transaction()
    await first.start()
    await one.execute("""INSERT INTO documents (id, metadata) VALUES ($1, '{"a": "b"}')""", id_)
    second = asyncio.create_task(chunk(two, id_))
    await until_blocked_or_done(owner, two, second)
    await first.commit()
    inserted = await second
    assert await seen_by(worker, ["user:1"]) == {inserted}
    await assert_derived_is_true(owner, worker)


async def test_a_revocation_while_its_document_is_deleted_and_inserted_again(without_keys: Pair) -> None:
    one, two, owner, worker = without_keys
    id_ = await document(one, "user:1")
    await chunk(one, id_)
    first = one.transaction()
    await first.start()
    await one.execute("DELETE FROM documents WHERE id = $1", id_)
    await one.execute("INSERT INTO documents (id) VALUES ($1)", id_)
    await chunk(one, id_)
    second = asyncio.create_task(revoke(two, id_, "user:1"))
    await until_blocked_or_done(owner, two, second)
    await first.commit()
    await second
    assert await seen_by(worker, ["user:1"]) == set()
    await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM document_grants WHERE document_id = $1",
        "INSERT INTO document_grants VALUES ($1, 'user:2')",
        "INSERT INTO document_chunks (document_id, text_content) VALUES ($1, 'c')",
    ],
)
async def test_a_document_that_the_snapshot_lacks_is_not_missed(
    without_keys: Pair, isolation: Any, change: str
) -> None:
    one, two, owner, worker = without_keys
    id_ = uuid4()
    await grant(one, id_, "user:1")
    async with snapshot_taken(two, isolation):
        await one.execute("INSERT INTO documents (id) VALUES ($1)", id_)
        await chunk(one, id_)
        with pytest.raises((asyncpg.SerializationError, asyncpg.FeatureNotSupportedError)):
            await two.execute(change, id_)
    await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
@pytest.mark.parametrize(
    "change", ["DELETE FROM document_chunks", "UPDATE document_chunks SET id = gen_random_uuid()"]
)
async def test_a_chunk_whose_document_the_snapshot_lacks_leaves_no_entry(
    without_keys: Pair, isolation: Any, change: str
) -> None:
    """The document came since, with metadata: its entries are not in the snapshot, and would stay."""
    one, two, owner, worker = without_keys
    id_ = uuid4()
    await chunk(one, id_)
    async with snapshot_taken(two, isolation):
        await one.execute("""INSERT INTO documents (id, metadata) VALUES ($1, '{"a": "b"}')""", id_)
        with pytest.raises((asyncpg.SerializationError, asyncpg.FeatureNotSupportedError)):
            await two.execute(change)
    await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO document_grants VALUES ($1, 'user:1')",
        "INSERT INTO document_chunks (document_id, text_content) VALUES ($1, 'c')",
    ],
)
async def test_an_insert_whose_snapshot_lacks_a_change_fails(
    without_keys: Pair, isolation: Any, change: str
) -> None:
    one, two, owner, worker = without_keys
    id_ = uuid4()
    await grant(one, id_, "group:law")
    async with snapshot_taken(two, isolation):
        await one.execute(change, id_)
        with pytest.raises(asyncpg.SerializationError):
            await two.execute("INSERT INTO documents (id) VALUES ($1)", id_)
    await two.execute("INSERT INTO documents (id) VALUES ($1)", id_)
    await assert_derived_is_true(owner, worker)


async def until_blocked_or_done(observer: Connection, writer: Connection, task: asyncio.Task[Any]) -> None:
    """The second writer waits for the first; one that need not has finished by then."""
    for _ in range(1000):
        if task.done() or await observer.fetchval(
            "SELECT cardinality(pg_blocking_pids($1)) > 0", writer.get_server_pid()
        ):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the second transaction neither waits nor ends")


# A back end's own triggers


CHANGES_THE_DOCUMENT = """
    CREATE FUNCTION other_document() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN NEW.document_id := '{id}'; RETURN NEW; END $$;
    CREATE TRIGGER zzzz_after_ours BEFORE INSERT OR UPDATE ON document_chunks
    FOR EACH ROW EXECUTE FUNCTION other_document();
"""


async def test_a_trigger_that_comes_after_ours(pair: Pair) -> None:
    one, _, owner, worker = pair
    shared, secret = await document(one, "user:1"), await document(one)
    moved = await chunk(one, shared)
    await owner.execute(CHANGES_THE_DOCUMENT.format(id=secret))
    with pytest.raises(asyncpg.TriggeredActionError, match="changed the document or access set of chunk"):
        await chunk(one, shared)
    with pytest.raises(asyncpg.TriggeredActionError, match="changed the document or access set of chunk"):
        await one.execute("UPDATE document_chunks SET text_content = 'other' WHERE id = $1", moved)
    await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("table", ["documents", "document_chunks"])
async def test_a_trigger_that_keeps_access_from_being_revoked_makes_the_revocation_fail(
    pair: Pair, table: str
) -> None:
    one, _, owner, worker = pair
    id_ = await document(one, "user:1")
    await chunk(one, id_)
    await owner.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;"
        f"CREATE TRIGGER a_first BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION refuse();"
    )
    with pytest.raises(asyncpg.TriggeredActionError, match=f"trigger on {table} suppressed"):
        await revoke(one, id_, "user:1")
    await assert_derived_is_true(owner, worker)


async def test_an_operator_that_was_planted_before_is_not_used(empty_database: Database) -> None:
    async with connected(empty_database.admin) as admin:
        await admin.execute(
            "GRANT CREATE ON SCHEMA public TO back_end; SET ROLE back_end;"
            "CREATE FUNCTION never(uuid[], uuid[]) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT false';"
            "CREATE OPERATOR public.<> (FUNCTION = never, LEFTARG = uuid[], RIGHTARG = uuid[]);"
        )
    await migrate(empty_database.owner, principals_setting=SETTING)
    async with (
        connected(empty_database.owner) as owner,
        connected(empty_database.writer) as writer,
        connected(empty_database.worker) as worker,
    ):
        id_ = await chunk(writer, await document(writer, "user:1"), [UUID(int=1)])
        await assert_derived_is_true(owner, worker)
        await writer.execute(
            "UPDATE document_chunks SET related_topic_ids = $2 WHERE id = $1", id_, [UUID(int=2)]
        )
        await assert_derived_is_true(owner, worker)


# Writes that our triggers do not see


PARTITIONED = """
    CREATE TABLE documents (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), metadata jsonb) PARTITION BY HASH (id);
    CREATE TABLE document_chunks (id uuid PRIMARY KEY, document_id uuid NOT NULL, text_content text,
        related_topic_ids uuid[] NOT NULL DEFAULT '{}') PARTITION BY HASH (id);
    CREATE TABLE document_grants (document_id uuid, principal text, PRIMARY KEY (document_id, principal))
        PARTITION BY HASH (document_id);
    CREATE TABLE documents_0 PARTITION OF documents FOR VALUES WITH (MODULUS 1, REMAINDER 0);
    CREATE TABLE document_chunks_0 PARTITION OF document_chunks FOR VALUES WITH (MODULUS 1, REMAINDER 0);
    CREATE TABLE document_grants_0 PARTITION OF document_grants FOR VALUES WITH (MODULUS 1, REMAINDER 0);
"""


async def test_partitions(empty_database: Database) -> None:
    """Written through the parents, or documents and chunks directly: triggers on rows are the partitions' too."""
    async with connected(empty_database.owner) as owner:
        await owner.execute(PARTITIONED)
        await migrate(empty_database.owner, principals_setting=SETTING)
        async with connected(empty_database.worker) as worker:
            id_ = await document(owner, "user:1", "user:2")
            await owner.execute(
                "INSERT INTO document_chunks_0 (id, document_id, text_content)"
                " VALUES (gen_random_uuid(), $1, 'c')",
                id_,
            )
            await owner.execute("""UPDATE documents_0 SET metadata = '{"a": 1}'""")
            await assert_derived_is_true(owner, worker)
            await revoke(owner, id_, "user:1")
            assert await seen_by(worker, ["user:1"]) == set()
            await assert_derived_is_true(owner, worker)
            await owner.execute("DELETE FROM documents_0")
            await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize(
    "bypass",
    [
        "DELETE FROM document_grants_0",  # triggers on statements are the parent's only
        "SET session_replication_role = replica; DELETE FROM document_grants",
        "ALTER TABLE document_grants DISABLE TRIGGER USER; DELETE FROM document_grants",
    ],
    ids=["a partition", "replication", "triggers off"],
)
async def test_a_revocation_past_the_triggers_is_found_and_repaired(
    empty_database: Database, bypass: str
) -> None:
    async with (
        connected(empty_database.admin) as admin,
        connected(empty_database.owner) as owner,
    ):
        await owner.execute(PARTITIONED)
        await migrate(empty_database.owner, principals_setting=SETTING)
        async with connected(empty_database.worker) as worker:
            id_ = await document(owner, "user:1")
            await owner.execute(
                "INSERT INTO document_chunks (id, document_id, text_content) VALUES (gen_random_uuid(), $1, 'c')",
                id_,
            )
            await admin.execute(bypass)
            assert len(await seen_by(worker, ["user:1"])) == 1
            stale = await owner.fetch("SELECT * FROM anabranch_stale_documents()")
            assert [tuple(row) for row in stale] == [(id_,)]
            await owner.execute("SELECT anabranch_rebuild_derived()")
            assert await seen_by(worker, ["user:1"]) == set()
            await assert_derived_is_true(owner, worker)
