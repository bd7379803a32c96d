"""Ordered acknowledgement: an event may be acknowledged only when every event before it in its partition is done.

Belongs here: deciding which offset may be acknowledged. Does not belong here: Kafka, tasks, locks. Committing an
offset means "everything before it is done". Faust chooses that offset wrongly when acknowledgements arrive out of
order, so Anabranch always acknowledges in order.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["AckTracker", "Entry"]


@dataclass(slots=True, eq=False)
class Entry:
    """One event that has started: its offset, without any of its content."""

    queue: Hashable
    offset: int
    done: bool = False


class AckTracker:
    """Events that have started and are not yet acknowledged, in one queue per partition and group generation."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Entry]] = {}

    def __len__(self) -> int:
        """Number of events that are not yet acknowledged."""
        return sum(len(queue) for queue in self._queues.values())

    def unacknowledged(self, queue: Hashable) -> int:
        """Number of events of one queue that are not yet acknowledged."""
        return len(self._queues.get(queue, ()))

    def begin(self, queue: Hashable, offset: int) -> Entry:
        """Append an event to its queue. Call in offset order."""
        entry = Entry(queue, offset)
        self._queues.setdefault(queue, deque()).append(entry)
        return entry

    def complete(self, entry: Entry) -> int | None:
        """Mark an event as done.

        Returns:
            The highest offset that may be acknowledged now, together with all before it. None if nothing new may be
            acknowledged, or the queue was cleared.
        """
        entry.done = True
        queue = self._queues.get(entry.queue)
        last = None
        while queue and queue[0].done:
            last = queue.popleft().offset
        if not queue:
            self._queues.pop(entry.queue, None)
        return last

    def clear(self) -> None:
        """Drop every queue: the partitions now belong to other members, or will be read again."""
        self._queues.clear()
