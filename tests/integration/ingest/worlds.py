"""Documents at random, and what a store holds, both as plain values that can be compared."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
from pgvector.asyncpg import register_vector

from streams.core.documents import Chunk, Document
from tests.integration.access_oracle import METADATA, PRINCIPALS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import asyncpg

__all__ = ["Model", "chunk_of", "contents", "random_document", "vector", "versions"]

DIMENSIONS = 768

Row = tuple[Any, ...]


def vector(number: int) -> np.ndarray:
    """One of many directions, shape (768,), float32."""
    found = np.zeros(DIMENSIONS, dtype=np.float32)
    found[number % DIMENSIONS] = 1
    found[(number // DIMENSIONS) % DIMENSIONS] += 0.5
    return found


def chunk_of(number: int, text: str = "text", **fields: Any) -> Chunk:
    return Chunk(id=UUID(int=1000 + number), text_content=text, embedding=vector(number), **fields)


def random_document(rng: random.Random, *, documents: int, chunks: int) -> Document:
    """One of few documents, with some of few chunks: repeated, changed, and chunks that another document may have."""
    of_chunks = rng.sample(range(chunks), rng.choice([0, 1, 2, 3, 5]))
    return Document(
        id=UUID(int=1 + rng.randrange(documents)),
        chunks=[_random_chunk(rng, number) for number in of_chunks],
        grants=rng.choice([None, frozenset(rng.sample(PRINCIPALS, rng.randrange(len(PRINCIPALS))))]),
        session_id=rng.choice([None, UUID(int=7)]),
        title=rng.choice([None, "t", "π" * 3000]),
        source_url=rng.choice([None, "https://example.org/a"]),
        file_description=rng.choice([None, "f"]),
        document_type=rng.choice([None, "d"]),
        metadata=_random_metadata(rng),
    )


def _random_chunk(rng: random.Random, number: int) -> Chunk:
    searchable = rng.random() < 0.8
    return Chunk(
        id=UUID(int=1000 + number),
        # Also longer than a page, and as random as text that does not compress.
        text_content=rng.choice(["", "a", "b", rng.randbytes(6000).hex()]),
        searchable=searchable,
        embedding=vector(rng.randrange(3)) if searchable else None,
        session_id=rng.choice([None, UUID(int=7), UUID(int=8)]),
        parent_chunk_id=rng.choice([None, UUID(int=1000)]),
        related_topic_ids=[UUID(int=70 + topic) for topic in rng.sample(range(3), rng.randrange(3))],
        chunk_type=rng.choice([None, "problem"]),
        chunk_position=rng.choice([None, 1, -(2**31)]),
        token_count=rng.choice([None, 1]),
        page=rng.choice([None, 2**31 - 1]),
        section=rng.choice([None, "s"]),
        coordinates=rng.choice([None, {"x0": 1.5, "y0": 2}]),
        metadata=_random_metadata(rng),
    )


def _random_metadata(rng: random.Random) -> dict[str, Any]:
    value = json.loads(rng.choice(METADATA))
    return value if isinstance(value, dict) else {}


@dataclass
class Model:
    """What the store must hold: documents, grants and chunks, by id."""

    documents: dict[UUID, Row] = field(default_factory=dict)
    grants: dict[UUID, frozenset[str]] = field(default_factory=dict)
    chunks: dict[UUID, Row] = field(default_factory=dict)

    def ingest(self, document: Document) -> bool:
        """Whether it is written."""
        if any(
            chunk.id in self.chunks and self.chunks[chunk.id][0] != document.id for chunk in document.chunks
        ):
            return False
        if document.grants is not None or document.id not in self.documents:
            self.grants[document.id] = document.grants or frozenset()
        self.documents[document.id] = (
            document.session_id, document.title, document.source_url, document.file_description,
            document.document_type, document.metadata,
        )  # fmt: skip
        self._drop_chunks(document.id)
        for chunk in document.chunks:
            self.chunks[chunk.id] = (
                document.id, chunk.session_id, chunk.parent_chunk_id, list(chunk.related_topic_ids),
                chunk.chunk_type, chunk.chunk_position, chunk.text_content, chunk.token_count, chunk.page,
                chunk.section, chunk.coordinates, chunk.metadata,
                None if chunk.embedding is None else chunk.embedding.tolist(),
            )  # fmt: skip
        return True

    def delete(self, id_: UUID) -> bool:
        """Whether it was there."""
        self._drop_chunks(id_)
        self.grants.pop(id_, None)
        return self.documents.pop(id_, None) is not None

    def _drop_chunks(self, document_id: UUID) -> None:
        self.chunks = {id_: row for id_, row in self.chunks.items() if row[0] != document_id}


async def contents(connection: asyncpg.Connection[asyncpg.Record]) -> Model:
    """What the store holds, read as its owner or a superuser."""
    await register_vector(connection)
    await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
    documents = await connection.fetch(
        "SELECT id, session_id, title, source_url, file_description, document_type, metadata FROM documents"
    )
    chunks = await connection.fetch(
        "SELECT id, document_id, session_id, parent_chunk_id, related_topic_ids, chunk_type, chunk_position,"
        " text_content, token_count, page, section, coordinates, metadata, embedding FROM document_chunks"
    )
    grants: dict[UUID, set[str]] = {row["id"]: set() for row in documents}
    for row in await connection.fetch("SELECT document_id, principal FROM document_grants"):
        grants[row["document_id"]].add(row["principal"])
    return Model(
        {row["id"]: tuple(row)[1:] for row in documents},
        {id_: frozenset(principals) for id_, principals in grants.items()},
        {
            row["id"]: (*tuple(row)[1:-1], None if row["embedding"] is None else row["embedding"].to_list())
            for row in chunks
        },
    )


async def versions(connection: asyncpg.Connection[asyncpg.Record]) -> Mapping[str, Sequence[Row]]:
    """The place and the writing transaction of each row: equal only if nothing was written."""
    return {
        table: sorted(
            tuple(row)
            for row in await connection.fetch(f"SELECT ctid::text, xmin::text, cmin::text FROM {table}")
        )
        for table in (
            "documents", "document_chunks", "document_grants", "access_sets", "chunk_topics", "chunk_metadata",
        )
    }  # fmt: skip
