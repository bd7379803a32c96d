"""LangChain: a retriever, and documents to ingest. Needs the extra ``langchain``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, SkipValidation

from streams.adapters.ingestion import SourceChunk, to_lines
from streams.adapters.messages import metadata_of, question
from streams.adapters.shared import SharedClient
from streams.client import Filters, RetrievalResult

__all__ = ["AnabranchRetriever", "ingestion_lines", "to_documents"]


class AnabranchRetriever(BaseRetriever):
    """Asks questions by request and reply. Synchronous and asynchronous use share the client's connection.

    Keyword arguments of ``invoke`` and ``ainvoke`` override the fields, and may be any option of `Client.retrieve`. An
    unknown one is a TypeError. Errors are those of `Client.retrieve`.

    Attributes:
        client: the connection.
        principals: whom the caller acts as, 1 to 64: what they may read is searched.
        embeddings: embeds questions; None: the embedding stage embeds them.
        timeout: seconds, from sending to the reply.
        session_id, topic_id, profile, k, similarity_threshold, token_budget, filters: see `QueryOptions`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    client: SharedClient
    principals: Sequence[str]
    embeddings: Embeddings | None = None
    timeout: float = 30.0
    session_id: UUID | str | None = None
    topic_id: UUID | str | None = None
    profile: str | None = None
    k: int | None = None
    similarity_threshold: float | None = None
    token_budget: int | None = None
    # Made into a `Filters` here, a mapping would lose what is misspelt.
    filters: SkipValidation[Filters | Mapping[str, Any] | None] = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        del run_manager  # nothing inside reports to it
        embedding = None if self.embeddings is None else self.embeddings.embed_query(query)
        return to_documents(self.client.retrieve(**self._arguments(query, embedding, options)))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        del run_manager  # nothing inside reports to it
        embedding = None if self.embeddings is None else await self.embeddings.aembed_query(query)
        return to_documents(await self.client.aretrieve(**self._arguments(query, embedding, options)))

    def _arguments(
        self, query: str, embedding: list[float] | None, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _ARGUMENTS}
        return {**own, **question(query, embedding), **options}


_ARGUMENTS: Final = (
    AnabranchRetriever.model_fields.keys()
    - BaseRetriever.model_fields.keys()
    - {
        "client",
        "embeddings",
    }
)


def to_documents(result: RetrievalResult) -> list[Document]:
    """The passages in their order, with all their fields as metadata."""
    return [
        Document(
            page_content=passage.text_content,
            id=str(passage.chunk_id),
            metadata=metadata_of(passage, result),
        )
        for passage in result.results
    ]


def ingestion_lines(
    documents: Iterable[Document],
    *,
    grants: Sequence[str] | None = None,
    session_id: UUID | str | None = None,
    embeddings: Embeddings | None = None,
    source_key: str = "source",
) -> Iterator[bytes]:
    """Documents, already split, as lines for `streams.ingest.ingest` and ``anabranch ingest``.

    Documents with the same source are the chunks of one document. If they have no source, their ids are used, and
    without ids their texts.

    Args:
        documents: all chunks of each document, in order.
        grants: the principals that may read the documents; None: those that the store has for them, or nobody.
        session_id: of the documents.
        embeddings: embeds the texts; None: ingestion does.
        source_key: the metadata key of the source.
    """
    split = list(documents)
    texts = [document.page_content for document in split]
    vectors = [None] * len(split) if embeddings is None else embeddings.embed_documents(texts)
    return to_lines(
        (
            SourceChunk(
                str(document.metadata.get(source_key) or document.id or document.page_content),
                document.page_content,
                document.metadata,
                vector,
            )
            for document, vector in zip(split, vectors, strict=True)
        ),
        grants=grants,
        session_id=session_id,
    )
