"""Reads the sample corpus that is part of the package.

The texts are in ``source/*.toml``, where people edit them. Everything that can be derived from them (ids, positions,
the full text of a problem) is computed here, to avoid duplication. The embeddings and token counts need a model and a
tokenizer, and are stored by ``embed.py``. A checksum links them to the texts; `load` raises an error if the texts have
changed since.

This module imports only numpy and the standard library, and nothing else from ``streams``.
"""

import hashlib
import io
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar
from uuid import NAMESPACE_URL, UUID, uuid5

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Scalar = str | int | float
_T = TypeVar("_T")

EMBEDDING_DIMENSIONS = 768

PARENT_TYPE = "problem_set"
CHILD_TYPE = "problem"

_DOCUMENT_FILE = re.compile(r"\d\d-.+\.toml")


class SampleError(Exception):
    """The sample is inconsistent: a source refers to something that does not exist, or the embeddings are stale."""


@dataclass(frozen=True, slots=True)
class Session:
    """A group of related documents."""

    id: UUID
    key: str
    title: str


@dataclass(frozen=True, slots=True)
class Topic:
    """A subject to which chunks of any document may be related."""

    id: UUID
    key: str
    title: str


@dataclass(frozen=True, slots=True)
class Document:
    """A row of ``documents``."""

    id: UUID
    key: str
    session_id: UUID | None
    title: str
    source_url: str
    file_description: str | None
    document_type: str
    metadata: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of ``document_chunks`` without its embedding, which is a row of `Corpus.chunk_embeddings`.

    Attributes:
        key: ``<document key>/<chunk key>``, for people; `id` is derived from it.
        chunk_position: 1, 2, 3, ... within the document, in reading order, parents included.
        token_count: cl100k_base tokens of `text_content`; None if the document's tokens are not counted.
        coordinates: ``x0``, ``y0``, ``x1``, ``y1`` in points (1/72 inch) from the top left of the page.
        embedding_row: row in `Corpus.chunk_embeddings`; None for a parent, which is never searched.
    """

    id: UUID
    key: str
    document_id: UUID
    session_id: UUID | None
    parent_chunk_id: UUID | None
    related_topic_ids: tuple[UUID, ...]
    chunk_type: str
    chunk_position: int
    text_content: str
    token_count: int | None
    page: int | None
    section: str | None
    coordinates: Mapping[str, float] | None
    metadata: Mapping[str, Scalar]
    embedding_row: int | None


@dataclass(frozen=True, slots=True)
class Grant:
    """A row of ``document_grants``: who may read a document."""

    document_id: UUID
    principal: str


@dataclass(frozen=True, slots=True)
class GoldenQuery:
    """A question with known answers, and the event fields for it.

    Attributes:
        filters: the event's ``filters`` object, or None.
        expected: chunk id to grade; 3 answers the question, 2 helps, 1 is related.
        embedding_row: row in `Corpus.query_embeddings`.
    """

    id: UUID
    key: str
    text: str
    principals: tuple[str, ...]
    session_id: UUID | None
    topic_id: UUID | None
    profile: str
    filters: Mapping[str, str | Mapping[str, str]] | None
    expected: Mapping[UUID, int]
    embedding_row: int


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The whole sample.

    Attributes:
        embedding_model: the name to put in an event's ``embedding_model``.
        chunk_embeddings: shape (searchable chunks, 768), float32, rows of unit length.
        query_embeddings: shape (golden queries, 768), float32, rows of unit length.
    """

    sessions: tuple[Session, ...]
    topics: tuple[Topic, ...]
    documents: tuple[Document, ...]
    chunks: tuple[Chunk, ...]
    grants: tuple[Grant, ...]
    queries: tuple[GoldenQuery, ...]
    embedding_model: str
    chunk_embeddings: Vector = field(repr=False)
    query_embeddings: Vector = field(repr=False)

    def chunk_embedding(self, chunk: Chunk) -> Vector | None:
        """The chunk's embedding, shape (768,), unit length; None for a parent."""
        if chunk.embedding_row is None:
            return None
        row: Vector = self.chunk_embeddings[chunk.embedding_row]
        return row

    def query_embedding(self, query: GoldenQuery) -> Vector:
        """The question's embedding, shape (768,), unit length."""
        row: Vector = self.query_embeddings[query.embedding_row]
        return row


def load() -> Corpus:
    """Read the sample corpus.

    Raises:
        SampleError: the sources are inconsistent, or have changed after the embeddings were computed.
    """
    package = resources.files(__package__ or "streams.sample")
    stored = json.loads((package / "embeddings.json").read_text(encoding="utf-8"))
    texts = read_texts(package / "source", token_counts=stored["token_counts"])
    if texts.sha256() != stored["text_sha256"]:
        raise SampleError(
            "the sample texts have changed after their embeddings were computed: run python -m streams.sample.embed"
        )
    return Corpus(
        sessions=texts.sessions,
        topics=texts.topics,
        documents=texts.documents,
        chunks=texts.chunks,
        grants=texts.grants,
        queries=texts.queries,
        embedding_model=stored["embedding_model"],
        chunk_embeddings=_read_unit_rows(package / "chunk_embeddings.npy", len(texts.searchable())),
        query_embeddings=_read_unit_rows(package / "query_embeddings.npy", len(texts.queries)),
    )


@dataclass(frozen=True, slots=True)
class Texts:
    """The content of the sources: the corpus without embeddings."""

    sessions: tuple[Session, ...]
    topics: tuple[Topic, ...]
    documents: tuple[Document, ...]
    chunks: tuple[Chunk, ...]
    grants: tuple[Grant, ...]
    queries: tuple[GoldenQuery, ...]
    counted: frozenset[UUID]
    """Documents whose chunks have a token count."""

    def searchable(self) -> tuple[Chunk, ...]:
        """The chunks that are embedded, in row order."""
        return tuple(chunk for chunk in self.chunks if chunk.embedding_row is not None)

    def chunk_inputs(self) -> list[str]:
        """The text to embed for each searchable chunk: only its text, without title or section."""
        return [chunk.text_content for chunk in self.searchable()]

    def query_inputs(self) -> list[str]:
        """The text to embed for each golden query."""
        return [query.text for query in self.queries]

    def sha256(self) -> str:
        """Checksum of everything from which the embeddings and token counts are computed, in row order."""
        digest = hashlib.sha256()
        # Includes parents: they have no embedding, but a token count.
        for kind, key, text in [
            *(("chunk", chunk.key, chunk.text_content) for chunk in self.chunks),
            *(("query", query.key, query.text) for query in self.queries),
        ]:
            digest.update(f"{kind}\0{key}\0{text}\0".encode())
        return digest.hexdigest()


def read_texts(source: Traversable, token_counts: Mapping[str, int]) -> Texts:
    """Read the TOML sources: ``catalogue.toml``, ``golden.toml`` and the documents by order of file name.

    Args:
        source: the directory.
        token_counts: chunk key → cl100k_base tokens; None for chunks without a key.
    """
    catalogue = _read_toml(source / "catalogue.toml")
    namespace = uuid5(NAMESPACE_URL, catalogue["namespace"])
    sessions = {
        key: Session(id=uuid5(namespace, f"session/{key}"), key=key, title=title)
        for key, title in catalogue["sessions"].items()
    }
    topics = {
        key: Topic(id=uuid5(namespace, f"topic/{key}"), key=key, title=title)
        for key, title in catalogue["topics"].items()
    }
    documents: list[Document] = []
    chunks: list[Chunk] = []
    grants: list[Grant] = []
    counted: set[UUID] = set()
    rows = 0
    for entry in sorted(source.iterdir(), key=lambda file: file.name):
        if not _DOCUMENT_FILE.fullmatch(entry.name):
            continue
        raw = _read_toml(entry)
        session = _named(sessions, raw.get("session"), entry.name)
        document = Document(
            id=uuid5(namespace, f"document/{raw['slug']}"),
            key=raw["slug"],
            session_id=session.id if session else None,
            title=raw["title"],
            source_url=raw["source_url"],
            file_description=raw.get("file_description"),
            document_type=raw["document_type"],
            metadata=raw["metadata"],
        )
        documents.append(document)
        grants.extend(Grant(document_id=document.id, principal=principal) for principal in raw["grants"])
        if raw.get("count_tokens", True):
            counted.add(document.id)
        ids = {item["key"]: uuid5(namespace, f"chunk/{document.key}/{item['key']}") for item in raw["chunk"]}
        for position, item in enumerate(raw["chunk"], start=1):
            chunk_type = item.get("type", CHILD_TYPE if "parent" in item else "theory")
            key = f"{document.key}/{item['key']}"
            related = [_named(topics, name, key) for name in item.get("topics", ())]
            searched = chunk_type != PARENT_TYPE
            chunks.append(
                Chunk(
                    id=ids[item["key"]],
                    key=key,
                    document_id=document.id,
                    session_id=document.session_id,
                    parent_chunk_id=_named(ids, item.get("parent"), key),
                    related_topic_ids=tuple(topic.id for topic in related if topic),
                    chunk_type=chunk_type,
                    chunk_position=position,
                    text_content=_flow(item["text"]) if searched else _with_children(item, raw["chunk"]),
                    token_count=token_counts.get(key),
                    page=item.get("page"),
                    section=item.get("section"),
                    coordinates=_box(item.get("box")),
                    metadata=item.get("metadata", {}),
                    embedding_row=rows if searched else None,
                )
            )
            rows += searched
    by_key = {chunk.key: chunk.id for chunk in chunks}
    return Texts(
        sessions=tuple(sessions.values()),
        topics=tuple(topics.values()),
        documents=tuple(documents),
        chunks=tuple(chunks),
        grants=tuple(grants),
        queries=tuple(
            _golden(_read_toml(source / "golden.toml")["query"], namespace, sessions, topics, by_key)
        ),
        counted=frozenset(counted),
    )


def _golden(
    raw: list[dict[str, Any]],
    namespace: UUID,
    sessions: Mapping[str, Session],
    topics: Mapping[str, Topic],
    chunk_ids: Mapping[str, UUID],
) -> Iterator[GoldenQuery]:
    for row, item in enumerate(raw):
        key = item["key"]
        session = _named(sessions, item.get("session"), key)
        topic = _named(topics, item.get("topic"), key)
        expected: dict[UUID, int] = {}
        for name, grade in item["expect"].items():
            chunk_id = _named(chunk_ids, name, key)
            if chunk_id is not None:
                expected[chunk_id] = grade
        yield GoldenQuery(
            id=uuid5(namespace, f"query/{key}"),
            key=key,
            text=_flow(item["text"]),
            principals=tuple(item["principals"]),
            session_id=session.id if session else None,
            topic_id=topic.id if topic else None,
            profile=item["profile"],
            filters=item.get("filters"),
            expected=expected,
            embedding_row=row,
        )


def _named(known: Mapping[str, _T], name: str | None, where: str) -> _T | None:
    """The object with this name; None for no name; raises an error with the place for an unknown name."""
    if name is None:
        return None
    if name not in known:
        raise SampleError(f"{where}: unknown name {name!r}")
    return known[name]


def _flow(text: str) -> str:
    """Undo the source's line wrapping: blank lines separate paragraphs, all other white space becomes one space."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip()))


def _with_children(parent: Mapping[str, Any], siblings: list[dict[str, Any]]) -> str:
    """The full text of a problem: the common data, then each part with its letter."""
    parts = [_flow(item["text"]) for item in siblings if item.get("parent") == parent["key"]]
    lettered = [f"({chr(ord('a') + index)}) {part}" for index, part in enumerate(parts)]
    return "\n\n".join([_flow(parent["text"]), *lettered])


def _box(corners: list[float] | None) -> dict[str, float] | None:
    return None if corners is None else dict(zip(("x0", "y0", "x1", "y1"), corners, strict=True))


def _read_toml(file: Traversable) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _read_unit_rows(file: Traversable, rows: int) -> Vector:
    """Rows of unit length as float32; they are stored in half precision, which changes their length slightly."""
    stored = np.load(io.BytesIO(file.read_bytes()), allow_pickle=False)
    if stored.shape != (rows, EMBEDDING_DIMENSIONS):
        raise SampleError(f"{file.name} has shape {stored.shape}, not {(rows, EMBEDDING_DIMENSIONS)}")
    exact = stored.astype(np.float64)
    unit: Vector = (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(np.float32)
    unit.flags.writeable = False
    return unit
