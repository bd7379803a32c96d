"""What a worker or an embedding stage shows of itself: counts, times and states, never anything of an event."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from streams.telemetry.history import Figures, Quantiles

__all__ = ["PartitionStatus", "Stage", "State", "Status", "status_document"]

Stage = Literal["worker", "embedder"]
#: ``starting``: not ready, and it has not been since the start.
State = Literal["starting", "ready", "not_ready", "stopping"]


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """An assigned partition.

    Attributes:
        partition: its number.
        lag: number of events that are not committed; None if it is not known.
        oldest_waiting_seconds: age of the oldest of them; 0 if there is none.
    """

    partition: int
    lag: int | None
    oldest_waiting_seconds: float


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a stage at one time.

    Attributes:
        stage: which one.
        at: the time, in UTC.
        uptime_seconds: since the start.
        state: the same decision as on the readiness page.
        state_seconds: how long it has not changed.
        problems: sentences that say why it is not ready, by what is affected.
        dependencies: the states of what events need.
        partitions: the assigned partitions, ascending.
        in_flight: number of events that have started and are not acknowledged.
        figures: what the counters show.
        versions: what runs here, and what it is connected to; None: not known yet.
        documentation: the address of the documentation; None: there is none.
    """

    stage: Stage
    at: datetime
    uptime_seconds: float
    state: State
    state_seconds: float
    problems: Mapping[str, str]
    dependencies: Mapping[str, str]
    partitions: Sequence[PartitionStatus]
    in_flight: int
    figures: Figures
    versions: Mapping[str, str | None]
    documentation: str | None

    @property
    def lag(self) -> int | None:
        """Number of events that are not committed; None if it is not known, or without partitions."""
        known = [each.lag for each in self.partitions if each.lag is not None]
        return sum(known) if known and len(known) == len(self.partitions) else None

    @property
    def oldest_waiting_seconds(self) -> float | None:
        """Age of the oldest event that is not committed; None without partitions."""
        return max((each.oldest_waiting_seconds for each in self.partitions), default=None)


def status_document(status: Status) -> Mapping[str, object]:
    """The status as a JSON object. Its form is stable: releases only add fields. Numbers are finite or null."""
    figures = status.figures
    return {
        "stage": status.stage,
        "at": _time(status, 0.0),
        "state": status.state,
        "since": _time(status, status.state_seconds),
        "uptime_seconds": _number(status.uptime_seconds),
        "problems": dict(status.problems),
        "dependencies": dict(status.dependencies),
        "partitions": [
            {
                "partition": each.partition,
                "lag": each.lag,
                "oldest_waiting_seconds": _number(each.oldest_waiting_seconds),
            }
            for each in status.partitions
        ],
        "lag": status.lag,
        "oldest_waiting_seconds": _number(status.oldest_waiting_seconds),
        "in_flight": status.in_flight,
        "window_seconds": _number(figures.window_seconds),
        "events": {
            outcome: {
                "per_second": _number(figures.rates[outcome]),
                "recent": int(figures.recent[outcome]),
                "total": int(total),
            }
            for outcome, total in figures.totals.items()
        },
        "latency_seconds": {name: _quantiles(found) for name, found in figures.latency.items()},
        "dead_letters": [
            {
                "code": each.code,
                "recent": int(each.recent),
                "total": int(each.total),
                "last_at": _time(status, each.seconds_ago),
            }
            for each in figures.dead_letters
        ],
        "versions": dict(status.versions),
        "documentation": status.documentation,
    }


def _quantiles(found: Quantiles) -> Mapping[str, object]:
    return {
        "events": int(found.events),
        "p50": _number(found.p50),
        "p95": _number(found.p95),
        "p99": _number(found.p99),
    }


def _time(status: Status, seconds_ago: float) -> str:
    at = status.at - timedelta(seconds=seconds_ago)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def _number(value: float | None) -> float | None:
    """Rounded to microseconds."""
    return None if value is None or not math.isfinite(value) else round(value, 6)
