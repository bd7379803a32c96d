"""Ingestion: reads lines, embeds what lacks an embedding, and writes batches of whole documents."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol
from uuid import UUID

from streams.core.documents import Batch, Chunk, Document, DocumentError, Line, Problem, Vector, batches
from streams.core.embedding_errors import EmbeddingError, TextError
from streams.embedding.embedder import Embedding
from streams.store.ingestion import Deleted, DocumentStore, Written, open_documents
from streams.wire.documents import decode_document, decode_id, decode_lines

__all__ = [
    "OpenEmbedder",
    "Report",
    "TextEmbedder",
    "Validated",
    "delete",
    "ingest",
    "open_documents",
    "validate",
]

logger = logging.getLogger(__name__)

# Few enough that an interrupted run embeds little again, and that a transaction takes seconds although the vector index
# takes milliseconds for each chunk; enough that the cost of a transaction does not matter.
_MAX_CHUNKS: Final = 500
_MAX_LINES: Final = 500
# Several of the embedder's batches, so that a hosted provider works while responses travel.
_TEXTS_IN_FLIGHT: Final = 128


class TextEmbedder(Protocol):
    """The part of an `Embedder` that ingestion uses."""

    async def embed(self, text: str) -> Embedding: ...


OpenEmbedder = Callable[[], AbstractAsyncContextManager[TextEmbedder]]


class Report(Protocol):
    """Is informed of the progress."""

    def progress(self, lines: int, size: int) -> None:
        """Lines were completed, of this size in bytes together."""
        ...

    def rejected(self, number: int, error: DocumentError) -> None:
        """Nothing was written for the line with this number."""
        ...

    def truncated(self, number: int, chunk: int) -> None:
        """Only the beginning of a chunk was embedded: of the line with this number, by its index."""
        ...


class _FirstRejection:
    """Ends the run at the first rejected line."""

    def progress(self, lines: int, size: int) -> None:
        pass

    def rejected(self, number: int, error: DocumentError) -> None:
        raise DocumentError(error.code, f"line {number}: {error}")

    def truncated(self, number: int, chunk: int) -> None:
        logger.warning("line %d: only the beginning of chunks[%d] was embedded", number, chunk)


@dataclass(frozen=True, slots=True)
class Validated:
    """What valid lines contain.

    Attributes:
        chunks_to_embed: searchable chunks without an embedding.
    """

    documents: int = 0
    chunks: int = 0
    chunks_to_embed: int = 0


async def ingest(
    lines: Iterable[bytes],
    store: DocumentStore,
    report: Report | None = None,
    *,
    open_embedder: OpenEmbedder | None = None,
    embed_again: bool = False,
) -> Written:
    """Write the document of each line. Lines that cannot be written are reported; the others are written.

    Args:
        lines: documents as JSON; read in a thread.
        store: where to write them.
        report: is informed of the progress; None: the first rejected line ends the run.
        open_embedder: called when the first chunk has to be embedded; None: documents with such chunks are rejected.
        embed_again: embed also chunks that the store has with the same text and an embedding.

    Raises:
        DocumentError: a line was rejected, and there is no report. What was written stays.
        EmbeddingError: the provider fails, or is misconfigured.
        OSError, asyncpg.PostgresError, asyncpg.InterfaceError: the store fails, or the lines cannot be read.
            After any of these errors, run it again to continue.
    """
    report = report or _FirstRejection()
    total = Written()

    async with AsyncExitStack() as stack:
        embedder: TextEmbedder | None = None

        async def write(batch: Batch) -> None:
            nonlocal embedder, total
            chunks = _to_embed(batch.documents)
            known = {} if embed_again else await store.embeddings(chunks)
            needed = [chunk for chunk in chunks if chunk.id not in known]
            if needed and embedder is None and open_embedder is not None:
                embedder = await stack.enter_async_context(open_embedder())
            outcomes = {**known, **await _embed(needed, embedder)}
            batch = Batch([_with_embeddings(line, outcomes, report) for line in batch.lines])
            written, rejected = await store.write(batch.documents)
            total += written
            _report(report, batch, rejected)

        await _each_batch(decode_lines(lines, partial(decode_document, dimensions=store.dimensions)), write)
    return total


async def delete(lines: Iterable[bytes], store: DocumentStore, report: Report) -> Deleted:
    """Delete the document of each line. Lines without a valid id are reported.

    Raises:
        OSError, asyncpg.PostgresError, asyncpg.InterfaceError: the store fails, or the lines cannot be read. Run it
            again to continue.
    """
    total = Deleted()

    async def remove(batch: Batch) -> None:
        nonlocal total
        deleted, rejected = await store.delete(batch.ids)
        total += deleted
        _report(report, batch, rejected)

    await _each_batch(decode_lines(lines, decode_id), remove)
    return total


async def validate(lines: Iterable[bytes], store: DocumentStore, report: Report) -> Validated:
    """Report the lines that are invalid, without writing anything. What only the store can reject is not found.

    Raises:
        OSError: the lines cannot be read.
    """
    total = Validated()

    async def count(batch: Batch) -> None:
        nonlocal total
        total = Validated(
            total.documents + len(batch.documents),
            total.chunks + sum(len(document.chunks) for document in batch.documents),
            total.chunks_to_embed + len(_to_embed(batch.documents)),
        )
        _report(report, batch, {})

    await _each_batch(decode_lines(lines, partial(decode_document, dimensions=store.dimensions)), count)
    return total


async def _each_batch(lines: Iterator[Line], act: Callable[[Batch], Awaitable[None]]) -> None:
    """Act on one batch after another, while a thread reads and decodes the next one."""
    grouped = batches(lines, max_chunks=_MAX_CHUNKS, max_lines=_MAX_LINES)
    ahead = asyncio.create_task(asyncio.to_thread(next, grouped, None))
    try:
        while (batch := await ahead) is not None:
            ahead = asyncio.create_task(asyncio.to_thread(next, grouped, None))
            await act(batch)
    finally:
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)


def _to_embed(documents: Iterable[Document]) -> list[Chunk]:
    return [
        chunk
        for document in documents
        for chunk in document.chunks
        if chunk.searchable and chunk.embedding is None
    ]


async def _embed(
    chunks: Sequence[Chunk], embedder: TextEmbedder | None
) -> dict[UUID, Embedding | DocumentError]:
    """The embedding of each chunk, or why it cannot be embedded, by the chunk's id."""
    if embedder is None:
        error = DocumentError(
            Problem.EMBEDDING_MISSING, "has no embedding, and ANABRANCH_EMBEDDING_PROVIDER is not set"
        )
        return dict.fromkeys((chunk.id for chunk in chunks), error)
    outcomes: dict[UUID, Embedding | DocumentError] = {}
    free = asyncio.Semaphore(_TEXTS_IN_FLIGHT)

    async def one(chunk: Chunk) -> None:
        async with free:
            try:
                outcomes[chunk.id] = await embedder.embed(chunk.text_content)
            except TextError as error:
                outcomes[chunk.id] = DocumentError(Problem(error.code), str(error))

    try:
        async with asyncio.TaskGroup() as group:
            for chunk in chunks:
                group.create_task(one(chunk))
    except* EmbeddingError as errors:
        raise errors.exceptions[0] from None
    return outcomes


def _with_embeddings(
    line: Line, outcomes: Mapping[UUID, Vector | Embedding | DocumentError], report: Report
) -> Line:
    """The line with the embeddings of its chunks, or with the error of the first one that has none."""
    if not isinstance(line.content, Document):
        return line
    chunks = list(line.content.chunks)
    for index, chunk in enumerate(chunks):
        outcome = outcomes.get(chunk.id)
        if isinstance(outcome, DocumentError):
            return replace(line, content=DocumentError(outcome.code, f"chunks[{index}]: {outcome}"))
        if isinstance(outcome, Embedding):
            if outcome.truncated:
                report.truncated(line.number, index)
            chunks[index] = replace(chunk, embedding=outcome.vector)
        elif outcome is not None:
            chunks[index] = replace(chunk, embedding=outcome)
    return replace(line, content=replace(line.content, chunks=chunks))


def _report(report: Report, batch: Batch, rejected: Mapping[UUID, DocumentError]) -> None:
    for line in batch.lines:
        content = line.content
        error = content if isinstance(content, DocumentError) else rejected.get(_id_of(content))
        if error is not None:
            report.rejected(line.number, error)
    report.progress(len(batch.lines), sum(line.size for line in batch.lines))


def _id_of(content: Document | UUID) -> UUID:
    return content if isinstance(content, UUID) else content.id
