"""Writes documents with their grants and chunks, as a back end does: as anabranch_writer, in short transactions.

Each transaction writes whole documents, so readers see a document's old state or its new one, never chunks without its
grants. `COPY` cannot write to tables with row-level security, so rows are copied to temporary tables first.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, Final, Self, TypeVar
from uuid import UUID

import asyncpg
import numpy as np
from pgvector import Vector as PgVector
from pgvector.asyncpg import register_vector
from tenacity import stop_after_attempt, wait_random_exponential

from streams.core.documents import Chunk, Document, DocumentError, Problem, Vector
from streams.retries import retry
from streams.store.catalog import vector_schema

__all__ = ["Deleted", "DocumentStore", "IngestionError", "Written", "open_documents"]

T = TypeVar("T", "Written", "Deleted")

_DOCUMENT_COLUMNS: Final = (
    "id", "session_id", "title", "source_url", "file_description", "document_type", "metadata",
)  # fmt: skip
_CHUNK_COLUMNS: Final = (
    "id", "document_id", "session_id", "parent_chunk_id", "related_topic_ids", "chunk_type", "chunk_position",
    "text_content", "token_count", "page", "section", "coordinates", "metadata", "embedding",
)  # fmt: skip

# A lost race: another transaction wrote the same rows at the same time.
_LOST_RACE: Final = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.UniqueViolationError,
)
_ATTEMPTS: Final = 6
_CONNECTION_ERRORS: Final = (
    OSError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
_CLOSE_SECONDS: Final = 5.0
# asyncpg sends rows in buffers of 512 KiB. If it has to wait between two of them and the connection is lost meanwhile,
# it waits indefinitely, or logs the error and raises another.
_COPY_BYTES: Final = 400_000
# SQLSTATE classes of errors that are due to the data: data exception, constraint, triggered data change, check option,
# program limit (a value is too long for an index), raised by a back end's own trigger.
_DUE_TO_DATA: Final = frozenset({"22", "23", "27", "44", "54", "P0"})


class IngestionError(Exception):
    """The store is not ready for ingestion; the message says why and what to do in one line."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Numbers of rows."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class Written(_Counts):
    """What writing changed.

    Attributes:
        unreadable: documents that nobody may read.
    """

    documents_new: int = 0
    documents_changed: int = 0
    documents_unchanged: int = 0
    chunks_new: int = 0
    chunks_changed: int = 0
    chunks_unchanged: int = 0
    chunks_deleted: int = 0
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class Deleted(_Counts):
    """What deleting changed."""

    documents_deleted: int = 0
    documents_missing: int = 0
    chunks_deleted: int = 0


@asynccontextmanager
async def open_documents(dsn: str, *, statement_cache_size: int = 100) -> AsyncIterator["DocumentStore"]:
    """Connect for ingestion.

    Args:
        dsn: connection string of a member of anabranch_writer, the owner or a superuser.
        statement_cache_size: 0 for a pooler that does not support prepared statements.

    Raises:
        IngestionError: the tables are missing, or the role lacks a privilege.
        OSError, asyncpg.PostgresError, asyncpg.InterfaceError: the store cannot be reached.
    """
    connection = await asyncpg.connect(
        dsn,
        statement_cache_size=statement_cache_size,
        server_settings={"application_name": "anabranch ingest"},
    )
    try:
        # In one transaction: a pooler without prepared statements may otherwise change the server between two steps of
        # one statement.
        async with _transaction(connection):
            row = await connection.fetchrow(_EMBEDDING_COLUMN)
            if row is None or row["dimensions"] < 1:
                raise IngestionError(
                    "the store has no column document_chunks.embedding of type vector; run `anabranch migrate`"
                )
            if missing := await connection.fetchrow(_MISSING_PRIVILEGE):
                raise IngestionError(f"{missing['what']}; as a superuser, run: {missing['remedy']}")
            await register_vector(connection, schema=await vector_schema(connection, for_sql=False))
        yield DocumentStore(connection, dimensions=row["dimensions"], storage=row["storage"])
    finally:
        await connection.close()


_EMBEDDING_COLUMN: Final = """
    SELECT a.atttypmod AS dimensions,
           CASE a.attstorage WHEN 'p' THEN 'PLAIN' WHEN 'm' THEN 'MAIN' WHEN 'x' THEN 'EXTENDED' ELSE 'EXTERNAL' END
             AS storage
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = to_regclass('public.document_chunks') AND a.attname = 'embedding' AND NOT a.attisdropped
      AND t.typname = 'vector'
"""

# With what grants it; no row if nothing is missing. The transactions use the rights of anabranch_writer alone. A worker
# would refuse to start with a login that may write, so its login does not get the right.
_MISSING_PRIVILEGE: Final = """
    SELECT c.what, c.remedy
    FROM pg_roles w
    CROSS JOIN LATERAL (VALUES
      (1, NOT pg_has_role(w.oid, 'MEMBER')
          AND EXISTS (SELECT FROM pg_roles r WHERE r.rolname = 'anabranch_reader' AND pg_has_role(r.oid, 'MEMBER')),
       'this login is a worker''s, which must not write: ingestion needs a login of its own',
       'CREATE ROLE anabranch_ingestion LOGIN PASSWORD ''…'' IN ROLE anabranch_writer;'),
      (2, NOT pg_has_role(w.oid, 'MEMBER'),
       'the login of ingestion lacks a privilege',
       format('GRANT anabranch_writer TO %I;', current_user)),
      (3, NOT has_database_privilege(w.oid, current_database(), 'TEMPORARY'),
       'the login of ingestion lacks a privilege',
       format('GRANT TEMPORARY ON DATABASE %I TO anabranch_writer;', current_database()))
    ) AS c(position, missing, what, remedy)
    WHERE w.rolname = 'anabranch_writer' AND c.missing
    ORDER BY c.position
    LIMIT 1
"""


class DocumentStore:
    """The documents of a store, on one connection.

    Attributes:
        dimensions: of the store's embeddings.

    Args:
        connection: not in a transaction, with a codec for vectors.
        dimensions: of the column for embeddings.
        storage: of that column.
    """

    def __init__(
        self, connection: "asyncpg.Connection[asyncpg.Record]", *, dimensions: int, storage: str
    ) -> None:
        self._connection = connection
        self._storage = storage
        self.dimensions = dimensions

    async def write(self, documents: Sequence[Document]) -> tuple[Written, Mapping[UUID, DocumentError]]:
        """Write documents, in one transaction if nothing is wrong with them. Rows that would not change stay untouched.

        A document's chunks and, where given, grants replace those that it has.

        Args:
            documents: have no document and no chunk in common. Every searchable chunk has an embedding.

        Returns:
            What changed, and why documents were rejected, by their ids. Nothing of these was written.

        Raises:
            OSError, asyncpg.PostgresError, asyncpg.InterfaceError: the store fails; documents may be written.
        """
        return await self._each(documents, lambda document: document.id, self._write, Written())

    async def delete(self, ids: Sequence[UUID]) -> tuple[Deleted, Mapping[UUID, DocumentError]]:
        """Delete documents with their chunks and grants, in one transaction if the store allows all of it.

        Args:
            ids: of documents, distinct; some may be missing.

        Returns:
            What changed, and why documents were not deleted, by their ids.

        Raises:
            OSError, asyncpg.PostgresError, asyncpg.InterfaceError: the store fails; documents may be deleted.
        """
        return await self._each(ids, lambda id_: id_, self._delete, Deleted())

    async def embeddings(self, chunks: Iterable[Chunk]) -> Mapping[UUID, Vector]:
        """The embeddings of those chunks that the store has with the same text, by id; each of shape (dimensions,)."""
        texts = {chunk.id: chunk.text_content for chunk in chunks}
        if not texts:
            return {}
        async with self._transaction():
            rows = await self._connection.fetch(_STORED, list(texts))
        return {
            row["id"]: _as_array(row["embedding"]) for row in rows if row["text_content"] == texts[row["id"]]
        }

    async def analyze(self) -> None:
        """Collect statistics for the planner, if the login may. Until then, it assumes tables as before the load."""
        await self._connection.execute(
            "ANALYZE public.documents, public.document_chunks, public.access_sets, public.chunk_topics,"
            " public.chunk_metadata"
        )

    async def _each(
        self,
        items: Sequence[Any],
        id_of: Callable[[Any], UUID],
        act: Callable[[Sequence[Any]], Any],
        nothing: T,
    ) -> tuple[T, Mapping[UUID, DocumentError]]:
        """Act on all items together, or if one of them is rejected, on one after another: it is only due to some."""
        if not items:
            return nothing, {}
        try:
            return await self._attempts(act, items), {}
        except DocumentError as error:
            if len(items) == 1:
                return nothing, {id_of(items[0]): error}
        rejected: dict[UUID, DocumentError] = {}
        total = nothing
        for item in items:
            counts, its_error = await self._each([item], id_of, act, nothing)
            total += counts
            rejected |= its_error
        return total, rejected

    async def _attempts(self, act: Callable[[Sequence[Any]], Any], items: Sequence[Any]) -> Any:
        results: list[Any] = []

        async def attempt() -> None:
            async with self._transaction():
                result = await act(items)
            results.append(result)

        try:
            await retry(
                attempt,
                retriable=lambda error: isinstance(error, _LOST_RACE),
                stop=stop_after_attempt(_ATTEMPTS),
                wait=wait_random_exponential(multiplier=0.02, max=1),
            )
        except asyncpg.PostgresError as error:
            if (error.sqlstate or "")[:2] not in _DUE_TO_DATA:
                raise
            # Without the server's text, which may quote values.
            constraint = f", constraint {error.constraint_name}" if error.constraint_name else ""
            raise DocumentError(
                Problem.REJECTED_BY_STORE,
                f"PostgreSQL error {error.sqlstate} ({type(error).__name__}{constraint})",
            ) from None
        return results[0]

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        async with _transaction(self._connection):
            # Not more than what ingestion needs, whoever logged in.
            await self._connection.execute("SET LOCAL ROLE anabranch_writer")
            yield

    async def _write(self, documents: Sequence[Document]) -> Written:
        connection = self._connection
        owners = {chunk.id: document.id for document in documents for chunk in document.chunks}
        await self._stage(documents)
        ids = [document.id for document in documents]
        # Concurrent writes to the same documents wait here, and then see what this transaction wrote.
        known = [row["id"] for row in await connection.fetch(_LOCK, ids)]
        known_chunks = await connection.fetch(_KNOWN_CHUNKS, list(owners))
        for row in known_chunks:
            if row["document_id"] != owners[row["id"]]:
                raise DocumentError(
                    Problem.CHUNK_OF_OTHER_DOCUMENT, f"chunk {row['id']} belongs to another document"
                )
        # Before the chunks, so that each chunk is written only once, with its final access set.
        changed = await self._write_documents(known)
        deleted = await self._count(_DELETE_VANISHED, known) if known else 0
        chunk_ids = [row["id"] for row in known_chunks]
        chunks_changed = await self._count(_UPDATE_CHUNKS, chunk_ids) if chunk_ids else 0
        chunks_new = await self._count(_INSERT_CHUNKS, chunk_ids)
        return Written(
            documents_new=len(ids) - len(known),
            documents_changed=changed,
            documents_unchanged=len(known) - changed,
            chunks_new=chunks_new,
            chunks_changed=chunks_changed,
            chunks_unchanged=len(chunk_ids) - chunks_changed,
            chunks_deleted=deleted,
            unreadable=await connection.fetchval(_UNREADABLE, ids),
        )

    async def _write_documents(self, known: Sequence[UUID]) -> int:
        """Write documents and grants; returns how many of the known ones changed."""
        changed: set[UUID] = set()
        if known:
            for statement in (_UPDATE_DOCUMENTS, _REVOKE):
                changed |= {row["id"] for row in await self._connection.fetch(statement, known)}
        await self._connection.execute(_INSERT_DOCUMENTS, known)
        granted = await self._connection.fetch(_GRANT)
        return len(changed | ({row["id"] for row in granted} & set(known)))

    async def _stage(self, documents: Sequence[Document]) -> None:
        """Copy the rows to temporary tables, which exist until the transaction ends."""
        await self._connection.execute(_STAGE.format(storage=self._storage))
        for table, columns, records in (
            ("ingested_documents", (*_DOCUMENT_COLUMNS, "sets_grants"), map(_document_row, documents)),
            ("ingested_grants", ("document_id", "principal"), _grant_rows(documents)),
            ("ingested_chunks", _CHUNK_COLUMNS, _chunk_rows(documents)),
        ):
            for part in _parts(records):
                await self._connection.copy_records_to_table(
                    table, schema_name="pg_temp", columns=columns, records=part
                )

    async def _delete(self, ids: Sequence[UUID]) -> Deleted:
        await self._connection.fetch(_LOCK, ids)
        # Chunks first: without a document or grants, each would be updated before it is deleted.
        chunks = await self._count("DELETE FROM public.document_chunks c WHERE c.document_id = ANY ($1)", ids)
        documents = await self._count("DELETE FROM public.documents d WHERE d.id = ANY ($1)", ids)
        # The tables may lack foreign keys.
        await self._count("DELETE FROM public.document_grants g WHERE g.document_id = ANY ($1)", ids)
        return Deleted(
            documents_deleted=documents, documents_missing=len(ids) - documents, chunks_deleted=chunks
        )

    async def _count(self, statement: str, *arguments: Any) -> int:
        """Execute a statement; returns how many rows it wrote."""
        return int((await self._connection.execute(statement, *arguments)).rpartition(" ")[2])


@asynccontextmanager
async def _transaction(connection: "asyncpg.Connection[asyncpg.Record]") -> AsyncIterator[None]:
    """A transaction that raises the first error. If the connection is lost, asyncpg's raises the rollback's instead."""
    # READ COMMITTED, whatever the default: the triggers need it.
    transaction = connection.transaction(isolation="read_committed")
    try:
        await transaction.start()
        try:
            yield
        except BaseException:
            await _roll_back(transaction, connection)
            raise
        await transaction.commit()
    except asyncpg.InternalClientError as error:
        if not connection.is_closed():
            raise
        # asyncpg drops what the server says between two statements before it closes the connection, and the next
        # statement fails with an error about the state of the protocol.
        raise asyncpg.ConnectionDoesNotExistError("the server closed the connection") from error


async def _roll_back(
    transaction: asyncpg.transaction.Transaction, connection: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    try:
        await transaction.rollback()
    except _CONNECTION_ERRORS:
        # The connection is lost, and the server rolls back. A COPY that could not start leaves a pending operation in
        # asyncpg. Unless the connection is closed before the loss is noticed, its error goes to the log.
        with suppress(*_CONNECTION_ERRORS):
            await connection.close(timeout=_CLOSE_SECONDS)


def _parts(records: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Groups of rows, each small enough for one COPY."""
    part: list[tuple[Any, ...]] = []
    size = 0
    for record in records:
        part.append(record)
        size += sum(map(_size, record))
        if size >= _COPY_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _size(value: Any) -> int:
    """Of a value in COPY's binary format, in bytes; rounded up."""
    if isinstance(value, str):
        return 8 + len(value.encode())
    if isinstance(value, np.ndarray):
        return 8 + value.nbytes
    return 32 + 20 * len(value) if isinstance(value, (list, tuple)) else 32


def _document_row(document: Document) -> tuple[Any, ...]:
    return (
        document.id,
        document.session_id,
        document.title,
        document.source_url,
        document.file_description,
        document.document_type,
        json.dumps(document.metadata),
        document.grants is not None,
    )


def _grant_rows(documents: Iterable[Document]) -> Iterable[tuple[UUID, str]]:
    return ((document.id, principal) for document in documents for principal in document.grants or ())


def _chunk_rows(documents: Iterable[Document]) -> Iterable[tuple[Any, ...]]:
    return (
        (
            chunk.id,
            document.id,
            chunk.session_id,
            chunk.parent_chunk_id,
            chunk.related_topic_ids,
            chunk.chunk_type,
            chunk.chunk_position,
            chunk.text_content,
            chunk.token_count,
            chunk.page,
            chunk.section,
            None if chunk.coordinates is None else json.dumps(chunk.coordinates),
            json.dumps(chunk.metadata),
            chunk.embedding,
        )
        for document in documents
        for chunk in document.chunks
    )


def _as_array(stored: PgVector) -> Vector:
    return np.asarray(stored.to_numpy(), dtype=np.float32)


def _listed(columns: Iterable[str], prefix: str = "") -> str:
    return ", ".join(prefix + column for column in columns)


def _changed(columns: Iterable[str], stored: str, ingested: str) -> str:
    """Whether a stored row differs. Compares bytes: some types have no operator for it, or one in another schema."""
    return f"ROW({_listed(columns, stored)})::record OPERATOR(pg_catalog.*<>) ROW({_listed(columns, ingested)})::record"


def _assignments(columns: Iterable[str]) -> str:
    return ", ".join(f"{column} = s.{column}" for column in columns)


# Only constants are inserted into the statements below.

# With the columns' own types. Up to a page, rows are stored as they are: their texts are compressed in the store only.
_STAGE: Final = f"""
    CREATE TEMPORARY TABLE ingested_documents ON COMMIT DROP AS
      SELECT {_listed(_DOCUMENT_COLUMNS)}, true AS sets_grants FROM public.documents WITH NO DATA;
    CREATE TEMPORARY TABLE ingested_grants ON COMMIT DROP AS
      SELECT document_id, principal FROM public.document_grants WITH NO DATA;
    CREATE TEMPORARY TABLE ingested_chunks WITH (toast_tuple_target = 8160) ON COMMIT DROP AS
      SELECT {_listed(_CHUNK_COLUMNS)} FROM public.document_chunks WITH NO DATA;
    ALTER TABLE pg_temp.ingested_chunks ALTER COLUMN embedding SET STORAGE {{storage}};
"""  # noqa: S608  # see above

# In a fixed order, so that concurrent runs do not deadlock.
_LOCK: Final = "SELECT d.id FROM public.documents d WHERE d.id = ANY ($1::uuid[]) ORDER BY d.id FOR UPDATE"
_KNOWN_CHUNKS: Final = (
    "SELECT c.id, c.document_id FROM public.document_chunks c WHERE c.id = ANY ($1::uuid[])"
)
_STORED: Final = """
    SELECT c.id, c.text_content, c.embedding FROM public.document_chunks c
    WHERE c.id = ANY ($1::uuid[]) AND c.embedding IS NOT NULL
"""
_UPDATE_DOCUMENTS: Final = f"""
    UPDATE public.documents d SET {_assignments(_DOCUMENT_COLUMNS[1:])}
    FROM pg_temp.ingested_documents s
    WHERE d.id = s.id AND d.id = ANY ($1::uuid[]) AND {_changed(_DOCUMENT_COLUMNS, "d.", "s.")}
    RETURNING d.id
"""  # noqa: S608  # see above
_INSERT_DOCUMENTS: Final = f"""
    INSERT INTO public.documents ({_listed(_DOCUMENT_COLUMNS)})
    SELECT {_listed(_DOCUMENT_COLUMNS, "s.")} FROM pg_temp.ingested_documents s
    WHERE s.id <> ALL ($1::uuid[])
    ORDER BY s.id
"""  # noqa: S608  # see above
_REVOKE: Final = """
    DELETE FROM public.document_grants g
    USING pg_temp.ingested_documents s
    WHERE g.document_id = s.id AND s.sets_grants AND g.document_id = ANY ($1::uuid[])
      AND NOT EXISTS (SELECT FROM pg_temp.ingested_grants n
                      WHERE n.document_id = g.document_id AND n.principal OPERATOR(pg_catalog.=) g.principal)
    RETURNING g.document_id AS id
"""
# Not ON CONFLICT: the table of a back end may lack the key.
_GRANT: Final = """
    INSERT INTO public.document_grants (document_id, principal)
    SELECT n.document_id, n.principal FROM pg_temp.ingested_grants n
    WHERE NOT EXISTS (SELECT FROM public.document_grants g
                      WHERE g.document_id = n.document_id AND g.principal OPERATOR(pg_catalog.=) n.principal)
    RETURNING document_id AS id
"""
_DELETE_VANISHED: Final = """
    DELETE FROM public.document_chunks c
    WHERE c.document_id = ANY ($1::uuid[])
      AND NOT EXISTS (SELECT FROM pg_temp.ingested_chunks s WHERE s.id = c.id)
"""
_UPDATE_CHUNKS: Final = f"""
    UPDATE public.document_chunks c SET {_assignments(_CHUNK_COLUMNS[2:])}
    FROM pg_temp.ingested_chunks s
    WHERE c.id = s.id AND c.id = ANY ($1::uuid[]) AND {_changed(_CHUNK_COLUMNS, "c.", "s.")}
"""  # noqa: S608  # see above
_INSERT_CHUNKS: Final = f"""
    INSERT INTO public.document_chunks ({_listed(_CHUNK_COLUMNS)})
    SELECT {_listed(_CHUNK_COLUMNS, "s.")} FROM pg_temp.ingested_chunks s
    WHERE s.id <> ALL ($1::uuid[])
"""  # noqa: S608  # see above
_UNREADABLE: Final = """
    SELECT count(*) FROM public.documents d WHERE d.id = ANY ($1::uuid[]) AND d.access_set_id IS NULL
"""
