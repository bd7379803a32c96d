"""Retrieval: one query fans out into its arms, and they rejoin as one result.

What may live here: which searches are made, that they run in parallel, when to search further. Not: SQL, Kafka, Avro,
metrics; it returns facts and durations. `Store` and `Tokenizer` are the two ports it needs.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol
from uuid import UUID

import numpy as np
import numpy.typing as npt

from streams.core.messages import (
    DIMENSIONS,
    Filters,
    Passage,
    QueryEmbedding,
    RetrievalResult,
    result_id,
)
from streams.core.profiles import RetrievalParams
from streams.core.selection import (
    Arm,
    Candidate,
    Pick,
    Scope,
    Selection,
    order_by_similarity,
    rank_candidates,
    select,
)

__all__ = [
    "ArmResult",
    "Retrieved",
    "Search",
    "Store",
    "StoredPassage",
    "Tokenizer",
    "retrieve",
    "unit_vector",
]

# Growing the limit by this factor reaches a parent's fifty children on top in two more rounds.
_GROWTH = 4
# Beyond this many candidates in one arm an honest warning beats another search.
_MAX_CANDIDATES = 10_000

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Search:
    """One arm's question to the store.

    Attributes:
        vector: the query's direction, shape (768,), unit length.
        principals: who asks.
        session_id: the session to search in; None: all that the asker may read.
        topic_id: the topic to search in (the local arm); None: the whole session.
        filters: ANDed conditions; None: none.
        expand_parents: whether problems are to name the parents that replace them.
        limit: most rows to return.
    """

    vector: Vector
    principals: Sequence[str]
    session_id: UUID | None
    topic_id: UUID | None
    filters: Filters | None
    expand_parents: bool
    limit: int


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm's answer.

    Attributes:
        candidates: at most ``limit``.
        complete: the scope has no further row.
        truncated: the index gave up, and the scope is too large to search exactly; what it had found by then came back.
    """

    candidates: Sequence[Candidate]
    complete: bool
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A chunk's text and surroundings, as the store has them.

    Attributes:
        invalid: an optional column was malformed and has become null.
    """

    chunk_id: UUID
    document_id: UUID
    text_content: str
    token_count: int | None
    page: int | None
    section: str | None
    chunk_position: int | None
    coordinates: Mapping[str, float] | None
    title: str | None
    source_url: str | None
    file_description: str | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    invalid: bool = False


class Store(Protocol):
    """Where chunks are. Raises only TransientError subclasses, or what nobody foresaw."""

    async def search(self, search: Search) -> ArmResult: ...

    async def passages(
        self, principals: Sequence[str], chunk_ids: Sequence[UUID]
    ) -> Mapping[UUID, StoredPassage]: ...


Tokenizer = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A result, and how long its parts took, in seconds."""

    result: RetrievalResult
    search_seconds: float
    assemble_seconds: float
    arm_seconds: Mapping[Scope, float]


def unit_vector(embedding: Sequence[float]) -> Vector:
    """The embedding's direction: normalized in float64, shape (768,), float32.

    pgvector sums squares in float32, where vectors scaled by 1e-25 or 1e20 under- or overflow. The largest component
    is divided out first, so that no square under- or overflows in float64 either.
    """
    vector = np.asarray(embedding, dtype=np.float64)
    vector = vector / np.abs(vector).max()
    unit: Vector = (vector / np.linalg.norm(vector)).astype(np.float32)
    return unit


async def retrieve(
    query: QueryEmbedding, rules: RetrievalParams, store: Store, count_tokens: Tokenizer, *, started: float
) -> Retrieved:
    """Answer one query.

    Args:
        query: the event.
        rules: its profile and its own wishes, combined.
        store: where to search.
        count_tokens: tokens of a text.
        started: `perf_counter()` when the event was read; ``query_time_ms`` counts from there.
    """
    clock = _Clock()
    fan_out = _FanOut(query, rules, store)
    texts = _Texts(query.principals, store, count_tokens)
    skipping = rules.token_budget is not None and rules.profile.overflow == "skip"
    while True:
        with clock.searching:
            await fan_out.search()
        # Whose text must be known: under `skip` the budget may reach any candidate, else none beyond the first k.
        arms = _without_parents(fan_out.arms, texts.gone)
        reachable = select(arms, k=rules.k, missing_ids=texts.gone)
        if skipping:
            wanted = {candidate.passage_id for arm in arms.values() for candidate in arm.candidates}
        elif reachable.starved:
            fan_out.widen(reachable.starved)
            continue
        else:
            wanted = {pick.candidate.passage_id for pick in reachable.picks}
        with clock.searching:
            lost = await texts.fetch(wanted)
        if lost:
            continue  # others take their places, which may be beyond what was looked at
        with clock.assembling:
            selection = select(
                arms,
                k=rules.k,
                token_budget=rules.token_budget,
                overflow=rules.profile.overflow,
                cost=texts.tokens,
                missing_ids=texts.gone,
            )
        if not selection.starved:
            break
        fan_out.widen(selection.starved)
    with clock.assembling:
        result = _result(query, rules, selection, texts, truncated=fan_out.truncated, started=started)
    return Retrieved(result, clock.searching.seconds, clock.assembling.seconds, dict(fan_out.arm_seconds))


def _without_parents(arms: Mapping[Scope, Arm], gone: Collection[UUID]) -> Mapping[Scope, Arm]:
    """The arms as if parents that are gone by now had been missing when they were looked for."""
    if not gone:
        return arms
    return {
        scope: Arm(
            [
                replace(candidate, parent_id=None, parent_missing=True)
                if candidate.parent_id in gone
                else candidate
                for candidate in arm.candidates
            ],
            complete=arm.complete,
        )
        for scope, arm in arms.items()
    }


class _Stopwatch:
    """Adds up the time spent inside it, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._since


class _Clock:
    def __init__(self) -> None:
        self.searching = _Stopwatch()
        self.assembling = _Stopwatch()


class _Texts:
    """The texts of the passages that a selection may reach, fetched once each.

    Attributes:
        gone: passages that were deleted, or revoked from the asker, since they were found.
    """

    def __init__(self, principals: Sequence[str], store: Store, count_tokens: Tokenizer) -> None:
        self._principals = principals
        self._store = store
        self._count_tokens = count_tokens
        self._passages: dict[UUID, StoredPassage] = {}
        self._tokens: dict[tuple[UUID, bool], int] = {}
        self.gone: set[UUID] = set()

    async def fetch(self, chunk_ids: Collection[UUID]) -> bool:
        """Fetch those that are not here yet; True where one of them is gone."""
        missing = [
            chunk_id for chunk_id in chunk_ids if chunk_id not in self._passages and chunk_id not in self.gone
        ]
        if not missing:
            return False
        self._passages.update(await self._store.passages(self._principals, missing))
        lost = {chunk_id for chunk_id in missing if chunk_id not in self._passages}
        self.gone |= lost
        return bool(lost)

    def passage(self, candidate: Candidate) -> StoredPassage:
        return self._passages[candidate.passage_id]

    def header(self, candidate: Candidate) -> str | None:
        """An expanded parent's text brings its own header."""
        if candidate.parent_id is not None:
            return None
        description = self.passage(candidate).file_description
        return None if description is None else f"[Source: {description}]"

    def tokens(self, candidate: Candidate) -> int:
        """Tokens of header and text; the stored count of the text's where there is one."""
        key = (candidate.passage_id, candidate.parent_id is not None)
        if key not in self._tokens:
            passage, header = self.passage(candidate), self.header(candidate)
            text = (
                self._count_tokens(passage.text_content)
                if passage.token_count is None
                else passage.token_count
            )
            self._tokens[key] = text if header is None else text + self._count_tokens(header + "\n")
        return self._tokens[key]


class _FanOut:
    """The arms of one query, searched in parallel, each as far as needed."""

    def __init__(self, query: QueryEmbedding, rules: RetrievalParams, store: Store) -> None:
        self._query = query
        self._store = store
        self._expand = rules.profile.expand_parents
        self._threshold = rules.similarity_threshold
        self._vector = unit_vector(query.embedding)
        scopes: tuple[Scope, ...] = ("global",) if query.topic_id is None else ("local", "global")
        # The global arm repeats what the local one took, and children share parents: ask for more at once than k.
        limit = rules.k * len(scopes) * (3 if self._expand else 1)
        self._limits: dict[Scope, int] = dict.fromkeys(scopes, limit)
        self._stale = set(scopes)
        self.arms: dict[Scope, Arm] = {}
        self.arm_seconds: dict[Scope, float] = {}
        self.truncated = False

    async def search(self) -> None:
        """Search every arm whose limit has changed since it was last searched."""
        scopes, self._stale = sorted(self._stale), set()
        if len(scopes) == 1:
            await self._search_arm(scopes[0])
        elif scopes:
            try:
                async with asyncio.TaskGroup() as group:
                    for scope in scopes:
                        group.create_task(self._search_arm(scope))
            except BaseExceptionGroup as both:
                # One arm's failure cancels the other; which of two failures is told makes no difference.
                raise both.exceptions[0] from None

    def widen(self, scopes: frozenset[Scope]) -> None:
        """Ask these arms for more next time, up to where a warning is more honest than another search."""
        for scope in scopes:
            if self._limits[scope] >= _MAX_CANDIDATES:
                self.arms[scope] = Arm(self.arms[scope].candidates, complete=True)
                self.truncated = True
            else:
                self._limits[scope] = min(self._limits[scope] * _GROWTH, _MAX_CANDIDATES)
                self._stale.add(scope)

    async def _search_arm(self, scope: Scope) -> None:
        clock = perf_counter()
        query = self._query
        found = await self._store.search(
            Search(
                vector=self._vector,
                principals=query.principals,
                session_id=query.session_id,
                topic_id=query.topic_id if scope == "local" else None,
                filters=query.filters,
                expand_parents=self._expand,
                limit=self._limits[scope],
            )
        )
        self.truncated = self.truncated or found.truncated
        self.arms[scope] = rank_candidates(
            found.candidates,
            # With as many as asked for, a wider search may still find more.
            complete=found.complete or (found.truncated and len(found.candidates) < self._limits[scope]),
            similarity_threshold=self._threshold,
        )
        self.arm_seconds[scope] = self.arm_seconds.get(scope, 0.0) + perf_counter() - clock


def _result(
    query: QueryEmbedding,
    rules: RetrievalParams,
    selection: Selection,
    texts: _Texts,
    *,
    truncated: bool,
    started: float,
) -> RetrievalResult:
    picks = order_by_similarity(selection.picks) if rules.profile.order == "similarity" else selection.picks
    warnings = {
        "k_clamped": rules.k_clamped,
        "first_passage_exceeds_budget": selection.first_exceeds_budget,
        "parent_missing": any(pick.candidate.parent_missing for pick in picks),
        "scan_truncated": truncated,
        "store_value_invalid": any(texts.passage(pick.candidate).invalid for pick in picks),
    }
    return RetrievalResult(
        schema_version=query.schema_version,
        result_id=result_id(query.event_id),
        event_id=query.event_id,
        query_hash=query.query_hash,
        embedding_model=query.embedding_model,
        profile=rules.name,
        session_id=query.session_id,
        topic_id=query.topic_id,
        query_embedding_dimensions=DIMENSIONS,
        k_requested=rules.k_requested,
        k_effective=rules.k,
        k_returned=len(picks),
        score_type="cosine_similarity",
        similarity_threshold=rules.similarity_threshold,
        token_budget=rules.token_budget,
        tokens_used=selection.tokens_used,
        query_time_ms=(perf_counter() - started) * 1000,
        warnings=tuple(code for code, holds in warnings.items() if holds),
        results=tuple(_passage(rank, pick, texts) for rank, pick in enumerate(picks, start=1)),
    )


def _passage(rank: int, pick: Pick, texts: _Texts) -> Passage:
    stored = texts.passage(pick.candidate)
    return Passage(
        rank=rank,
        chunk_id=stored.chunk_id,
        document_id=stored.document_id,
        matched_chunk_id=pick.candidate.chunk_id,
        scope=pick.scope,
        score=pick.candidate.score,
        text_content=stored.text_content,
        header=texts.header(pick.candidate),
        token_count=texts.tokens(pick.candidate),
        page=stored.page,
        section=stored.section,
        coordinates=None if stored.coordinates is None else dict(stored.coordinates),
        title=stored.title,
        source_url=stored.source_url,
        chunk_position=stored.chunk_position,
        metadata=dict(stored.metadata),
    )
