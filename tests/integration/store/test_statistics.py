"""Every figure of `anabranch stats` against plain counting in Python, in stores that are odd on purpose."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from io import StringIO
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pytest

from streams.cli import stats as view
from streams.embedded.postgres import EmbeddedPostgres
from streams.store.migrate import migrate
from streams.store.postgres import _coordinates, _token_count
from streams.store.reference import TABLES
from streams.store.statistics import Statistics, StatisticsError, collect
from streams.terminal import Console
from tests.conftest import SETTING
from tests.integration.connections import connected, execute
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.oracle import metadata_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.conftest import Database, PostgresServer


WANTED = {
    "access_sets_digest": "btree (digest)",
    "access_sets_principals": "gin (principals)",
    "chunk_metadata_chunk_id": "btree (chunk_id)",
    "chunk_metadata_instant": "btree (entry, instant, chunk_id, access_set_id)",
    "chunk_metadata_number": "btree (entry, number, chunk_id, access_set_id)",
    "chunk_metadata_searchable": "btree (entry, chunk_id, access_set_id)",
    "chunk_topics_chunk_id": "btree (chunk_id)",
    "chunk_topics_searchable": "btree (topic_id, session_id, chunk_id, access_set_id)",
    "document_chunks_document_id": "btree (document_id)",
    "document_chunks_embedding_halfvec": "hnsw (((l2_normalize(embedding))::halfvec(768)) halfvec_cosine_ops)",
    "document_chunks_metadata": "gin (metadata)",
    "document_chunks_related_topic_ids": "gin (related_topic_ids)",
    "document_chunks_searchable_access_set": "btree (access_set_id, session_id)",
    "document_chunks_searchable_session": "btree (session_id, access_set_id)",
    "document_chunks_section": "btree (section)",
    "documents_access_set_id": "btree (access_set_id)",
    "documents_document_type": "btree (document_type)",
    "documents_metadata": "gin (metadata)",
    "documents_session_id": "btree (session_id)",
    "documents_source_url": 'btree (source_url COLLATE "C")',
}

# The keys of --json: a promise. `[]` stands for each member of a list.
KEYS = {
    *("server.database", "server.postgresql", "server.pgvector"),
    *("chunks.total", "chunks.embedded", "chunks.embedded_share", "chunks.with_parent"),
    *("chunks.parent_missing", "embeddings.dimensions", "embeddings.dimensions_min"),
    *("embeddings.dimensions_max", "embeddings.zero", "embeddings.extreme", "embeddings.storage"),
    *("embeddings.out_of_line", "tables[].name", "tables[].rows", "tables[].heap_bytes"),
    *("tables[].toast_bytes", "tables[].index_bytes", "tables[].total_bytes", "indexes[].name"),
    *("indexes[].table", "indexes[].definition", "indexes[].state", "indexes[].bytes"),
    *("fields[].table", "fields[].name", "fields[].present", "fields[].share", "fields[].malformed"),
    *("metadata_keys[].table", "metadata_keys[].distinct", "metadata_keys[].most_common[].key"),
    *("metadata_keys[].most_common[].rows", "metadata_keys[].most_common[].share", "sessions.total"),
    *("sessions.documents_without", "sessions.chunks_without", "sessions.largest[].session_id"),
    *("sessions.largest[].documents", "sessions.largest[].chunks", "topics.total", "topics.chunks_with"),
    *("topics.largest[].topic_id", "topics.largest[].chunks", "access.grants"),
    *("access.documents_unreadable", "access.documents_unreadable_share", "access.chunks_unreadable"),
    *("access.documents_public", "access.kinds[].kind", "access.kinds[].grants"),
    *("access.kinds[].principals", "access.kinds[].documents", "access.access_sets"),
    "access.access_set_max",
}
# `differences` is empty here; test_verification.py provokes some.


async def statistics(dsn: str) -> Statistics:
    async with connected(dsn) as connection:
        found = await collect(connection)
        assert not connection.is_in_transaction()
        assert await connection.fetchval("SELECT current_user = session_user")
    return found


# A store that is odd on purpose

ODD_METADATA: list[Any] = [
    None,
    {},
    {"year": 1912, "author": "K. Rehbock"},
    {"year": None},
    {"": "", "naïve key": [1, {"year": 2}], "\x1b[31m": "red"},
    {"year": "1912"},
    [],
    ["year"],
    "year",
    7,
    True,
]
ODD_COORDINATES: list[str | None] = [
    None,
    "null",
    "{}",
    '{"x0": 1, "y0": -2.5e3}',
    '{"x0": 1.7976931348623157e308}',
    '{"x0": 1e400}',
    '{"x0": -1e400}',
    '{"x0": "1"}',
    '{"x0": null}',
    '{"x0": true}',
    '{"x0": [1]}',
    '{"x0": {"type": "number"}}',
    "[]",
    "[1, 2]",
    '[{"x0": 1}]',
    '"x0"',
    "3",
]
READERS = [
    "public",
    "group:law",
    "group:",
    "user:1",
    "user:2",
    "user:2:b",
    ":",
    "plain",
    "PUBLIC",
    "",
    "é" * 257,
]


def odd_corpus(seed: int, *, documents: int = 90, chunks: int = 700) -> Corpus:
    rng = random.Random(seed)
    sessions = [None, *(random_uuid(rng) for _ in range(8))]
    topics = [random_uuid(rng) for _ in range(9)]

    def some(*values: Any) -> Any:
        return rng.choice([None, "", *values])

    made = [
        Document(
            id=random_uuid(rng),
            readers=frozenset(rng.sample(READERS, rng.choice([0, 1, 1, 2, 4]))),
            session_id=rng.choice(sessions),
            title=some("Weirs", "'; DROP TABLE documents; --"),
            source_url=some("https://example.org/%_"),
            file_description=some("Notes"),
            document_type=some("lecture"),
            metadata=rng.choice(ODD_METADATA),
        )
        for _ in range(documents)
    ]
    vectors = unit_vectors(chunks, seed)
    ids = [random_uuid(rng) for _ in range(chunks)]
    lengths = [1.0, 1.0, 1.0, 1.0, 1e-3, 1e3, 0.0, 1e-25, 1e20]
    return Corpus.of(
        made,
        [
            Chunk(
                id=ids[number],
                document_id=rng.choice(made).id,
                text_content=f"chunk {number}",
                embedding=rng.choice([None, vectors[number] * np.float32(rng.choice(lengths))]),
                session_id=rng.choice(sessions),
                parent_chunk_id=rng.choice([None, None, rng.choice(ids), random_uuid(rng)]),
                # Duplicates in the array are one topic.
                related_topic_ids=rng.choices(topics, k=rng.randrange(4)),
                chunk_type=some("theory", "problem"),
                chunk_position=rng.choice([None, 0, number]),
                token_count=rng.choice([None, -1, 0, 120, 2_000_000, 2_000_001, 2**31 - 1]),
                page=rng.choice([None, 0, 3]),
                section=some("2.1"),
                coordinates=rng.choice([None, {}, {"x0": 1.5}, {"x0": "1"}, [1]]),
                metadata=rng.choice(ODD_METADATA),
            )
            for number in range(chunks)
        ],
    )


# Counting again, without a database


def share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def largest(counts: Counter[Any], limit: int) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))[:limit]


def field(table: str, name: str, values: Sequence[Any], malformed: Callable[[Any], bool]) -> dict[str, Any]:
    empty: list[Any] = [None, "", {}]
    bad = [value for value in values if malformed(value)]
    present = [value for value in values if not malformed(value) and value not in empty]
    return {
        "table": table,
        "name": name,
        "present": len(present),
        "share": share(len(present), len(values)),
        "malformed": len(bad),
    }


def expected_fields(corpus: Corpus) -> list[dict[str, Any]]:
    rules: dict[str, Callable[[Any], bool]] = {
        "metadata": lambda value: not isinstance(value, dict | None),
        "coordinates": lambda value: value is not None and _coordinates(json.dumps(value))[1],
        "token_count": lambda value: _token_count(value)[1],
    }
    names: dict[str, tuple[Iterable[Any], str]] = {
        "documents": (
            corpus.documents.values(),
            "title source_url file_description document_type session_id metadata",
        ),
        "document_chunks": (
            corpus.chunks.values(),
            "chunk_type chunk_position page section coordinates token_count session_id metadata",
        ),
    }
    return [
        field(table, name, [getattr(row, name) for row in rows], rules.get(name, lambda _: False))
        for table, (rows, listed) in names.items()
        for name in listed.split()
    ]


def expected_keys(table: str, rows: Sequence[Any]) -> dict[str, Any]:
    counts = Counter(key for row in rows if isinstance(row.metadata, dict) for key in row.metadata)
    return {
        "table": table,
        "distinct": len(counts),
        "most_common": [
            {"key": key, "rows": number, "share": share(number, len(rows))}
            for key, number in largest(counts, 50)
        ],
    }


def expected_access(corpus: Corpus) -> dict[str, Any]:
    documents = corpus.documents.values()
    readable = {d.id for d in documents if any(1 <= len(reader) <= 256 for reader in d.readers)}
    grants = [(reader, d.id) for d in documents for reader in d.readers]

    def kind(principal: str) -> str | None:
        if principal == "public":
            return "public"
        return principal.partition(":")[0] if ":" in principal else None

    by_kind: dict[str | None, list[tuple[str, UUID]]] = {}
    for reader, document in grants:
        by_kind.setdefault(kind(reader), []).append((reader, document))
    kinds = [
        {
            "kind": name,
            "grants": len(given),
            "principals": len({reader for reader, _ in given}),
            "documents": len({document for _, document in given}),
        }
        for name, given in by_kind.items()
    ]
    sets = {d.readers for d in documents if d.readers}
    return {
        "grants": len(grants),
        "documents_unreadable": len(documents) - len(readable),
        "documents_unreadable_share": share(len(documents) - len(readable), len(documents)),
        "chunks_unreadable": sum(c.document_id not in readable for c in corpus.chunks.values()),
        "documents_public": sum("public" in d.readers for d in documents),
        "kinds": sorted(kinds, key=lambda k: (-k["grants"], k["kind"] is None, k["kind"] or "")),
        "access_sets": len(sets),
        "access_set_max": max(map(len, sets), default=0),
    }


def expected(corpus: Corpus) -> dict[str, Any]:
    documents, chunks = list(corpus.documents.values()), list(corpus.chunks.values())
    vectors = [c.embedding for c in chunks if c.embedding is not None]
    lengths = [float(np.linalg.norm(vector.astype(np.float64))) for vector in vectors]
    children = [c for c in chunks if c.parent_chunk_id is not None]
    topics = Counter(topic for c in chunks for topic in set(c.related_topic_ids))
    chunks_of = Counter(c.session_id for c in chunks if c.session_id)
    documents_of = Counter(d.session_id for d in documents if d.session_id)
    sessions = sorted({*chunks_of, *documents_of}, key=lambda s: (-chunks_of[s], -documents_of[s], str(s)))
    return {
        "chunks": {
            "total": len(chunks),
            "embedded": len(vectors),
            "embedded_share": share(len(vectors), len(chunks)),
            "with_parent": len(children),
            "parent_missing": sum(c.parent_chunk_id not in corpus.chunks for c in children),
        },
        "embeddings": {
            "dimensions": 768,
            "dimensions_min": 768 if vectors else None,
            "dimensions_max": 768 if vectors else None,
            "zero": sum(length == 0 for length in lengths),
            "extreme": sum(length > 0 and not 1e-10 < length < 1e10 for length in lengths),
            "storage": "plain",
            "out_of_line": 0,
        },
        "fields": expected_fields(corpus),
        "metadata_keys": [expected_keys("documents", documents), expected_keys("document_chunks", chunks)],
        "sessions": {
            "total": len(sessions),
            "documents_without": sum(d.session_id is None for d in documents),
            "chunks_without": sum(c.session_id is None for c in chunks),
            "largest": [
                {"session_id": s, "documents": documents_of[s], "chunks": chunks_of[s]} for s in sessions[:5]
            ],
        },
        "topics": {
            "total": len(topics),
            "chunks_with": sum(bool(c.related_topic_ids) for c in chunks),
            "largest": [{"topic_id": t, "chunks": number} for t, number in largest(topics, 5)],
        },
        "access": expected_access(corpus),
    }


def counted(found: Statistics) -> dict[str, Any]:
    """The figures that rows alone decide."""
    figures: dict[str, Any] = json.loads(json.dumps(asdict(found), default=str))
    return {
        name: value
        for name, value in figures.items()
        if name not in {"server", "tables", "indexes", "differences"}
    }


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_figure_is_what_plain_counting_gives(database: Database, seed: int) -> None:
    corpus = odd_corpus(seed)
    await load(database.writer, corpus)
    found = await statistics(database.owner)
    truth = expected(corpus)
    assert truth["embeddings"]["zero"]
    assert truth["embeddings"]["extreme"]
    assert truth["chunks"]["parent_missing"]
    assert truth["access"]["documents_unreadable"]
    assert counted(found) == plain(truth)
    rows = {table.name: table.rows for table in found.tables}
    assert rows == {
        "documents": len(corpus.documents),
        "document_chunks": len(corpus.chunks),
        "document_grants": truth["access"]["grants"],
        "access_sets": truth["access"]["access_sets"],
        "chunk_topics": sum(len(set(c.related_topic_ids)) for c in corpus.chunks.values()),
        "chunk_metadata": sum(
            len(metadata_rows(corpus.documents[c.document_id].metadata, c.metadata))
            for c in corpus.chunks.values()
        ),
    }
    for table in found.tables:
        assert table.total_bytes >= table.heap_bytes + table.toast_bytes + table.index_bytes > 0


async def test_an_empty_store(database: Database) -> None:
    found = await statistics(database.owner)
    assert found.differences == ()
    assert counted(found) == plain(expected(Corpus.of([], [])))
    assert [table.name for table in found.tables] == list(TABLES)
    assert {table.rows for table in found.tables} == {0}
    assert {index.state for index in found.indexes} == {"valid"}
    assert "chunks" in shown(found)


async def test_only_one_kind_of_everything(database: Database) -> None:
    """Largest lists are cut at their length, and what is cut is still counted."""
    session, rng = UUID(int=7), random.Random(4)
    document = Document(UUID(int=1), frozenset(f"kind{n}:a" for n in range(30)), session, metadata={})
    chunk = Chunk(
        UUID(int=2),
        document.id,
        "text",
        unit_vectors(1, 1)[0],
        session,
        related_topic_ids=[random_uuid(rng) for _ in range(12)],
        metadata={f"key{n:02}": n for n in range(70)},
    )
    await load(database.writer, Corpus.of([document], [chunk]))
    found = await statistics(database.owner)
    assert (found.topics.total, len(found.topics.largest)) == (12, 5)
    assert (found.access.grants, len(found.access.kinds)) == (30, 20)
    keys = found.metadata_keys[1]
    assert (keys.distinct, [key.key for key in keys.most_common]) == (70, [f"key{n:02}" for n in range(50)])
    assert "and 62 less common keys" in shown(found)


@pytest.mark.parametrize("written", ODD_COORDINATES)
async def test_coordinates_are_malformed_where_a_worker_says_so(
    database: Database, written: str | None
) -> None:
    await load(
        database.writer,
        Corpus.of([Document(UUID(int=1), frozenset())], [Chunk(UUID(int=2), UUID(int=1), "text", None)]),
    )
    async with connected(database.writer) as connection:
        stored = await connection.fetchval(
            "UPDATE document_chunks SET coordinates = $1 RETURNING coordinates::text", written
        )
    values, malformed = _coordinates(stored)
    (found,) = [entry for entry in (await statistics(database.owner)).fields if entry.name == "coordinates"]
    assert (found.present, found.malformed) == (int(bool(values)), int(malformed))


# Vectors outside of their rows


async def test_vectors_outside_of_their_rows_are_counted(database: Database) -> None:
    document = Document(UUID(int=1), frozenset({"public"}))
    vectors = unit_vectors(5, 1)
    chunks = [Chunk(UUID(int=n + 2), document.id, "text", vectors[n]) for n in range(5)]
    await execute(database.owner, "ALTER TABLE document_chunks ALTER embedding SET STORAGE EXTERNAL")
    await load(database.writer, Corpus.of([document], chunks[:3]))
    found = await statistics(database.owner)
    assert (found.embeddings.storage, found.embeddings.out_of_line) == ("external", 3)

    await execute(database.owner, "ALTER TABLE document_chunks ALTER embedding SET STORAGE PLAIN")
    async with connected(database.owner) as connection:
        await connection.executemany(
            "INSERT INTO document_chunks (id, document_id, text_content, embedding)"
            " VALUES ($1, $2, $3, $4::text::vector)",
            [
                (c.id, c.document_id, c.text_content, str(np.asarray(c.embedding).tolist()))
                for c in chunks[3:]
            ],
        )
    found = await statistics(database.owner)
    assert (found.embeddings.storage, found.embeddings.out_of_line) == ("plain", 3)
    assert "3 vectors stored out of line" in shown(found)

    await execute(database.owner, "VACUUM FULL document_chunks")
    assert (await statistics(database.owner)).embeddings.out_of_line == 0


async def test_an_older_server_cannot_report() -> None:
    with EmbeddedPostgres(version=16) as server:
        await migrate(server.dsn(), principals_setting=SETTING)
        found = await statistics(server.dsn())
    assert found.server.postgresql.startswith("16.")
    assert found.embeddings.out_of_line is None
    assert "this server cannot report it" in shown(found)


# Indexes


async def test_wanted_indexes(database: Database) -> None:
    found = (await statistics(database.owner)).indexes
    assert {index.name: index.definition for index in found} == WANTED
    assert all(index.name.startswith(f"{index.table}_") for index in found)
    assert all(index.bytes > 0 for index in found)


async def test_missing_invalid_and_renamed_indexes(database: Database) -> None:
    await execute(
        database.owner,
        """
        DROP INDEX document_chunks_searchable_session;
        ALTER INDEX documents_session_id RENAME TO of_the_back_end;
        DROP INDEX document_chunks_embedding_halfvec;
        CREATE INDEX with_parameters ON document_chunks
          USING hnsw (embedding vector_cosine_ops) WITH (m = 8) WHERE embedding IS NOT NULL;
        DROP INDEX document_chunks_document_id;
        CREATE INDEX only_some ON document_chunks (document_id) WHERE page > 1;
        CREATE INDEX a_twin ON document_chunks (access_set_id, session_id);
        """,
    )
    await execute(
        database.admin,
        "UPDATE pg_index SET indisvalid = false"
        " WHERE indexrelid IN ('documents_source_url'::regclass, 'a_twin'::regclass)",
    )
    found = (await statistics(database.owner)).indexes
    states = {index.name: index.state for index in found}
    assert len(found) == len(WANTED)
    assert {name for name, state in states.items() if state == "missing"} == {
        "document_chunks_searchable_session",
        "document_chunks_document_id",
    }
    assert {name for name, state in states.items() if state == "invalid"} == {"documents_source_url"}
    assert states["of_the_back_end"] == states["with_parameters"] == "valid"
    assert states["document_chunks_searchable_access_set"] == "valid"
    async with connected(database.owner) as connection:
        for index in found:
            size = await connection.fetchval("SELECT pg_relation_size(to_regclass($1))", index.name)
            assert index.bytes == (size or 0)


# Who may count


async def test_whoever_sees_every_row_counts_the_same(postgres: PostgresServer, database: Database) -> None:
    corpus = odd_corpus(5, documents=20, chunks=40)
    await load(database.writer, corpus)
    role = f"member_{database.name}"
    await execute(database.admin, f"CREATE ROLE {role} LOGIN NOINHERIT PASSWORD 'test' IN ROLE store_owner")
    try:
        truth = plain(expected(corpus))
        for dsn in (database.owner, database.admin, database.writer, postgres.login(role, database)):
            found = await statistics(dsn)
            assert counted(found) == truth
            # Only the owner, whoever acts in its name, may call what compares.
            assert found.differences == (None if dsn == database.writer else ())
    finally:
        await execute(database.admin, f"DROP ROLE {role}")


async def test_whoever_does_not_see_every_row_is_refused(
    postgres: PostgresServer, database: Database
) -> None:
    """Row-level security hides without a word: the figures would be wrong, not missing."""
    await load(database.writer, odd_corpus(6, documents=5, chunks=5))
    with pytest.raises(StatisticsError, match=r"'worker' may not see every row of access_sets; .*owner"):
        await statistics(database.worker)

    role = f"reader_{database.name}"
    await execute(
        database.admin,
        f"CREATE ROLE {role} LOGIN PASSWORD 'test'; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role};"
        f"CREATE POLICY one ON document_chunks TO {role} USING (page > 1)",
    )
    try:
        with pytest.raises(StatisticsError, match="may not see every row"):
            await statistics(postgres.login(role, database))
        await execute(
            database.admin,
            "".join(f"CREATE POLICY every ON {table} TO {role} USING (true);" for table in TABLES),
        )
        assert (await statistics(postgres.login(role, database))).chunks.total == 5
        await execute(
            database.admin, "CREATE POLICY less ON documents AS RESTRICTIVE USING (title IS NOT NULL)"
        )
        with pytest.raises(StatisticsError, match="may not see every row of documents"):
            await statistics(postgres.login(role, database))
        await execute(
            database.admin, f"REVOKE SELECT ON documents FROM {role}; DROP POLICY less ON documents"
        )
        with pytest.raises(
            StatisticsError, match="permission denied for table documents: set DATABASE_ADMIN"
        ):
            await statistics(postgres.login(role, database))
    finally:
        await execute(database.admin, f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_pgvector_in_a_schema_of_its_own(database: Database) -> None:
    await load(database.writer, odd_corpus(7, documents=5, chunks=20))
    before = await statistics(database.owner)
    await execute(
        database.admin,
        "CREATE SCHEMA extensions; GRANT USAGE ON SCHEMA extensions TO PUBLIC;"
        "ALTER EXTENSION vector SET SCHEMA extensions",
    )
    assert await statistics(database.owner) == before


# A store that is not there yet


async def test_a_store_that_is_not_migrated(postgres: PostgresServer, empty_database: Database) -> None:
    with pytest.raises(StatisticsError, match=r"table public\.documents is missing: run `anabranch migrate`"):
        await statistics(empty_database.owner)
    bare = postgres.create("template0")
    try:
        with pytest.raises(StatisticsError, match="no extension vector: run `anabranch migrate`"):
            await statistics(bare.admin)
    finally:
        postgres.drop(bare)


async def test_a_missing_column(database: Database) -> None:
    await execute(database.owner, "ALTER TABLE documents DROP COLUMN file_description")
    with pytest.raises(StatisticsError, match=r"file_description.* does not exist: run `anabranch migrate`"):
        await statistics(database.owner)


# The command


def shown(found: Statistics, *, width: int = 110) -> str:
    console = Console(file=StringIO(), width=width, highlight=False, color_system=None)
    view.show(found, console)
    output = console.file
    assert isinstance(output, StringIO)
    return output.getvalue()


async def test_the_table(database: Database) -> None:
    await load(database.writer, odd_corpus(8))
    found = await statistics(database.owner)
    for width in (80, 110, 200):
        output = shown(found, width=width)
        assert max(map(len, output.splitlines())) <= width
        for index in found.indexes:
            assert index.name in output
        assert "\x1b" not in output
    assert "\\x1b[31m" in output
    assert "without a prefix" in output


async def test_a_share_never_rounds_to_all_or_nothing(database: Database) -> None:
    found = await statistics(database.owner)
    for shares, text in ((0.99999, "> 99.9 %"), (0.00001, "< 0.1 %"), (1.0, "100.0 %"), (0.0, " 0.0 %")):
        assert text in shown(replace(found, chunks=replace(found.chunks, embedded_share=shares)))


def run(dsn: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"]} | ({"DATABASE_ADMIN_CONNECTION_STRING": dsn} if dsn else {})
    return subprocess.run(
        [sys.executable, "-m", "streams", "stats", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def paths(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {found for key, member in value.items() for found in paths(member, f"{path}.{key}")}
    if isinstance(value, list):
        return {found for member in value for found in paths(member, f"{path}[]")}
    return {path.removeprefix(".")}


async def test_the_command(database: Database) -> None:
    corpus = odd_corpus(9, documents=20, chunks=60)
    await load(database.writer, corpus)
    # Otherwise autovacuum may change sizes between the two readings.
    await execute(database.owner, "VACUUM ANALYZE")
    as_json = run(database.owner, "--json")
    assert (as_json.returncode, as_json.stderr) == (0, "")
    figures = json.loads(as_json.stdout)
    assert paths(figures) == KEYS
    assert figures == plain(asdict(await statistics(database.owner)))
    table = run(database.owner)
    assert (table.returncode, table.stderr) == (0, "")
    assert table.stdout.startswith(f"{database.name}  PostgreSQL 18")


def test_errors_are_one_line(database: Database, empty_database: Database) -> None:
    nowhere = database.owner.replace(database.name, "nowhere")
    for dsn, word, code in (
        (database.worker, "every row", 1),
        (empty_database.owner, "anabranch migrate", 1),
        (nowhere, "no database of this name", 1),
        ("postgresql://nobody@127.0.0.1:1/x", "PostgreSQL: ", 1),
        (None, "DATABASE_ADMIN_CONNECTION_STRING is not set", 2),
    ):
        ended = run(dsn, "--json")
        assert ended.returncode == code
        assert ended.stdout == ""
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert word in ended.stderr
