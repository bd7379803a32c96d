"""Rates and quantiles of the last minutes, from snapshots of the counters. Events cost nothing more."""

import math
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final

from prometheus_client import Counter, Histogram

from streams.telemetry.metrics import StageMetrics

__all__ = [
    "INTERVAL_SECONDS",
    "WINDOW_SECONDS",
    "Buckets",
    "CodeCount",
    "Figures",
    "History",
    "Interval",
    "Quantiles",
    "Snapshot",
    "quantile",
    "take_snapshot",
]

#: Time between two snapshots.
INTERVAL_SECONDS: Final = 5.0
#: How far back they go.
WINDOW_SECONDS: Final = 300.0

_RATE_SECONDS = 60.0
# A rate over less time says little.
_MIN_RATE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram.

    Attributes:
        bounds: upper bounds in seconds, ascending; the last one is infinite.
        counts: for each bound, the number of values up to it.
    """

    bounds: Sequence[float]
    counts: Sequence[float]

    def since(self, earlier: "Buckets") -> "Buckets":
        """What was counted since an earlier state of the same histogram."""
        return Buckets(
            self.bounds, tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters at one time.

    Attributes:
        at: seconds since any moment.
        events: number of finished events by outcome.
        dead_letters: by code.
        durations: `duration` of an event, its `age`, and those of its stages.
    """

    at: float
    events: Mapping[str, float]
    dead_letters: Mapping[str, float]
    durations: Mapping[str, Buckets]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Durations in seconds, estimated from a histogram; None without events.

    Attributes:
        events: number of durations.
        longest: the highest finite bound: a quantile of this duration may be longer.
    """

    events: float
    p50: float | None
    p95: float | None
    p99: float | None
    longest: float


@dataclass(frozen=True, slots=True)
class CodeCount:
    """Dead letters with one code.

    Attributes:
        code: the code.
        recent: their number in the window.
        total: their number since the start.
        seconds_ago: when the last one was noticed, at most an interval after it was written.
    """

    code: str
    recent: float
    total: float
    seconds_ago: float


@dataclass(frozen=True, slots=True)
class Interval:
    """What was finished between two snapshots.

    Attributes:
        began: seconds ago.
        ended: seconds ago.
        rates: events per second by outcome.
    """

    began: float
    ended: float
    rates: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """What the snapshots show.

    Attributes:
        window_seconds: the time that `recent`, `latency` and `intervals` cover.
        rate_seconds: the time that `rates` cover.
        rates: finished events per second by outcome; None right after the start.
        recent: number of finished events by outcome, in the window.
        totals: the same since the start.
        intervals: oldest first.
        latency: by name, as in `Snapshot.durations`; of the window.
        dead_letters: codes with dead letters since the start, the latest first.
    """

    window_seconds: float
    rate_seconds: float
    rates: Mapping[str, float | None]
    recent: Mapping[str, float]
    totals: Mapping[str, float]
    intervals: Sequence[Interval]
    latency: Mapping[str, Quantiles]
    dead_letters: Sequence[CodeCount]


class History:
    """The snapshots of the window, and what has to be remembered for longer.

    Args:
        first: taken at the start.
    """

    def __init__(self, first: Snapshot) -> None:
        self._snapshots = deque([first])
        self._latest = first
        self._last_dead_letters: dict[str, float] = {}

    def record(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; to be called once per interval."""
        self._notice(snapshot)
        self._snapshots.append(snapshot)
        # The first one is the state at the window's beginning.
        while self._snapshots[1].at <= snapshot.at - WINDOW_SECONDS:
            self._snapshots.popleft()

    def figures(self, now: Snapshot) -> Figures:
        """The figures up to now.

        Args:
            now: a snapshot that was just taken.
        """
        self._notice(now)
        first, rate_from = self._snapshots[0], self._at_or_before(now.at - _RATE_SECONDS)
        rate_seconds = now.at - rate_from.at
        return Figures(
            window_seconds=now.at - first.at,
            rate_seconds=rate_seconds,
            rates={
                outcome: (count - rate_from.events.get(outcome, 0)) / rate_seconds
                if rate_seconds >= _MIN_RATE_SECONDS
                else None
                for outcome, count in now.events.items()
            },
            recent={outcome: count - first.events.get(outcome, 0) for outcome, count in now.events.items()},
            totals=now.events,
            intervals=list(self._intervals(now.at)),
            latency={
                name: _quantiles(buckets.since(first.durations[name]))
                for name, buckets in now.durations.items()
            },
            dead_letters=sorted(
                (
                    CodeCount(
                        code,
                        recent=now.dead_letters[code] - first.dead_letters.get(code, 0),
                        total=now.dead_letters[code],
                        seconds_ago=now.at - at,
                    )
                    for code, at in self._last_dead_letters.items()
                ),
                key=lambda each: (each.seconds_ago, each.code),
            ),
        )

    def _notice(self, snapshot: Snapshot) -> None:
        latest, self._latest = self._latest, snapshot
        for code, count in snapshot.dead_letters.items():
            if count > latest.dead_letters.get(code, 0):
                self._last_dead_letters[code] = snapshot.at

    def _at_or_before(self, at: float) -> Snapshot:
        """The latest snapshot that is not after a time, or else the first one."""
        earlier = self._snapshots[0]
        for snapshot in self._snapshots:
            if snapshot.at > at:
                break
            earlier = snapshot
        return earlier

    def _intervals(self, now: float) -> Iterator[Interval]:
        for begin, end in pairwise(self._snapshots):
            if (seconds := end.at - begin.at) > 0:
                rates = {
                    outcome: (count - begin.events.get(outcome, 0)) / seconds
                    for outcome, count in end.events.items()
                }
                yield Interval(now - begin.at, now - end.at, rates)


def take_snapshot(metrics: StageMetrics, *, at: float) -> Snapshot:
    """Read the counters of a stage.

    Args:
        metrics: the stage's.
        at: the time, in seconds since any moment.
    """
    return Snapshot(
        at=at,
        events=_counts(metrics.events, "outcome"),
        dead_letters=_counts(metrics.dead_letters, "code"),
        durations={
            "duration": _histograms(metrics.duration)[""],
            "age": _histograms(metrics.event_age)[""],
            **_histograms(metrics.stage_duration, "stage"),
        },
    )


def quantile(share: float, buckets: Buckets) -> float | None:
    """A quantile in seconds, as Prometheus estimates it: by linear interpolation within its bucket.

    Returns:
        None without values; the highest finite bound if the quantile is beyond it.
    """
    rank = share * buckets.counts[-1]
    below, lower = 0.0, 0.0
    for bound, count in zip(buckets.bounds, buckets.counts, strict=True):
        if count > below and count >= rank:
            if math.isinf(bound):
                return lower
            # Rounding must not lead out of the bucket.
            return min(bound, lower + (bound - lower) * (rank - below) / (count - below))
        below, lower = count, bound
    return None


def _quantiles(buckets: Buckets) -> Quantiles:
    p50, p95, p99 = (quantile(share, buckets) for share in (0.5, 0.95, 0.99))
    return Quantiles(buckets.counts[-1], p50, p95, p99, longest=buckets.bounds[-2])


def _counts(counter: Counter, label: str) -> Mapping[str, float]:
    return {sample.labels[label]: sample.value for family in counter.collect() for sample in family.samples}


def _histograms(histogram: Histogram, label: str | None = None) -> Mapping[str, Buckets]:
    """By the values of one label, and summed over all others; with an empty name if there is no label."""
    found: dict[str, dict[float, float]] = {}
    for family in histogram.collect():
        for sample in family.samples:
            if "le" in sample.labels:
                counts = found.setdefault(sample.labels[label] if label else "", {})
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return {
        name: Buckets(_shared(tuple(counts)), array("d", counts.values())) for name, counts in found.items()
    }


@cache
def _shared(bounds: tuple[float, ...]) -> tuple[float, ...]:
    """The same object for the same bounds: each snapshot has them."""
    return bounds
