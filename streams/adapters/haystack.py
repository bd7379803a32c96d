"""Haystack: a retriever component, and documents to ingest. Needs the extra ``haystack``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack
from uuid import UUID

from haystack import Document, component, default_to_dict

from streams.adapters.ingestion import SourceChunk, to_lines
from streams.adapters.messages import metadata_of, question
from streams.adapters.shared import SharedClient
from streams.client import Client, QueryOptions, RetrievalResult

__all__ = ["AnabranchRetriever", "ingestion_lines", "to_documents"]


@component
class AnabranchRetriever:
    """Asks questions by request and reply. Synchronous and asynchronous use share the client's connection.

    Errors are those of `Client.retrieve`.

    Args:
        client: the connection; None: one of its own, as `Client.from_environment` configures it. Only then can the
            pipeline be saved.
        principals: whom the caller acts as, unless ``run`` names others.
        timeout: seconds, from sending to the reply.
        options: see `QueryOptions`. Those of a pipeline that is saved must be values that JSON has.
    """

    def __init__(
        self,
        client: SharedClient | None = None,
        *,
        principals: Sequence[str] | None = None,
        timeout: float = 30.0,
        **options: Unpack[QueryOptions],
    ) -> None:
        self._client = client
        self._owns_client = client is None
        self._parameters = {"principals": principals, "timeout": timeout, **options}

    def warm_up(self) -> None:
        """Create the component's own client, if it has none.

        Raises:
            SettingsError: a setting is missing or invalid.
        """
        self._opened()

    def close(self) -> None:
        """Close the component's own client."""
        if self._owns_client and self._client is not None:
            self._client.close()
            self._client = None

    def to_dict(self) -> dict[str, Any]:
        """The parameters, for a pipeline that is saved.

        Raises:
            ValueError: the client was given, so it cannot be saved.
        """
        if not self._owns_client:
            raise ValueError("only a retriever that takes its client from the environment can be saved")
        return default_to_dict(self, **self._parameters)

    @component.output_types(documents=list[Document])
    def run(
        self,
        query: str,
        query_embedding: list[float] | None = None,
        *,
        principals: list[str] | None = None,
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        session_id: str | None = None,
        topic_id: str | None = None,
    ) -> dict[str, list[Document]]:
        """Ask one question.

        Args:
            query: the question.
            query_embedding: of the question; None: the embedding stage embeds it.
            principals: replace the component's.
            filters: those of the contract, not those of Haystack's document stores.
            top_k: replaces the component's ``k``.
            session_id: replaces the component's.
            topic_id: replaces the component's.

        Returns:
            The passages as ``documents``, in their order.
        """
        arguments = self._arguments(
            query,
            query_embedding,
            principals=principals,
            filters=filters,
            k=top_k,
            session_id=session_id,
            topic_id=topic_id,
        )
        return {"documents": to_documents(self._opened().retrieve(**arguments))}

    @component.output_types(documents=list[Document])
    async def run_async(
        self,
        query: str,
        query_embedding: list[float] | None = None,
        *,
        principals: list[str] | None = None,
        filters: dict[str, Any] | None = None,
        top_k: int | None = None,
        session_id: str | None = None,
        topic_id: str | None = None,
    ) -> dict[str, list[Document]]:
        """As `run`."""
        arguments = self._arguments(
            query,
            query_embedding,
            principals=principals,
            filters=filters,
            k=top_k,
            session_id=session_id,
            topic_id=topic_id,
        )
        return {"documents": to_documents(await self._opened().aretrieve(**arguments))}

    def _opened(self) -> SharedClient:
        if self._client is None:
            self._client = SharedClient(Client.from_environment())
        return self._client

    def _arguments(self, query: str, embedding: list[float] | None, **given: Any) -> dict[str, Any]:
        replacing = {name: value for name, value in given.items() if value is not None}
        arguments = {**self._parameters, **question(query, embedding), **replacing}
        if arguments["principals"] is None:
            raise ValueError("principals are missing: whom the caller acts as")
        return arguments


def to_documents(result: RetrievalResult) -> list[Document]:
    """The passages in their order, with all their fields as metadata."""
    return [
        Document(
            id=str(passage.chunk_id),
            content=passage.text_content,
            meta=metadata_of(passage, result),
            score=passage.score,
        )
        for passage in result.results
    ]


def ingestion_lines(
    documents: Iterable[Document],
    *,
    grants: Sequence[str] | None = None,
    session_id: UUID | str | None = None,
    source_key: str = "source_id",
) -> Iterator[bytes]:
    """Documents, already split, as lines for `streams.ingest.ingest` and ``anabranch ingest``. Embeddings are kept.

    Documents with the same source are the chunks of one document; splitters set ``source_id``. If they have no source,
    their ids are used. Haystack makes an id from the content, so a changed document is a new one. To replace it
    instead, use another key, for example ``file_path`` with full paths.

    Args:
        documents: all chunks of each document, in order.
        grants: the principals that may read the documents; None: those that the store has for them, or nobody.
        session_id: of the documents.
        source_key: the metadata key of the source.

    Raises:
        ValueError: a document has no text.
    """
    return to_lines(
        (_source_chunk(document, source_key) for document in documents), grants=grants, session_id=session_id
    )


def _source_chunk(document: Document, source_key: str) -> SourceChunk:
    if document.content is None:
        raise ValueError(f"document {document.id} has no text")
    metadata: Mapping[str, Any] = document.meta
    if "page_number" in metadata:
        metadata = {"page": metadata["page_number"], **metadata}
    source = str(metadata.get(source_key) or document.id)
    return SourceChunk(source, document.content, metadata, document.embedding)
