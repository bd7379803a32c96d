"""Retrieval over a store that keeps the port's promises and no others.

The store here is a list of rows. It returns what was asked for and not more, says whether the scope has more as
PostgreSQL can tell it, and may lose a passage between the search and the fetch.
"""

import asyncio
import math
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.errors import SearchTimeout, StoreUnavailable
from streams.core.messages import QueryEmbedding, RetrievalResult, result_id
from streams.core.profiles import Profile, RetrievalParams
from streams.core.selection import Candidate, Scope, order_by_similarity, rank_candidates, select
from streams.retrieval import ArmResult, Retrieved, Search, StoredPassage, StoredSize, retrieve, unit_vector

SESSION = UUID(int=0xA)
TOPIC = UUID(int=0xB)
DOCUMENT = UUID(int=0xC)
EVENT: dict[str, Any] = {
    "schema_version": "1.0.0",
    "event_id": "6F1C2F5E-8F0B-4D6A-9D43-0A7C1F2E3B4D",
    "occurred_at": "2025-06-01T12:34:56Z",
    "principals": ["user:42", "group:law"],
    "embedding": [0.5] * 768,
    "query_hash": "ab" * 32,
    "embedding_model": "all-mpnet-base-v2",
}
GLOBAL = QueryEmbedding.parse(EVENT)
TOPICAL = QueryEmbedding.parse(EVENT | {"session_id": str(SESSION), "topic_id": str(TOPIC)})


# Of a search that ends, whatever the machine is busy with; each asks for twice as much as the one before.
_MAX_SEARCHES = 40
_HANG_SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """A chunk; ``parent`` is that of a problem."""

    number: int
    distance: float
    in_topic: bool = False
    parent: int | None = None
    orphan: bool = False

    def candidate(self, *, expand: bool) -> Candidate:
        if not expand or self.parent is None:
            return Candidate(UUID(int=self.number), self.distance)
        if self.orphan:
            return Candidate(UUID(int=self.number), self.distance, parent_missing=True)
        return Candidate(UUID(int=self.number), self.distance, UUID(int=self.parent))


def passage(number: int, **fields: Any) -> StoredPassage:
    values: dict[str, Any] = {
        "chunk_id": UUID(int=number),
        "document_id": DOCUMENT,
        "text_content": f"text {number}",
        "token_count": None,
        "page": None,
        "section": None,
        "chunk_position": None,
        "coordinates": None,
        "title": None,
        "source_url": None,
        "file_description": None,
    } | fields
    return StoredPassage(**values)


@dataclass
class Rows:
    """A store of rows.

    Attributes:
        knows_its_end: an arm that was read to its last row says so even where that row was the last asked for.
        index_returns: rows after which the index stops early, in a scope too large to be searched exactly.
        lost: passages that are found and then not there any more.
    """

    rows: Sequence[Row]
    stored: Mapping[int, StoredPassage] = field(default_factory=dict)
    knows_its_end: bool = False
    index_returns: int | None = None
    lost: frozenset[int] = frozenset()
    searches: list[Search] = field(default_factory=list)
    fetched: list[UUID] = field(default_factory=list)
    measured: list[UUID] = field(default_factory=list)

    async def search(self, search: Search) -> ArmResult:
        self.searches.append(search)
        assert len(self.searches) <= _MAX_SEARCHES, "the search does not end"
        await asyncio.sleep(0)
        scope = self.scope("global" if search.topic_id is None else "local", expand=search.expand_parents)
        returned = scope[: search.limit]
        if self.index_returns is not None and self.index_returns < len(returned):
            return ArmResult(returned[: self.index_returns], complete=False, truncated=True)
        at_the_end = len(returned) == len(scope)
        return ArmResult(
            returned, complete=at_the_end and (self.knows_its_end or len(returned) < search.limit)
        )

    async def sizes(self, principals: Sequence[str], chunk_ids: Sequence[UUID]) -> Mapping[UUID, StoredSize]:
        assert principals == GLOBAL.principals
        assert len(chunk_ids) == len(set(chunk_ids)) > 0
        self.measured += chunk_ids
        await asyncio.sleep(0)
        present = {one: self.passage(one) for one in chunk_ids if one.int not in self.lost}
        return {
            one: StoredSize(stored.token_count, len(stored.text_content), stored.file_description)
            for one, stored in present.items()
        }

    async def passages(
        self, principals: Sequence[str], chunk_ids: Sequence[UUID]
    ) -> Mapping[UUID, StoredPassage]:
        assert principals == GLOBAL.principals
        assert len(chunk_ids) == len(set(chunk_ids)) > 0
        self.fetched += chunk_ids
        await asyncio.sleep(0)
        return {one: self.passage(one) for one in chunk_ids if one.int not in self.lost}

    def scope(self, scope: Scope, *, expand: bool) -> list[Candidate]:
        rows = [row for row in self.rows if scope == "global" or row.in_topic]
        # PostgreSQL sorts NaN behind every number.
        rows.sort(key=lambda row: (math.isnan(row.distance), row.distance, row.number))
        return [row.candidate(expand=expand) for row in rows]

    def passage(self, chunk_id: UUID) -> StoredPassage:
        return self.stored.get(chunk_id.int) or passage(chunk_id.int)


def params(k: int = 5, **fields: Any) -> RetrievalParams:
    own = {name: fields.pop(name, None) for name in ("k_requested", "similarity_threshold", "token_budget")}
    defaults: dict[str, Any] = {"k_default": 1, "k_min": 1, "k_max": 1000, "order": "interleaved"}
    profile = Profile(**(defaults | fields))
    return RetrievalParams(name="test", profile=profile, k=k, **own)


def tokens(text: str) -> int:
    return len(text)


async def ask(
    store: Any, query: QueryEmbedding = GLOBAL, overrides: RetrievalParams | None = None
) -> Retrieved:
    async with asyncio.timeout(_HANG_SECONDS):
        retrieved = await retrieve(query, overrides or params(), store, tokens, started=perf_counter())
    # It is built without validation, and must be what validation would have built.
    assert RetrievalResult.parse(retrieved.result.model_dump()) == retrieved.result
    return retrieved


async def answer(
    store: Any, query: QueryEmbedding = GLOBAL, overrides: RetrievalParams | None = None
) -> RetrievalResult:
    return (await ask(store, query, overrides)).result


def numbers(result: RetrievalResult) -> list[int]:
    return [one.chunk_id.int for one in result.results]


@st.composite
def stores(draw: st.DrawFn) -> Rows:
    """Few parents and many children, so that the first search starves more often than not."""
    count = draw(st.integers(0, 40))
    seed = draw(st.randoms(use_true_random=False))
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    rows = [
        Row(
            number=100 + number,
            distance=seed.choice([0.1, 0.2, 0.3, 0.5, 0.9, 1.2, math.nan]),
            in_topic=seed.random() < 0.5,
            parent=seed.choice([1, 2, 3]) if seed.random() < share else None,
            orphan=seed.random() < 0.1,
        )
        for number in range(count)
    ]
    passages = {
        number: passage(
            number,
            token_count=seed.choice([None, 0, 5, 40]),
            file_description=seed.choice([None, "", "A book"]),
            invalid=seed.random() < 0.1,
        )
        for number in [1, 2, 3, *(row.number for row in rows)]
    }
    everything = [1, 2, 3, *(row.number for row in rows)]
    lost = frozenset(number for number in everything if seed.random() < draw(st.sampled_from([0.0, 0.2])))
    return Rows(rows, passages, knows_its_end=draw(st.booleans()), lost=lost)


@given(
    store=stores(),
    topical=st.booleans(),
    k=st.integers(1, 8),
    expand=st.booleans(),
    order=st.sampled_from(["similarity", "interleaved"]),
    threshold=st.none() | st.sampled_from([0.0, 0.5, 0.7, 0.95]),
    budget=st.none() | st.integers(1, 120),
    overflow=st.sampled_from(["stop", "skip"]),
)
def test_however_often_it_searches_the_answer_is_that_over_the_whole_scopes(  # noqa: PLR0917  # hypothesis passes them by name
    store: Rows,
    topical: bool,  # noqa: FBT001  # hypothesis passes it by name
    k: int,
    expand: bool,  # noqa: FBT001  # hypothesis passes it by name
    order: str,
    threshold: float | None,
    budget: int | None,
    overflow: Any,
) -> None:
    overrides = params(
        k,
        expand_parents=expand,
        order=order,
        overflow=overflow,
        similarity_threshold=threshold,
        token_budget=budget,
    )
    result = asyncio.run(answer(store, TOPICAL if topical else GLOBAL, overrides))

    def header(candidate: Candidate) -> str | None:
        description = store.passage(candidate.passage_id).file_description
        return None if description is None or candidate.parent_id else f"[Source: {description}]"

    def cost(candidate: Candidate) -> int:
        stored, line = store.passage(candidate.passage_id), header(candidate)
        text = tokens(stored.text_content) if stored.token_count is None else stored.token_count
        return text + (0 if line is None else tokens(line + "\n"))

    scopes: tuple[Scope, ...] = ("local", "global") if topical else ("global",)
    # A parent that is lost was as good as missing when it was looked for.
    present = replace(
        store, rows=[replace(row, orphan=row.orphan or row.parent in store.lost) for row in store.rows]
    )
    whole = {
        scope: rank_candidates(
            present.scope(scope, expand=expand), complete=True, similarity_threshold=threshold
        )
        for scope in scopes
    }
    missing_ids = {UUID(int=number) for number in store.lost}
    expected = select(whole, k=k, token_budget=budget, overflow=overflow, cost=cost, missing_ids=missing_ids)
    picks = order_by_similarity(expected.picks) if order == "similarity" else expected.picks

    assert [(one.chunk_id, one.matched_chunk_id, one.scope, one.score) for one in result.results] == [
        (pick.candidate.passage_id, pick.candidate.chunk_id, pick.scope, pick.candidate.score)
        for pick in picks
    ]
    assert [one.rank for one in result.results] == list(range(1, result.k_returned + 1))
    assert [one.token_count for one in result.results] == [cost(pick.candidate) for pick in picks]
    assert [one.header for one in result.results] == [header(pick.candidate) for pick in picks]
    assert result.tokens_used == sum(one.token_count for one in result.results)
    # Nothing that nobody foresaw, and nothing that was not so.
    assert set(result.warnings) == {
        code
        for code, holds in {
            "first_passage_exceeds_budget": expected.first_exceeds_budget,
            "parent_missing": any(pick.candidate.parent_missing for pick in picks),
            "store_value_invalid": any(store.passage(pick.candidate.passage_id).invalid for pick in picks),
        }.items()
        if holds
    }
    assert len(store.fetched) == len(set(store.fetched))  # each text once
    assert len(store.measured) == len(set(store.measured))
    assert all(
        search.topic_id in {None, TOPIC} and search.limit > 0 and search.expand_parents is expand
        for search in store.searches
    )


async def test_what_is_asked_of_the_store() -> None:
    filters = {"section": "1.2", "metadata": {"year": "2020"}}
    query = QueryEmbedding.parse(
        EVENT | {"session_id": str(SESSION), "topic_id": str(TOPIC), "filters": filters}
    )
    store = Rows([])
    await answer(store, query)
    local, rest = sorted(store.searches, key=lambda search: search.topic_id is None)
    assert (local.topic_id, rest.topic_id) == (TOPIC, None)
    for search in (local, rest):
        assert (search.principals, search.session_id) == (("user:42", "group:law"), SESSION)
        assert search.filters == query.filters
        assert np.array_equal(search.vector, unit_vector(query.embedding))
    assert store.fetched == []  # nothing was found, so no text is asked for

    store = Rows([])
    await answer(store, GLOBAL)
    assert [(search.session_id, search.topic_id) for search in store.searches] == [(None, None)]


async def test_the_texts_of_what_is_not_returned_are_not_fetched() -> None:
    store = Rows([Row(number, number / 100) for number in range(1, 40)])
    result = await answer(store, GLOBAL, params(3, token_budget=10_000))
    assert numbers(result) == [1, 2, 3]
    assert sorted(store.fetched) == [UUID(int=1), UUID(int=2), UUID(int=3)]


async def test_only_the_arm_that_ran_dry_is_searched_further() -> None:
    children = [Row(number, 0.1, in_topic=True, parent=1) for number in range(100, 150)]
    others = [Row(number, 0.2, in_topic=True) for number in range(200, 203)]
    store = Rows([*children, *others, *(Row(number, 0.05) for number in range(300, 340))])
    retrieved = await ask(store, TOPICAL, params(3, expand_parents=True))
    result = retrieved.result
    assert numbers(result) == [1, 200, 300]
    assert [one.matched_chunk_id.int for one in result.results] == [100, 200, 300]
    limits = [(search.topic_id is not None, search.limit) for search in store.searches]
    assert sorted(limits) == [(False, 18), (True, 18), (True, 72)]
    # The last search of each arm, and what it returned.
    last = {
        scope: (search.limit, len(found.candidates)) for scope, (search, found) in retrieved.searches.items()
    }
    assert last == {"global": (18, 18), "local": (72, 53)}


async def test_a_passage_that_was_deleted_meanwhile_leaves_its_place_to_the_next() -> None:
    store = Rows([Row(number, number / 100) for number in range(1, 40)], lost=frozenset({2, 4, 5}))
    assert numbers(await answer(store, GLOBAL, params(4))) == [1, 3, 6, 7]
    # Even where all that the first search found is gone.
    store = Rows([Row(number, number / 100) for number in range(1, 40)], lost=frozenset(range(1, 20)))
    result = await answer(store, GLOBAL, params(4))
    assert (numbers(result), [one.rank for one in result.results]) == ([20, 21, 22, 23], [1, 2, 3, 4])


@pytest.mark.parametrize("overflow", ["stop", "skip"])
async def test_a_parent_that_was_deleted_meanwhile_leaves_its_place_to_its_child(overflow: str) -> None:
    """As one that was never there: each child stands for itself, with its own header, and it is told."""
    store = Rows(
        [Row(1, 0.1), Row(2, 0.2, parent=9), Row(3, 0.3, parent=9), Row(4, 0.4, parent=8), Row(5, 0.5)],
        {2: passage(2, file_description="Rivers")},
        lost=frozenset({9, 3}),
    )
    overrides = params(9, expand_parents=True, overflow=overflow, token_budget=1000)
    result = await answer(store, GLOBAL, overrides)
    assert [(one.chunk_id.int, one.matched_chunk_id.int, one.header) for one in result.results] == [
        (1, 1, None),
        (2, 2, "[Source: Rivers]"),
        (8, 4, None),
        (5, 5, None),
    ]
    assert result.warnings == ("parent_missing",)


async def test_a_scan_that_stopped_early_is_reported_and_not_repeated() -> None:
    store = Rows([Row(number, number / 100) for number in range(1, 60)], index_returns=3)
    result = await answer(store, GLOBAL, params(5))
    assert (numbers(result), result.warnings) == ([1, 2, 3], ("scan_truncated",))
    assert len(store.searches) == 1


async def test_a_scan_that_gave_up_with_enough_is_reported_and_widened() -> None:
    """Rows that become one passage are not enough, though the index has found as many as were asked for."""

    class Hasty(Rows):
        async def search(self, search: Search) -> ArmResult:
            found = await super().search(search)
            return replace(found, complete=False, truncated=True)

    siblings = [Row(number, 0.1, parent=1) for number in range(100, 200)]
    store = Hasty([*siblings, *(Row(number, 0.2) for number in range(200, 220))])
    result = await answer(store, GLOBAL, params(5, expand_parents=True))
    assert (numbers(result), result.warnings) == ([1, 200, 201, 202, 203], ("scan_truncated",))


async def test_a_search_has_an_end_where_one_parent_has_a_multitude_of_children() -> None:
    store = Rows([Row(number, 0.1, parent=1) for number in range(100, 12_100)])
    result = await answer(store, GLOBAL, params(2, expand_parents=True))
    assert (numbers(result), result.warnings) == ([1], ("scan_truncated",))
    assert max(search.limit for search in store.searches) == 10_000
    # With as many as it is ready to look at, there is nothing to warn of.
    store = Rows(store.rows[:9_999])
    result = await answer(store, GLOBAL, params(2, expand_parents=True))
    assert (numbers(result), result.warnings) == ([1], ())


async def test_an_empty_answer_is_an_answer() -> None:
    result = await answer(Rows([]), TOPICAL, params(4, similarity_threshold=0.75))
    assert (result.results, result.k_returned, result.tokens_used, result.warnings) == ((), 0, 0, ())


async def test_nothing_below_the_threshold_fills_up_k_and_equality_is_enough() -> None:
    store = Rows([Row(1, 0.25), Row(2, 0.2500001), Row(3, 0.3), Row(4, math.nan)])
    result = await answer(store, GLOBAL, params(4, similarity_threshold=0.75))
    assert [(one.chunk_id.int, one.score) for one in result.results] == [(1, 0.75)]
    assert result.similarity_threshold == 0.75


async def test_a_stored_zero_vector_is_never_returned() -> None:
    assert numbers(await answer(Rows([Row(1, math.nan), Row(2, 2.0)]))) == [2]


async def test_the_header_and_its_tokens() -> None:
    store = Rows(
        [Row(1, 0.1), Row(2, 0.2), Row(3, 0.3, parent=9), Row(4, 0.4), Row(5, 0.5, parent=8, orphan=True)],
        {
            1: passage(1, file_description="Rivers", token_count=7),
            2: passage(2, token_count=7),
            9: passage(9, file_description="Rivers", text_content="[Source: mine] whole problem"),
            4: passage(4, file_description="Rivers", text_content="four", token_count=0),
            5: passage(5, file_description="Rivers", text_content="child"),
        },
    )
    result = await answer(store, GLOBAL, params(9, expand_parents=True))
    line = tokens("[Source: Rivers]\n")
    assert [(one.chunk_id.int, one.header, one.token_count) for one in result.results] == [
        (1, "[Source: Rivers]", 7 + line),
        (2, None, 7),
        (9, None, tokens("[Source: mine] whole problem")),  # an expanded parent brings its own
        (4, "[Source: Rivers]", line),  # a stored count is believed, also one of zero
        (5, "[Source: Rivers]", tokens("child") + line),  # its parent is missing: the child stands for itself
    ]
    assert result.warnings == ("parent_missing",)


async def test_a_parent_that_matches_by_itself_has_its_header() -> None:
    passages = {9: passage(9, file_description="Rivers")}
    itself = await answer(
        Rows([Row(9, 0.1), Row(3, 0.2, parent=9)], passages), GLOBAL, params(2, expand_parents=True)
    )
    assert [(one.chunk_id.int, one.header) for one in itself.results] == [(9, "[Source: Rivers]")]
    child = await answer(
        Rows([Row(9, 0.2), Row(3, 0.1, parent=9)], passages), GLOBAL, params(2, expand_parents=True)
    )
    assert [(one.chunk_id.int, one.header) for one in child.results] == [(9, None)]


async def test_a_passage_that_fits_only_without_its_header_may_come_as_a_parent() -> None:
    passages = {9: passage(9, file_description="Rivers", token_count=10)}
    store = Rows([Row(9, 0.1), Row(3, 0.2, parent=9)], passages)
    overrides = params(2, expand_parents=True, token_budget=10, overflow="skip")
    (one,) = (await answer(store, GLOBAL, overrides)).results
    assert (one.chunk_id.int, one.matched_chunk_id.int, one.header, one.token_count) == (9, 3, None, 10)


async def test_a_first_passage_beyond_the_budget() -> None:
    store = Rows([Row(1, 0.1), Row(2, 0.2)], {1: passage(1, token_count=11), 2: passage(2, token_count=10)})
    stopped = await answer(store, GLOBAL, params(2, token_budget=10))
    assert (numbers(stopped), stopped.warnings) == ([], ("first_passage_exceeds_budget",))
    skipped = await answer(store, GLOBAL, params(2, token_budget=10, overflow="skip"))
    assert (numbers(skipped), skipped.warnings, skipped.tokens_used) == ([2], (), 10)


async def test_skipping_searches_on_for_what_fits() -> None:
    long = {number: passage(number, token_count=50) for number in range(1, 30)}
    store = Rows([Row(number, number / 100) for number in range(1, 40)], long)
    result = await answer(store, GLOBAL, params(2, token_budget=20, overflow="skip"))
    assert numbers(result) == [30, 31]
    assert len(store.searches) > 1


async def test_the_result_carries_what_the_event_said() -> None:
    result = await answer(Rows([Row(1, 0.1)]), TOPICAL, params(4, k_requested=400, token_budget=99))
    assert (result.event_id, result.result_id) == (TOPICAL.event_id, result_id(TOPICAL.event_id))
    assert (result.query_hash, result.embedding_model) == ("ab" * 32, "all-mpnet-base-v2")
    assert (result.profile, result.session_id, result.topic_id) == ("test", SESSION, TOPIC)
    assert (result.k_requested, result.k_effective, result.k_returned) == (400, 4, 1)
    assert (result.schema_version, result.score_type) == ("1.0.0", "cosine_similarity")
    assert (result.query_embedding_dimensions, result.token_budget) == (768, 99)
    assert result.warnings == ("k_clamped",)
    assert result.query_time_ms > 0


async def test_a_passage_carries_what_the_store_has() -> None:
    columns = {
        "page": 3,
        "section": "1.2",
        "chunk_position": 7,
        "coordinates": {"x0": 1.5},
        "title": "Rivers",
        "source_url": "https://example.org/",
        "metadata": {"year": "2020"},
    }
    result = await answer(Rows([Row(1, 0.25)], {1: passage(1, **columns)}))
    (one,) = result.results
    assert {name: getattr(one, name) for name in columns} == columns
    assert (one.document_id, one.matched_chunk_id, one.text_content) == (DOCUMENT, UUID(int=1), "text 1")
    assert (one.score, one.scope, one.rank) == (0.75, "global", 1)


async def test_the_same_event_over_the_same_store_gives_the_same_result() -> None:
    rows = [Row(number, 0.3, in_topic=number % 2 == 0) for number in range(1, 30)]
    first = await answer(Rows(rows), TOPICAL, params(9))
    for seed in range(5):
        shuffled = rows.copy()
        random.Random(seed).shuffle(shuffled)
        again = await answer(Rows(shuffled), TOPICAL, params(9))
        assert again.model_copy(update={"query_time_ms": first.query_time_ms}) == first


async def test_the_arms_are_searched_at_the_same_time() -> None:
    both = asyncio.Barrier(2)

    class Together(Rows):
        async def search(self, search: Search) -> ArmResult:
            await both.wait()  # one after the other would never get past this
            return await super().search(search)

    retrieved = await ask(Together([Row(1, 0.1, in_topic=True)]), TOPICAL)
    assert numbers(retrieved.result) == [1]
    assert set(retrieved.arm_seconds) == {"local", "global"}


async def test_times_are_reported_in_seconds_and_apart() -> None:
    class Slow(Rows):
        async def search(self, search: Search) -> ArmResult:
            await asyncio.sleep(0.05 if search.topic_id else 0.02)
            return await super().search(search)

    retrieved = await ask(Slow([Row(1, 0.1, in_topic=True)]), TOPICAL)
    assert 0.045 < retrieved.arm_seconds["local"] <= retrieved.search_seconds < 1
    assert 0.015 < retrieved.arm_seconds["global"] <= retrieved.search_seconds
    assert 0 < retrieved.assemble_seconds < 1
    assert retrieved.result.query_time_ms >= 1000 * retrieved.search_seconds


@pytest.mark.parametrize("scope", ["local", "global"])
async def test_one_arm_s_failure_is_reported_as_it_is_and_ends_the_other(scope: str) -> None:
    cancelled = asyncio.Event()

    class Failing(Rows):
        async def search(self, search: Search) -> ArmResult:
            if (search.topic_id is None) == (scope == "global"):
                await asyncio.sleep(0)
                raise StoreUnavailable("gone")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError

    with pytest.raises(StoreUnavailable, match="gone"):
        await ask(Failing([]), TOPICAL)
    assert cancelled.is_set()


async def test_a_failure_to_fetch_is_reported_as_it_is() -> None:
    class Failing(Rows):
        async def passages(
            self, principals: Sequence[str], chunk_ids: Sequence[UUID]
        ) -> Mapping[UUID, StoredPassage]:
            del principals, chunk_ids
            raise SearchTimeout("slow")

    with pytest.raises(SearchTimeout):
        await ask(Failing([Row(1, 0.1)]))


def direction(vector: Sequence[float]) -> list[float]:
    """Scaled by a power of two, which is exact, and summed without rounding."""
    _, exponent = math.frexp(max(map(abs, vector)))
    scaled = [math.ldexp(component, -exponent) for component in vector]
    length = math.sqrt(math.fsum(component * component for component in scaled))
    return [component / length for component in scaled]


@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1.0, 1e-30, 1e30, 1e-310, 1e-25, 1e20, 5e-324, 1e-160]),
    zeros=st.integers(0, 767),
)
def test_the_unit_vector_is_the_direction_whatever_the_length(seed: int, scale: float, zeros: int) -> None:
    rng = random.Random(seed)
    vector = [0.0] * zeros + [rng.uniform(-1, 1) * scale for _ in range(768 - zeros)]
    vector[-1] = scale  # never all zero
    unit = unit_vector(vector)
    assert (unit.shape, unit.dtype) == ((768,), np.dtype(np.float32))
    assert np.isfinite(unit).all()
    assert np.allclose(unit, direction(vector), rtol=0, atol=1e-7)
    assert abs(float(np.linalg.norm(unit.astype(np.float64))) - 1) < 1e-6


@pytest.mark.parametrize("component", [3.4028234663852886e38, -3.4028234663852886e38, 5e-324, 1.0])
def test_the_unit_vector_of_the_extremes(component: float) -> None:
    assert np.allclose(unit_vector([component] * 768), math.copysign(1 / math.sqrt(768), component))
    assert unit_vector([component, *[0.0] * 767])[0] == math.copysign(1, component)


def test_rows_are_what_the_property_relies_on() -> None:
    row = Row(5, 0.1, parent=1)
    assert row.candidate(expand=False).passage_id == UUID(int=5)
    assert row.candidate(expand=True).passage_id == UUID(int=1)
    assert replace(row, orphan=True).candidate(expand=True).parent_missing


@pytest.mark.parametrize("overflow", ["stop", "skip"])
async def test_long_texts_are_counted_off_the_event_loop(overflow: Any) -> None:
    """A megabyte takes half a second, for which no other event would go on."""
    counted: dict[int, bool] = {}

    def count(text: str) -> int:
        counted[len(text)] = threading.current_thread() is threading.main_thread()
        return len(text)

    store = Rows([Row(1, 0.1)], {1: passage(1, text_content="x" * 1_000_000, file_description="y" * 30)})
    overrides = params(1, token_budget=2_000_000, overflow=overflow)
    await retrieve(GLOBAL, overrides, store, count, started=perf_counter())
    assert counted.pop(1_000_000) is False
    assert [*counted] == [len("[Source: ]\n") + 30]
    # What is short is not worth a thread.
    counted.clear()
    await retrieve(GLOBAL, overrides, Rows([Row(2, 0.1)]), count, started=perf_counter())
    assert counted == {len("text 2"): True}


async def test_a_budget_that_nothing_fits_is_not_looked_after_for_long() -> None:
    rows = [Row(number, number / 20_000, in_topic=True) for number in range(1, 12_000)]
    store = Rows(rows, {number: passage(number, token_count=50) for number in range(1, 12_000)})
    result = await answer(store, TOPICAL, params(9, token_budget=40, overflow="skip"))
    assert (numbers(result), result.warnings) == ([], ("scan_truncated",))
    assert store.fetched == []  # what is stored says that they do not fit
    assert len(store.searches) <= 6
    assert max(search.limit for search in store.searches) == 1000

    # Where no count is stored, their length says that they cannot fit.
    long = "x" * (128 * 40 + 1)
    store = Rows(rows, {number: passage(number, text_content=long) for number in range(1, 12_000)})
    result = await answer(store, TOPICAL, params(9, token_budget=40, overflow="skip"))
    assert (numbers(result), result.warnings, store.fetched) == ([], ("scan_truncated",), [])


async def test_where_no_count_is_stored_texts_are_fetched_as_far_as_needed() -> None:
    rows = [Row(number, number / 20_000) for number in range(1, 1000)]
    fat = {number: passage(number, text_content="x" * 60) for number in range(1, 1000, 2)}
    store = Rows(rows, fat)
    result = await answer(store, GLOBAL, params(9, token_budget=59, overflow="skip"))
    assert numbers(result) == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert len(store.fetched) < 60  # of a thousand
