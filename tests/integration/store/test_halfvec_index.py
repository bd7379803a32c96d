"""Vectors of any length are stored and found through an index of half-precision numbers.

A halfvec has no numbers above 65,504, and rounds those below 6e-8 to zero. So the index is on the normalized vector,
whose components are between -1 and 1.
"""

from collections.abc import AsyncIterator
from uuid import UUID

import asyncpg
import numpy as np
import pytest
from pgvector.asyncpg import register_vector

from streams.retrieval import Search, unit_vector
from tests.conftest import Database
from tests.integration.connections import opened_store
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors

NORMALIZED = "(l2_normalize(embedding)::halfvec(768))"
CAST = "(embedding::halfvec(768))"
NEAREST = f"""
    SELECT id FROM document_chunks ORDER BY {NORMALIZED} <=> (l2_normalize($1::vector)::halfvec(768)) LIMIT 1
"""
DOCUMENT = Document(UUID(int=1), frozenset({"public"}))
FILLERS = 200


def chunk(number: int, embedding: np.ndarray) -> Chunk:
    return Chunk(UUID(int=1000 + number), DOCUMENT.id, "text", embedding)


async def index(owner: asyncpg.Connection, expression: str) -> None:
    """Replace the vector index by one on an expression, before there are rows."""
    await owner.execute(
        "DROP INDEX document_chunks_embedding_halfvec;"
        "CREATE INDEX document_chunks_embedding_halfvec ON document_chunks"
        f" USING hnsw ({expression} halfvec_cosine_ops)"
    )


@pytest.fixture
async def owner(database: Database) -> AsyncIterator[asyncpg.Connection]:
    """Sees every row, and searches through the index alone."""
    connection = await asyncpg.connect(database.owner)
    try:
        await register_vector(connection)
        await connection.execute("SET enable_seqscan = off; SET enable_sort = off")
        yield connection
    finally:
        await connection.close()


@pytest.mark.parametrize("factor", [1e-25, 1e-9, 1, 70_000, 1e20])
async def test_a_vector_of_any_length_is_found(
    database: Database, owner: asyncpg.Connection, factor: float
) -> None:
    await index(owner, NORMALIZED)
    vectors = unit_vectors(FILLERS + 1, 3)
    wanted = vectors[-1] * np.float32(factor)
    if factor == 70_000:
        wanted[0] = 70_000  # a single component that a halfvec does not have
    corpus = Corpus.of(
        [DOCUMENT], [*(chunk(n, vector) for n, vector in enumerate(vectors[:-1])), chunk(FILLERS, wanted)]
    )
    await load(database.writer, corpus)
    statement = await owner.prepare(NEAREST)
    query = wanted.astype(np.float64) / np.linalg.norm(wanted.astype(np.float64))
    assert "document_chunks_embedding_halfvec" in str(await statement.explain(query))
    assert await statement.fetchval(query) == UUID(int=1000 + FILLERS)
    # And by a worker, only through the index; pgvector's distance of full vectors has limits of its own (float32).
    if not 1e-15 < factor < 1e15:
        return
    async with opened_store(database.worker, exact_scan_rows=0, small_scope_rows=0) as store:
        search = Search(unit_vector(query), ["user:1"], None, None, None, expand_parents=False, limit=1)
        found = await store.search(search)
    assert [candidate.chunk_id for candidate in found.candidates] == [UUID(int=1000 + FILLERS)]


async def test_a_cast_alone_fails_or_misses_them(database: Database, owner: asyncpg.Connection) -> None:
    """Why the index is not on the simpler expression."""
    await index(owner, CAST)
    large, small = unit_vectors(2, 3)
    large[0] = 70_000
    await load(database.writer, Corpus.of([DOCUMENT], [chunk(1, small * np.float32(1e-9))]))
    found = await owner.fetch(
        f"SELECT id FROM document_chunks ORDER BY {CAST} <=> ($1::vector)::halfvec(768) LIMIT 1", small
    )
    assert found == []
    writer = await asyncpg.connect(database.writer)
    try:
        await register_vector(writer)
        with pytest.raises(asyncpg.NumericValueOutOfRangeError):
            await writer.execute(
                "INSERT INTO document_chunks (document_id, text_content, embedding) VALUES ($1, 'text', $2)",
                DOCUMENT.id,
                large,
            )
    finally:
        await writer.close()
