"""Retrieval: splits a query into its arms and merges their results into one.

Belongs here: which searches are made, running them in parallel, when to search further. Does not belong here: SQL,
Kafka, Avro, metrics; this module returns facts and durations. `Store` and `Tokenizer` are the two ports it needs.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol
from uuid import UUID

import numpy as np
import numpy.typing as npt

from streams.core.messages import (
    CONTRACT_VERSIONS,
    ArmExplanation,
    Explanation,
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
    count_outcomes,
    order_by_similarity,
    rank_candidates,
    select,
)
from streams.core.warning_codes import WarningCode

__all__ = [
    "ArmResult",
    "Retrieved",
    "Search",
    "Store",
    "StoredPassage",
    "StoredSize",
    "Tokenizer",
    "retrieve",
    "unit_vector",
]

# Growing the limit by this factor handles a parent whose fifty children rank first in two more rounds.
_GROWTH = 4
# Beyond this many candidates in one arm, return a warning instead of searching again.
_MAX_CANDIDATES = 10_000
# The same for candidates skipped because of the token budget, and how fast to grow to this limit.
_MAX_PASSED_OVER = 1000
_LOOK_AHEAD_GROWTH = 8
# For cl100k_base: a text with more bytes than this times the budget cannot fit.
_LONGEST_TOKEN_BYTES = 128
# A text of this many characters takes some milliseconds to count; longer ones are counted in a thread.
_LONG_TEXT = 8 * 1024

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Search:
    """One arm's search request to the store.

    Attributes:
        vector: the query's direction, shape (dimensions,), unit length.
        principals: the requesting principals.
        session_id: the session to search in; None: everything that the principals may read.
        topic_id: the topic to search in (the local arm); None: the whole session.
        filters: ANDed conditions; None: no conditions.
        expand_parents: whether to return the parents that replace problems.
        limit: maximum number of rows to return.
        with_passages: whether to return the content of the rows; not with ``expand_parents``.
    """

    vector: Vector
    principals: Sequence[str]
    session_id: UUID | None
    topic_id: UUID | None
    filters: Filters | None
    expand_parents: bool
    limit: int
    with_passages: bool = False


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm's result.

    Attributes:
        candidates: at most ``limit``, in order of (distance, id); in any order with ``passages``.
        complete: the scope has no more rows.
        truncated: the index scan reached its limit, and the scope is too large to search exactly; the candidates are
            those found until then.
        exact: all rows of the scope were compared; otherwise, the vector index found the candidates.
        passages: the content of the candidates, if the search asked for it.
    """

    candidates: Sequence[Candidate]
    complete: bool
    truncated: bool = False
    exact: bool = True
    passages: Mapping[UUID, "StoredPassage"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A chunk's text and metadata, as stored.

    Attributes:
        invalid: an optional column was malformed and has been replaced by null.
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


@dataclass(frozen=True, slots=True)
class StoredSize:
    """The size of a passage, available without reading its text.

    Attributes:
        token_count: stored token count of the text; None if it is missing or invalid.
        text_bytes: size of the text in UTF-8, or less.
    """

    token_count: int | None
    text_bytes: int
    file_description: str | None

    @property
    def header(self) -> str | None:
        return None if self.file_description is None else f"[Source: {self.file_description}]"


class Store(Protocol):
    """The store of the chunks. Raises only TransientError subclasses or unexpected exceptions."""

    async def search(self, search: Search) -> ArmResult: ...

    async def sizes(
        self, principals: Sequence[str], chunk_ids: Sequence[UUID]
    ) -> Mapping[UUID, StoredSize]: ...

    async def passages(
        self, principals: Sequence[str], chunk_ids: Sequence[UUID]
    ) -> Mapping[UUID, StoredPassage]: ...


Tokenizer = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A result, and the durations of its parts in seconds.

    Attributes:
        result: what is published.
        search_seconds: duration of the searches, which run in parallel, and of loading texts.
        assemble_seconds: duration of the selection.
        arm_seconds: each arm's searches.
        searches: each arm's last search, and what it returned.
    """

    result: RetrievalResult
    search_seconds: float
    assemble_seconds: float
    arm_seconds: Mapping[Scope, float]
    searches: Mapping[Scope, tuple[Search, ArmResult]]


def unit_vector(embedding: Sequence[float]) -> Vector:
    """The embedding's direction: normalized in float64, shape (dimensions,), float32.

    pgvector sums squares in float32, which underflows or overflows for vectors scaled by 1e-25 or 1e20. All components
    are first divided by the largest, so that squares do not underflow or overflow in float64 either.
    """
    vector = np.asarray(embedding, dtype=np.float64)
    vector = vector / np.abs(vector).max()
    unit: Vector = (vector / math.sqrt(vector.dot(vector))).astype(np.float32)
    return unit


async def retrieve(
    query: QueryEmbedding,
    params: RetrievalParams,
    store: Store,
    count_tokens: Tokenizer,
    *,
    started: float,
    on_stage: Callable[[str], None] = lambda _: None,
    contract: str = CONTRACT_VERSIONS[0],
) -> Retrieved:
    """Answer one query.

    Args:
        query: the event.
        params: its profile with its overrides applied.
        store: where to search.
        count_tokens: counts the tokens of a text.
        started: `perf_counter()` when the event was read; ``query_time_ms`` starts there.
        on_stage: called at the start of each stage: ``search`` or ``assemble``.
        contract: minor version of the result's contract.
    """
    timers = _StageTimers(on_stage)
    texts = _Texts(query.principals, store, count_tokens, budget=params.token_budget)
    fan_out = _FanOut(query, params, store, on_passages=texts.add)
    skipping = params.token_budget is not None and params.profile.overflow == "skip"
    batch = 2 * params.k
    while True:
        with timers.searching:
            await fan_out.search()
        arms = _without_missing_parents(fan_out.arms, texts.missing_ids)
        reachable = select(arms, k=params.k, missing_ids=texts.missing_ids)
        if reachable.starved:
            fan_out.widen(reachable.starved)
            continue
        # Sizes to load: with `skip`, the selection may reach any candidate, else only the first k.
        with timers.searching:
            any_missing = await (
                texts.measure({candidate.passage_id for arm in arms.values() for candidate in arm.candidates})
                if skipping
                else texts.fetch([pick.candidate.passage_id for pick in reachable.picks])
            )
        if any_missing:
            continue  # other candidates replace them, whose sizes may not be loaded yet
        with timers.assembling:
            await texts.count()
            selection = select(
                arms,
                k=params.k,
                token_budget=params.token_budget,
                overflow=params.profile.overflow,
                cost=texts.cost,
                missing_ids=texts.missing_ids,
            )
        if uncounted := texts.uncounted():
            # Only the texts show whether they fit. Load the nearest first: the others may not be needed.
            with timers.searching:
                await texts.fetch(uncounted[:batch])
            batch *= 2
            continue
        if selection.starved:
            fan_out.look_ahead()
            continue
        with timers.searching:
            any_missing = await texts.fetch([pick.candidate.passage_id for pick in selection.picks])
        if not any_missing:
            break
    with timers.assembling:
        # In 1.0.0, a result has no explanation.
        explains = bool(query.explain) and contract != CONTRACT_VERSIONS[0]
        result = _result(
            query,
            params,
            selection,
            texts,
            truncated=fan_out.truncated,
            started=started,
            contract=contract,
            explanation=_explanation(arms, selection) if explains else None,
        )
    return Retrieved(
        result, timers.searching.seconds, timers.assembling.seconds, fan_out.arm_seconds, fan_out.searches
    )


def _without_missing_parents(arms: Mapping[Scope, Arm], missing_ids: Collection[UUID]) -> Mapping[Scope, Arm]:
    """The arms as if parents deleted since the search had already been missing then."""
    if not missing_ids:
        return arms
    return {
        scope: replace(
            arm,
            candidates=[
                replace(candidate, parent_id=None, parent_missing=True)
                if candidate.parent_id in missing_ids
                else candidate
                for candidate in arm.candidates
            ],
        )
        for scope, arm in arms.items()
    }


class _Stopwatch:
    """Adds up the time spent inside it, in seconds."""

    def __init__(self, on_enter: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._since = 0.0
        self._on_enter = on_enter

    def __enter__(self) -> None:
        self._on_enter()
        self._since = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._since


class _StageTimers:
    def __init__(self, on_stage: Callable[[str], None]) -> None:
        self.searching = _Stopwatch(lambda: on_stage("search"))
        self.assembling = _Stopwatch(lambda: on_stage("assemble"))


class _Texts:
    """Token counts of the passages that a selection may reach, and the texts of the selected ones.

    Attributes:
        missing_ids: passages that were deleted, or became unreadable, after the search found them.
    """

    def __init__(
        self, principals: Sequence[str], store: Store, count_tokens: Tokenizer, *, budget: int | None
    ) -> None:
        self._principals = principals
        self._store = store
        self._count_tokens = count_tokens
        self._budget = budget
        self._sizes: dict[UUID, StoredSize] = {}
        self._passages: dict[UUID, StoredPassage] = {}
        self._tokens: dict[str | UUID, int] = {}
        """The token counts of passages' texts by id, and of headers."""
        self._uncounted: dict[UUID, None] = {}
        self.missing_ids: set[UUID] = set()

    async def measure(self, chunk_ids: Collection[UUID]) -> bool:
        """Load the sizes that are not known yet; return True if a passage is missing."""
        unread = [
            chunk_id
            for chunk_id in chunk_ids
            if chunk_id not in self._sizes and chunk_id not in self.missing_ids
        ]
        if not unread:
            return False
        sizes = await self._store.sizes(self._principals, unread)
        self._sizes.update(sizes)
        return self._record_missing(unread, sizes)

    async def fetch(self, chunk_ids: Sequence[UUID]) -> bool:
        """Load the texts that are not known yet; return True if a passage is missing."""
        unread = [
            chunk_id
            for chunk_id in chunk_ids
            if chunk_id not in self._passages and chunk_id not in self.missing_ids
        ]
        if not unread:
            return False
        passages = await self._store.passages(self._principals, unread)
        self.add(passages)
        return self._record_missing(unread, passages)

    def add(self, passages: Mapping[UUID, StoredPassage]) -> None:
        """Add texts that a search has returned."""
        self._passages.update(passages)
        for chunk_id, passage in passages.items():
            # A row may change between two reads: report the token count that the selection used.
            self._sizes.setdefault(
                chunk_id, StoredSize(passage.token_count, len(passage.text_content), passage.file_description)
            )

    def _record_missing(self, requested: Sequence[UUID], found: Collection[UUID]) -> bool:
        missing = {chunk_id for chunk_id in requested if chunk_id not in found}
        self.missing_ids |= missing
        return bool(missing)

    async def count(self) -> None:
        """Count the tokens of loaded texts without a stored count."""
        texts: dict[str | UUID, str] = {}
        for chunk_id, size in self._sizes.items():
            if chunk_id in self._tokens:
                continue
            if size.token_count is not None:
                self._tokens[chunk_id] = size.token_count
            elif chunk_id in self._passages:
                texts[chunk_id] = self._passages[chunk_id].text_content
        for size in self._sizes.values():
            if size.header is not None and size.header not in self._tokens:
                texts[size.header] = size.header + "\n"
        if sum(map(len, texts.values())) < _LONG_TEXT:
            counts = [self._count_tokens(text) for text in texts.values()]
        else:
            counts = await asyncio.to_thread(lambda: [self._count_tokens(text) for text in texts.values()])
        self._tokens.update(zip(texts, counts, strict=True))

    def uncounted(self) -> list[UUID]:
        """Passages for which `cost` was called but needs the text; in call order."""
        uncounted, self._uncounted = list(self._uncounted), {}
        return uncounted

    def passage(self, candidate: Candidate) -> StoredPassage:
        return self._passages[candidate.passage_id]

    def header(self, candidate: Candidate) -> str | None:
        """The passage's header; None for an expanded parent, whose text has its own header."""
        return None if candidate.parent_id is not None else self._sizes[candidate.passage_id].header

    def tokens(self, candidate: Candidate) -> int:
        """Tokens of header and text; uses the stored count of the text if there is one."""
        header = self.header(candidate)
        return self._tokens[candidate.passage_id] + (0 if header is None else self._tokens[header])

    def cost(self, candidate: Candidate) -> int:
        """Like `tokens`, but more than the budget if the text is not loaded, whether or not it would fit."""
        if candidate.passage_id in self._tokens:
            return self.tokens(candidate)
        budget = self._budget or 0
        if self._sizes[candidate.passage_id].text_bytes <= budget * _LONGEST_TOKEN_BYTES:
            self._uncounted[candidate.passage_id] = None
        return budget + 1


class _FanOut:
    """The arms of one query, searched in parallel, each as far as needed."""

    def __init__(
        self,
        query: QueryEmbedding,
        params: RetrievalParams,
        store: Store,
        *,
        on_passages: Callable[[Mapping[UUID, StoredPassage]], None],
    ) -> None:
        self._query = query
        self._on_passages = on_passages
        self._store = store
        self._expand = params.profile.expand_parents
        self._threshold = params.similarity_threshold
        self._vector = unit_vector(query.embedding)
        scopes: tuple[Scope, ...] = ("global",) if query.topic_id is None else ("local", "global")
        # The global arm returns the local arm's chunks again, and children share parents: request more than k at once.
        limit = params.k * len(scopes) * (3 if self._expand else 1)
        # Without another arm, parents or a budget, the selection is the first k: get their texts in the same call.
        self._with_passages = len(scopes) == 1 and not self._expand and params.token_budget is None
        self._limits: dict[Scope, int] = dict.fromkeys(scopes, limit)
        self._stale = set(scopes)
        self.arms: dict[Scope, Arm] = {}
        self.arm_seconds: dict[Scope, float] = {}
        self.searches: dict[Scope, tuple[Search, ArmResult]] = {}
        self.truncated = False

    async def search(self) -> None:
        """Search every arm whose limit has changed since its last search."""
        scopes, self._stale = sorted(self._stale), set()
        if len(scopes) == 1:
            await self._search_arm(scopes[0])
        elif scopes:
            try:
                async with asyncio.TaskGroup() as group:
                    for scope in scopes:
                        group.create_task(self._search_arm(scope))
            except BaseExceptionGroup as both:
                # One arm's failure cancels the other; if both fail, it does not matter which one is raised.
                raise both.exceptions[0] from None

    def widen(self, scopes: Collection[Scope]) -> None:
        """Request more from these arms next time, up to the limit at which a warning is returned instead."""
        self._widen(scopes, _GROWTH, _MAX_CANDIDATES)

    def look_ahead(self) -> None:
        """Request more from every arm that may have more, because the budget skipped the existing candidates."""
        scopes = [scope for scope, arm in self.arms.items() if not arm.complete]
        self._widen(scopes, _LOOK_AHEAD_GROWTH, _MAX_PASSED_OVER)

    def _widen(self, scopes: Collection[Scope], growth: int, maximum: int) -> None:
        for scope in scopes:
            if self._limits[scope] >= maximum:
                self.arms[scope] = replace(self.arms[scope], complete=True)
                self.truncated = True
            else:
                self._limits[scope] = min(self._limits[scope] * growth, maximum)
                self._stale.add(scope)

    async def _search_arm(self, scope: Scope) -> None:
        clock = perf_counter()
        query = self._query
        search = Search(
            vector=self._vector,
            principals=query.principals,
            session_id=query.session_id,
            topic_id=query.topic_id if scope == "local" else None,
            filters=query.filters,
            expand_parents=self._expand,
            limit=self._limits[scope],
            with_passages=self._with_passages,
        )
        result = await self._store.search(search)
        self.searches[scope] = search, result
        self._on_passages(result.passages)
        self.truncated = self.truncated or result.truncated
        self.arms[scope] = rank_candidates(
            result.candidates,
            # If the arm returned as many as requested, a larger search may find more.
            complete=result.complete or (result.truncated and len(result.candidates) < self._limits[scope]),
            similarity_threshold=self._threshold,
        )
        self.arm_seconds[scope] = self.arm_seconds.get(scope, 0.0) + perf_counter() - clock


def _result(
    query: QueryEmbedding,
    params: RetrievalParams,
    selection: Selection,
    texts: _Texts,
    *,
    truncated: bool,
    started: float,
    contract: str,
    explanation: Explanation | None,
) -> RetrievalResult:
    picks = order_by_similarity(selection.picks) if params.profile.order == "similarity" else selection.picks
    warnings = {
        WarningCode.K_CLAMPED: params.k_clamped,
        WarningCode.FIRST_PASSAGE_EXCEEDS_BUDGET: selection.first_exceeds_budget,
        WarningCode.PARENT_MISSING: any(pick.candidate.parent_missing for pick in picks),
        WarningCode.SCAN_TRUNCATED: truncated,
        WarningCode.STORE_VALUE_INVALID: any(texts.passage(pick.candidate).invalid for pick in picks),
        WarningCode.EXPLANATION_UNAVAILABLE: bool(query.explain) and explanation is None,
    }
    own = [code.value for code, holds in warnings.items() if holds]
    return RetrievalResult.of_canonical(
        schema_version=contract,
        result_id=result_id(query.event_id),
        event_id=query.event_id,
        query_hash=query.query_hash,
        embedding_model=query.embedding_model,
        profile=params.name,
        session_id=query.session_id,
        topic_id=query.topic_id,
        query_embedding_dimensions=len(query.embedding),
        k_requested=params.k_requested,
        k_effective=params.k,
        k_returned=len(picks),
        score_type="cosine_similarity",
        similarity_threshold=params.similarity_threshold,
        token_budget=params.token_budget,
        tokens_used=selection.tokens_used,
        query_time_ms=(perf_counter() - started) * 1000,
        warnings=tuple(dict.fromkeys([*own, *(query.upstream_warnings or ())])),
        results=tuple(_passage(rank, pick, texts) for rank, pick in enumerate(picks, start=1)),
        explanation=explanation,
    )


def _explanation(arms: Mapping[Scope, Arm], selection: Selection) -> Explanation:
    outcomes = count_outcomes(arms, selection)
    return Explanation.of_canonical(
        arms=tuple(
            ArmExplanation.of_canonical(scope=scope, **outcomes[scope])
            for scope in sorted(outcomes, reverse=True)  # local first
        )
    )


def _passage(rank: int, pick: Pick, texts: _Texts) -> Passage:
    stored = texts.passage(pick.candidate)
    score = pick.candidate.score
    if not -1 <= score <= 1:  # all else that the contract demands follows from the columns' types
        raise ValueError("the store returned a distance that is not in [0, 2]")
    return Passage.of_canonical(
        rank=rank,
        chunk_id=stored.chunk_id,
        document_id=stored.document_id,
        matched_chunk_id=pick.candidate.chunk_id,
        scope=pick.scope,
        score=score,
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
