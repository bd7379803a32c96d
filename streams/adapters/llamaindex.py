"""LlamaIndex: a retriever, and nodes to ingest. Needs the extra ``llamaindex``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Unpack
from uuid import UUID

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)

from streams.adapters.ingestion import SourceChunk, to_lines
from streams.adapters.messages import metadata_of, question
from streams.adapters.shared import SharedClient
from streams.client import QueryOptions, RetrievalResult

__all__ = ["AnabranchRetriever", "ingestion_lines", "to_nodes"]


class AnabranchRetriever(BaseRetriever):
    """Asks questions by request and reply. Synchronous and asynchronous use share the client's connection.

    A query with an embedding is asked with that embedding. Errors are those of `Client.retrieve`.

    Args:
        client: the connection.
        principals: whom the caller acts as, 1 to 64: what they may read is searched.
        embed_model: embeds questions; None: the embedding stage embeds them.
        timeout: seconds, from sending to the reply.
        options: see `QueryOptions`.
    """

    def __init__(
        self,
        client: SharedClient,
        *,
        principals: Sequence[str],
        embed_model: BaseEmbedding | None = None,
        timeout: float = 30.0,
        **options: Unpack[QueryOptions],
    ) -> None:
        super().__init__()
        self._client = client
        self._embed_model = embed_model
        self._arguments: Mapping[str, Any] = {"principals": principals, "timeout": timeout, **options}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        embedding = query_bundle.embedding
        if embedding is None and self._embed_model is not None:
            embedding = self._embed_model.get_agg_embedding_from_queries(query_bundle.embedding_strs)
        asked = question(query_bundle.query_str, embedding)
        return to_nodes(self._client.retrieve(**self._arguments, **asked))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        embedding = query_bundle.embedding
        if embedding is None and self._embed_model is not None:
            embedding = await self._embed_model.aget_agg_embedding_from_queries(query_bundle.embedding_strs)
        asked = question(query_bundle.query_str, embedding)
        return to_nodes(await self._client.aretrieve(**self._arguments, **asked))


def to_nodes(result: RetrievalResult) -> list[NodeWithScore]:
    """The passages in their order, with all their fields as metadata. A language model gets header and text."""
    nodes = []
    for passage in result.results:
        metadata = metadata_of(passage, result)
        hidden = [name for name in metadata if name != "header" or passage.header is None]
        node = TextNode(
            id_=str(passage.chunk_id),
            text=passage.text_content,
            metadata=metadata,
            metadata_template="{value}",
            text_template="{metadata_str}\n{content}",
            excluded_llm_metadata_keys=hidden,
            excluded_embed_metadata_keys=list(metadata),
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=str(passage.document_id))},
        )
        nodes.append(NodeWithScore(node=node, score=passage.score))
    return nodes


def ingestion_lines(
    nodes: Iterable[BaseNode],
    *,
    grants: Sequence[str] | None = None,
    session_id: UUID | str | None = None,
    source_key: str = "file_path",
) -> Iterator[bytes]:
    """Nodes as lines for `streams.ingest.ingest` and ``anabranch ingest``. Their embeddings are kept.

    Nodes with the same source are the chunks of one document. If they have no source, their documents' ids are used.

    Args:
        nodes: all nodes of each document, in order.
        grants: the principals that may read the documents; None: those that the store has for them, or nobody.
        session_id: of the documents.
        source_key: the metadata key of the source.

    Raises:
        ValueError: a document has neither a source nor an id of its own. LlamaIndex draws a random one in each run, so
            the same document would be ingested again and again.
    """
    return to_lines(
        (
            SourceChunk(
                _source(node, source_key),
                node.get_content(MetadataMode.NONE),
                node.metadata,
                node.embedding,
            )
            for node in nodes
        ),
        grants=grants,
        session_id=session_id,
    )


_RANDOM: Final = 4


def _source(node: BaseNode, key: str) -> str:
    source = node.metadata.get(key)
    if source:
        return str(source)
    identity = node.ref_doc_id or node.node_id
    try:
        is_random = UUID(identity).version == _RANDOM
    except ValueError:
        is_random = False
    if is_random:
        raise ValueError(
            f"node {node.node_id} has no metadata {key!r}, and its document's id is random: set the metadata, or name"
            " the key of another value that is the same in each run as source_key"
        )
    return identity
