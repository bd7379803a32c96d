"""The judgement: whether a series has grown, once everything has happened to the process that happens to it.

Only lulls between faults count, one point for each, and only the second half: before that, caches fill and pools open.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Final

from tests.soak.record import Record

__all__ = ["Bound", "Finding", "bounds", "judge", "theil_sen"]

# Fewer say nothing: any three points may rise.
_LEAST_LULLS: Final = 6
_MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class Bound:
    """What a series may do.

    Args:
        series: its name in the samples.
        title: what it is, with its unit.
        growth: most that it may grow over the second half; None: it may come and go below its ceiling.
        share: likewise, as a share of its level.
        ceiling: most that may be seen in any lull of the whole soak.
        unit: of what is shown.
    """

    series: str
    title: str
    growth: float | None = None
    share: float | None = None
    ceiling: float | None = None
    unit: float = 1.0


@dataclass(frozen=True)
class Finding:
    """What was found of one series, over the second half.

    Attributes:
        level: the median of its lulls.
        growth: from its beginning to its end.
        limit: of the growth.
        highest: in any lull of the whole soak.
        failures: a line for each bound that was missed.
    """

    bound: Bound
    level: float = 0.0
    growth: float = 0.0
    limit: float | None = None
    highest: float = 0.0
    failures: Sequence[str] = field(default=())


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between any two points: a few that lie astray do not bend it."""
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(points, 2) if x1 != x0]
    return median(slopes)


def judge(record: Record, bound: Bound) -> Finding:
    """Hold one series to its bound."""
    half = record.seconds / 2
    points = [point for point in record.points(bound.series) if point[0] >= half]
    if len(points) < _LEAST_LULLS:
        return Finding(
            bound,
            failures=[f"{bound.title}: {len(points)} lulls in the second half are too few to judge by"],
        )
    values = [value for _, value in points]
    level = median(values)
    # The fit does not see what begins late, nor the comparison what is spread thin among noise: whichever is more.
    third = len(values) // 3
    fitted = theil_sen(points) * (record.seconds - half)
    growth = max(fitted, median(values[-third:]) - median(values[:third]))
    limits = [
        *([] if bound.growth is None else [bound.growth]),
        *([] if bound.share is None else [bound.share * level]),
    ]
    limit = min(limits) if limits else None
    highest = max(record.calm(bound.series))
    failures = []
    if limit is not None and growth > limit:
        failures.append(
            f"{bound.title} grew by {growth / bound.unit:.1f} over the second half, over {limit / bound.unit:.1f}"
        )
    if bound.ceiling is not None and highest > bound.ceiling:
        failures.append(
            f"{bound.title}: {highest / bound.unit:.0f} in a lull, over {bound.ceiling / bound.unit:.0f}"
        )
    return Finding(bound, level, growth, limit, highest, failures)


def bounds(*, pool: int) -> Sequence[Bound]:
    """What a worker is held to, whose pool may have so many connections."""
    return [
        Bound("rss", "resident memory, MiB", growth=10 * _MIB, share=0.05, unit=_MIB),
        Bound("blocks", "Python's blocks of memory, thousands", share=0.02, unit=1000),
        Bound("files", "file descriptors, without connections to servers", growth=2),
        Bound("tasks", "asyncio's tasks", growth=3),
        Bound("kafka", "connections to Kafka", growth=1),
        # It opens what a burst needs and closes what has long been idle; what it loses count of goes over its size.
        # One more is for live recall.
        Bound("postgres", "connections to PostgreSQL", ceiling=pool + 1),
    ]
