"""Delivery: events in work, bounded, and acknowledged strictly in order.

Faust acknowledges an event when its agent asks for the next one, and commits past gaps; both lose events. So the agent
hands every event over to this, unacknowledged, and only this acknowledges: in the order of offsets, when the event and
every one before it in its partition is done, and only within the generation of the group that read it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, Protocol, TypeVar

from streams.core.acknowledgement import AckTracker, Entry

__all__ = ["Deliverable", "Delivery"]


class Deliverable(Protocol):
    """An event as it was read."""

    @property
    def partition(self) -> Hashable: ...

    @property
    def generation(self) -> int: ...

    def acknowledge(self) -> None: ...


R = TypeVar("R", bound=Deliverable)


class Delivery(Generic[R]):
    """Works on events concurrently.

    Args:
        handle: works on one event; returns when its result or dead letter is with the broker. It may raise nothing but
            CancelledError: what it raises is a defect, and the event stays unacknowledged.
        generation: the group's current generation.
        concurrency: most events between admission and acknowledgement. An event counts until it is acknowledged, not
            until it is done: otherwise one stuck event would let the queue behind it grow without end.
        on_defect: told when `handle` raised after all; without a restart that partition would stand still.
    """

    def __init__(
        self,
        handle: Callable[[R], Awaitable[None]],
        *,
        generation: Callable[[], int],
        concurrency: int,
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._handle = handle
        self._generation = generation
        self._concurrency = concurrency
        self._on_defect = on_defect
        self._tracker: AckTracker[R] = AckTracker()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only
        self._room = asyncio.Event()
        self._draining = False

    @property
    def in_flight(self) -> int:
        """Events admitted and not yet acknowledged."""
        return len(self._tracker)

    async def admit(self, record: R) -> None:
        """Take an event into work; waits while there is no room, which is what holds fetching back."""
        while self._busy() >= self._concurrency and not self._draining:
            self._room.clear()
            await self._room.wait()
        if self._draining or record.generation != self._generation():
            # Read before a rebalance: whoever owns the partition then reads it again. Taken into work now, it would be
            # acknowledged past those before it that the drain gives up.
            return
        entry = self._tracker.admit((record.partition, record.generation), record)
        task = asyncio.create_task(self._work(entry))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def drain(self, timeout_seconds: float) -> None:
        """Wait for the events in work, then give up on the rest: cancelled and unacknowledged, they are read again.

        No event is admitted from here on until `reopen`.
        """
        self._draining = True
        self._room.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_seconds)
        unfinished = set(self._tasks)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=1.0)
        self._tracker.clear()

    def reopen(self) -> None:
        """Partitions are assigned (again): admit events."""
        self._draining = False

    def _busy(self) -> int:
        # After a rebalance tasks of abandoned events may still be ending; they hold connections too.
        return max(len(self._tracker), len(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        # Only now is there room: while a task tells anybody that it is done, it still counts.
        self._tasks.discard(task)
        self._room.set()

    async def _work(self, entry: Entry[R]) -> None:
        try:
            await self._handle(entry.item)
            self._acknowledge(entry)
        except asyncio.CancelledError:
            raise
        except BaseException as defect:  # noqa: BLE001  # the task's end: nobody else would see it
            self._on_defect(defect)

    def _acknowledge(self, entry: Entry[R]) -> None:
        current = self._generation()
        for record in self._tracker.complete(entry):
            # A rebalance without revocation (the group forgot us) leaves no other trace than the generation.
            if record.generation == current:
                record.acknowledge()
