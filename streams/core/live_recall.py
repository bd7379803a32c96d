"""Live recall: the share of the nearest rows that the vector index finds, measured on a few of the events' searches.

Belongs here: the measure, which searches are repeated exactly, and how long that may take. Does not belong here:
running searches, measuring time, metrics.

A search is repeated if the budget allows it at that moment, so the budget must not depend on the search: it is checked
before the event's own searches add to it, because slow ones add most and would be chosen most often. Chance decides
which of the event's searches it is.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Literal

__all__ = [
    "ALL_ROWS",
    "LARGE_SECONDS",
    "NORMAL_ROWS",
    "Budget",
    "NotMeasured",
    "ScopeSize",
    "draw",
    "recall",
]

ScopeSize = Literal["normal", "large"]

#: A scope with more rows is large. It is sampled from a budget of its own, and counted apart.
NORMAL_ROWS: Final = 100_000
#: No scope has more rows. Five times as many are still an integer in SQL.
ALL_ROWS: Final = 400_000_000
#: Time limit of an exact search of a large scope.
LARGE_SECONDS: Final = 10.0
# Time limit of an exact search of any other scope. A search starts only if the budget pays for its whole time limit,
# and a worker earns its first seconds slowly. So the limit is small at first, and doubles when it was too short.
_FIRST_SECONDS = 0.25
_NORMAL_SECONDS = 2.0
# More is not saved: it would be spent at once after a pause.
_SAVED_SECONDS: dict[ScopeSize, float] = {"normal": 2 * _NORMAL_SECONDS, "large": LARGE_SECONDS}
# Share of the budget that is saved for large scopes.
_FOR_LARGE = 0.25
# Each search is drawn with this probability. An event has at most two searches, and at most one of them is drawn.
_PROBABILITY = 0.25


class NotMeasured(StrEnum):
    """Why the recall of a search was not measured."""

    EXACT = "exact"
    NOT_DRAWN = "not_drawn"
    PAUSED = "paused"
    TOO_LARGE = "too_large"
    TIMEOUT = "timeout"
    FAILED = "failed"
    EMPTY = "empty"


def recall(found: Sequence[float], nearest: Sequence[float]) -> float | None:
    """Recall@k: the share of the k nearest rows that a search found.

    Rows are compared by distance, so it does not matter which of several equally near rows were found (Aumüller,
    Bernhardsson and Faithfull, "ANN-Benchmarks", Information Systems 87, 2020).

    Args:
        found: the search's distances, ascending.
        nearest: the distances of the k nearest rows, or of all if there are fewer; NaN for those without a direction.

    Returns:
        From 0 to 1; None if there are no rows.
    """
    limits = [distance for distance in nearest if not math.isnan(distance)]
    if not limits:
        return None
    return sum(distance <= limits[-1] for distance in found[: len(limits)]) / len(limits)


def draw(searches: int, chance: float) -> int | None:
    """Draw at most one of an event's searches, each with the same probability, however many there are.

    Args:
        searches: how many there are.
        chance: random number, uniform in [0, 1).

    Returns:
        The index of the search, or None.
    """
    drawn = int(chance / _PROBABILITY)
    return drawn if drawn < searches else None


class Budget:
    """Seconds that exact searches may take: a share of the time that events' searches took.

    Args:
        share: of the time of the events' searches, from 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved: dict[ScopeSize, float] = {"normal": 0.0, "large": 0.0}
        self._normal_seconds = _FIRST_SECONDS

    def earn(self, seconds: float) -> None:
        """An event's searches took this time."""
        earned = self._share * seconds
        for_large = min(_FOR_LARGE * earned, _SAVED_SECONDS["large"] - self._saved["large"])
        self._saved["large"] += for_large
        self._saved["normal"] = min(self._saved["normal"] + earned - for_large, _SAVED_SECONDS["normal"])

    def seconds_for(self, size: ScopeSize) -> float | None:
        """Time limit of an exact search that starts now; None if the budget does not pay for it."""
        limit = self._normal_seconds if size == "normal" else LARGE_SECONDS
        return limit if self._saved[size] >= limit else None

    def spend(self, size: ScopeSize, seconds: float, *, timed_out: bool = False) -> None:
        """An exact search took this time, which may be a little more than its limit."""
        self._saved[size] -= seconds
        if timed_out and size == "normal":
            self._normal_seconds = min(2 * self._normal_seconds, _NORMAL_SECONDS)
