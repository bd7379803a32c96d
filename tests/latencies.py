"""What tests say about latencies, and about stalls; in seconds."""

from collections.abc import Collection, Iterable
from itertools import pairwise

__all__ = ["MAX_PAUSED", "pause_share", "percentile"]

_PAUSE_SECONDS = 0.3
MAX_PAUSED = 0.1
"""The largest share of time, under steady load, that may be pauses. A worker that stalls for a second at a time is
paused for more than a quarter of the time, on any machine; one that is only slow publishes steadily."""


def percentile(latencies: Collection[float], share: float) -> float:
    """The latency that this share of the events does not exceed."""
    return sorted(latencies)[int(share * (len(latencies) - 1))]


def pause_share(published: Iterable[float], *, since: float, until: float) -> float:
    """The share of a period in which nothing was published for more than 0.3 s.

    Args:
        published: when each result was published.
        since: the start of the period.
        until: its end.
    """
    moments = [since, *sorted(moment for moment in published if since < moment < until), until]
    pauses = (later - earlier for earlier, later in pairwise(moments))
    return sum(pause for pause in pauses if pause > _PAUSE_SECONDS) / (until - since)
