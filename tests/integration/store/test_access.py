"""Who sees which row, after any sequence of writes, by anybody, at the same time."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import asyncpg
import pytest

from tests.conftest import SETTING
from tests.integration.access_oracle import (
    METADATA,
    PRINCIPALS,
    READABLE,
    all_three,
    assert_derived_is_true,
    assert_derived_is_true_but_for_unused_sets,
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
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from tests.conftest import Database

    Connection = asyncpg.Connection[asyncpg.Record]

T = TypeVar("T")

HOSTILE = (
    "user:1,user:2",
    '["user:1"]',
    '"',
    "'",
    "'; DROP TABLE documents; --",
    '{"a":1}',
    "{user:1,public}",
    "{}",
    "\\",
    "\\u0000",
    "%",
    "_",
    " ",
    " public",
    "public ",
    "PUBLIC",
    "NULL",
    "null",
    "\t\n",
    "é",  # composed
    "e\u0301",  # decomposed: another string
    "\U0001f511",
    "\u202e",
    "$1",
    "x" * 256,
    "\U0001f511" * 256,
)


# Any order of writes


class Writes:
    """Random writes of a back end; those that the database refuses are rolled back."""

    def __init__(self, seed: int, writer: Connection, owner: Connection, *, unrelated: bool) -> None:
        self.random = random.Random(seed)
        self.writer = writer
        self.owner = owner
        self.documents = [self.uuid() for _ in range(6)]
        self.chunks = [self.uuid() for _ in range(12)]
        self.topics = [self.uuid() for _ in range(3)]
        self.sessions = [None, self.uuid(), self.uuid()]
        self.steps: list[Callable[[], Awaitable[Any]]] = [
            self.insert_document,
            self.insert_document,
            self.insert_chunks,
            self.insert_chunks,
            self.grant,
            self.grant,
            self.grant,
            self.revoke,
            self.change_grant,
            self.move_grant,
            self.move_chunk,
            self.change_topics,
            self.change_session,
            self.change_chunk_id,
            self.change_document_id,
            self.describe_document,
            self.describe_document,
            self.describe_chunk,
            self.describe_chunk,
            self.tamper,
            self.edit,
            self.delete_chunk,
            self.delete_document,
            self.truncate,
        ]
        self.unrelated = unrelated

    def uuid(self) -> UUID:
        return UUID(int=self.random.getrandbits(128))

    def one(self, of: Sequence[T]) -> T:
        return self.random.choice(of)

    async def step(self) -> str:
        step = self.one(self.steps)
        try:
            async with self.writer.transaction():
                await step()
                if self.random.random() < 0.1:
                    raise asyncpg.RaiseError  # a transaction that is rolled back leaves nothing
        except asyncpg.PostgresError as error:
            return f"{step.__name__} ({type(error).__name__})"
        return str(step.__name__)

    async def insert_document(self) -> None:
        await self.writer.execute(
            "INSERT INTO documents (id, session_id, access_set_id, metadata) VALUES ($1, $2, $3, $4)",
            self.one(self.documents),
            self.one(self.sessions),
            self.random.randrange(20),
            self.some_metadata(),
        )

    def some_topics(self) -> list[UUID | None] | None:
        if self.unrelated and self.random.random() < 0.2:
            return None
        return [self.one([*self.topics, None]) for _ in range(self.random.randrange(4))]

    def some_metadata(self) -> str | None:
        return self.one([None, "{}", *METADATA])

    async def describe_document(self) -> None:
        await self.writer.execute(
            "UPDATE documents SET metadata = $2 WHERE id = $1", self.one(self.documents), self.some_metadata()
        )

    async def describe_chunk(self) -> None:
        await self.writer.execute(
            "UPDATE document_chunks SET metadata = $2 WHERE id = $1",
            self.one(self.chunks),
            self.some_metadata(),
        )

    async def insert_chunks(self) -> None:
        await self.writer.execute(
            "INSERT INTO document_chunks"
            " (id, document_id, session_id, related_topic_ids, text_content, access_set_id, metadata)"
            " VALUES ($1, $2, $3, $4, 'text', $5, $6)",
            self.one(self.chunks),
            self.one(self.documents),
            self.one(self.sessions),
            self.some_topics(),
            self.random.randrange(20),
            self.some_metadata(),
        )

    async def grant(self) -> None:
        count = self.random.randint(1, 5)
        rows = [(self.one(self.documents), self.one(list(PRINCIPALS))) for _ in range(count)]
        await self.writer.execute(
            "INSERT INTO document_grants SELECT * FROM unnest($1::uuid[], $2::text[]) ON CONFLICT DO NOTHING",
            [d for d, _ in rows],
            [p for _, p in rows],
        )

    async def revoke(self) -> None:
        column, value = self.one(
            [("document_id", self.one(self.documents)), ("principal", self.one(list(PRINCIPALS)))]
        )
        await self.writer.execute(f"DELETE FROM document_grants WHERE {column} = $1", value)

    async def change_grant(self) -> None:
        await self.writer.execute(
            "UPDATE document_grants SET principal = $2 WHERE document_id = $1 AND principal = $3",
            self.one(self.documents),
            self.one(list(PRINCIPALS)),
            self.one(list(PRINCIPALS)),
        )

    async def move_grant(self) -> None:
        await self.writer.execute(
            "UPDATE document_grants SET document_id = $2 WHERE document_id = $1",
            self.one(self.documents),
            self.one(self.documents),
        )

    async def move_chunk(self) -> None:
        await self.writer.execute(
            "UPDATE document_chunks SET document_id = $2 WHERE document_id = $1",
            self.one(self.documents),
            self.one(self.documents),
        )

    async def change_topics(self) -> None:
        await self.writer.execute(
            "UPDATE document_chunks SET related_topic_ids = $2 WHERE id = $1",
            self.one(self.chunks),
            self.some_topics(),
        )

    async def change_session(self) -> None:
        await self.writer.execute(
            "UPDATE document_chunks SET session_id = $2 WHERE id = $1",
            self.one(self.chunks),
            self.one(self.sessions),
        )

    async def change_chunk_id(self) -> None:
        await self.writer.execute(
            "UPDATE document_chunks SET id = $2 WHERE id = $1", self.one(self.chunks), self.one(self.chunks)
        )

    async def change_document_id(self) -> None:
        await self.writer.execute(
            "UPDATE documents SET id = $2 WHERE id = $1", self.one(self.documents), self.one(self.documents)
        )

    async def tamper(self) -> None:
        table = self.one(["documents", "document_chunks"])
        await self.writer.execute(f"UPDATE {table} SET access_set_id = $1", self.one([None, 1, 2, 3, 99]))

    async def edit(self) -> None:
        await self.writer.execute("UPDATE documents SET title = 'edited'")
        await self.writer.execute("UPDATE document_chunks SET text_content = 'edited'")

    async def delete_chunk(self) -> None:
        await self.writer.execute("DELETE FROM document_chunks WHERE id = $1", self.one(self.chunks))

    async def delete_document(self) -> None:
        await self.writer.execute("DELETE FROM documents WHERE id = $1", self.one(self.documents))

    async def truncate(self) -> None:
        if self.random.random() < 0.5:
            return
        # Not the writer's to do. In a transaction of its own: the writer's has touched nothing yet.
        table = self.one(["document_grants", "document_chunks", "documents"])
        await self.owner.execute(f"TRUNCATE {table}" + ("" if self.unrelated else " CASCADE"))


@pytest.mark.parametrize("unrelated", [False, True], ids=["foreign keys", "no foreign keys"])
@pytest.mark.parametrize("seed", range(6))
async def test_any_order_of_writes_leaves_the_truth(
    database: Database, seed: int, *, unrelated: bool
) -> None:
    """Without foreign keys, as in a back end's own tables, documents may come after their grants."""
    async with all_three(database) as (owner, writer, worker):
        if unrelated:
            await drop_foreign_keys(owner)
        writes = Writes(seed, writer, owner, unrelated=unrelated)
        history = []
        for _ in range(120):
            history.append(await writes.step())
            try:
                await assert_derived_is_true(owner, worker)
            except AssertionError as error:
                raise AssertionError(f"after {history[-8:]}") from error
        assert sum("(" not in step for step in history) > 60, "too few writes succeeded to mean anything"


async def test_a_bulk_load_is_one_statement(database: Database) -> None:
    async with all_three(database) as (owner, writer, worker):
        await writer.execute(
            "INSERT INTO documents (id) SELECT gen_random_uuid() FROM generate_series(1, 500)"
        )
        await writer.execute(
            "INSERT INTO document_grants SELECT id, p FROM documents, unnest($1::text[]) p",
            ["user:1", "group:law"],
        )
        await writer.execute(
            "INSERT INTO document_chunks (document_id, text_content) SELECT id, 'c' FROM documents"
        )
        assert await owner.fetchval("SELECT count(*) FROM access_sets") == 1
        await assert_derived_is_true(owner, worker)


# At the same time


@pytest.fixture
async def pair(database: Database) -> AsyncIterator[tuple[Connection, Connection, Connection, Connection]]:
    async with (
        connected(database.writer) as one,
        connected(database.writer) as two,
        connected(database.owner) as owner,
        connected(database.worker) as worker,
    ):
        yield one, two, owner, worker


Pair = tuple["Connection", "Connection", "Connection", "Connection"]


async def test_two_grants_on_one_document_at_the_same_time(pair: Pair) -> None:
    one, two, owner, worker = pair
    id_ = await document(one)
    await chunk(one, id_)
    first = one.transaction()
    await first.start()
    await grant(one, id_, "user:1")
    second = asyncio.create_task(grant(two, id_, "user:2"))
    await until_blocked(owner, two.get_server_pid())
    await first.commit()
    await second
    assert await owner.fetchval("SELECT principals FROM access_sets") == ["user:1", "user:2"]
    await assert_derived_is_true(owner, worker)


async def test_a_grant_and_a_revocation_at_the_same_time(pair: Pair) -> None:
    one, two, owner, worker = pair
    id_ = await document(one, "user:1")
    first = one.transaction()
    await first.start()
    await revoke(one, id_, "user:1")
    second = asyncio.create_task(grant(two, id_, "user:2"))
    await until_blocked(owner, two.get_server_pid())
    await first.commit()
    await second
    assert await owner.fetchval("SELECT principals FROM access_sets") == ["user:2"]
    await assert_derived_is_true(owner, worker)


async def test_a_chunk_that_is_added_while_a_grant_is_revoked(pair: Pair) -> None:
    one, two, owner, worker = pair
    id_ = await document(one, "user:1")
    first = one.transaction()
    await first.start()
    await revoke(one, id_, "user:1")
    second = asyncio.create_task(chunk(two, id_))
    await until_blocked(owner, two.get_server_pid())
    await first.commit()
    await second
    assert await seen_by(worker, ["user:1"]) == set()
    await assert_derived_is_true(owner, worker)


async def test_a_grant_that_is_revoked_while_a_chunk_is_added(pair: Pair) -> None:
    one, two, owner, worker = pair
    id_ = await document(one, "user:1")
    first = one.transaction()
    await first.start()
    await chunk(one, id_)
    second = asyncio.create_task(revoke(two, id_, "user:1"))
    await until_blocked(owner, two.get_server_pid())
    await first.commit()
    await second
    assert await seen_by(worker, ["user:1"]) == set()
    await assert_derived_is_true(owner, worker)


async def test_a_chunk_that_moves_to_a_document_while_its_grant_is_revoked(pair: Pair) -> None:
    one, two, owner, worker = pair
    secret, shared = await document(one), await document(one, "user:1")
    id_ = await chunk(one, secret)
    first = one.transaction()
    await first.start()
    await revoke(one, shared, "user:1")
    second = asyncio.create_task(
        two.execute("UPDATE document_chunks SET document_id = $2 WHERE id = $1", id_, shared)
    )
    await until_blocked(owner, two.get_server_pid())
    await first.commit()
    await second
    assert await seen_by(worker, ["user:1"]) == set()
    await assert_derived_is_true(owner, worker)


async def test_nobody_waits_for_another_ones_set_of_readers(pair: Pair) -> None:
    """Bulk loads in long transactions meet in the same new sets in any order: to wait would be a deadlock."""
    one, two, owner, worker = pair
    a, b = await document(one), await document(one)
    c, d = await document(one, "old"), await document(one)
    await two.execute("SET lock_timeout = '2s'")
    first, second = one.transaction(), two.transaction()
    await first.start()
    await second.start()
    await grant(one, a, "x")
    await grant(two, b, "y")
    await revoke(one, c, "old")  # throws the set away
    await grant(one, a, "y")
    await grant(two, b, "x")
    await grant(two, d, "old")  # the set that is being thrown away
    await first.commit()
    await second.commit()
    await assert_derived_is_true_but_for_unused_sets(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_stricter_isolation_level_fails_rather_than_going_wrong(pair: Pair, isolation: Any) -> None:
    one, two, owner, worker = pair
    id_ = await document(one, "user:1")
    late = two.transaction(isolation=isolation)
    await late.start()
    await two.fetch("SELECT 1 FROM documents")  # takes the snapshot
    await revoke(one, id_, "user:1")
    with pytest.raises(asyncpg.SerializationError):
        await chunk(two, id_)
    await late.rollback()
    await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_stricter_isolation_level_misses_no_chunk(pair: Pair, isolation: Any) -> None:
    """Its snapshot does not hold what was added since; the chunk would keep the reader that is revoked."""
    one, two, owner, worker = pair
    id_ = await document(one, "user:1")
    for change in (
        "DELETE FROM document_grants WHERE document_id = $1",
        """UPDATE documents SET metadata = '{"year": 2021}' WHERE id = $1""",
    ):
        late = two.transaction(isolation=isolation)
        await late.start()
        await two.fetch("SELECT 1 FROM documents")  # takes the snapshot
        await chunk(one, id_)
        with pytest.raises(asyncpg.FeatureNotSupportedError, match="only be written in READ COMMITTED"):
            await two.execute(change, id_)
        await late.rollback()
    await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
@pytest.mark.parametrize(
    "change", ["DELETE FROM document_chunks", "UPDATE document_chunks SET id = gen_random_uuid()"]
)
async def test_a_stricter_isolation_level_leaves_no_entry(pair: Pair, isolation: Any, change: str) -> None:
    """The document was described since: the entries are not in its snapshot, and the chunk itself was not touched."""
    one, two, owner, worker = pair
    id_ = await document(one, "user:1")
    await chunk(one, id_)
    late = two.transaction(isolation=isolation)
    await late.start()
    await two.fetch("SELECT 1 FROM documents")  # takes the snapshot
    await one.execute("""UPDATE documents SET metadata = '{"a": "b"}' WHERE id = $1""", id_)
    with pytest.raises(asyncpg.SerializationError):
        await two.execute(change)
    await late.rollback()
    await assert_derived_is_true(owner, worker)
    await two.execute(change)
    await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_stricter_isolation_level_leaves_no_chunk_without_its_document(
    pair: Pair, isolation: Any
) -> None:
    """With the foreign key or without: the chunk was added since."""
    one, two, owner, worker = pair
    for drop in (None, "ALTER TABLE document_chunks DROP CONSTRAINT document_chunks_document_id_fkey"):
        if drop is not None:
            await owner.execute(drop)
        id_ = await document(one, "user:1")
        late = two.transaction(isolation=isolation)
        await late.start()
        await two.fetch("SELECT 1 FROM documents")  # takes the snapshot
        await chunk(one, id_)
        with pytest.raises((asyncpg.SerializationError, asyncpg.FeatureNotSupportedError)):
            await two.execute("DELETE FROM documents WHERE id = $1", id_)
        await late.rollback()
        await assert_derived_is_true(owner, worker)


# What an asker can do


async def test_principals_are_only_ever_compared(database: Database) -> None:
    async with connected(database.writer) as writer, connected(database.worker) as worker:
        mine = {principal: await chunk(writer, await document(writer, principal)) for principal in HOSTILE}
        public = await chunk(writer, await document(writer, "public"))
        for principal in HOSTILE:
            assert await seen_by(worker, [principal]) == {mine[principal], public}, repr(principal)
        assert await seen_by(worker, HOSTILE) == {*mine.values(), public}
        assert await seen_by(worker, [f"stranger {n}" for n in range(64)]) == {public}


async def test_a_document_with_thousands_of_readers(database: Database) -> None:
    async with all_three(database) as (owner, writer, worker):
        id_ = await chunk(writer, await document(writer, *(f"user:{n:06} {'é' * 200}" for n in range(5000))))
        assert await seen_by(worker, [f"user:004711 {'é' * 200}"]) == {id_}
        assert await seen_by(worker, ["user:004711"]) == set()
        await assert_derived_is_true(owner, worker)


@pytest.mark.parametrize("table", READABLE)
@pytest.mark.parametrize(
    "value",
    [None, "", "[]", "{}", "null", '"public"', '{"public": 1}', "[1]", "[null]", '[["public"]]', "public"],
)
async def test_without_principals_there_is_nothing(database: Database, table: str, value: str | None) -> None:
    async with connected(database.writer) as writer, connected(database.worker) as worker:
        id_ = await chunk(writer, await document(writer, "public", "1", "null"), [UUID(int=1)])
        await writer.execute("""UPDATE document_chunks SET metadata = '{"a": 1}' WHERE id = $1""", id_)
        try:
            async with worker.transaction():
                if value is not None:
                    await worker.execute("SELECT set_config($1, $2, true)", SETTING, value)
                assert await worker.fetch(f"SELECT {READABLE[table]} FROM {table}") == []
        except (asyncpg.InvalidParameterValueError, asyncpg.InvalidTextRepresentationError):
            pass  # JSON that is no array, or no JSON: refused, which is as good


async def test_nothing_is_left_on_a_connection(database: Database) -> None:
    async with connected(database.writer) as writer, connected(database.worker) as worker:
        await chunk(writer, await document(writer, "user:1"))
        assert len(await seen_by(worker, ["user:1"])) == 1
        assert await worker.fetchval("SELECT current_setting($1)", SETTING) == ""
        assert await worker.fetch("SELECT id FROM document_chunks") == []


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO documents (title) VALUES ('mine')",
        "UPDATE documents SET title = 'mine'",
        "DELETE FROM document_chunks",
        "INSERT INTO document_grants SELECT id, 'user:1' FROM documents",
        "UPDATE document_chunks SET access_set_id = 1",
        "INSERT INTO access_sets (principals, digest) VALUES ('{user:1}', '')",
        "INSERT INTO chunk_topics VALUES (gen_random_uuid(), gen_random_uuid())",
        "INSERT INTO chunk_metadata VALUES (gen_random_uuid(), gen_random_uuid())",
        "TRUNCATE document_grants",
        "SELECT * FROM document_grants",
        "SELECT principals FROM access_sets",
        "SELECT id FROM documents FOR UPDATE",
        "SET ROLE anabranch_writer",
        "SET ROLE store_owner",
        "SET ROLE postgres",
        "ALTER TABLE documents DISABLE ROW LEVEL SECURITY",
        "DROP POLICY anabranch_reader_documents ON documents",
        "SELECT anabranch_access_set(gen_random_uuid())",
        "SELECT anabranch_rebuild_derived()",
        "SELECT anabranch_stale_documents()",
        "CREATE TABLE public.mine ()",
    ],
)
async def test_a_worker_cannot(database: Database, statement: str) -> None:
    async with connected(database.worker) as worker:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await worker.execute(statement)


async def test_a_worker_cannot_go_around_the_policies(database: Database) -> None:
    async with connected(database.writer) as writer, connected(database.worker) as worker:
        await chunk(writer, await document(writer, "public"))
        await worker.execute("SET row_security = off")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):  # an error rather than rows
            await worker.fetch("SELECT id FROM documents")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE access_sets SET principals = '{user:1}'",
        "DELETE FROM chunk_topics",
        "DELETE FROM chunk_metadata",
        "TRUNCATE document_grants",
        "SET ROLE store_owner",
    ],
)
async def test_a_back_end_cannot(database: Database, statement: str) -> None:
    async with connected(database.writer) as writer:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await writer.execute(statement)


async def test_a_set_in_use_cannot_be_thrown_away(database: Database) -> None:
    async with connected(database.owner) as owner:
        await document(owner, "user:1")
        with pytest.raises(asyncpg.ForeignKeyViolationError):
            await owner.execute("DELETE FROM access_sets")


async def test_a_back_ends_own_objects_do_not_come_between(database: Database) -> None:
    """The functions run with the owner's rights: nothing that a back end makes may come into their way."""
    async with all_three(database) as (owner, writer, worker):
        async with connected(database.admin) as admin:
            await admin.execute("CREATE SCHEMA trap; GRANT ALL ON SCHEMA trap TO PUBLIC")
        await writer.execute(
            "CREATE TABLE trap.document_grants (document_id uuid, principal text);"
            "CREATE TEMP TABLE document_grants (document_id uuid, principal text);"
            "CREATE TEMP TABLE access_sets (id bigint, principals text[], digest bytea);"
            "CREATE FUNCTION trap.sha256(bytea) RETURNS bytea LANGUAGE sql AS $$ SELECT '\\x00'::bytea $$;"
            "SET search_path = trap, public, pg_catalog, pg_temp"
        )
        id_ = await writer.fetchval("INSERT INTO public.documents (title) VALUES ('t') RETURNING id")
        await writer.execute("INSERT INTO public.document_grants VALUES ($1, 'user:1')", id_)
        await assert_derived_is_true(owner, worker)
        assert await owner.fetchval("SELECT length(digest) FROM access_sets") == 32


# What it costs


async def test_the_caller_is_evaluated_once_a_statement(database: Database) -> None:
    async with connected(database.owner) as owner, connected(database.worker) as worker:
        await owner.execute(
            "INSERT INTO documents (id) SELECT gen_random_uuid() FROM generate_series(1, 300)"
        )
        await owner.execute(
            "INSERT INTO document_grants SELECT id, 'user:' || (random() * 50)::int FROM documents"
        )
        await owner.execute(
            "INSERT INTO document_chunks (document_id, text_content) SELECT id, 'c' FROM documents"
        )
        await owner.execute("ANALYZE")
        async with worker.transaction():
            await worker.execute("SELECT set_config($1, $2, true)", SETTING, '["user:1"]')
            plan = json.loads(
                await worker.fetchval(
                    "EXPLAIN (ANALYZE, FORMAT JSON)"
                    " SELECT c.id FROM document_chunks c JOIN documents d ON d.id = c.document_id"
                )
            )[0]["Plan"]
    nodes = list(walk(plan))
    # A SubPlan that is not hashed is run once a row.
    apart = [node for node in nodes if node.get("Parent Relationship") in {"InitPlan", "SubPlan"}]
    assert len(apart) >= 2
    assert {node["Actual Loops"] for node in apart} == {1}


def walk(node: dict[str, Any]) -> Iterable[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from walk(child)
