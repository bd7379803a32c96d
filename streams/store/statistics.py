"""Statistics of a store's contents for operators, collected as the owner of its tables.

These are only figures: `anabranch check` reports what is wrong and what to do. They come from one snapshot, so they are
consistent even while a back end writes.

The field names of the dataclasses are the keys of `anabranch stats --json` and are stable: new ones may be added, but
existing ones keep their meaning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID

import asyncpg

from streams.store.catalog import Catalog, Connection, quoted, read_catalog
from streams.store.postgres import MAX_TOKEN_COUNT
from streams.store.reference import DEFAULT_DIMENSIONS, TABLES, Statement, index_definitions, reference
from streams.store.verification import Difference, NotVerified, hidden_tables, verify

__all__ = [
    "Access",
    "Chunks",
    "Difference",
    "Embeddings",
    "Field",
    "Index",
    "MetadataKey",
    "MetadataKeys",
    "PrincipalKind",
    "Server",
    "Session",
    "Sessions",
    "Statistics",
    "StatisticsError",
    "Table",
    "Topic",
    "Topics",
    "collect",
]

#: How many sessions, topics, kinds of principals and metadata keys to list; all of them are counted.
LARGEST: Final = 5
MAX_KINDS: Final = 20
MAX_KEYS: Final = 50

_MIGRATE: Final = "run `anabranch migrate`"


class StatisticsError(Exception):
    """The statistics cannot be collected; the message is one line and says what to do."""


@dataclass(frozen=True)
class Server:
    """The versions, and the name of the database."""

    database: str
    postgresql: str
    pgvector: str


@dataclass(frozen=True)
class Chunks:
    """Chunks and their parents.

    Args:
        total: rows of ``document_chunks``.
        embedded: chunks with an embedding; only these are searched.
        embedded_share: of the total; None if there are no chunks.
        with_parent: chunks that name a parent.
        parent_missing: chunks whose parent does not exist.
    """

    total: int
    embedded: int
    embedded_share: float | None
    with_parent: int
    parent_missing: int


@dataclass(frozen=True)
class Embeddings:
    """The vector column.

    Args:
        dimensions: as declared for the column; None if it accepts any.
        dimensions_min: of the stored vectors; None if there are none.
        dimensions_max: of the stored vectors; None if there are none.
        zero: vectors that are all zeros: they have no direction and are never returned.
        extreme: vectors so short or so long that pgvector's float32 sums underflow or overflow: their similarity is
            always wrong.
        storage: how new rows are stored; ``plain`` is within the row.
        out_of_line: vectors stored out of line (TOAST); None before PostgreSQL 17, which cannot report it.
    """

    dimensions: int | None
    dimensions_min: int | None
    dimensions_max: int | None
    zero: int
    extreme: int
    storage: Literal["plain", "external", "main", "extended"]
    out_of_line: int | None


@dataclass(frozen=True)
class Index:
    """An index of the reference schema.

    Args:
        name: of the matching index, or of the reference's if there is none.
        table: the table it is on.
        definition: method and columns.
        state: ``invalid`` if the build failed or has not finished.
        bytes: on disk; 0 if it is missing.
    """

    name: str
    table: str
    definition: str
    state: Literal["valid", "invalid", "missing"]
    bytes: int


@dataclass(frozen=True)
class Table:
    """A table's number of rows, and its size on disk.

    Args:
        name: without its schema, which is ``public``.
        rows: number of rows.
        heap_bytes: the rows themselves.
        toast_bytes: long values stored out of line (TOAST).
        index_bytes: all indexes, including those not in the reference schema.
        total_bytes: everything, including the free space and visibility maps.
    """

    name: str
    rows: int
    heap_bytes: int
    toast_bytes: int
    index_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Field:
    """How many rows have a value in an optional column.

    Args:
        table: ``documents`` or ``document_chunks``.
        name: of the column.
        present: rows with a value that is well-formed and not empty (``''``, ``{}``, JSON's ``null``).
        share: of the table's rows; None if there are none.
        malformed: rows with a value that a worker omits with the warning ``store_value_invalid``.
    """

    table: str
    name: str
    present: int
    share: float | None
    malformed: int


@dataclass(frozen=True)
class MetadataKey:
    """A key of ``metadata``, and the number of rows that have it, with any value."""

    key: str
    rows: int
    share: float


@dataclass(frozen=True)
class MetadataKeys:
    """The metadata of one table.

    Args:
        table: ``documents`` or ``document_chunks``.
        distinct: number of different keys.
        most_common: the most frequent keys, by number of rows.
    """

    table: str
    distinct: int
    most_common: tuple[MetadataKey, ...]


@dataclass(frozen=True)
class Session:
    """The size of a session."""

    session_id: UUID
    documents: int
    chunks: int


@dataclass(frozen=True)
class Sessions:
    """The sessions of documents and chunks.

    Args:
        total: number of different sessions.
        documents_without: documents without a session.
        chunks_without: chunks without a session.
        largest: by number of chunks.
    """

    total: int
    documents_without: int
    chunks_without: int
    largest: tuple[Session, ...]


@dataclass(frozen=True)
class Topic:
    """The size of a topic."""

    topic_id: UUID
    chunks: int


@dataclass(frozen=True)
class Topics:
    """The topics, as the local arm finds them.

    Args:
        total: number of different topics.
        chunks_with: chunks that are related to at least one topic.
        largest: by number of chunks.
    """

    total: int
    chunks_with: int
    largest: tuple[Topic, ...]


@dataclass(frozen=True)
class PrincipalKind:
    """Grants by the kind of their principal.

    Args:
        kind: the part before the first colon, or ``public``; None for principals without a colon.
        grants: rows of ``document_grants``.
        principals: number of different principals.
        documents: number of different documents.
    """

    kind: str | None
    grants: int
    principals: int
    documents: int


@dataclass(frozen=True)
class Access:
    """Who can read documents, according to the grants themselves, not to the data derived from them.

    Args:
        grants: rows of ``document_grants``.
        documents_unreadable: documents that nobody can read: they have no grants, or only grants to principals that
            events cannot contain, because they are empty or longer than 256 characters.
        documents_unreadable_share: of all documents; None if there are none.
        chunks_unreadable: chunks of such documents.
        documents_public: documents that everybody can read.
        kinds: sorted by number of grants.
        access_sets: number of different sets of readers.
        access_set_max: number of principals in the largest set.
    """

    grants: int
    documents_unreadable: int
    documents_unreadable_share: float | None
    chunks_unreadable: int
    documents_public: int
    kinds: tuple[PrincipalKind, ...]
    access_sets: int
    access_set_max: int


@dataclass(frozen=True)
class Statistics:
    """All statistics, and wrong derived data.

    Args:
        differences: the first row of each table whose derived data differs from the defining rule; None if this role
            could not compare.
    """

    server: Server
    chunks: Chunks
    embeddings: Embeddings
    tables: tuple[Table, ...]
    indexes: tuple[Index, ...]
    fields: tuple[Field, ...]
    metadata_keys: tuple[MetadataKeys, ...]
    sessions: Sessions
    topics: Topics
    access: Access
    differences: tuple[Difference, ...] | None


async def collect(connection: Connection) -> Statistics:
    """Collect the statistics in one read-only transaction.

    Versions, sizes, indexes and storage come from the catalogs. Everything else is counted with table scans:
    ``_CHUNKS`` reads every row of ``document_chunks`` with its vector (about 4 GB for a million chunks).
    ``_KEYS``, ``_PARENTS``, ``_SESSIONS`` and ``_UNREADABLE`` read every row without the vector; the last three
    may use an index instead. The other tables are read entirely once or twice, and are small in comparison. Readers
    and writers are not blocked.

    Args:
        connection: as the tables' owner, or another role that sees every row; outside a transaction.

    Raises:
        StatisticsError: something is missing, or this role does not see every row.
    """
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return await _collect(connection)
    except (asyncpg.UndefinedColumnError, asyncpg.UndefinedFunctionError) as error:
        raise StatisticsError(f"{_first_line(error)}: {_MIGRATE}") from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise StatisticsError(
            f"{_first_line(error)}: set DATABASE_ADMIN_CONNECTION_STRING to the tables' owner"
        ) from error


async def _collect(connection: Connection) -> Statistics:
    server = await _server(connection)
    catalog = await read_catalog(connection)
    await _see_everything(connection, catalog)
    documents = await _row(connection, _DOCUMENTS)
    chunks = await _row(connection, _scan_of_chunks(connection))
    topics = await _row(connection, _TOPICS)
    sets = await _row(connection, _ACCESS_SETS)
    unreadable = await _row(connection, _UNREADABLE)
    rows = {
        "documents": documents["total"],
        "document_chunks": chunks["total"],
        "document_grants": await connection.fetchval("SELECT count(*) FROM public.document_grants"),
        "access_sets": sets["total"],
        "chunk_topics": topics["total"],
        "chunk_metadata": await connection.fetchval("SELECT count(*) FROM public.chunk_metadata"),
    }
    sizes = {
        row["name"]: row
        for row in await connection.fetch(_SIZES, [*TABLES, *(index.name for index in catalog.indexes)])
    }
    sessions = await connection.fetch(_SESSIONS, LARGEST)
    return Statistics(
        server=server,
        chunks=Chunks(
            total=chunks["total"],
            embedded=chunks["embedded"],
            embedded_share=_share(chunks["embedded"], chunks["total"]),
            **await _row(connection, _PARENTS),
        ),
        embeddings=Embeddings(
            **await _row(connection, _VECTOR_COLUMN),
            **{name: chunks[name] for name in _OF_EMBEDDINGS},
        ),
        tables=tuple(Table(rows=rows[name], **sizes[name]) for name in TABLES),
        indexes=tuple(
            _index(catalog, statement, sizes)
            # The indexes do not depend on the setting's name.
            for statement in reference(
                "anabranch.principals", dimensions=catalog.dimensions or DEFAULT_DIMENSIONS
            )
            if statement.kind == "index"
        ),
        fields=(
            *_fields("documents", _DOCUMENT_FIELDS, documents),
            *_fields("document_chunks", _CHUNK_FIELDS, chunks),
        ),
        metadata_keys=(
            await _metadata_keys(connection, "documents", rows["documents"]),
            await _metadata_keys(connection, "document_chunks", rows["document_chunks"]),
        ),
        sessions=Sessions(
            total=sessions[0]["total"] if sessions else 0,
            documents_without=documents["total"] - documents["session_id"],
            chunks_without=chunks["total"] - chunks["session_id"],
            largest=tuple(Session(row["session_id"], row["documents"], row["chunks"]) for row in sessions),
        ),
        topics=Topics(
            total=topics["topics"],
            chunks_with=topics["chunks"],
            largest=tuple(Topic(**row) for row in await connection.fetch(_LARGEST_TOPICS, LARGEST)),
        ),
        access=Access(
            grants=rows["document_grants"],
            documents_unreadable=unreadable["documents"],
            documents_unreadable_share=_share(unreadable["documents"], rows["documents"]),
            chunks_unreadable=unreadable["chunks"],
            documents_public=unreadable["public"],
            kinds=tuple(PrincipalKind(**row) for row in await connection.fetch(_KINDS, MAX_KINDS)),
            access_sets=rows["access_sets"],
            access_set_max=sets["largest"],
        ),
        differences=await _differences(connection),
    )


async def _differences(connection: Connection) -> tuple[Difference, ...] | None:
    try:
        return tuple(await verify(connection))
    except NotVerified:
        return None


# Prerequisites


async def _server(connection: Connection) -> Server:
    row = await connection.fetchrow(
        # For any logged-in role: the vector type and its functions may be in a schema of their own.
        "SELECT current_database()::text AS database, current_setting('server_version') AS postgresql,"
        "       extversion AS pgvector,"
        "       set_config('search_path', format('public, %s', extnamespace::regnamespace), true)"
        " FROM pg_extension WHERE extname = 'vector'"
    )
    if row is None:
        raise StatisticsError(f"the database has no extension vector: {_MIGRATE}")
    return Server(row["database"], row["postgresql"], row["pgvector"])


async def _see_everything(connection: Connection, catalog: Catalog) -> None:
    """Make sure that this role sees every row: row-level security hides rows without an error."""
    missing = [name for name in TABLES if name not in catalog.relations]
    if missing:
        raise StatisticsError(f"table public.{missing[0]} is missing: {_MIGRATE}")
    hidden = await hidden_tables(connection)
    if not hidden:
        return
    # As in `migrate`: a member of the owner acts as the owner, whether it inherits its rights or not.
    owner = catalog.relations[hidden[0]].owner
    if await connection.fetchval("SELECT pg_has_role($1, 'MEMBER')", owner):
        await connection.execute(f"SET LOCAL ROLE {quoted(owner)}")
        hidden = await hidden_tables(connection)
    if hidden:
        role = await connection.fetchval("SELECT current_user::text")
        raise StatisticsError(
            f"role {role!r} may not see every row of {hidden[0]};"
            f" set DATABASE_ADMIN_CONNECTION_STRING to the tables' owner, {owner!r}"
        )


# Rows

_DOCUMENT_FIELDS: Final = (
    "title",
    "source_url",
    "file_description",
    "document_type",
    "session_id",
    "metadata",
)
_CHUNK_FIELDS: Final = (
    "chunk_type",
    "chunk_position",
    "page",
    "section",
    "coordinates",
    "token_count",
    "session_id",
    "metadata",
)

_DOCUMENTS: Final = """
    SELECT count(*) AS total,
           count(*) FILTER (WHERE title <> '') AS title,
           count(*) FILTER (WHERE source_url <> '') AS source_url,
           count(*) FILTER (WHERE file_description <> '') AS file_description,
           count(*) FILTER (WHERE document_type <> '') AS document_type,
           count(session_id) AS session_id,
           count(*) FILTER (WHERE jsonb_typeof(metadata) = 'object' AND metadata <> '{}') AS metadata,
           count(*) FILTER (WHERE jsonb_typeof(metadata) NOT IN ('object', 'null')) AS metadata_malformed
    FROM public.documents
"""

_OF_EMBEDDINGS: Final = ("dimensions_min", "dimensions_max", "zero", "extreme", "out_of_line")

# A vector's distance to itself is NaN exactly if pgvector's sum of squares, in float32, is 0 or infinite. Its norm is
# summed in float64, and is 0 only for the zero vector. Well-formed coordinates are an object of numbers that fit into
# float64; `strict`, because the lax mode unwraps arrays.
_CHUNKS: Final = """
    SELECT count(*) AS total,
           count(embedding) AS embedded,
           min(vector_dims(embedding)) AS dimensions_min,
           max(vector_dims(embedding)) AS dimensions_max,
           count(*) FILTER (WHERE vector_norm(embedding) = 0) AS zero,
           count(*) FILTER (WHERE embedding <=> embedding = 'NaN' AND vector_norm(embedding) > 0) AS extreme,
           {out_of_line} AS out_of_line,
           count(*) FILTER (WHERE chunk_type <> '') AS chunk_type,
           count(chunk_position) AS chunk_position,
           count(page) AS page,
           count(*) FILTER (WHERE section <> '') AS section,
           count(*) FILTER (WHERE coordinates_kind = 'object' AND coordinates <> '{}') AS coordinates,
           count(*) FILTER (WHERE coordinates_kind = 'malformed') AS coordinates_malformed,
           count(*) FILTER (WHERE token_count BETWEEN 0 AND {max_tokens}) AS token_count,
           count(*) FILTER (WHERE token_count NOT BETWEEN 0 AND {max_tokens}) AS token_count_malformed,
           count(session_id) AS session_id,
           count(*) FILTER (WHERE jsonb_typeof(metadata) = 'object' AND metadata <> '{}') AS metadata,
           count(*) FILTER (WHERE jsonb_typeof(metadata) NOT IN ('object', 'null')) AS metadata_malformed
    FROM public.document_chunks
    CROSS JOIN LATERAL (SELECT CASE
      WHEN jsonb_typeof(coordinates) = 'null' THEN 'null'
      WHEN jsonb_typeof(coordinates) = 'object' AND NOT jsonb_path_exists(coordinates,
        'strict $.* ? (@.type() != "number" || @ > 1.7976931348623157e308 || @ < -1.7976931348623157e308)')
      THEN 'object'
      WHEN coordinates IS NOT NULL THEN 'malformed'
    END) AS judged (coordinates_kind)
""".replace("{max_tokens}", str(MAX_TOKEN_COUNT))
_OUT_OF_LINE: Final = "count(pg_column_toast_chunk_id(embedding))"
_SERVER_WITH_DETAILS: Final = 17


def _scan_of_chunks(connection: Connection) -> str:
    details = connection.get_server_version().major >= _SERVER_WITH_DETAILS
    return _CHUNKS.replace("{out_of_line}", _OUT_OF_LINE if details else "NULL::bigint")


_PARENTS: Final = """
    SELECT count(*) AS with_parent, count(*) FILTER (WHERE parent.id IS NULL) AS parent_missing
    FROM public.document_chunks child
    LEFT JOIN public.document_chunks parent ON parent.id = child.parent_chunk_id
    WHERE child.parent_chunk_id IS NOT NULL
"""


def _fields(table: str, names: Sequence[str], counted: Mapping[str, int]) -> tuple[Field, ...]:
    return tuple(
        Field(
            table=table,
            name=name,
            present=counted[name],
            share=_share(counted[name], counted["total"]),
            malformed=counted.get(f"{name}_malformed", 0),
        )
        for name in names
    )


# Metadata

_KEYS: Final = """
    SELECT key, count(*) AS rows, count(*) OVER () AS distinct
    FROM public.{table},
         jsonb_object_keys(CASE jsonb_typeof(metadata) WHEN 'object' THEN metadata ELSE '{{}}' END) AS key
    GROUP BY key
    ORDER BY rows DESC, key COLLATE "C"
    LIMIT $1
"""


async def _metadata_keys(connection: Connection, table: str, total: int) -> MetadataKeys:
    found = await connection.fetch(_KEYS.format(table=table), MAX_KEYS)
    return MetadataKeys(
        table=table,
        distinct=found[0]["distinct"] if found else 0,
        most_common=tuple(
            MetadataKey(row["key"], row["rows"], _share(row["rows"], total) or 0.0) for row in found
        ),
    )


# Sessions and topics

_SESSIONS: Final = """
    SELECT session_id, coalesce(of_documents.number, 0) AS documents, coalesce(of_chunks.number, 0) AS chunks,
           count(*) OVER () AS total
    FROM (SELECT session_id, count(*) AS number FROM public.documents
          WHERE session_id IS NOT NULL GROUP BY session_id) of_documents
    FULL JOIN (SELECT session_id, count(*) AS number FROM public.document_chunks
               WHERE session_id IS NOT NULL GROUP BY session_id) of_chunks USING (session_id)
    ORDER BY chunks DESC, documents DESC, session_id
    LIMIT $1
"""

_TOPICS: Final = """
    SELECT count(*) AS total, count(DISTINCT topic_id) AS topics, count(DISTINCT chunk_id) AS chunks
    FROM public.chunk_topics
"""
_LARGEST_TOPICS: Final = """
    SELECT topic_id, count(*) AS chunks
    FROM public.chunk_topics
    GROUP BY topic_id
    ORDER BY chunks DESC, topic_id
    LIMIT $1
"""

# Access

_ACCESS_SETS: Final = """
    SELECT count(*) AS total, coalesce(max(cardinality(principals)), 0) AS largest
    FROM public.access_sets
"""

# The contract allows principals of 1 to 256 characters.
_UNREADABLE: Final = """
    WITH readable AS (
      SELECT DISTINCT document_id AS id FROM public.document_grants
      WHERE char_length(principal) BETWEEN 1 AND 256
    )
    SELECT (SELECT count(*) FROM public.documents d
            WHERE NOT EXISTS (SELECT FROM readable r WHERE r.id = d.id)) AS documents,
           (SELECT count(*) FROM public.document_chunks c
            WHERE NOT EXISTS (SELECT FROM readable r WHERE r.id = c.document_id)) AS chunks,
           (SELECT count(DISTINCT document_id) FROM public.document_grants
            WHERE principal = 'public') AS public
"""

_KINDS: Final = """
    SELECT kind, count(*) AS grants, count(DISTINCT principal) AS principals,
           count(DISTINCT document_id) AS documents
    FROM (SELECT principal, document_id,
                 CASE WHEN principal = 'public' THEN principal
                      WHEN principal LIKE '%:%' THEN split_part(principal, ':', 1) END AS kind
          FROM public.document_grants) g
    GROUP BY kind
    ORDER BY grants DESC, kind COLLATE "C" NULLS LAST
    LIMIT $1
"""

# Catalogs

# The type modifier is the number of dimensions; -1 means any.
_VECTOR_COLUMN: Final = """
    SELECT nullif(atttypmod, -1) AS dimensions,
           CASE attstorage WHEN 'p' THEN 'plain' WHEN 'e' THEN 'external'
                           WHEN 'm' THEN 'main' ELSE 'extended' END AS storage
    FROM pg_attribute
    WHERE attrelid = 'public.document_chunks'::regclass AND attname = 'embedding' AND NOT attisdropped
"""

_SIZES: Final = """
    SELECT relname::text AS name,
           pg_relation_size(oid) AS heap_bytes,
           CASE reltoastrelid WHEN 0 THEN 0 ELSE pg_total_relation_size(reltoastrelid) END AS toast_bytes,
           pg_indexes_size(oid) AS index_bytes,
           pg_total_relation_size(oid) AS total_bytes
    FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relname = ANY ($1::text[])
"""


def _index(catalog: Catalog, statement: Statement, sizes: Mapping[str, asyncpg.Record]) -> Index:
    """The index that serves a statement of the reference. As in `migrate`, names and parameters are ignored."""
    definitions = index_definitions(statement)
    found = [
        index
        for index in catalog.indexes
        if index.table == statement.table and index.usable and index.definition in definitions
    ]
    shown = statement.definition.removeprefix("USING ")
    if not found:
        return Index(statement.name, statement.table, shown, "missing", 0)
    serving = max(found, key=lambda index: index.valid)  # one valid index is enough
    return Index(
        serving.name,
        statement.table,
        shown,
        "valid" if serving.valid else "invalid",
        sizes[serving.name]["heap_bytes"],
    )


async def _row(connection: Connection, query: str) -> dict[str, Any]:
    """The row of a query that returns exactly one."""
    (row,) = await connection.fetch(query)
    return dict(row)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
