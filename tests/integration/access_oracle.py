"""Who may read what: the plain rule, recomputed from the three tables, and compared with what is derived and seen."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg

from tests.conftest import SETTING
from tests.integration.connections import connected
from tests.integration.oracle import metadata_rows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from tests.conftest import Database

    Connection = asyncpg.Connection[asyncpg.Record]

PRINCIPALS = ("user:1", "user:2", "group:law", "public")
READABLE = {
    "documents": "id",
    "document_chunks": "id",
    "chunk_topics": "chunk_id",
    "chunk_metadata": "chunk_id",
    "access_sets": "id",
}

# No two of the values read alike as results carry them, but for those that are meant to.
METADATA = (
    '{"year": 2020}',
    '{"year": "2020", "author": "Ā"}',
    '{"year": null, "author": ["a", 1]}',
    '{"author": {"name": "a"}, "": ""}',
    '{"author": true, "year": 2021}',
    '{"year": "2021-05-01", "author": ["a", "b", "a"]}',
    "[1]",
    '"year"',
    "null",
)


@asynccontextmanager
async def all_three(database: Database) -> AsyncIterator[tuple[Connection, Connection, Connection]]:
    """The owner, a back end, a worker."""
    async with (
        connected(database.owner) as owner,
        connected(database.writer) as writer,
        connected(database.worker) as worker,
    ):
        yield owner, writer, worker


async def seen_by(
    worker: Connection, principals: str | Iterable[str], table: str = "document_chunks"
) -> set[Any]:
    """The ids that a worker reads for an asker; a string is put into the setting as it is."""
    value = principals if isinstance(principals, str) else json.dumps(list(principals))
    async with worker.transaction(readonly=True):
        await worker.execute("SELECT set_config($1, $2, true)", SETTING, value)
        return {row[0] for row in await worker.fetch(f"SELECT {READABLE[table]} FROM {table}")}


async def document(connection: Connection, *principals: str) -> UUID:
    id_: UUID = await connection.fetchval("INSERT INTO documents (title) VALUES ('t') RETURNING id")
    await grant(connection, id_, *principals)
    return id_


async def grant(connection: Connection, document_id: UUID, *principals: str) -> None:
    await connection.execute(
        "INSERT INTO document_grants SELECT $1, p FROM unnest($2::text[]) p", document_id, list(principals)
    )


async def revoke(connection: Connection, document_id: UUID, *principals: str) -> None:
    await connection.execute(
        "DELETE FROM document_grants WHERE document_id = $1 AND principal = ANY ($2::text[])",
        document_id,
        list(principals),
    )


async def chunk(connection: Connection, document_id: UUID, topics: Iterable[UUID] = ()) -> UUID:
    id_: UUID = await connection.fetchval(
        "INSERT INTO document_chunks (document_id, text_content, related_topic_ids)"
        " VALUES ($1, 'c', $2) RETURNING id",
        document_id,
        list(topics),
    )
    return id_


async def drop_foreign_keys(owner: Connection) -> None:
    """Makes the tables like a back end's own: nothing joins them, and a chunk's topics may be null."""
    await owner.execute(
        "ALTER TABLE document_chunks DROP CONSTRAINT document_chunks_document_id_fkey;"
        "ALTER TABLE document_grants DROP CONSTRAINT document_grants_document_id_fkey;"
        "ALTER TABLE document_chunks ALTER related_topic_ids DROP NOT NULL"
    )


async def until_blocked(observer: Connection, pid: int) -> None:
    for _ in range(1000):
        if await observer.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the second transaction did not wait for the first")


def metadata_of(document: asyncpg.Record | None, chunk: asyncpg.Record) -> list[Any]:
    """The document's metadata, and the chunk's."""
    return [json.loads((row["metadata"] if row else None) or "null") for row in (document, chunk)]


async def assert_derived_is_true(owner: Connection, worker: Connection) -> None:
    """Everything that is derived, recomputed from the three tables by the plain rule."""
    documents = {
        row["id"]: row for row in await owner.fetch("SELECT id, access_set_id, metadata FROM documents")
    }
    chunks = await owner.fetch(
        "SELECT id, document_id, session_id, related_topic_ids, access_set_id, metadata FROM document_chunks"
    )
    readers = defaultdict(set)
    for row in await owner.fetch("SELECT document_id, principal FROM document_grants"):
        readers[row["document_id"]].add(row["principal"])
    sets = {
        row["id"]: row["principals"] for row in await owner.fetch("SELECT id, principals FROM access_sets")
    }

    for id_, row in documents.items():
        assert sets.get(row["access_set_id"]) == (sorted(readers[id_]) or None), f"document {id_}"
    for row in chunks:
        its = documents.get(row["document_id"])
        assert row["access_set_id"] == (its["access_set_id"] if its else None), f"chunk {row['id']}"
    assert {tuple(row) for row in await owner.fetch("SELECT * FROM chunk_topics")} == {
        (topic, row["id"], row["session_id"], row["access_set_id"])
        for row in chunks
        for topic in row["related_topic_ids"] or ()
        if topic is not None
    }
    assert {tuple(row) for row in await owner.fetch("SELECT * FROM chunk_metadata")} == {
        (entry, row["id"], row["access_set_id"], number, instant)
        for row in chunks
        for entry, number, instant in metadata_rows(*metadata_of(documents.get(row["document_id"]), row))
    }
    assert set(sets) == {row["access_set_id"] for row in documents.values()} - {None}, "a set is left over"
    assert tuple(await owner.fetchrow("SELECT * FROM anabranch_rebuild_derived()") or ()) == (0,) * 5

    for caller in [(p,) for p in PRINCIPALS] + [("user:1", "group:law"), ("nobody",)]:
        visible = {id_ for id_ in documents if readers[id_] & {*caller, "public"}}
        assert await seen_by(worker, caller, "documents") == visible
        theirs = {row["id"]: row for row in chunks if row["document_id"] in visible}
        assert await seen_by(worker, caller) == set(theirs)
        assert await seen_by(worker, caller, "chunk_topics") == {
            id_ for id_, row in theirs.items() if any(row["related_topic_ids"] or ())
        }
        assert await seen_by(worker, caller, "chunk_metadata") == {
            id_
            for id_, row in theirs.items()
            if metadata_rows(*metadata_of(documents[row["document_id"]], row))
        }


async def assert_derived_is_true_but_for_unused_sets(owner: Connection, worker: Connection) -> None:
    """After concurrent writes, sets may be left that nobody could discard: whoever came last skipped them."""
    stale = {
        kind: await owner.fetch(f"SELECT * FROM anabranch_stale_{kind}()")
        for kind in ("documents", "chunks", "topics", "metadata")
    }
    assert not any(stale.values()), stale
    await owner.execute("SELECT anabranch_rebuild_derived()")  # discards the unused sets
    await assert_derived_is_true(owner, worker)
