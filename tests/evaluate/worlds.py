"""Fifty thousand chunks, grown from a small collection's vectors with noise, and labelled twice.

In the uncorrelated world what a row is labelled with says nothing about what it is about. In the correlated one rows
are labelled along their likeness to one chunk, as sessions, departments and years are in life: a filter then keeps one
region, and a query either leans towards it or away from it, which is where an approximate index starves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from json import dumps
from typing import Any, Final
from uuid import NAMESPACE_URL, UUID, uuid5

import numpy as np
import numpy.typing as npt

from benchmarks import CRANFIELD
from streams.bench.world import CHUNKS_PER_DOCUMENT, fill, noisy, unit
from streams.bench.world import base as collection
from streams.core.messages import Filters, MetadataRange
from tests.conftest import Database

__all__ = [
    "CRANFIELD",
    "EVERYBODY",
    "SHARES",
    "SIZE",
    "Base",
    "Cell",
    "World",
    "base",
    "day_bound",
    "grow",
    "kinds",
    "load",
    "rank_bound",
]

SIZE: Final = 50_000
SHARES: Final[Mapping[str, float]] = {"50": 0.5, "10": 0.1, "1": 0.01, "0.1": 0.001}
# A principal who is in every set.
EVERYBODY: Final = "group:everybody"
# Half the documents of the uncorrelated world have a reader of their own, and so a set of their own.
FEW, MANY = "group:few", "group:many"

_NOISE: Final = 0.6
_FIRST_DAY: Final = datetime(2000, 1, 1, tzinfo=UTC)
_LONG_AS_A_PASSAGE: Final = "The boundary layer thickens downstream of the leading edge. " * 12
_CHUNK_COLUMNS: Final = (
    "id", "document_id", "session_id", "related_topic_ids", "chunk_type", "chunk_position", "text_content", "section",
    "embedding",
)  # fmt: skip

Vectors = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Base:
    """A small collection's vectors, and queries to it; unit length."""

    name: str
    vectors: Vectors
    queries: Vectors


@dataclass(frozen=True)
class Cell:
    """One filter that keeps one share of the rows.

    Attributes:
        by: what is filtered by.
        keeps: which share, in percent, as a label.
        kept: whether each chunk is in.
        fields: what the search says, over the defaults.
        condition: the same rows in plain SQL over ``c`` and ``d``, with ``$2`` for `argument`.
        argument: None where there is no condition.
    """

    by: str
    keeps: str
    kept: Mask
    fields: Mapping[str, Any]
    condition: str = "true"
    argument: Any = None


@dataclass(frozen=True)
class World:
    """Chunk i belongs to document i // 10."""

    correlated: bool
    vectors: Vectors
    queries: Vectors
    chunk_ids: Sequence[UUID]
    document_ids: Sequence[UUID]
    # of each document
    sessions: npt.NDArray[np.object_]
    document_types: npt.NDArray[np.object_]
    prefixes: npt.NDArray[np.object_]
    classes: npt.NDArray[np.object_]
    groups: npt.NDArray[np.object_]
    tags: npt.NDArray[np.object_]
    kinds: npt.NDArray[np.object_]
    ranks: npt.NDArray[np.intp]
    days: npt.NDArray[np.intp]
    # of each chunk
    sections: npt.NDArray[np.object_]
    topics: Mapping[str, Mask] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "correlated" if self.correlated else "uncorrelated"

    @cached_property
    def numbers(self) -> Mapping[UUID, int]:
        """Which chunk an id belongs to."""
        return {chunk_id: number for number, chunk_id in enumerate(self.chunk_ids)}

    @cached_property
    def whole(self) -> Cell:
        """No filter at all."""
        return Cell("nothing", "100", np.ones(SIZE, bool), {})

    def cells(self) -> Iterator[Cell]:
        """Each filter, at each share."""
        for keeps in SHARES:
            yield from (self.cell(by, keeps) for by in _FILTERS)

    def cell(self, by: str, keeps: str) -> Cell:
        return _FILTERS[by](self, by, keeps)

    def readers(self, document: int) -> list[str]:
        """Who may read a document."""
        readers = [EVERYBODY, f"group:{self.groups[document]}"]
        if self.correlated:
            return readers
        return [*readers, FEW] if document % 2 else [*readers, MANY, f"user:{document}"]

    def callers(self) -> Iterator[Cell]:
        """Callers of half the rows each: through five sets, and through 2,500."""
        if self.correlated:
            return
        documents = np.arange(len(self.document_ids))
        for principal, odd in ((FEW, 1), (MANY, 0)):
            kept = _of_chunks(documents % 2 == odd)
            sets = 5 if principal == FEW else len(self.document_ids) // 2
            yield Cell(
                f"a caller of {sets:,} sets", "50", kept, {"principals": [principal]}, _READABLE, [principal]
            )


def session_id(label: str) -> UUID:
    return uuid5(NAMESPACE_URL, f"session:{label}")


def topic_id(label: str) -> UUID:
    return uuid5(NAMESPACE_URL, f"topic:{label}")


def prefix(label: str) -> str:
    return f"https://example.org/{label}/"


def kinds(label: str) -> tuple[str, ...]:
    """The values that stand for one label."""
    return tuple(f"{label}-{letter}" for letter in "abc")


def rank_bound(label: str) -> float:
    """The documents of lesser rank are that share of all."""
    return SHARES[label] * SIZE / CHUNKS_PER_DOCUMENT


def day_bound(label: str) -> datetime:
    """The documents of earlier days are that share of all."""
    return _FIRST_DAY + timedelta(days=rank_bound(label))


# The owner sees every row, so plain SQL states which of them the caller may read.
_READABLE: Final = "c.access_set_id = ANY (ARRAY(SELECT id FROM access_sets WHERE principals && $2::text[]))"


def _of_chunks(of_documents: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.repeat(of_documents, CHUNKS_PER_DOCUMENT)


def _by_session(world: World, by: str, keeps: str) -> Cell:
    session = session_id(keeps)
    kept = _of_chunks(world.sessions == keeps)
    return Cell(by, keeps, kept, {"session_id": session}, "c.session_id = $2", session)


def _by_topic(world: World, by: str, keeps: str) -> Cell:
    fields = {"session_id": session_id("50"), "topic_id": topic_id(keeps)}
    condition = "c.related_topic_ids @> ARRAY[$2::uuid]"
    return Cell(by, keeps, world.topics[keeps], fields, condition, topic_id(keeps))


def _by_section(world: World, by: str, keeps: str) -> Cell:
    fields = {"filters": Filters(section=keeps)}
    return Cell(by, keeps, world.sections == keeps, fields, "c.section = $2", keeps)


def _by_type(world: World, by: str, keeps: str) -> Cell:
    kept = _of_chunks(world.document_types == keeps)
    fields = {"filters": Filters(document_type=keeps)}
    return Cell(by, keeps, kept, fields, "d.document_type = $2", keeps)


def _by_prefix(world: World, by: str, keeps: str) -> Cell:
    kept = _of_chunks(world.prefixes == keeps)
    fields = {"filters": Filters(source_url_prefix=prefix(keeps))}
    return Cell(by, keeps, kept, fields, "d.source_url ^@ $2", prefix(keeps))


def _by_metadata(world: World, by: str, keeps: str) -> Cell:
    kept = _of_chunks(world.classes == keeps)
    wanted = {"class": keeps}
    return Cell(
        by, keeps, kept, {"filters": Filters(metadata=wanted)}, "d.metadata @> $2::jsonb", dumps(wanted)
    )


def _by_contains(world: World, by: str, keeps: str) -> Cell:
    kept = _of_chunks(world.tags == keeps)
    fields = {"filters": Filters(metadata_contains={"tags": (keeps,)})}
    return Cell(by, keeps, kept, fields, "d.metadata @> $2::jsonb", dumps({"tags": [keeps]}))


def _by_any(world: World, by: str, keeps: str) -> Cell:
    kept = _of_chunks(world.kinds == keeps)
    fields = {"filters": Filters(metadata_any={"kind": kinds(keeps)})}
    return Cell(by, keeps, kept, fields, "d.metadata ->> 'kind' = ANY ($2::text[])", kinds(keeps))


def _by_numbers(world: World, by: str, keeps: str) -> Cell:
    bound = rank_bound(keeps)
    fields = {"filters": Filters(metadata_range={"rank": MetadataRange(lt=bound)})}
    condition = "(d.metadata ->> 'rank')::float8 < $2::float8"
    return Cell(by, keeps, _of_chunks(world.ranks < bound), fields, condition, bound)


def _by_dates(world: World, by: str, keeps: str) -> Cell:
    bound = day_bound(keeps)
    fields = {"filters": Filters(metadata_range={"day": MetadataRange(before=bound)})}
    kept = _of_chunks(world.days < rank_bound(keeps))
    return Cell(by, keeps, kept, fields, "(d.metadata ->> 'day')::timestamptz < $2::timestamptz", bound)


def _by_grants(world: World, by: str, keeps: str) -> Cell:
    caller = [f"group:{keeps}"]
    return Cell(by, keeps, _of_chunks(world.groups == keeps), {"principals": caller}, _READABLE, caller)


_FILTERS: Final = {
    "session": _by_session,
    "topic": _by_topic,
    "section": _by_section,
    "document type": _by_type,
    "URL prefix": _by_prefix,
    "metadata": _by_metadata,
    "metadata_contains": _by_contains,
    "metadata_any": _by_any,
    "range of numbers": _by_numbers,
    "range of dates": _by_dates,
    "grants": _by_grants,
}


def base(seed: int) -> Base:
    """Cranfield's real vectors where they are; elsewhere clusters that are made up."""
    if CRANFIELD.is_dir():
        found = collection(CRANFIELD)
        return Base(
            "Cranfield (1,686 chunks and 225 queries, all-mpnet-base-v2)", found.vectors, found.queries
        )
    rng = np.random.default_rng(seed)
    centres = unit(rng.normal(size=(60, 768)) + 3 * rng.normal(size=(1, 768)))

    def around(count: int) -> Vectors:
        return noisy(centres[rng.integers(0, len(centres), count)], 0.7, rng)

    return Base("made-up clusters: Cranfield is not beside the checkout", around(1700), around(225))


def grow(of: Base, seed: int, *, correlated: bool) -> World:
    """A world; the same for the same seed."""
    rng = np.random.default_rng([seed, int(correlated)])
    origin = rng.integers(0, len(of.vectors), SIZE)
    vectors = noisy(of.vectors[origin], _NOISE, rng)
    documents = SIZE // CHUNKS_PER_DOCUMENT
    if correlated:
        vectors = vectors[np.argsort(-(vectors @ of.vectors[7]), kind="stable")]

    def order(count: int) -> npt.NDArray[np.intp]:
        return np.arange(count) if correlated else rng.permutation(count)

    def labels(count: int) -> npt.NDArray[np.object_]:
        return _labels(order(count))

    sessions = labels(documents)
    # Topics are shares of the store within the largest session; each lies in the one before it.
    members = np.flatnonzero(_of_chunks(sessions == "50"))
    members = members if correlated else rng.permutation(members)
    topics = {}
    for keeps, share in SHARES.items():
        topics[keeps] = np.zeros(SIZE, bool)
        topics[keeps][members[: round(share * SIZE)]] = True
    return World(
        correlated=correlated,
        vectors=vectors,
        queries=of.queries,
        chunk_ids=[UUID(bytes=rng.bytes(16), version=4) for _ in range(SIZE)],
        document_ids=[UUID(bytes=rng.bytes(16), version=4) for _ in range(documents)],
        sessions=sessions,
        document_types=labels(documents),
        prefixes=labels(documents),
        classes=labels(documents),
        groups=labels(documents),
        sections=labels(SIZE),
        topics=topics,
        tags=labels(documents),
        kinds=labels(documents),
        ranks=order(documents),
        days=order(documents),
    )


async def load(world: World, database: Database) -> None:
    """Write a world into a migrated database."""
    sessions = [session_id(label) for label in world.sessions]
    await fill(
        database.admin,
        documents=(
            (
                document_id,
                sessions[number],
                f"Document {number}",
                f"{prefix(world.prefixes[number])}{number}",
                world.document_types[number],
                dumps(
                    {
                        "class": world.classes[number],
                        "number": number,
                        "tags": [world.tags[number], "of all"],
                        "kind": kinds(world.kinds[number])[number % 3],
                        "rank": int(world.ranks[number]),
                        "day": f"{_FIRST_DAY + timedelta(days=int(world.days[number])):%Y-%m-%d}",
                    }
                ),
            )
            for number, document_id in enumerate(world.document_ids)
        ),
        readers=((id_, world.readers(number)) for number, id_ in enumerate(world.document_ids)),
        chunk_columns=_CHUNK_COLUMNS,
        chunks=(
            (
                chunk_id,
                world.document_ids[number // CHUNKS_PER_DOCUMENT],
                sessions[number // CHUNKS_PER_DOCUMENT],
                [topic_id(keeps) for keeps, mask in world.topics.items() if mask[number]],
                "theory",
                number % CHUNKS_PER_DOCUMENT,
                f"{number}. {_LONG_AS_A_PASSAGE}",
                world.sections[number],
                world.vectors[number],
            )
            for number, chunk_id in enumerate(world.chunk_ids)
        ),
    )


def _labels(order: npt.NDArray[np.intp]) -> npt.NDArray[np.object_]:
    """Each share's label, along an order; what is left over is labelled as the rest."""
    labels = np.full(len(order), "rest", object)
    first = 0
    for label, share in SHARES.items():
        end = first + round(share * len(order))
        labels[order[first:end]] = label
        first = end
    return labels
