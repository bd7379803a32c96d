"""What stands in a store, as plain values: loaded through the back end's role, and read by the oracle."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import asyncpg
import numpy as np
from pgvector.asyncpg import register_vector

from tests.conftest import Database

__all__ = [
    "SLOW_ASKERS",
    "Chunk",
    "Corpus",
    "Document",
    "load",
    "load_indexed",
    "random_uuid",
    "tiny_corpus",
    "unit_vectors",
]

# Some askers' searches take long: run once a statement, before any row is looked at.
SLOW_ASKERS = """
    CREATE FUNCTION public.wait_for_slow() RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
    BEGIN
      IF current_setting('anabranch.principals', true) LIKE '%user:slow%' THEN PERFORM pg_sleep(2); END IF;
      RETURN true;
    END $$;
    CREATE POLICY slow ON public.document_chunks AS RESTRICTIVE FOR SELECT TO anabranch_reader
      USING ((SELECT public.wait_for_slow()));
"""


@dataclass(frozen=True)
class Document:
    id: UUID
    readers: frozenset[str]
    session_id: UUID | None = None
    title: str | None = None
    source_url: str | None = None
    file_description: str | None = None
    document_type: str | None = None
    metadata: Any = field(default_factory=dict)  # any JSON value; None: SQL's null


@dataclass(frozen=True)
class Chunk:
    id: UUID
    document_id: UUID
    text_content: str
    embedding: np.ndarray | None  # float32, shape (768,)
    session_id: UUID | None = None
    parent_chunk_id: UUID | None = None
    related_topic_ids: Sequence[UUID] = ()
    chunk_type: str | None = "theory"
    chunk_position: int | None = None
    token_count: int | None = None
    page: int | None = None
    section: str | None = None
    coordinates: Any = None
    metadata: Any = None


@dataclass(frozen=True)
class Corpus:
    documents: Mapping[UUID, Document]
    chunks: Mapping[UUID, Chunk]

    @classmethod
    def of(cls, documents: Iterable[Document], chunks: Iterable[Chunk]) -> "Corpus":
        return cls({document.id: document for document in documents}, {chunk.id: chunk for chunk in chunks})


async def load(dsn: str, corpus: Corpus) -> None:
    """Writes a corpus as the back end that the connection string logs in as."""
    connection = await asyncpg.connect(dsn)
    try:
        await register_vector(connection)
        async with connection.transaction():
            await connection.executemany(
                "INSERT INTO documents (id, session_id, title, source_url, file_description, document_type,"
                " metadata) VALUES ($1, $2, $3, $4, $5, $6, $7)",
                [
                    (
                        d.id,
                        d.session_id,
                        d.title,
                        d.source_url,
                        d.file_description,
                        d.document_type,
                        _json(d.metadata),
                    )
                    for d in corpus.documents.values()
                ],
            )
            await connection.executemany(
                "INSERT INTO document_grants (document_id, principal) VALUES ($1, $2)",
                [(d.id, reader) for d in corpus.documents.values() for reader in sorted(d.readers)],
            )
            await connection.executemany(
                "INSERT INTO document_chunks (id, document_id, session_id, parent_chunk_id,"
                " related_topic_ids, chunk_type, chunk_position, text_content, token_count, page, section,"
                " coordinates, metadata, embedding)"
                " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
                [
                    (
                        c.id,
                        c.document_id,
                        c.session_id,
                        c.parent_chunk_id,
                        list(c.related_topic_ids),
                        c.chunk_type,
                        c.chunk_position,
                        c.text_content,
                        c.token_count,
                        c.page,
                        c.section,
                        _json(c.coordinates),
                        _json(c.metadata),
                        c.embedding,
                    )
                    for c in corpus.chunks.values()
                ],
            )
    finally:
        await connection.close()


async def load_indexed(database: Database, corpus: Corpus) -> None:
    """Load a large corpus, and build the vector index afterwards: much faster."""
    owner = await asyncpg.connect(database.owner)
    try:
        index = await owner.fetchval(
            "SELECT pg_get_indexdef('public.document_chunks_embedding_halfvec'::regclass)"
        )
        await owner.execute("DROP INDEX public.document_chunks_embedding_halfvec")
        await load(database.writer, corpus)
        await owner.execute(index)
        # Vacuumed: the first scan of a dead row would be its last.
        await owner.execute(
            "VACUUM ANALYZE public.documents, public.document_chunks, public.access_sets, public.chunk_topics,"
            " public.chunk_metadata"
        )
    finally:
        await owner.close()


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def random_uuid(rng: random.Random) -> UUID:
    return UUID(int=rng.getrandbits(128), version=4)


def unit_vectors(count: int, seed: int) -> np.ndarray:
    """Random directions, shape (count, 768), float32."""
    vectors = np.random.default_rng(seed).standard_normal((count, 768))
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


def tiny_corpus() -> Corpus:
    """A search here costs as little as one can."""
    rng = random.Random(1)
    document = Document(random_uuid(rng), frozenset({"public"}))
    return Corpus.of(
        [document],
        [
            Chunk(random_uuid(rng), document.id, "text", vector, token_count=1)
            for vector in unit_vectors(8, 1)
        ],
    )
