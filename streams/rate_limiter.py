"""Limits the rate of events, without bursts after a delay."""

from collections.abc import Callable

__all__ = ["RateLimiter"]


class RateLimiter:
    """Spaces events evenly.

    Args:
        rate: events per second.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._interval = 1 / rate
        self._clock = clock
        self._due = clock()

    def delay(self) -> float:
        """Seconds to wait before the next event; each call reserves one event."""
        now = self._clock()
        delay = max(0.0, self._due - now)
        self._due = now + delay + self._interval
        return delay
