"""Selection: merges two ranked arms into one list of passages (SPEC 4.5).

Belongs here: the order in which candidates are taken, de-duplication, parents, the threshold, the token budget, ranks.
Does not belong here: where candidates come from, the content of passages, timing. All functions are pure.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Literal, get_args
from uuid import UUID

__all__ = [
    "Arm",
    "Candidate",
    "Pick",
    "Scope",
    "Selection",
    "SkipReason",
    "count_outcomes",
    "order_by_similarity",
    "rank_candidates",
    "select",
]

Scope = Literal["local", "global"]
#: Why a candidate was passed over; the names are the explanation's.
SkipReason = Literal["duplicates", "same_parent", "over_budget", "missing"]

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
        below_threshold: how many more were found, all less similar than the threshold.
    """

    candidates: Sequence[Candidate]
    complete: bool
    below_threshold: int = 0


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
        ended_by_budget: with ``stop``, a passage that does not fit ended the selection.
        skipped: how many candidates of each arm were passed over before the selection ended, by reason.
    """

    picks: tuple[Pick, ...]
    tokens_used: int
    starved: frozenset[Scope]
    ended_by_budget: bool
    skipped: Mapping[tuple[Scope, SkipReason], int] = field(default_factory=dict, compare=False)

    @property
    def first_exceeds_budget(self) -> bool:
        """Whether not even the first passage fits, with ``stop``."""
        return self.ended_by_budget and not self.picks


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
            return Arm(near, complete=True, below_threshold=len(ranked) - len(near))
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
    matched: set[UUID] = set()
    picks: list[Pick] = []
    skipped: Counter[tuple[Scope, SkipReason]] = Counter()
    used = 0
    exhausted: set[Scope] = set()
    turns = _turns(arms, exhausted)
    turn = next(turns)
    starved: frozenset[Scope] = frozenset()
    ended_by_budget = False
    while len(picks) < k:
        candidate = next(queues[turn], None)
        if candidate is None:
            if not arms[turn].complete:
                starved = frozenset([turn])
                break
            exhausted.add(turn)
            if len(exhausted) == len(arms):
                break
            turn = next(turns)
            continue
        if candidate.passage_id in taken:
            skipped[turn, _skip_reason(candidate, matched, missing_ids)] += 1
            continue
        tokens = 0 if cost is None else cost(candidate)
        if token_budget is not None and used + tokens > token_budget:
            ended_by_budget = overflow == "stop"
            if ended_by_budget:
                break
            skipped[turn, "over_budget"] += 1
            continue
        taken.add(candidate.passage_id)
        matched.add(candidate.chunk_id)
        used += tokens
        picks.append(Pick(candidate, turn))
        turn = next(turns)
    return Selection(tuple(picks), used, starved, ended_by_budget, skipped)


def _turns(arms: Collection[Scope], exhausted: Collection[Scope]) -> Iterator[Scope]:
    return (scope for scope in cycle(_TURNS) if scope in arms and scope not in exhausted)


def _skip_reason(
    candidate: Candidate, matched: Collection[UUID], missing_ids: Collection[UUID]
) -> SkipReason:
    """Why the passage of a candidate cannot be selected: it is missing, or already selected."""
    if candidate.passage_id in missing_ids:
        return "missing"
    is_sibling = candidate.parent_id is not None and candidate.chunk_id not in matched
    return "same_parent" if is_sibling else "duplicates"


def count_outcomes(arms: Mapping[Scope, Arm], selection: Selection) -> dict[Scope, dict[str, int]]:
    """What became of each arm's candidates: numbers by outcome, whose sum is ``candidates``."""
    outcomes: dict[Scope, dict[str, int]] = {}
    for scope, arm in arms.items():
        reasons: tuple[SkipReason, ...] = get_args(SkipReason)
        counts = {str(reason): selection.skipped.get((scope, reason), 0) for reason in reasons}
        counts["returned"] = sum(pick.scope == scope for pick in selection.picks)
        unreached = len(arm.candidates) - sum(counts.values())
        counts["not_needed"] = 0 if selection.ended_by_budget else unreached
        counts["over_budget"] += unreached if selection.ended_by_budget else 0
        counts["below_threshold"] = arm.below_threshold
        outcomes[scope] = {"candidates": len(arm.candidates) + arm.below_threshold} | counts
    return outcomes


def order_by_similarity(picks: Iterable[Pick]) -> list[Pick]:
    """Sort by descending score, then passage id. By score, not distance: two distances may round to one score."""
    return sorted(picks, key=lambda pick: (-pick.candidate.score, pick.candidate.passage_id))
