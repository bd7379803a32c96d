"""``python -m benchmarks.ingest``: what `anabranch ingest` costs beside a bare COPY of the same rows.

Both write to the reference schema with its triggers, indexes and foreign keys, each time in a new database: with the
vector index, and without it, as one loads a large store. They take turns, so that a busy minute of the machine counts
for both. The bare COPY writes rows that are in memory, as a superuser, because COPY cannot write through row-level
security. Ingestion reads and validates a file.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final
from uuid import UUID

import asyncpg
import numpy as np
from pgvector.asyncpg import register_vector

from benchmarks.goals import table_of
from streams import sample
from streams.core.documents import Document, DocumentError
from streams.embedded.postgres import EmbeddedPostgres
from streams.ingest import ingest
from streams.store.ingestion import open_documents
from streams.terminal import Console
from streams.wire.documents import decode_document
from tests.conftest import Database, PostgresServer

_DIMENSIONS: Final = 768
_CHUNKS_PER_DOCUMENT: Final = 20
_VARIANTS: Final = {
    "with the vector index": "",
    "without it": "DROP INDEX document_chunks_embedding_halfvec",
}


class _Strict:
    """A report that accepts no rejected line."""

    def progress(self, lines: int, size: int) -> None:
        pass

    def rejected(self, number: int, error: DocumentError) -> None:
        raise RuntimeError(f"line {number}: {error}")

    def truncated(self, number: int, chunk: int) -> None:
        raise RuntimeError(f"line {number}: chunk {chunk} is truncated")


@dataclass
class Measured:
    """Seconds of each round."""

    copy: list[float] = field(default_factory=list)
    ingestion: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return median(ingestion / copy for copy, ingestion in zip(self.copy, self.ingestion, strict=True))


def lines_of(chunks: int) -> list[bytes]:
    """Documents of twenty chunks: texts of the sample corpus with their token counts, topics, metadata and grants."""
    rng = np.random.default_rng(1)
    texts = [(chunk.text_content, chunk.token_count) for chunk in sample.load().chunks]
    lines = []
    for number in range(chunks // _CHUNKS_PER_DOCUMENT):
        vectors = rng.standard_normal((_CHUNKS_PER_DOCUMENT, _DIMENSIONS))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        session, topic = str(UUID(int=number % 50 + 1)), str(UUID(int=number % 7 + 1))
        its = [
            texts[(number * _CHUNKS_PER_DOCUMENT + index) % len(texts)]
            for index in range(_CHUNKS_PER_DOCUMENT)
        ]
        document = {
            "id": str(UUID(bytes=rng.bytes(16), version=4)),
            "session_id": session,
            "title": f"Document {number}",
            "source_url": f"https://example.org/{number}",
            "document_type": "paper",
            "metadata": {"year": 2000 + number % 20},
            "grants": [f"user:{number % 100}", f"group:{number % 20}"],
            "chunks": [
                {
                    "id": str(UUID(bytes=rng.bytes(16), version=4)),
                    "text_content": text,
                    "token_count": tokens,
                    "related_topic_ids": [topic] if index % 2 else [],
                    "metadata": {"part": f"{index}"},
                    "embedding": [float(component) for component in vector.astype(np.float32)],
                }
                for index, ((text, tokens), vector) in enumerate(zip(its, vectors, strict=True))
            ],
        }
        lines.append(json.dumps(document).encode() + b"\n")
    return lines


async def bare_copy(database: Database, documents: Sequence[Document]) -> float:
    """Seconds to copy all rows, in one transaction."""
    tables: list[tuple[str, list[str], list[tuple[Any, ...]]]] = [
        (
            "documents",
            ["id", "session_id", "title", "source_url", "document_type", "metadata"],
            [
                (d.id, d.session_id, d.title, d.source_url, d.document_type, json.dumps(d.metadata))
                for d in documents
            ],
        ),
        (
            "document_grants",
            ["document_id", "principal"],
            [(d.id, principal) for d in documents for principal in d.grants or ()],
        ),
        (
            "document_chunks",
            ["id", "document_id", "session_id", "related_topic_ids", "chunk_position", "text_content", "token_count",
             "metadata", "embedding"],
            [
                (c.id, d.id, c.session_id, c.related_topic_ids, c.chunk_position, c.text_content, c.token_count,
                 json.dumps(c.metadata), c.embedding)
                for d in documents
                for c in d.chunks
            ],
        ),
    ]  # fmt: skip
    connection = await asyncpg.connect(database.admin)
    try:
        await register_vector(connection)
        began = perf_counter()
        async with connection.transaction():
            for table, columns, records in tables:
                await connection.copy_records_to_table(table, columns=columns, records=records)
        return perf_counter() - began
    finally:
        await connection.close()


async def ingestion(database: Database, file: Path, documents: int) -> float:
    """Seconds to ingest the file, from reading it to the last commit."""
    async with open_documents(database.writer) as store:
        began = perf_counter()
        with file.open("rb") as lines:
            written = await ingest(lines, store, _Strict())
        seconds = perf_counter() - began
    if written.documents_new != documents:
        raise RuntimeError(f"not everything was written: {written}")
    return seconds


async def _main(arguments: argparse.Namespace, server: PostgresServer, folder: Path) -> None:
    console = Console()
    lines = lines_of(arguments.chunks)
    documents = [decode_document(line, dimensions=_DIMENSIONS) for line in lines]
    file = folder / "documents.jsonl"
    file.write_bytes(b"".join(lines))
    console.print(
        f"{arguments.chunks:,} chunks of {_DIMENSIONS} dimensions in {len(lines):,} documents, medians of"
        f" {arguments.rounds} rounds; the file has {file.stat().st_size / 1e6:.0f} MB",
        soft_wrap=True,
    )
    measured = {name: Measured() for name in _VARIANTS}
    for number in range(arguments.rounds):
        for name, preparation in _VARIANTS.items():
            # Whoever writes first in a round changes.
            for copies in (number % 2 == 0, number % 2 == 1):
                database = server.database()
                await _execute(database.owner, preparation)
                if copies:
                    measured[name].copy.append(await bare_copy(database, documents))
                else:
                    measured[name].ingestion.append(await ingestion(database, file, len(lines)))
                server.drop(database)
    table = table_of("bare COPY, s", "anabranch ingest, s", "chunks/s", "ratio", first="")
    for name, each in measured.items():
        seconds = median(each.ingestion)
        table.add_row(
            name,
            f"{median(each.copy):.2f}",
            f"{seconds:.2f}",
            f"{arguments.chunks / seconds:,.0f}",
            f"{each.ratio:.2f}",
        )
    console.print(table)
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {
                    name: {"copy": m.copy, "ingestion": m.ingestion, "ratio": m.ratio}
                    for name, m in measured.items()
                }
            )
        )


async def _execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql or "SELECT")
    finally:
        await connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ingest")
    parser.add_argument("--chunks", type=int, default=4000, help="chunks to write each time (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    with EmbeddedPostgres() as embedded, TemporaryDirectory(prefix="anabranch-bench-") as temporary:
        asyncio.run(_main(parser.parse_args(), PostgresServer(embedded), Path(temporary)))
