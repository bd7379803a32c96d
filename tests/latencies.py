"""What tests say about latencies, in seconds."""

from collections.abc import Collection

__all__ = ["MAX_MORE_SLOW", "percentile", "slow_share"]

_SLOW_SECONDS = 0.5
MAX_MORE_SLOW = 0.1
"""How much larger the share of slow events may be after a burst than before it. A worker that stalls for a second at a
time answers more than half of its events so late."""


def percentile(latencies: Collection[float], share: float) -> float:
    """The latency that this share of the events does not exceed."""
    return sorted(latencies)[int(share * (len(latencies) - 1))]


def slow_share(latencies: Collection[float]) -> float:
    """The share of events that took longer than half a second."""
    return sum(seconds > _SLOW_SECONDS for seconds in latencies) / len(latencies)
