"""Writes the sample corpus to a store."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final
from uuid import UUID

from streams.core.documents import Chunk, Document
from streams.sample import Corpus
from streams.store.ingestion import open_documents

__all__ = ["load_corpus"]

_DOCUMENT_FIELDS: Final = (
    "id", "session_id", "title", "source_url", "file_description", "document_type", "metadata",
)  # fmt: skip
_CHUNK_FIELDS: Final = (
    "id", "text_content", "session_id", "parent_chunk_id", "related_topic_ids", "chunk_type", "chunk_position",
    "token_count", "page", "section", "coordinates", "metadata",
)  # fmt: skip


async def load_corpus(dsn: str, corpus: Corpus) -> None:
    """Write the corpus as `anabranch ingest` would: it replaces what the store has of its documents.

    Args:
        dsn: connection string of a member of anabranch_writer. Only the tables' owner or a superuser can also collect
            statistics; for others, PostgreSQL skips that with a warning.
        corpus: the corpus to write.

    Raises:
        IngestionError: the store is not ready.
        DocumentError: the store rejects a document.
        OSError, asyncpg.PostgresError, asyncpg.InterfaceError: the store cannot be reached or written.
    """
    async with open_documents(dsn) as store:
        _, rejected = await store.write(list(_documents(corpus)))
        for error in rejected.values():
            raise error
        await store.analyze()


def _documents(corpus: Corpus) -> Iterator[Document]:
    grants: defaultdict[UUID, set[str]] = defaultdict(set)
    for grant in corpus.grants:
        grants[grant.document_id].add(grant.principal)
    chunks: defaultdict[UUID, list[Chunk]] = defaultdict(list)
    for chunk in corpus.chunks:
        embedding = corpus.chunk_embedding(chunk)
        fields = {name: getattr(chunk, name) for name in _CHUNK_FIELDS}
        chunks[chunk.document_id].append(
            Chunk(**fields, embedding=embedding, searchable=embedding is not None)
        )
    for document in corpus.documents:
        fields = {name: getattr(document, name) for name in _DOCUMENT_FIELDS}
        yield Document(**fields, chunks=chunks[document.id], grants=frozenset(grants[document.id]))
