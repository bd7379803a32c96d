"""Lets a connection be opened completely although its caller is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Openings"]

T = TypeVar("T")


class Openings:
    """What is being opened at the moment. aiokafka leaves a connection open if its bootstrap is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, opening: Coroutine[Any, Any, T]) -> T:
        """Run it to its end; a caller that is cancelled does not wait for it."""
        task = asyncio.ensure_future(opening)
        self._tasks.add(task)
        task.add_done_callback(self._opened)
        return await asyncio.shield(task)

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until everything is open or has failed, then cancel what is left.

        Args:
            seconds: how long; None: as long as it takes.
        """
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _opened(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be cancelled, and not look at it
