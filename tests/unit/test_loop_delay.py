"""The measure of a late event loop."""

import asyncio
import time
from contextlib import suppress

from streams.worker.loop_delay import watch_loop_delay


async def measured(busy_seconds: float, *, interval_seconds: float) -> list[float]:
    """The delays that are reported while something keeps the loop busy once."""
    delays: list[float] = []
    watching = asyncio.create_task(watch_loop_delay(delays.append, interval_seconds=interval_seconds))
    await asyncio.sleep(1.5 * interval_seconds)
    before = len(delays)
    time.sleep(busy_seconds)  # noqa: ASYNC251  # on purpose
    await asyncio.sleep(interval_seconds / 2)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    assert before >= 1
    return delays[before:]


async def test_a_delay_is_reported_for_each_timer_that_it_holds_up() -> None:
    """One sample of a second among hundreds of short ones would be invisible."""
    delays = await measured(0.5, interval_seconds=0.05)
    late = [delay for delay in delays if delay > 0.05]
    assert len(late) >= 8
    assert max(late) >= 0.4


async def test_delays_are_never_negative() -> None:
    assert min(await measured(0.01, interval_seconds=0.02)) >= 0
