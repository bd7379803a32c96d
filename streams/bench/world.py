"""A store to search and events to send: a small collection's vectors, grown with noise into dense clusters.

Every chunk is a real one with noise, so that a query has dozens of near neighbours that differ little: the case in
which an approximate index misses most. Sessions, topics and grants are random; every event's visible rows are known,
so that every answer can be compared with exact search.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal
from uuid import UUID, uuid4

import asyncpg
import numpy as np
import numpy.typing as npt
from pgvector.asyncpg import register_vector

from streams import sample
from streams.core.messages import SCHEMA_VERSION, QueryEmbedding, in_oldest_version
from streams.core.profiles import BUILTIN_PROFILES
from streams.core.selection import Arm, Candidate, select
from streams.wire import Codec

__all__ = [
    "AUDITORS",
    "CHUNKS_PER_DOCUMENT",
    "Base",
    "EventFactory",
    "Kind",
    "Question",
    "Workload",
    "World",
    "base",
    "exact",
    "fill",
    "grow",
    "load",
    "noisy",
    "questions",
    "unit",
]

Kind = Literal["chat", "extraction"]
#: Half of the mixed workload's events are chat.
Workload = Literal["chat", "extraction", "mixed"]
Vectors = npt.NDArray[np.float32]

CHUNKS_PER_DOCUMENT: Final = 10
#: A principal that may read every document.
AUDITORS: Final = "group:auditors"
_GROUPS: Final = 20
# A document is granted to this many groups, and a caller is in this many: two thirds of the rows are visible.
_GRANTS: Final = 2
_MEMBERSHIPS: Final = 8
_CALLERS: Final = 50
# Of the store and of the questions, the largest session has a fifth, the hundredth a hundredth of that.
_SESSIONS: Final = 100
_SHARES: Final = 1 / np.arange(1, _SESSIONS + 1) / np.sum(1 / np.arange(1, _SESSIONS + 1))
_TOPICS: Final = 5
# How far a chunk is from its origin, and a query from the collection's query; lengths, where every vector has length 1.
_NOISE: Final = 0.12
_QUERY_NOISE: Final = 0.2
_DOCUMENT_COLUMNS: Final = ("id", "session_id", "title", "source_url", "document_type", "metadata")
_CHUNK_COLUMNS: Final = (
    "id", "document_id", "session_id", "related_topic_ids", "chunk_type", "chunk_position", "text_content",
    "token_count", "embedding",
)  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A small collection: vectors of unit length, their texts, and queries."""

    name: str
    vectors: Vectors
    texts: Sequence[str]
    queries: Vectors


@dataclass(frozen=True)
class World:
    """What a store holds. Chunk i belongs to document i // 10.

    Attributes:
        origins: for each chunk, the row of the base that it was grown from.
        sessions: for each document, the number of its session.
        topics: for each chunk, the number of its topic within the session; -1 for none.
        groups: for each document, the groups that may read it; shape (documents, 2).
        callers: for each caller, the groups that it is in.
    """

    base: Base
    vectors: Vectors
    origins: npt.NDArray[np.intp]
    chunk_ids: Sequence[UUID]
    document_ids: Sequence[UUID]
    session_ids: Sequence[UUID]
    topic_ids: Sequence[Sequence[UUID]]
    sessions: npt.NDArray[np.intp]
    topics: npt.NDArray[np.intp]
    groups: npt.NDArray[np.intp]
    callers: Sequence[npt.NDArray[np.intp]]

    @property
    def size(self) -> int:
        return len(self.vectors)

    @cached_property
    def session_of_chunk(self) -> npt.NDArray[np.intp]:
        return np.repeat(self.sessions, CHUNKS_PER_DOCUMENT)[: self.size]

    def readers(self, document: int) -> list[str]:
        """The principals that may read a document."""
        return [AUDITORS, *(f"group:{group}" for group in self.groups[document])]

    def visible(self, caller: int | None) -> npt.NDArray[np.bool_]:
        """Whether a caller may read each chunk; None: an auditor."""
        if caller is None:
            return np.ones(self.size, bool)
        documents = np.isin(self.groups, self.callers[caller]).any(axis=1)
        return np.repeat(documents, CHUNKS_PER_DOCUMENT)[: self.size]


@dataclass(frozen=True)
class Question:
    """What an event asks. Many events may ask the same.

    Attributes:
        caller: number of the caller; None: an auditor.
        session: number of the session; None: the whole store.
        topic: number of the topic within the session.
    """

    kind: Kind
    vector: Vectors
    caller: int | None
    principals: tuple[str, ...]
    session: int | None = None
    topic: int | None = None
    session_id: UUID | None = None
    topic_id: UUID | None = None

    def event(self, *, lifetime: timedelta | None = None) -> QueryEmbedding:
        """A new event; without a lifetime it does not expire."""
        now = datetime.now(UTC)
        event = QueryEmbedding(
            schema_version=SCHEMA_VERSION,
            event_id=uuid4(),
            occurred_at=now,
            principals=self.principals,
            embedding=tuple(map(float, self.vector)),
            session_id=self.session_id,
            topic_id=self.topic_id,
            profile=self.kind,
            expires_at=None if lifetime is None else now + lifetime,
        )
        return in_oldest_version(event)


def base(cranfield: Path | None) -> Base:
    """Cranfield's vectors and texts if the folder is given and exists, else the sample corpus's."""
    if cranfield is not None and cranfield.is_dir():
        rows = [
            json.loads(line) for line in (cranfield / "chunks.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        return Base(
            "Cranfield",
            unit(np.load(cranfield / "chunk_embeddings.npy").astype(np.float32)),
            [row["text"] or row["title"] for row in rows],
            unit(np.load(cranfield / "query_embeddings.npy").astype(np.float32)),
        )
    corpus = sample.load()
    searchable = [chunk for chunk in corpus.chunks if chunk.embedding_row is not None]
    return Base(
        "the sample corpus",
        corpus.chunk_embeddings,
        [chunk.text_content for chunk in sorted(searchable, key=lambda chunk: chunk.embedding_row or 0)],
        corpus.query_embeddings,
    )


def grow(of: Base, size: int, seed: int) -> World:
    """Grow a collection to a number of chunks; the same for the same seed."""
    rng = np.random.default_rng(seed)
    documents = -(-size // CHUNKS_PER_DOCUMENT)
    origins = rng.integers(0, len(of.vectors), size)
    vectors = noisy(of.vectors[origins], _NOISE, rng)
    return World(
        base=of,
        vectors=vectors,
        origins=origins,
        chunk_ids=_ids(rng, size),
        document_ids=_ids(rng, documents),
        session_ids=_ids(rng, _SESSIONS),
        topic_ids=[_ids(rng, _TOPICS) for _ in range(_SESSIONS)],
        sessions=rng.choice(_SESSIONS, documents, p=_SHARES),
        topics=np.where(rng.random(size) < 0.5, rng.integers(0, _TOPICS, size), -1),  # noqa: PLR2004  # half
        groups=np.array([rng.choice(_GROUPS, _GRANTS, replace=False) for _ in range(documents)]),
        callers=[rng.choice(_GROUPS, _MEMBERSHIPS, replace=False) for _ in range(_CALLERS)],
    )


def questions(world: World, kind: Kind, count: int, seed: int, *, auditor: bool = False) -> list[Question]:
    """Draw questions of one kind; chat asks in a topic of a session, extraction in the whole store.

    Args:
        world: the store.
        kind: the profile.
        count: how many.
        seed: of the draw.
        auditor: ask as a caller that may read everything.
    """
    rng = np.random.default_rng([seed, kind == "chat"])
    vectors = noisy(world.base.queries[rng.integers(0, len(world.base.queries), count)], _QUERY_NOISE, rng)
    found = []
    for vector in vectors:
        caller = None if auditor else int(rng.integers(len(world.callers)))
        principals = (
            (AUDITORS,)
            if caller is None
            else (f"user:{caller}", *(f"group:{group}" for group in world.callers[caller]))
        )
        if kind == "extraction":
            found.append(Question(kind, vector, caller, principals))
            continue
        session, topic = int(rng.choice(_SESSIONS, p=_SHARES)), int(rng.integers(_TOPICS))
        found.append(
            Question(
                kind,
                vector,
                caller,
                principals,
                session,
                topic,
                world.session_ids[session],
                world.topic_ids[session][topic],
            )
        )
    return found


def exact(world: World, question: Question) -> set[UUID]:
    """The chunks of the answer if every search were exact, computed with NumPy."""
    profile = BUILTIN_PROFILES[question.kind]
    similarities = world.vectors @ question.vector
    scope = world.visible(question.caller)
    if question.session is not None:
        scope &= world.session_of_chunk == question.session
    scopes = {"global": scope}
    if question.topic is not None:
        scopes["local"] = scope & (world.topics == question.topic)

    def arm(rows: npt.NDArray[np.bool_]) -> Arm:
        numbers = np.flatnonzero(rows)
        nearest = numbers[np.argsort(-similarities[numbers], kind="stable")[: 2 * profile.k_default]]
        return Arm(
            [Candidate(world.chunk_ids[number], 1 - float(similarities[number])) for number in nearest],
            complete=True,
        )

    picks = select({name: arm(rows) for name, rows in scopes.items()}, k=profile.k_default).picks  # type: ignore[misc]  # the names are scopes
    return {pick.candidate.chunk_id for pick in picks}


class EventFactory:
    """Makes events, one after another, without encoding each again: only the event id differs.

    Args:
        codec: encodes the queries once.
        queries: asked in order, again and again.
    """

    def __init__(self, codec: Codec, queries: Sequence[QueryEmbedding]) -> None:
        self._templates = []
        for query in queries:
            before, _, after = codec.encode_query(query).partition(str(query.event_id).encode())
            self._templates.append((before, after))

    def __call__(self, number: int) -> tuple[bytes, bytes]:
        """Key and value of a new event from the query with a number, modulo their count."""
        before, after = self._templates[number % len(self._templates)]
        event_id = str(uuid4()).encode()
        return event_id, before + event_id + after


async def load(world: World, dsn: str) -> float:
    """Write a world into a migrated, empty store; returns the seconds that building the vector index took.

    Args:
        world: what to write.
        dsn: of a superuser or the owner.
    """
    return await fill(
        dsn,
        documents=(
            (
                document_id,
                world.session_ids[world.sessions[number]],
                f"Document {number}",
                f"https://example.org/{number}",
                "paper",
                json.dumps({"number": number}),
            )
            for number, document_id in enumerate(world.document_ids)
        ),
        readers=((id_, world.readers(number)) for number, id_ in enumerate(world.document_ids)),
        chunk_columns=_CHUNK_COLUMNS,
        chunks=(_chunk(world, number) for number in range(world.size)),
    )


async def fill(
    dsn: str,
    *,
    documents: Iterable[Sequence[Any]],
    readers: Iterable[tuple[UUID, Iterable[str]]],
    chunk_columns: Sequence[str],
    chunks: Iterable[Sequence[Any]],
) -> float:
    """Write rows into a migrated, empty store; returns the seconds that building the vector index took.

    Args:
        dsn: of a superuser or the owner.
        documents: id, session, title, URL, type and metadata of each.
        readers: the principals that may read each document.
        chunk_columns: the columns that `chunks` has.
        chunks: after the documents; read once, so that a generator saves memory.
    """
    connection = await asyncpg.connect(dsn)
    try:
        await register_vector(connection)
        # Loaded first, indexed afterwards, as one loads a store; with the definition of the migration.
        hnsw = await connection.fetchval(
            "SELECT pg_get_indexdef('document_chunks_embedding_halfvec'::regclass)"
        )
        await connection.execute("DROP INDEX document_chunks_embedding_halfvec")
        await connection.copy_records_to_table("documents", columns=_DOCUMENT_COLUMNS, records=documents)
        await connection.copy_records_to_table(
            "document_grants",
            columns=["document_id", "principal"],
            records=((document_id, reader) for document_id, each in readers for reader in each),
        )
        await connection.copy_records_to_table("document_chunks", columns=chunk_columns, records=chunks)
        await connection.execute("SET maintenance_work_mem = '1GB'")
        began = perf_counter()
        await connection.execute(hnsw)
        seconds = perf_counter() - began
        await connection.execute("VACUUM ANALYZE")
    finally:
        await connection.close()
    return seconds


def _chunk(world: World, number: int) -> tuple[Any, ...]:
    session, topic = world.session_of_chunk[number], world.topics[number]
    text = world.base.texts[world.origins[number]]
    return (
        world.chunk_ids[number],
        world.document_ids[number // CHUNKS_PER_DOCUMENT],
        world.session_ids[session],
        [] if topic < 0 else [world.topic_ids[session][topic]],
        "theory",
        number % CHUNKS_PER_DOCUMENT,
        text,
        len(text) // 4,  # about a token each; the counts only have to be stored
        world.vectors[number],
    )


def _ids(rng: np.random.Generator, count: int) -> list[UUID]:
    return [UUID(bytes=rng.bytes(16), version=4) for _ in range(count)]


def noisy(vectors: Vectors, length: float, rng: np.random.Generator) -> Vectors:
    """The vectors with random noise of a length, divided by their lengths again."""
    noise = rng.standard_normal(vectors.shape, dtype=np.float32)
    return unit(vectors + noise * np.float32(length / np.sqrt(vectors.shape[1])))


def unit(vectors: npt.NDArray[Any]) -> Vectors:
    """The vectors divided by their lengths."""
    divided: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return divided
