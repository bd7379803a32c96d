"""Selection: merges two ranked arms into one list of passages (SPEC 4.5).

Belongs here: the order in which candidates are taken, de-duplication, parents, the threshold, the token budget, ranks.
Does not belong here: where candidates come from, the content of passages, timing. All functions are pure.
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
    "order_by_similarity",
    "rank_candidates",
    "select",
]

Scope = Literal["local", "global"]

# With a topic, two of three places are reserved for the topic's own chunks.
_TURNS: Sequence[Scope] = ("local", "local", "global")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk returned by a search.

    Attributes:
        chunk_id: the chunk that matched.
        distance: cosine distance to the query, in [0, 2].
        parent_id: the parent that replaces it, if the profile expands parents and the parent is valid.
        parent_missing: the profile expands parents, but this chunk has no valid parent.
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
        complete: there are no candidates beyond the last one.
    """

    candidates: Sequence[Candidate]
    complete: bool


@dataclass(frozen=True, slots=True)
class Pick:
    """A selected candidate, and the arm whose turn it was."""

    candidate: Candidate
    scope: Scope


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected candidates.

    Attributes:
        picks: in selection order.
        tokens_used: tokens of the picks; 0 if no cost function was given.
        starved: arms that ran out of candidates although the scope has more: search further and select again.
        first_exceeds_budget: with ``stop``, not even the first passage fits.
    """

    picks: tuple[Pick, ...]
    tokens_used: int
    starved: frozenset[Scope]
    first_exceeds_budget: bool


def rank_candidates(
    candidates: Iterable[Candidate], *, complete: bool, similarity_threshold: float | None
) -> Arm:
    """Sort candidates into the total order and drop those below the threshold.

    A NaN distance means that a stored embedding is all zeros and has no direction: the candidate is dropped.
    """
    ranked = sorted(
        (candidate for candidate in candidates if not math.isnan(candidate.distance)),
        key=lambda candidate: (candidate.distance, candidate.chunk_id),
    )
    if similarity_threshold is not None:
        near = [candidate for candidate in ranked if candidate.score >= similarity_threshold]
        if len(near) < len(ranked):  # the rest of the scope is even farther away
            return Arm(near, complete=True)
    return Arm(ranked, complete=complete)


def select(
    arms: Mapping[Scope, Arm],
    *,
    k: int,
    token_budget: int | None = None,
    overflow: Literal["stop", "skip"] = "stop",
    cost: Callable[[Candidate], int] | None = None,
    missing_ids: Collection[UUID] = (),
) -> Selection:
    """Take up to k passages from the arms: local, local, global, repeating.

    A skipped candidate (a duplicate, or one that does not fit with ``skip``) does not use up its arm's turn. When an
    arm is exhausted, all further candidates come from the other arm.

    Args:
        arms: ``global``, and ``local`` if the event names a topic.
        k: maximum number of passages.
        token_budget: maximum number of tokens; None: no budget.
        overflow: how to handle a passage that does not fit.
        cost: tokens of the candidate's passage, including its header; None: every passage costs nothing.
        missing_ids: passages that were deleted, or became unreadable, after the search found them.
    """
    queues = {scope: iter(arm.candidates) for scope, arm in arms.items()}
    taken: set[UUID] = set(missing_ids)
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
    """Sort by descending score, then passage id. By score, not distance: two distances may round to one score."""
    return sorted(picks, key=lambda pick: (-pick.candidate.score, pick.candidate.passage_id))
