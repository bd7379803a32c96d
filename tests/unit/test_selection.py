"""Selection, compared with a naive reading of its rules.

The oracle keeps no queues and no memory: for every place it looks through whole arms again.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

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

Cost = Callable[[Candidate], int]

IDS = [UUID(int=number) for number in range(12)]
# Few values, so that ties and duplicates are the rule.
DISTANCES = [0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0]


def chunk(number: int, distance: float = 0.5, parent: int | None = None) -> Candidate:
    return Candidate(UUID(int=number), distance, None if parent is None else UUID(int=parent))


def arm(*candidates: Candidate, complete: bool = True) -> Arm:
    return Arm(candidates, complete)


def taken(selection: Selection) -> list[tuple[int, Scope]]:
    return [(pick.candidate.passage_id.int, pick.scope) for pick in selection.picks]


def oracle(  # noqa: PLR0917  # as many as the rules have
    arms: Mapping[Scope, Arm],
    k: int,
    budget: int | None,
    overflow: str,
    cost: Cost,
    missing_ids: Collection[UUID],
) -> Selection:
    """Section 4.5 of the specification, sentence by sentence."""
    picks: list[Pick] = []
    turns: list[Scope] = ["local", "local", "global"] if "local" in arms else ["global"]

    def result(starved: Collection[Scope] = (), *, by_budget: bool = False) -> Selection:
        used = sum(cost(pick.candidate) for pick in picks)
        return Selection(tuple(picks), used, frozenset(starved), by_budget)

    while len(picks) < k:
        used = sum(cost(pick.candidate) for pick in picks)
        inside = {pick.candidate.passage_id for pick in picks} | set(missing_ids)
        # Each pick used up one turn, and nothing else did.
        turn = turns[len(picks) % len(turns)]
        for scope in [turn, *(other for other in arms if other != turn)]:
            fresh = [one for one in arms[scope].candidates if one.passage_id not in inside]
            if overflow == "skip" and budget is not None:
                fresh = [one for one in fresh if used + cost(one) <= budget]
            if fresh:
                break
            if not arms[scope].complete:
                return result([scope])
        if not fresh:
            return result()
        if budget is not None and used + cost(fresh[0]) > budget:
            return result(by_budget=True)
        picks.append(Pick(fresh[0], scope))
    return result()


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    """Any candidates at all: children that share a parent, a parent beside its children, repetitions."""
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from(IDS), st.sampled_from(DISTANCES), st.none() | st.sampled_from(IDS[:4])),
            max_size=14,
        )
    )
    return sorted((Candidate(*row) for row in rows), key=lambda one: (one.distance, one.chunk_id))


@st.composite
def arms_of_a_query(draw: st.DrawFn) -> dict[Scope, Arm]:
    arms: dict[Scope, Arm] = {"global": Arm(draw(candidates()), draw(st.booleans()))}
    if draw(st.booleans()):
        arms["local"] = Arm(draw(candidates()), draw(st.booleans()))
    return arms


@given(
    arms=arms_of_a_query(),
    k=st.integers(1, 10),
    budget=st.none() | st.integers(0, 30),
    overflow=st.sampled_from(["stop", "skip"]),
    costs=st.lists(st.integers(0, 12), min_size=len(IDS), max_size=len(IDS)),
    missing_ids=st.sets(st.sampled_from(IDS), max_size=3),
)
def test_selection_is_the_oracles(  # noqa: PLR0917  # hypothesis passes them by name
    arms: dict[Scope, Arm],
    k: int,
    budget: int | None,
    overflow: Literal["stop", "skip"],
    costs: list[int],
    missing_ids: set[UUID],
) -> None:
    def cost(candidate: Candidate) -> int:
        return costs[candidate.passage_id.int]

    selection = select(arms, k=k, token_budget=budget, overflow=overflow, cost=cost, missing_ids=missing_ids)
    assert selection == oracle(arms, k, budget, overflow, cost, missing_ids)

    passages = [pick.candidate.passage_id for pick in selection.picks]
    assert len(passages) == len(set(passages)) <= k
    assert not missing_ids & set(passages)
    assert selection.tokens_used == sum(costs[passage.int] for passage in passages)
    assert budget is None or selection.tokens_used <= budget
    assert all(not arms[scope].complete for scope in selection.starved)


@given(arms=arms_of_a_query(), k=st.integers(1, 10), extra=candidates())
def test_what_is_not_starved_cannot_change_by_searching_further(
    arms: dict[Scope, Arm], k: int, extra: list[Candidate]
) -> None:
    selection = select(arms, k=k)
    assume(not selection.starved)
    longer: dict[Scope, Arm] = {
        scope: one if one.complete else Arm([*one.candidates, *extra], complete=True)
        for scope, one in arms.items()
    }
    assert select(longer, k=k) == selection


def consistent(arms: dict[Scope, Arm]) -> dict[Scope, Arm]:
    """Without repetitions in an arm, and with one parent for each chunk, as in a store that does not change."""
    first = {one.chunk_id: one for arm in reversed(arms.values()) for one in reversed(arm.candidates)}
    return {
        scope: Arm(
            sorted(
                {first[one.chunk_id] for one in arm.candidates}, key=lambda one: (one.distance, one.chunk_id)
            ),
            arm.complete,
        )
        for scope, arm in arms.items()
    }


@given(
    arms=arms_of_a_query().map(consistent),
    k=st.integers(1, 10),
    budget=st.none() | st.integers(0, 30),
    overflow=st.sampled_from(["stop", "skip"]),
    missing_ids=st.sets(st.sampled_from(IDS), max_size=3),
    below=st.integers(0, 3),
)
def test_each_candidate_has_one_outcome(  # noqa: PLR0917  # hypothesis passes them by name
    arms: dict[Scope, Arm],
    k: int,
    budget: int | None,
    overflow: Literal["stop", "skip"],
    missing_ids: set[UUID],
    below: int,
) -> None:
    def cost(candidate: Candidate) -> int:
        return candidate.passage_id.int

    arms = {scope: Arm(one.candidates, complete=True, below_threshold=below) for scope, one in arms.items()}
    selection = select(arms, k=k, token_budget=budget, overflow=overflow, cost=cost, missing_ids=missing_ids)
    outcomes = count_outcomes(arms, selection)
    assert outcomes.keys() == arms.keys()
    matched = {pick.candidate.chunk_id for pick in selection.picks}
    passages = {pick.candidate.passage_id for pick in selection.picks}
    for scope, of_arm in outcomes.items():
        assert min(of_arm.values()) >= 0
        assert of_arm["candidates"] == len(arms[scope].candidates) + below
        assert of_arm["candidates"] == sum(of_arm.values()) - of_arm["candidates"]
        assert of_arm["below_threshold"] == below
        assert of_arm["returned"] == sum(pick.scope == scope for pick in selection.picks)
        assert budget is not None or not of_arm["over_budget"]
        if len(selection.picks) < k and not selection.ended_by_budget:
            # Every candidate was looked at, in an order that does not matter any more.
            lost = [one for one in arms[scope].candidates if one.passage_id in missing_ids]
            inside = [one for one in arms[scope].candidates if one.passage_id in passages and one not in lost]
            siblings = [one for one in inside if one.parent_id and one.chunk_id not in matched]
            assert of_arm["not_needed"] == 0
            assert of_arm["missing"] == len(lost)
            if budget is None:
                assert of_arm["same_parent"] == len(siblings)
                assert of_arm["duplicates"] == len(inside) - len(siblings) - of_arm["returned"]
        if selection.ended_by_budget:
            assert of_arm["not_needed"] == 0


def test_outcomes_by_example() -> None:
    arms: dict[Scope, Arm] = {
        "local": arm(chunk(1, parent=50), chunk(2, parent=50), chunk(7), chunk(3), chunk(4), chunk(5)),
        "global": Arm(
            [chunk(1, parent=50), chunk(2, parent=50), chunk(3), chunk(9)], complete=True, below_threshold=2
        ),
    }

    def outcomes(**fields: Any) -> list[dict[str, int]]:
        selection = select(arms, cost=lambda one: one.chunk_id.int, missing_ids={UUID(int=7)}, **fields)
        return [
            {name: number for name, number in count_outcomes(arms, selection)[scope].items() if number}
            for scope in ("local", "global")
        ]

    # The parent and 3 are local, then 9 is global, then 4 is local.
    assert outcomes(k=4) == [
        {"candidates": 6, "same_parent": 1, "missing": 1, "returned": 3, "not_needed": 1},
        {"candidates": 6, "duplicates": 2, "same_parent": 1, "returned": 1, "below_threshold": 2},
    ]
    assert outcomes(k=4, token_budget=12, overflow="stop") == [
        {"candidates": 6, "same_parent": 1, "missing": 1, "returned": 2, "over_budget": 2},
        {"candidates": 6, "duplicates": 2, "same_parent": 1, "over_budget": 1, "below_threshold": 2},
    ]
    assert outcomes(k=4, token_budget=12, overflow="skip") == [
        {"candidates": 6, "same_parent": 1, "missing": 1, "returned": 3, "over_budget": 1},
        {"candidates": 6, "duplicates": 2, "same_parent": 1, "over_budget": 1, "below_threshold": 2},
    ]


def test_the_turns_are_local_local_global() -> None:
    arms: dict[Scope, Arm] = {
        "local": arm(*(chunk(number) for number in range(10, 16))),
        "global": arm(*(chunk(number) for number in range(20, 26))),
    }
    assert taken(select(arms, k=7)) == [
        (10, "local"),
        (11, "local"),
        (20, "global"),
        (12, "local"),
        (13, "local"),
        (21, "global"),
        (14, "local"),
    ]


def test_a_skipped_candidate_keeps_the_turn() -> None:
    arms: dict[Scope, Arm] = {
        "local": arm(chunk(1), chunk(2), chunk(3)),
        "global": arm(chunk(1), chunk(2), chunk(9), chunk(3)),
    }
    # The global turn passes over two chunks that are already in, and still takes one.
    assert taken(select(arms, k=4)) == [(1, "local"), (2, "local"), (9, "global"), (3, "local")]


def test_an_exhausted_arm_leaves_its_turns_to_the_other() -> None:
    local, rest = arm(chunk(1)), arm(chunk(7), chunk(8), chunk(9))
    expected = [(1, "local"), (7, "global"), (8, "global"), (9, "global")]
    assert taken(select({"local": local, "global": rest}, k=9)) == expected
    short: dict[Scope, Arm] = {"local": arm(*(chunk(n) for n in range(1, 6))), "global": arm(chunk(9))}
    assert [scope for _, scope in taken(select(short, k=9))] == ["local", "local", "global", *["local"] * 3]


def test_a_parent_comes_once_and_its_other_children_are_skipped() -> None:
    one = arm(chunk(1, 0.1, parent=50), chunk(2, 0.2, parent=50), chunk(3, 0.3), chunk(50, 0.4))
    selection = select({"global": one}, k=9)
    assert taken(selection) == [(50, "global"), (3, "global")]
    assert selection.picks[0].candidate.chunk_id == UUID(int=1)  # the child that matched


@pytest.mark.parametrize("complete", [True, False])
def test_an_arm_that_ran_dry_is_starved_only_where_its_scope_has_more(*, complete: bool) -> None:
    dry = arm(chunk(1), chunk(2), complete=complete)
    assert select({"global": dry}, k=2).starved == frozenset()
    assert select({"global": dry}, k=3).starved == (frozenset() if complete else {"global"})


def test_an_incomplete_arm_that_is_not_needed_is_not_starved() -> None:
    arms: dict[Scope, Arm] = {"local": arm(chunk(1), chunk(2)), "global": arm(complete=False)}
    assert select(arms, k=2).starved == frozenset()
    assert select(arms, k=3).starved == {"global"}


def test_stop_ends_at_the_first_passage_that_does_not_fit_and_skip_goes_on() -> None:
    arms: dict[Scope, Arm] = {"global": arm(chunk(4), chunk(9), chunk(3), chunk(2), complete=False)}

    def cost(candidate: Candidate) -> int:
        return candidate.chunk_id.int

    stopped = select(arms, k=4, token_budget=9, overflow="stop", cost=cost)
    assert (taken(stopped), stopped.tokens_used) == ([(4, "global")], 4)
    assert not stopped.starved
    assert stopped.ended_by_budget
    assert not stopped.first_exceeds_budget
    skipped = select(arms, k=3, token_budget=9, overflow="skip", cost=cost)
    assert (taken(skipped), skipped.tokens_used) == ([(4, "global"), (3, "global"), (2, "global")], 9)
    # A budget that is just filled is not exceeded.
    assert taken(select(arms, k=4, token_budget=13, overflow="stop", cost=cost))[-1] == (9, "global")


def test_a_first_passage_beyond_the_budget_is_reported_under_stop_only() -> None:
    arms: dict[Scope, Arm] = {"global": arm(chunk(9), chunk(1))}
    stopped = select(arms, k=2, token_budget=5, overflow="stop", cost=lambda one: one.chunk_id.int)
    assert stopped == Selection((), 0, frozenset(), ended_by_budget=True)
    assert stopped.first_exceeds_budget
    skipped = select(arms, k=2, token_budget=5, overflow="skip", cost=lambda one: one.chunk_id.int)
    assert (taken(skipped), skipped.first_exceeds_budget) == ([(1, "global")], False)


def test_the_price_of_what_is_already_in_or_gone_is_never_asked() -> None:
    # Its text is not there to be counted.
    asked: list[int] = []

    def cost(candidate: Candidate) -> int:
        asked.append(candidate.chunk_id.int)
        return 1

    select({"global": arm(chunk(1), chunk(1), chunk(2), chunk(3))}, k=9, cost=cost, missing_ids={UUID(int=2)})
    assert asked == [1, 3]


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(IDS), st.sampled_from([*DISTANCES, math.nan])), unique=True, max_size=20
    ),
    threshold=st.none() | st.sampled_from([0.0, 0.5, 0.75, 0.9, 1.0]) | st.floats(0, 1),
    complete=st.booleans(),
    seed=st.integers(0, 99),
)
def test_an_arm_is_in_the_total_order_and_nothing_is_below_the_threshold(
    rows: list[tuple[UUID, float]], threshold: float | None, seed: int, *, complete: bool
) -> None:
    found = [Candidate(*row) for row in rows]
    random.Random(seed).shuffle(found)
    one = rank_candidates(found, complete=complete, similarity_threshold=threshold)

    directed = [candidate for candidate in found if candidate.distance == candidate.distance]  # NaN
    near = [candidate for candidate in directed if threshold is None or 1 - candidate.distance >= threshold]
    assert sorted(one.candidates, key=str) == sorted(near, key=str)
    for before, after in pairwise(one.candidates):
        assert before.distance < after.distance or (
            before.distance == after.distance and before.chunk_id.int <= after.chunk_id.int
        )
    assert one.below_threshold == len(directed) - len(near)
    # Where the threshold cut something off, whatever the scope still has is farther.
    assert one.complete == (complete or len(near) < len(directed))


def test_the_threshold_is_inclusive() -> None:
    found = [chunk(1, 0.25), chunk(2, 0.2500001), chunk(3, math.nan)]
    assert rank_candidates(found, complete=False, similarity_threshold=0.75) == Arm(
        [found[0]], complete=True, below_threshold=1
    )


@given(
    st.lists(st.tuples(st.sampled_from(IDS), st.sampled_from(DISTANCES)), unique_by=lambda row: row[0]),
    st.integers(0, 99),
)
def test_similarity_sorts_by_score_then_id(rows: list[tuple[UUID, float]], seed: int) -> None:
    picks = [Pick(Candidate(*row), "global") for row in rows]
    random.Random(seed).shuffle(picks)
    ordered = [(pick.candidate.score, str(pick.candidate.passage_id)) for pick in order_by_similarity(picks)]
    for (score, chunk_id), (next_score, next_id) in pairwise(ordered):
        assert score > next_score or (score == next_score and chunk_id < next_id)
    assert len(ordered) == len(rows)


def test_distances_that_round_to_one_score_are_a_tie() -> None:
    near, far = chunk(2, 1e-17), chunk(1, 2e-17)
    assert near.score == far.score
    ordered = order_by_similarity([Pick(near, "global"), Pick(far, "global")])
    assert [pick.candidate for pick in ordered] == [far, near]
    # The same passage through parents: its own id counts, which is what consumers see.
    children = [Pick(chunk(1, 0.5, parent=9), "global"), Pick(chunk(2, 0.5, parent=8), "global")]
    assert [pick.candidate.passage_id.int for pick in order_by_similarity(children)] == [8, 9]
