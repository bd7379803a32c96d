"""Measures how late the worker's event loop is: while it is, no event makes progress, whatever the stages measure."""

import asyncio
from collections.abc import Callable
from time import perf_counter

__all__ = ["watch_loop_delay"]

# An idle worker wakes up this often anyway. A delay is noticed if it is longer than this, or happens often.
_INTERVAL_SECONDS = 0.25


async def watch_loop_delay(
    observe: Callable[[float], None], *, interval_seconds: float = _INTERVAL_SECONDS
) -> None:
    """Report by how many seconds a timer is late, indefinitely.

    A delay that is longer than the interval is reported once for every timer that it would have delayed, with the
    time that each would have been late. Otherwise the longest delays would count the least.

    Args:
        observe: called with the delay of each timer.
        interval_seconds: time between two timers.
    """
    due = perf_counter() + interval_seconds
    while True:
        await asyncio.sleep(max(0.0, due - perf_counter()))
        now = perf_counter()
        while due <= now:
            observe(now - due)
            due += interval_seconds
