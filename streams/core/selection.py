"""Selection: two ranked arms become one list of passages (SPEC 4.5).

What may live here: the order in which candidates are taken, de-duplication, parents, the threshold, the token budget,
ranks. Not: where candidates come from, what a passage says, how long anything takes. All functions are pure.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal
from uuid import UUID

__all__ = [
    "Arm",
    "Candidate",
    "Pick",
    "Scope",
    "Selection",
    "rank_candidates",
    "order_by_similarity",
    "select",
]

Scope = Literal["local", "global"]

# A topic reserves two places in three for its own chunks.
_TURNS: Sequence[Scope] = ("local", "local", "global")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk that a search returned.

    Attributes:
        chunk_id: the chunk that matched.
        distance: cosine distance to the query, in [0, 2].
        parent_id: the parent that replaces it, where the profile expands and the parent is there.
        parent_missing: it should be replaced, but its parent is not there.
    """

    chunk_id: UUID
    distance: float
    parent_id: UUID | None = None
    parent_missing: bool = False

    @property
    def passage_id(self) -> UUID:
        return self.chunk_id if self.parent_id is None else self.parent_id

    @property
    def score(self) -> float:
        return 1.0 - self.distance


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm's candidates, nearest first.

    Attributes:
        candidates: in the total order (distance, chunk id).
        complete: no candidate lies beyond the last one.
    """

    candidates: Sequence[Candidate]
    complete: bool


@dataclass(frozen=True, slots=True)
class Pick:
    """A candidate that was taken, and by which arm's turn."""

    candidate: Candidate
    scope: Scope


@dataclass(frozen=True, slots=True)
class Selection:
    """What was taken.

    Attributes:
        picks: in the order of selection.
        tokens_used: of the picks; 0 where no cost was given.
        starved: arms that ran dry though the scope has more: search further and select again.
        first_exceeds_budget: under ``stop``, not even the first passage fits.
    """

    picks: tuple[Pick, ...]
    tokens_used: int
    starved: frozenset[Scope]
    first_exceeds_budget: bool


def rank_candidates(
    candidates: Iterable[Candidate], *, complete: bool, similarity_threshold: float | None
) -> Arm:
    """Put candidates into the total order and cut them off at the threshold.

    A distance that is NaN belongs to a stored zero vector, which has no direction: it is dropped.
    """
    ranked = sorted(
        (candidate for candidate in candidates if not math.isnan(candidate.distance)),
        key=lambda candidate: (candidate.distance, candidate.chunk_id),
    )
    if similarity_threshold is not None:
        near = [candidate for candidate in ranked if candidate.score >= similarity_threshold]
        if len(near) < len(ranked):  # the rest of the scope is farther still
            return Arm(near, complete=True)
    return Arm(ranked, complete=complete)


def select(
    arms: Mapping[Scope, Arm],
    *,
    k: int,
    token_budget: int | None = None,
    overflow: Literal["stop", "skip"] = "stop",
    cost: Callable[[Candidate], int] | None = None,
    gone: Collection[UUID] = (),
) -> Selection:
    """Take up to k passages from the arms: local, local, global, repeating.

    A candidate that is passed over (a duplicate, or one that does not fit under ``skip``) does not use up its arm's
    turn. When an arm is exhausted, the other is taken.

    Args:
        arms: ``global``, and ``local`` where the event names a topic.
        k: most passages to take.
        token_budget: most tokens to take; None: no budget.
        overflow: what a passage that does not fit does.
        cost: tokens of the passage that a candidate stands for, header included; None: nothing costs anything.
        gone: passages that are no longer there (or no longer readable) since they were found.
    """
    queues = {scope: iter(arm.candidates) for scope, arm in arms.items()}
    taken: set[UUID] = set(gone)
    picks: list[Pick] = []
    used = 0
    turns = cycle([scope for scope in _TURNS if scope in arms])
    turn = next(turns)
    exhausted: set[Scope] = set()
    while len(picks) < k:
        candidate = next(queues[turn], None)
        if candidate is None:
            if not arms[turn].complete:
                return Selection(tuple(picks), used, frozenset([turn]), first_exceeds_budget=False)
            exhausted.add(turn)
            if len(exhausted) == len(arms):
                break
            while turn in exhausted:
                turn = next(turns)
            continue
        if candidate.passage_id in taken:
            continue
        tokens = 0 if cost is None else cost(candidate)
        if token_budget is not None and used + tokens > token_budget:
            if overflow == "stop":
                return Selection(tuple(picks), used, frozenset(), first_exceeds_budget=not picks)
            continue
        taken.add(candidate.passage_id)
        used += tokens
        picks.append(Pick(candidate, turn))
        turn = next(turns)
        while turn in exhausted:
            turn = next(turns)
    return Selection(tuple(picks), used, frozenset(), first_exceeds_budget=False)


def order_by_similarity(picks: Iterable[Pick]) -> list[Pick]:
    """Score descending, then passage id. By score, not distance: two distances may round to one score."""
    return sorted(picks, key=lambda pick: (-pick.candidate.score, pick.candidate.passage_id))
