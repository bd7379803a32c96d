"""Documents of other libraries as lines for `streams.ingest` and `anabranch ingest`.

These libraries split a text into documents or nodes, each of which names its source in its metadata. Here, each of them
is a chunk, and all chunks with the same source are one document: a line.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import NAMESPACE_URL, UUID, uuid5

from pydantic_core import to_json

from streams.core.fields import INT32_MAX, INT32_MIN

__all__ = ["SourceChunk", "document_id", "to_lines"]

# Fields that metadata fills if its value has the field's type. Counts of tokens are not among them: other libraries
# count with other tokenizers.
_DOCUMENT_TEXTS: Final = ("title", "source_url", "file_description", "document_type")
_CHUNK_TEXTS: Final = ("section", "chunk_type")


@dataclass(frozen=True, slots=True)
class SourceChunk:
    """A chunk as another library has it.

    Attributes:
        source: what all chunks of a document have in common, in each run.
        text: to search and to return.
        metadata: any values that JSON or `str` can express.
        embedding: shape (dimensions,).
    """

    source: str
    text: str
    metadata: Mapping[str, Any]
    embedding: Sequence[float] | None = None


def document_id(source: str) -> UUID:
    """The id of the document from a source: the source itself if it is a UUID, otherwise the source's UUIDv5."""
    try:
        return UUID(source)
    except ValueError:
        return uuid5(NAMESPACE_URL, f"urn:anabranch:document:{source}")


def to_lines(
    chunks: Iterable[SourceChunk],
    *,
    grants: Sequence[str] | None = None,
    session_id: UUID | str | None = None,
) -> Iterator[bytes]:
    """Group chunks by their source into documents, in the order of each source's first chunk.

    Metadata with the name and the type of a field becomes that field, everything else stays metadata. What belongs to
    the document must be the same in all its chunks that have it.

    Args:
        chunks: all chunks of each document, in the document's order.
        grants: the principals that may read the documents; None: those that the store has for them, or nobody.
        session_id: of the documents.

    Yields:
        One line of JSON for each document.

    Raises:
        ValueError: a text contains unpaired surrogates.
    """
    documents: dict[str, list[SourceChunk]] = defaultdict(list)
    for chunk in chunks:
        documents[chunk.source].append(chunk)
    common = _given(grants=None if grants is None else list(grants), session_id=session_id)
    for source, parts in documents.items():
        fields = _document_fields(parts)
        document = {"id": document_id(source), **common, **fields}
        document["chunks"] = [_chunk(part, excluded=fields.keys()) for part in parts]
        yield to_json(document, inf_nan_mode="strings", fallback=_plain) + b"\n"


def _document_fields(chunks: Sequence[SourceChunk]) -> dict[str, str]:
    fields = {}
    for name in _DOCUMENT_TEXTS:
        values = [chunk.metadata[name] for chunk in chunks if chunk.metadata.get(name) is not None]
        if values and type(values[0]) is str and all(value == values[0] for value in values):
            fields[name] = values[0]
    return fields


def _chunk(chunk: SourceChunk, *, excluded: Iterable[str]) -> dict[str, Any]:
    fields = _chunk_fields(chunk.metadata)
    taken = {*excluded, *fields}
    return _given(
        text_content=chunk.text,
        **fields,
        embedding=None if chunk.embedding is None else list(map(float, chunk.embedding)),
        metadata={name: value for name, value in chunk.metadata.items() if name not in taken},
    )


def _chunk_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: metadata[name] for name in _CHUNK_TEXTS if type(metadata.get(name)) is str
    }
    page = metadata.get("page")
    if type(page) is int and INT32_MIN <= page <= INT32_MAX:
        fields["page"] = page
    coordinates = metadata.get("coordinates")
    if isinstance(coordinates, dict) and all(map(_is_coordinate, coordinates.items())):
        fields["coordinates"] = coordinates
    topics = metadata.get("related_topic_ids")
    if isinstance(topics, list):
        with suppress(ValueError):
            fields["related_topic_ids"] = [UUID(str(topic)) for topic in topics]
    return fields


def _is_coordinate(entry: tuple[Any, Any]) -> bool:
    name, number = entry
    return type(name) is str and type(number) in (int, float) and math.isfinite(number)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _plain(value: Any) -> Any:
    """What JSON has instead of a value that it does not know; NumPy's numbers and arrays have their own conversion."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
