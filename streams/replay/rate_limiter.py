"""So many a second, and no faster after a delay."""

from collections.abc import Callable

__all__ = ["RateLimiter"]


class RateLimiter:
    """Spaces events evenly.

    Args:
        rate: events a second.
        clock: seconds, monotonic.
    """

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._interval = 1 / rate
        self._clock = clock
        self._due = clock()

    def pause(self) -> float:
        """Seconds to wait before the next event; each call is for another one."""
        now = self._clock()
        pause = max(0.0, self._due - now)
        self._due = now + pause + self._interval
        return pause
