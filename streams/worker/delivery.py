"""Delivery: events run concurrently, within bounds, and are acknowledged strictly in order.

Faust acknowledges an event when its agent requests the next one, and commits past gaps; both lose events. So the agent
passes every event, unacknowledged, to this module, which alone acknowledges: in offset order, when the event and all
before it in its partition are done, and only within the group generation in which it was read.

A partition cannot block the others: an event occupies a slot only while it runs, and one partition never uses more than
half of the slots while the worker has other partitions.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from streams.core.acknowledgement import AckTracker, Entry

__all__ = ["Deliverable", "Delivery", "InterruptibleWaits"]

# Maximum number of events of one partition that have started but cannot be acknowledged yet, because an earlier one is
# still running. A crash repeats at most this many.
_MAX_UNACKNOWLEDGED = 1000


class Deliverable(Protocol):
    """An event as it was read."""

    @property
    def partition(self) -> Hashable: ...

    @property
    def offset(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def size(self) -> int:
        """Size in memory, in bytes."""
        ...


R = TypeVar("R", bound=Deliverable)


class InterruptibleWaits:
    """Waits of an event for its next attempt or for the store. A drain ends these waits at once."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._over = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within this context the event is only waiting, so its task may be cancelled."""
        if self._over or (task := asyncio.current_task()) is None:
            raise asyncio.CancelledError
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    async def sleep(self, seconds: float) -> None:
        """Sleep between two attempts."""
        with self.pause():
            await asyncio.sleep(seconds)

    def end(self) -> None:
        """Cancel the tasks that are waiting, and those that start to wait later."""
        self._over = True
        for task in self._tasks:
            task.cancel()

    def allow(self) -> None:
        """Allow waits again, for future tasks."""
        self._over = False


@dataclass(slots=True, eq=False)
class _Partition(Generic[R]):
    """One partition in one group generation."""

    waiting: deque[R] = field(default_factory=deque)
    running: int = 0
    paused: bool = False


class Delivery(Generic[R]):
    """Runs events concurrently.

    Args:
        handle: processes one event; returns when the broker has acknowledged its result or dead letter. It must raise
            only CancelledError: any other exception is a bug, and the event stays unacknowledged.
        acknowledge: called with a partition and an offset: that event and all before it are done.
        generation: returns the group's current generation.
        concurrency: maximum number of events that run at the same time.
        max_waiting_bytes: limit for the waiting events of all partitions. When it is exceeded, only partitions without
            waiting events are fetched, until at most half of it is in use.
        pause: stop fetching a partition because enough of its events are waiting. Events that were already fetched may
            still be admitted.
        resume: fetch the partition again.
        on_defect: called if `handle` raises nevertheless; without a restart, that partition would be blocked.
        waits: the waits of `handle` during which nothing else is running.
        max_unacknowledged: maximum number of a partition's events that have started and are not acknowledged. At this
            limit the partition waits for its oldest event; otherwise the queue behind a stuck event would grow
            without limit.
    """

    def __init__(
        self,
        handle: Callable[[R], Awaitable[None]],
        *,
        acknowledge: Callable[[Hashable, int], None],
        generation: Callable[[], int],
        concurrency: int,
        max_waiting_bytes: int,
        pause: Callable[[Hashable], None],
        resume: Callable[[Hashable], None],
        on_defect: Callable[[BaseException], None],
        waits: InterruptibleWaits,
        max_unacknowledged: int = _MAX_UNACKNOWLEDGED,
    ) -> None:
        self._handle = handle
        self._send_acknowledgement = acknowledge
        self._generation = generation
        self._concurrency = concurrency
        self._max_waiting_bytes = max_waiting_bytes
        self._pause = pause
        self._resume = resume
        self._on_defect = on_defect
        self._waits = waits
        self._max_unacknowledged = max_unacknowledged
        self._tracker = AckTracker()
        # In round-robin order: a partition that has started an event moves to the end.
        self._partitions: dict[tuple[Hashable, int], _Partition[R]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself only keeps weak references
        self._waiting_bytes = 0
        self._is_full = False
        self._max_per_partition = concurrency
        self._draining = False

    @property
    def in_flight(self) -> int:
        """Number of events that have started and are not yet acknowledged."""
        return len(self._tracker)

    @property
    def running(self) -> int:
        """Number of events that occupy a slot."""
        return len(self._tasks)

    @property
    def waiting(self) -> int:
        """Number of events that were read and have not started."""
        return sum(len(partition.waiting) for partition in self._partitions.values())

    def admit(self, record: R) -> bool:
        """Admit an event: it starts at once or waits for its turn.

        Returns:
            False if it is dropped: it was read before a rebalance, and the partition's next owner reads it again.
        """
        if self._draining or record.generation != self._generation():
            # If it started now, it would be acknowledged past earlier events that the drain cancels.
            return False
        key = record.partition, record.generation
        self._partitions.setdefault(key, _Partition()).waiting.append(record)
        self._waiting_bytes += record.size
        self._begin_waiting()
        if not self._is_full and self._waiting_bytes > self._max_waiting_bytes:
            self._is_full = True
            for each in self._partitions:
                self._update_paused(each)
        self._update_paused(key)
        return True

    async def drain(self, timeout_seconds: float) -> int:
        """Wait for the running events, then cancel the rest: they stay unacknowledged and are read again.

        Events that are only waiting are cancelled at once. No event is admitted until `reopen`.

        Returns:
            Number of running events that were cancelled after the timeout.
        """
        self._draining = True
        self._clear_waiting()
        self._waits.end()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_seconds)
        unfinished = set(self._tasks)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=1.0)
        self._tracker.clear()
        return len(unfinished)

    def reopen(self, partitions: int) -> None:
        """Admit events again: this number of partitions has been assigned."""
        # The limit also applies while other partitions are idle: the duration of an event is unknown, and it cannot be
        # interrupted for other partitions' events that arrive meanwhile.
        self._max_per_partition = self._concurrency if partitions <= 1 else max(1, self._concurrency // 2)
        self._clear_waiting()  # if the group evicted this member, there was no drain
        self._waits.allow()
        self._draining = False

    def _clear_waiting(self) -> None:
        self._partitions.clear()
        self._waiting_bytes = 0
        self._is_full = False

    def _update_paused(self, key: tuple[Hashable, int]) -> None:
        partition = self._partitions[key]
        waiting = len(partition.waiting)
        if key[1] != self._generation():
            return  # the partition's current owner decides
        if not partition.paused and (waiting >= self._concurrency or (self._is_full and waiting)):
            partition.paused = True
            self._pause(key[0])
        elif partition.paused and waiting <= self._concurrency // 2 and not (self._is_full and waiting):
            partition.paused = False
            self._resume(key[0])

    def _begin_waiting(self) -> None:
        """Start as many events as allowed, one partition after the other."""
        current = self._generation()
        # After a rebalance, cancelled tasks may still be ending; they also hold connections.
        while len(self._tasks) < self._concurrency:
            key = next((key for key in self._partitions if key[1] == current and self._may_begin(key)), None)
            if key is None:
                return
            partition = self._partitions[key] = self._partitions.pop(key)
            record = partition.waiting.popleft()
            self._waiting_bytes -= record.size
            partition.running += 1
            task = asyncio.create_task(self._run_one(self._tracker.begin(key, record.offset), record))
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_task_done, partition))
            if self._is_full and self._waiting_bytes <= self._max_waiting_bytes // 2:
                self._is_full = False
                for each in self._partitions:
                    self._update_paused(each)
            self._update_paused(key)

    def _may_begin(self, key: tuple[Hashable, int]) -> bool:
        partition = self._partitions[key]
        return (
            bool(partition.waiting)
            and partition.running < self._max_per_partition
            and self._tracker.unacknowledged(key) < self._max_unacknowledged
        )

    def _on_task_done(self, partition: _Partition[R], task: asyncio.Task[None]) -> None:
        # The slot is free only now: a task still counts while it reports that it is done.
        self._tasks.discard(task)
        partition.running -= 1
        if not self._draining:
            self._begin_waiting()

    async def _run_one(self, entry: Entry, record: R) -> None:
        try:
            await self._handle(record)
            self._acknowledge(entry, record)
        except asyncio.CancelledError:
            raise
        except BaseException as defect:  # noqa: BLE001  # end of the task: otherwise the exception would be lost
            self._on_defect(defect)

    def _acknowledge(self, entry: Entry, record: R) -> None:
        last = self._tracker.complete(entry)
        # A rebalance without revocation (the group evicted this member) is visible only in the generation.
        if last is not None and record.generation == self._generation():
            self._send_acknowledgement(record.partition, last)
