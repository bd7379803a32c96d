"""Documents to ingest: each with its readers and its chunks. Texts arrive already split.

A document is valid or invalid as a whole. The fields have the names and rules of the store's columns and of the
contracts. Unknown fields are errors: a misspelt ``grants`` would otherwise have no effect.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final
from uuid import UUID, uuid5

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator

from streams.core.errors import ContractViolation
from streams.core.fields import (
    FLOAT32_MAX,
    ContractModel,
    Count,
    Int32,
    Number,
    Text,
    Uuid,
    as_array,
    as_components,
    check_numbers,
    check_text,
    rule_error,
)

__all__ = [
    "Batch",
    "Chunk",
    "Document",
    "DocumentError",
    "Line",
    "Problem",
    "Vector",
    "batches",
    "parse_document",
    "parse_id",
]

Vector = npt.NDArray[np.float32]

# pgvector computes in float32, where the squares of longer or shorter components overflow or vanish.
_SMALL: Final = 2.0**-30
_LARGE: Final = 2.0**30
# What `strict_json` makes of an integer that is too long.
_LONG_INTEGER: Final = 10**310


class Problem(StrEnum):
    """The stable codes of why a document is not ingested."""

    UNDECODABLE = "undecodable"
    INVALID_DOCUMENT = "invalid_document"
    DUPLICATE_CHUNK = "duplicate_chunk"
    DIMENSION_MISMATCH = "dimension_mismatch"
    NON_FINITE_EMBEDDING = "non_finite_embedding"
    ZERO_EMBEDDING = "zero_embedding"
    EMBEDDING_MISSING = "embedding_missing"
    EMPTY_TEXT = "empty_text"
    TEXT_REJECTED = "text_rejected"
    CHUNK_OF_OTHER_DOCUMENT = "chunk_of_other_document"
    REJECTED_BY_STORE = "rejected_by_store"


class DocumentError(Exception):
    """A document cannot be ingested. The message names the place and the rule in one line, and quotes no text."""

    def __init__(self, code: Problem, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chunk:
    """A row of ``document_chunks``.

    Attributes:
        searchable: whether it has an embedding, or gets one before it is written. Without one, it is never searched.
        embedding: shape (the store's dimensions,), finite, not all zeros, of any length.
    """

    id: UUID
    text_content: str
    searchable: bool = True
    embedding: Vector | None = None
    session_id: UUID | None = None
    parent_chunk_id: UUID | None = None
    related_topic_ids: Sequence[UUID] = ()
    chunk_type: str | None = None
    chunk_position: int | None = None
    token_count: int | None = None
    page: int | None = None
    section: str | None = None
    coordinates: Mapping[str, float] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Document:
    """A row of ``documents``, with all its chunks.

    Attributes:
        grants: the principals that may read it; None: those that the store has for it, or nobody.
    """

    id: UUID
    chunks: Sequence[Chunk] = ()
    grants: frozenset[str] | None = None
    session_id: UUID | None = None
    title: str | None = None
    source_url: str | None = None
    file_description: str | None = None
    document_type: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def parse_document(instance: Mapping[str, Any], *, dimensions: int) -> Document:
    """Validate a document and resolve what is absent.

    Args:
        instance: the decoded JSON object.
        dimensions: of the store's embeddings.

    Raises:
        DocumentError: the document is invalid.
    """
    try:
        line = _DocumentLine.parse(instance)
    except ContractViolation as error:
        raise DocumentError(Problem.INVALID_DOCUMENT, str(error)) from None
    chunks = tuple(
        _chunk(chunk, line, position, dimensions) for position, chunk in enumerate(line.chunks, start=1)
    )
    seen: set[UUID] = set()
    for number, chunk in enumerate(chunks):
        if chunk.id in seen:
            raise DocumentError(Problem.DUPLICATE_CHUNK, f"chunks[{number}].id occurs twice in the document")
        seen.add(chunk.id)
    return Document(
        id=line.id,
        chunks=chunks,
        grants=None if line.grants is None else frozenset(line.grants),
        session_id=line.session_id,
        title=line.title,
        source_url=line.source_url,
        file_description=line.file_description,
        document_type=line.document_type,
        metadata=line.metadata or {},
    )


def parse_id(instance: Mapping[str, Any]) -> UUID:
    """The id of a document to delete; all other fields are ignored.

    Raises:
        DocumentError: it is missing or invalid.
    """
    try:
        return _IdLine.parse(instance).id
    except ContractViolation as error:
        raise DocumentError(Problem.INVALID_DOCUMENT, str(error)) from None


def _chunk(line: "_ChunkLine", document: "_DocumentLine", position: int, dimensions: int) -> Chunk:
    place = f"chunks[{position - 1}]"
    searchable = line.searchable is not False
    if line.embedding is not None and not searchable:
        raise DocumentError(
            Problem.INVALID_DOCUMENT, f"{place} has an embedding, but its searchable is false"
        )
    return Chunk(
        id=uuid5(document.id, str(position)) if line.id is None else line.id,
        text_content=line.text_content,
        searchable=searchable,
        embedding=None if line.embedding is None else _vector(line.embedding, dimensions, place),
        session_id=document.session_id if line.session_id is None else line.session_id,
        parent_chunk_id=line.parent_chunk_id,
        related_topic_ids=line.related_topic_ids or (),
        chunk_type=line.chunk_type,
        chunk_position=position if line.chunk_position is None else line.chunk_position,
        token_count=line.token_count,
        page=line.page,
        section=line.section,
        coordinates=line.coordinates,
        metadata=line.metadata or {},
    )


def _vector(components: npt.NDArray[np.floating], dimensions: int, place: str) -> Vector:
    if len(components) != dimensions:
        raise DocumentError(
            Problem.DIMENSION_MISMATCH,
            f"{place}.embedding has {len(components)} components, the store's have {dimensions}",
        )
    largest = float(np.abs(components).max())
    if not largest <= FLOAT32_MAX:  # NaN if a component is NaN
        raise DocumentError(
            Problem.NON_FINITE_EMBEDDING,
            f"{place}.embedding contains a component that is infinite or outside the float32 range",
        )
    if largest == 0:
        raise DocumentError(Problem.ZERO_EMBEDDING, f"{place}.embedding is all zeros")
    if not _SMALL <= largest <= _LARGE:
        # By a power of two, which keeps the direction exactly.
        components = np.ldexp(components, -math.frexp(largest)[1])
    return components.astype(np.float32)


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    """Check that jsonb stores a value as it is."""
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if type(item) is str:
            check_text(item)
        elif type(item) is dict:
            pending.extend(item)
            pending.extend(item.values())
        elif type(item) is list:
            pending.extend(item)
        elif (type(item) is float and not math.isfinite(item)) or (
            type(item) is int and abs(item) >= _LONG_INTEGER
        ):
            raise rule_error("number", "contains a number that is too large")
    return value


# One invalid item is enough: each costs a hundred times its own size.
_FIRST_ONLY: Final = Field(fail_fast=True)

_Metadata = Annotated[dict[str, Any], AfterValidator(_storable)]
_Embedding = Annotated[Any, PlainValidator(as_components)]
_Uuids = Annotated[tuple[Uuid, ...], _FIRST_ONLY, BeforeValidator(as_array)]
_Principal = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(check_text)]
_Coordinates = Annotated[dict[Text, Number], BeforeValidator(check_numbers)]


class _IdLine(ContractModel):
    id: Uuid


class _ChunkLine(ContractModel):
    model_config = ConfigDict(extra="forbid")

    id: Uuid | None = None
    text_content: Text
    searchable: bool | None = None
    embedding: _Embedding | None = None
    session_id: Uuid | None = None
    parent_chunk_id: Uuid | None = None
    related_topic_ids: _Uuids | None = None
    chunk_type: Text | None = None
    chunk_position: Int32 | None = None
    token_count: Count | None = None
    page: Int32 | None = None
    section: Text | None = None
    coordinates: _Coordinates | None = None
    metadata: _Metadata | None = None


class _DocumentLine(ContractModel):
    model_config = ConfigDict(extra="forbid")

    id: Uuid
    chunks: Annotated[tuple[_ChunkLine, ...], _FIRST_ONLY, BeforeValidator(as_array)]
    grants: Annotated[tuple[_Principal, ...], _FIRST_ONLY, BeforeValidator(as_array)] | None = None
    session_id: Uuid | None = None
    title: Text | None = None
    source_url: Text | None = None
    file_description: Text | None = None
    document_type: Text | None = None
    metadata: _Metadata | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A line of input.

    Attributes:
        number: of the line, from 1.
        size: in bytes.
        content: what the line contains, or why it is invalid.
    """

    number: int
    size: int
    content: "Document | UUID | DocumentError"


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Lines whose documents are written in one transaction: they have no document and no chunk in common."""

    lines: Sequence[Line]

    @property
    def documents(self) -> list[Document]:
        return [line.content for line in self.lines if isinstance(line.content, Document)]

    @property
    def ids(self) -> list[UUID]:
        """Of the documents to delete."""
        return [line.content for line in self.lines if isinstance(line.content, UUID)]


def batches(lines: Iterable[Line], *, max_chunks: int, max_lines: int) -> Iterator[Batch]:
    """Group lines, in order.

    Args:
        lines: the lines.
        max_chunks: a batch that has so many is complete, so it has at most one document more.
        max_lines: of a batch.
    """
    batch: list[Line] = []
    seen: set[UUID] = set()
    chunks = 0
    for line in lines:
        ids = _ids(line.content)
        if not seen.isdisjoint(ids) or chunks >= max_chunks or len(batch) >= max_lines:
            yield Batch(batch)
            batch, seen, chunks = [], set(), 0
        batch.append(line)
        seen |= ids
        chunks += len(line.content.chunks) if isinstance(line.content, Document) else 0
    if batch:
        yield Batch(batch)


def _ids(content: "Document | UUID | DocumentError") -> set[UUID]:
    """Of the document and its chunks. In one set: a document and a chunk with the same id only make batches smaller."""
    if isinstance(content, Document):
        return {content.id, *(chunk.id for chunk in content.chunks)}
    return {content} if isinstance(content, UUID) else set()
