"""Writing and deleting documents: equal to a model in memory, whole, and never readable by more than its grants say."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

import asyncpg
import numpy as np
import pytest
from pgvector.asyncpg import register_vector

from streams.core.documents import Batch, Chunk, Document, Line, Problem, batches
from streams.store.ingestion import Deleted, DocumentStore, IngestionError, Written, open_documents
from tests.conftest import SETTING, Database, PostgresServer
from tests.integration.access_oracle import (
    assert_derived_is_true,
    assert_derived_is_true_but_for_unused_sets,
    drop_foreign_keys,
)
from tests.integration.connections import connected, execute
from tests.integration.ingest.worlds import Model, chunk_of, contents, random_document, versions
from tests.integration.pgbouncer import POOL_SIZE, PgBouncer, program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

ID, OTHER = UUID(int=1), UUID(int=2)


def grouped(documents: Iterable[Document]) -> Iterable[Batch]:
    lines = (Line(number, 1, document) for number, document in enumerate(documents, start=1))
    return batches(lines, max_chunks=8, max_lines=4)


async def write(store: DocumentStore, *documents: Document) -> Written:
    written, rejected = await store.write(documents)
    assert not rejected
    return written


async def found_in(database: Database) -> Model:
    async with connected(database.owner) as owner:
        return await contents(owner)


@pytest.mark.parametrize(
    ("seed", "keyed"), [(0, True), (1, True), (2, False)], ids=["one", "two", "without foreign keys"]
)
async def test_random_runs_equal_a_model(database: Database, *, seed: int, keyed: bool) -> None:
    rng, model = random.Random(seed), Model()
    async with connected(database.owner) as owner, connected(database.worker) as worker:
        if not keyed:
            await drop_foreign_keys(owner)
        async with open_documents(database.writer) as store:
            rejections = 0
            for _ in range(25):
                if rng.random() < 0.3:
                    ids = [UUID(int=1 + number) for number in rng.sample(range(7), rng.randint(1, 3))]
                    deleted, rejected = await store.delete(ids)
                    assert not rejected
                    expected = [model.delete(id_) for id_ in ids]
                    assert (deleted.documents_deleted, deleted.documents_missing) == (
                        expected.count(True),
                        expected.count(False),
                    )
                else:
                    documents = [
                        random_document(rng, documents=6, chunks=12) for _ in range(rng.randint(1, 8))
                    ]
                    for batch in grouped(documents):
                        _, rejected = await store.write(batch.documents)
                        expected_ids = {each.id for each in batch.documents if not model.ingest(each)}
                        assert set(rejected) == expected_ids
                        assert {error.code for error in rejected.values()} <= {
                            Problem.CHUNK_OF_OTHER_DOCUMENT
                        }
                        rejections += len(rejected)
                assert await contents(owner) == model
            assert rejections > 5
        await owner.reset_type_codec("jsonb", schema="pg_catalog")
        await assert_derived_is_true(owner, worker)


async def test_the_same_twice_writes_nothing(database: Database) -> None:
    rng = random.Random(5)
    documents = []
    for number in range(1, 9):
        document = random_document(rng, documents=1, chunks=9)
        chunks = [
            replace(chunk, id=UUID(int=100 * number + index)) for index, chunk in enumerate(document.chunks)
        ]
        documents.append(replace(document, id=UUID(int=number), chunks=chunks))
    async with connected(database.owner) as owner, open_documents(database.writer) as store:
        first = await write(store, *documents)
        assert first.documents_new == len(documents)
        assert first.chunks_new > 5
        before = await versions(owner)
        again = await write(store, *documents)
        assert await versions(owner) == before
    assert again == Written(
        documents_unchanged=len(documents), chunks_unchanged=first.chunks_new, unreadable=first.unreadable
    )


async def test_only_what_differs_is_counted_and_written(database: Database) -> None:
    async with open_documents(database.writer) as store:
        kept, changed, vanished, added = (chunk_of(number) for number in range(4))
        grants = frozenset({"user:1", "user:2"})
        assert await write(
            store, Document(id=ID, grants=grants, chunks=[kept, changed, vanished])
        ) == Written(documents_new=1, chunks_new=3)
        async with connected(database.owner) as owner:
            [before] = await owner.fetch("SELECT xmin::text FROM document_chunks WHERE id = $1", kept.id)
            assert await write(
                store, Document(id=ID, grants=grants, chunks=[kept, chunk_of(1, "changed"), added])
            ) == Written(
                documents_unchanged=1, chunks_new=1, chunks_changed=1, chunks_unchanged=1, chunks_deleted=1
            )
            assert await owner.fetch("SELECT xmin::text FROM document_chunks WHERE id = $1", kept.id) == [
                before
            ]
        # Another title, and other grants, are each a change of the document.
        chunks = [kept, chunk_of(1, "changed"), added]
        for document in (
            Document(id=ID, grants=grants, chunks=chunks, title="t"),
            Document(id=ID, grants=frozenset({"user:1"}), chunks=chunks, title="t"),
            Document(id=ID, grants=frozenset({"user:1", "user:3"}), chunks=chunks, title="t"),
        ):
            assert await write(store, document) == Written(documents_changed=1, chunks_unchanged=3)
        assert await store.delete([ID, OTHER]) == (
            Deleted(documents_deleted=1, documents_missing=1, chunks_deleted=3),
            {},
        )


async def test_absent_grants_stay_and_given_ones_replace(database: Database) -> None:
    async with open_documents(database.writer) as store:
        readers = []
        for grants in (None, frozenset({"user:1"}), None, frozenset({"user:2", "public"}), frozenset[str]()):
            written = await write(store, Document(id=ID, grants=grants, chunks=[chunk_of(1)]))
            readers.append((await found_in(database)).grants[ID])
            assert written.unreadable == (not readers[-1])
    assert readers == [set(), {"user:1"}, {"user:1"}, {"user:2", "public"}, set()]


async def test_a_chunk_does_not_move_to_another_document(database: Database) -> None:
    """Whatever else is in the batch, and in the order of the lines."""
    moved = chunk_of(1)
    old = Document(id=ID, title="old", grants=frozenset({"user:1"}), chunks=[moved])
    thief = Document(id=OTHER, grants=frozenset({"public"}), chunks=[moved, chunk_of(2)])
    third = Document(id=UUID(int=3), chunks=[chunk_of(3)])
    async with open_documents(database.writer) as store:
        await write(store, old)
        written, rejected = await store.write([thief, third])
        assert (written.documents_new, written.chunks_new) == (1, 1)
        assert {id_: (error.code, str(error)) for id_, error in rejected.items()} == {
            OTHER: (Problem.CHUNK_OF_OTHER_DOCUMENT, f"chunk {moved.id} belongs to another document")
        }
        model = Model()
        assert model.ingest(old)
        assert model.ingest(third)
        assert await found_in(database) == model
        # The thief's line first: still rejected. Afterwards: the old document has given the chunk up.
        emptied = Document(id=ID, chunks=[])
        assert set((await store.write([thief, emptied]))[1]) == {OTHER}
        await write(store, old)
        assert not (await store.write([emptied, thief]))[1]


async def test_what_a_back_end_s_constraint_rejects_does_not_stop_the_others(database: Database) -> None:
    await execute(
        database.owner, "ALTER TABLE document_chunks ADD CONSTRAINT brief CHECK (length(text_content) < 9)"
    )
    documents = [
        Document(id=UUID(int=number), chunks=[chunk_of(number, "canary-5e0f" if number == 2 else "fine")])
        for number in (1, 2, 3)
    ]
    async with open_documents(database.writer) as store:
        written, rejected = await store.write(documents)
    assert (written.documents_new, written.chunks_new) == (2, 2)
    assert {id_: (error.code, str(error)) for id_, error in rejected.items()} == {
        OTHER: (
            Problem.REJECTED_BY_STORE,
            "PostgreSQL error 23514 (CheckViolationError, constraint brief)",
        )
    }
    assert set((await found_in(database)).documents) == {ID, UUID(int=3)}


async def test_a_value_that_is_too_long_for_an_index_is_rejected_alone(database: Database) -> None:
    long = random.Random(1).randbytes(20_000).hex()
    async with open_documents(database.writer) as store:
        _, rejected = await store.write(
            [
                Document(id=ID, chunks=[chunk_of(1, section=long)]),
                Document(id=OTHER, chunks=[chunk_of(2, long)]),
            ]
        )
    assert {id_: error.code for id_, error in rejected.items()} == {ID: Problem.REJECTED_BY_STORE}


async def test_what_references_a_document_keeps_it_from_being_deleted(database: Database) -> None:
    await execute(
        database.owner,
        "CREATE TABLE citations (chunk_id uuid REFERENCES document_chunks);"
        " GRANT ALL ON citations TO anabranch_writer",
    )
    async with open_documents(database.writer) as store:
        documents = [Document(id=UUID(int=number), chunks=[chunk_of(number)]) for number in (1, 2)]
        await write(store, *documents)
        await execute(database.writer, f"INSERT INTO citations VALUES ('{chunk_of(1).id}')")
        deleted, rejected = await store.delete([ID, OTHER])
        assert deleted == Deleted(documents_deleted=1, chunks_deleted=1)
        assert {id_: error.code for id_, error in rejected.items()} == {ID: Problem.REJECTED_BY_STORE}
        # A changed chunk is updated, so the reference stays.
        assert await write(store, Document(id=ID, chunks=[chunk_of(1, "changed")])) == Written(
            documents_unchanged=1, chunks_changed=1, unreadable=1
        )


async def test_concurrent_runs_leave_one_version_of_each_document(database: Database) -> None:
    """Neither errors nor mixtures, whichever came last."""

    def version(number: int, id_: UUID) -> Document:
        chunks = [
            chunk_of(int(id_) * 100 + each, f"version {number}") for each in range(number % 3, 3 + number % 2)
        ]
        return Document(id=id_, grants=frozenset({f"user:{number}"}), title=f"{number}", chunks=chunks)

    rng = random.Random(3)
    ids = [UUID(int=number) for number in range(1, 5)]

    async def run(of: Sequence[int]) -> None:
        async with open_documents(database.writer) as store:
            for number in of:
                if number % 7 == 3:
                    assert not (await store.delete(rng.sample(ids, 2)))[1]
                else:
                    await write(store, *[version(number, id_) for id_ in rng.sample(ids, 3)])

    await asyncio.gather(*(run(range(first, first + 10)) for first in range(0, 40, 10)))
    found = await found_in(database)
    assert found.documents
    for id_, (_, title, *_) in found.documents.items():
        expected = Model()
        assert expected.ingest(version(int(title), id_))
        assert found.grants[id_] == expected.grants[id_]
        assert {each: row for each, row in found.chunks.items() if row[0] == id_} == expected.chunks
    async with connected(database.owner) as owner, connected(database.worker) as worker:
        await assert_derived_is_true_but_for_unused_sets(owner, worker)


async def test_no_reader_sees_a_chunk_with_other_grants_than_its_own(database: Database) -> None:
    """While a document alternates between a public and a confidential version."""
    public, group = frozenset({"public"}), frozenset({"group:law"})

    def version(number: int) -> Document:
        confidential = bool(number % 2)
        text = "confidential" if confidential else "open"
        return Document(
            id=ID,
            title=text,
            grants=group if confidential else public,
            # The same chunks with other texts, and other chunks.
            chunks=[chunk_of(each, text) for each in (1, 2, 3 + number % 2)],
        )

    seen: set[str] = set()
    done = asyncio.Event()

    async def read() -> None:
        async with connected(database.worker, **{SETTING: '["user:42"]'}) as worker:
            while not done.is_set():
                for table, column in (("document_chunks", "text_content"), ("documents", "title")):
                    seen.update(row[0] for row in await worker.fetch(f"SELECT {column} FROM {table}"))

    readers = [asyncio.create_task(read()) for _ in range(2)]
    async with open_documents(database.writer) as store:
        for number in range(40):
            await write(store, version(number))
    done.set()
    await asyncio.gather(*readers)
    assert seen == {"open"}


async def test_stored_embeddings_are_those_of_the_same_text(database: Database) -> None:
    async with open_documents(database.writer) as store:
        without = Chunk(id=UUID(int=1003), text_content="text", searchable=False)
        await write(store, Document(id=ID, chunks=[chunk_of(1), chunk_of(2, "another"), without]))
        asked = [Chunk(id=UUID(int=1000 + number), text_content="text") for number in (1, 2, 3, 4)]
        found = await store.embeddings(asked)
        assert list(found) == [UUID(int=1001)]
        expected = chunk_of(1).embedding
        assert expected is not None
        assert found[UUID(int=1001)].tolist() == expected.tolist()
        assert await store.embeddings([]) == {}


@pytest.mark.parametrize("storage", ["PLAIN", "EXTERNAL"])
async def test_dimensions_are_those_of_the_column(database: Database, storage: str) -> None:
    await execute(
        database.owner,
        "DROP INDEX document_chunks_embedding_halfvec;"
        "ALTER TABLE document_chunks ALTER COLUMN embedding TYPE vector(1500);"
        f"ALTER TABLE document_chunks ALTER COLUMN embedding SET STORAGE {storage}",
    )
    vector = np.arange(1500, dtype=np.float32)
    async with open_documents(database.writer) as store:
        assert store.dimensions == 1500
        chunk = Chunk(id=OTHER, text_content="π" * 9000, embedding=vector)
        assert (await write(store, Document(id=ID, chunks=[chunk]))).chunks_new == 1
        assert (await store.embeddings([chunk]))[OTHER].tolist() == vector.tolist()


async def test_pgvector_may_be_in_any_schema_and_back_ends_may_have_their_own_columns(
    database: Database,
) -> None:
    await execute(
        database.admin,
        'CREATE SCHEMA "Ext"; GRANT USAGE ON SCHEMA "Ext" TO PUBLIC; ALTER EXTENSION vector SET SCHEMA "Ext";'
        "ALTER TABLE document_chunks ADD COLUMN created_at timestamptz NOT NULL DEFAULT now(),"
        "  ADD COLUMN likes int NOT NULL DEFAULT 0",
    )
    async with open_documents(database.writer) as store:
        await write(store, Document(id=ID, chunks=[chunk_of(1)]))
        await execute(database.admin, "UPDATE document_chunks SET likes = 3")
        assert (await write(store, Document(id=ID, chunks=[chunk_of(1, "changed")]))).chunks_changed == 1
        assert list(await store.embeddings([chunk_of(1, "changed")])) == [chunk_of(1).id]
    async with connected(database.admin) as admin:
        assert await admin.fetchval("SELECT likes FROM document_chunks") == 3


@pytest.mark.slow
async def test_several_runs_share_a_pooler_without_prepared_statements(database: Database) -> None:
    """PgBouncer 1.18 in transaction mode, with fewer server connections than runs."""
    with PgBouncer(program("1.18"), replace(database, worker=database.writer)) as pooler:

        async def run(number: int) -> None:
            async with open_documents(pooler.dsn, statement_cache_size=0) as store:
                for each in range(8):
                    id_ = UUID(int=100 * number + each)
                    await write(store, Document(id=id_, chunks=[chunk_of(100 * number + each)]))

        await asyncio.gather(*(run(number) for number in range(1, 2 * POOL_SIZE)))
    assert len((await found_in(database)).chunks) == 8 * (2 * POOL_SIZE - 1)


async def test_rows_are_written_with_the_rights_of_anabranch_writer_alone(database: Database) -> None:
    """Also for a superuser: row-level security applies, so that a mistake cannot write where a back end could not."""
    await execute(
        database.admin,
        "CREATE POLICY few ON documents AS RESTRICTIVE TO anabranch_writer USING (title = 'allowed')",
    )
    async with open_documents(database.admin) as store:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await store.write([Document(id=ID, title="another")])
        await write(store, Document(id=OTHER, title="allowed"))


LACKS: Final = "the login of ingestion lacks a privilege; as a superuser, run: "
OF_A_WORKER: Final = (
    "this login is a worker's, which must not write: ingestion needs a login of its own; as a superuser, run:"
    " CREATE ROLE anabranch_ingestion LOGIN PASSWORD '…' IN ROLE anabranch_writer;"
)
NOT_READY: Final = {
    "the worker's role": (
        "",
        "worker",
        OF_A_WORKER,
    ),
    "no temporary tables": (
        "REVOKE TEMPORARY ON DATABASE {name} FROM PUBLIC",
        "writer",
        f"{LACKS}GRANT TEMPORARY ON DATABASE {{name}} TO anabranch_writer;",
    ),
    "no table": (
        "DROP TABLE document_chunks",
        "writer",
        "the store has no column document_chunks.embedding of type vector; run `anabranch migrate`",
    ),
}


@pytest.mark.parametrize(("sql", "role", "message"), NOT_READY.values(), ids=NOT_READY.keys())
async def test_a_store_that_is_not_ready_is_reported(
    database: Database, sql: str, role: str, message: str
) -> None:
    if sql:
        await execute(database.admin, sql.format(name=database.name))
    with pytest.raises(IngestionError) as caught:
        async with open_documents(getattr(database, role)):
            pass
    assert str(caught.value) == message.format(name=database.name)


async def test_a_login_without_the_right_gets_it(postgres: PostgresServer, database: Database) -> None:
    await execute(database.admin, "DROP ROLE IF EXISTS newcomer; CREATE ROLE newcomer LOGIN PASSWORD 'test'")
    with pytest.raises(IngestionError) as caught:
        async with open_documents(postgres.login("newcomer", database)):
            pass
    assert str(caught.value) == f"{LACKS}GRANT anabranch_writer TO newcomer;"


async def test_metadata_arrives_as_it_is(database: Database) -> None:
    metadata: dict[str, Any] = {"π": [1, 2.5, True, None, {"a": "\u2028\\"}], "n": 10**40, "": ""}
    async with open_documents(database.writer) as store:
        await write(store, Document(id=ID, metadata=metadata, chunks=[chunk_of(1, metadata=metadata)]))
    async with connected(database.owner) as owner:
        for table in ("documents", "document_chunks"):
            assert json.loads(await owner.fetchval(f"SELECT metadata FROM {table}")) == metadata


# A lost connection


class _Watched:
    """A connection that does something as soon as a statement is sent, before anything else of the event loop."""

    def __init__(
        self, connection: asyncpg.Connection[asyncpg.Record], at: int, act: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._at = at
        self._act = act
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._connection, name)
        if name not in {"execute", "fetch", "fetchval", "copy_records_to_table"}:
            return found

        def send(*arguments: Any, **options: Any) -> Any:
            self.sent += 1
            if self.sent == self._at:
                asyncio.get_running_loop().call_soon(self._act)
            return found(*arguments, **options)

        return send


def terminate(database: Database, pid: int) -> None:
    """End a server process once it waits for its client; the event loop stands still until it has ended."""

    async def run() -> None:
        async with connected(database.admin) as admin:
            waits = "SELECT wait_event = 'ClientRead' FROM pg_stat_activity WHERE pid = $1"
            for _ in range(3000):
                if await admin.fetchval(waits, pid):
                    break
                await asyncio.sleep(0.01)
            await admin.execute("SELECT pg_terminate_backend($1, 60000)", pid)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, run()).result()


class _OnceRead(dict[str, float]):
    """Coordinates that do something when they are encoded."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(x0=1.0)
        self._act = act

    def items(self) -> Any:
        self._act()
        return super().items()


@asynccontextmanager
async def lost_once(database: Database, at: int) -> AsyncIterator[tuple[DocumentStore, _Watched, list[str]]]:
    """A store whose connection is lost when a statement is sent; and what the event loop logs, once it is closed."""
    logged: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: logged.append(context["message"]))
    try:
        async with connected(database.writer) as connection:
            await register_vector(connection)
            pid = connection.get_server_pid()
            watched = _Watched(connection, at, lambda: terminate(database, pid))
            yield DocumentStore(cast("Any", watched), dimensions=768, storage="PLAIN"), watched, logged
            while watched.sent >= at and not connection.is_closed():  # noqa: ASYNC110  # asyncpg has no event for it
                await asyncio.sleep(0.01)
        gc.collect()
    finally:
        loop.set_exception_handler(None)


async def test_a_lost_connection_raises_its_error_whenever_it_is_lost(database: Database) -> None:
    """The server's last message arrives with the reply to a statement, so no statement waits for a reply."""
    documents = [
        Document(id=each, grants=frozenset({"a"}), chunks=[chunk_of(int(each))]) for each in (ID, OTHER)
    ]
    for at in range(1, 100):
        async with lost_once(database, at) as (store, watched, logged):
            error = ""
            try:
                await store.write(documents)
            except asyncpg.ConnectionDoesNotExistError as lost:
                error = str(lost)
        assert ("closed" in error) == (watched.sent >= at)
        assert not logged
        if watched.sent < at:
            break
        assert not (await found_in(database)).documents
    assert at > 9
    assert len((await found_in(database)).documents) == 2


async def test_a_connection_that_is_lost_during_a_copy_raises_its_error(database: Database) -> None:
    async with lost_once(database, 1000) as (store, watched, logged):
        loop, act = asyncio.get_running_loop(), watched._act
        coordinates = _OnceRead(lambda: loop.call_soon(act))
        chunks = [chunk_of(number, "x" * 300_000) for number in range(60)]
        chunks[1] = replace(chunks[1], coordinates=coordinates)
        with pytest.raises(asyncpg.ConnectionDoesNotExistError, match="closed"):
            async with asyncio.timeout(120):
                await store.write([Document(id=ID, chunks=chunks)])
    assert not logged
    assert not (await found_in(database)).documents
