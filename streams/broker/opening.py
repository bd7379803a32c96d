"""Lets a connection be opened completely although its caller is cancelled."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

__all__ = ["Opening"]

T = TypeVar("T")


class Opening(Generic[T]):
    """An attempt to open a connection, shared by everybody who needs it meanwhile.

    It goes on if they are cancelled: aiokafka leaves a connection open if its bootstrap is cancelled. So there is never
    more than one attempt, however many callers have given up.

    Args:
        attempt: opens the connection.
    """

    def __init__(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._attempt = attempt
        self._task: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Wait for the attempt that is being made, else for a new one.

        Raises:
            Exception: the attempt's.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._attempt())
            self._task.add_done_callback(_retrieve)
        return await asyncio.shield(self._task)

    async def stop(self, seconds: float) -> None:
        """Wait that long for the attempt that is being made, then cancel it."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=seconds)
            self._task.cancel()
            await asyncio.wait([self._task])


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # all callers may be cancelled, and not look at it
