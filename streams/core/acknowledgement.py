"""Ordered acknowledgement: an event may be acknowledged only when every event before it in its partition is done.

What may live here: who waits for whom. Not: Kafka, tasks, locks. Committing an offset says "everything before it is
done"; Faust's own choice of that offset is wrong as soon as acknowledgements come out of order, so they never do.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Entry", "AckTracker"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One event in work."""

    lane: Hashable
    item: T
    done: bool = field(default=False)


class AckTracker(Generic[T]):
    """Queues of events in work, one a lane (a partition in one generation of the consumer group)."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[Entry[T]]] = {}

    def __len__(self) -> int:
        """Events that are not yet acknowledged."""
        return sum(len(lane) for lane in self._lanes.values())

    def admit(self, lane: Hashable, item: T) -> Entry[T]:
        """Put an event at the end of its lane. Call in the order of offsets."""
        entry = Entry(lane, item)
        self._lanes.setdefault(lane, deque()).append(entry)
        return entry

    def complete(self, entry: Entry[T]) -> Iterator[T]:
        """Mark an event as done; yields what may be acknowledged now, in order, and forgets it.

        An entry whose lane was abandoned yields nothing.
        """
        entry.done = True
        lane = self._lanes.get(entry.lane)
        if lane is None:
            return
        while lane and lane[0].done:
            yield lane.popleft().item
        if not lane:
            self._lanes.pop(entry.lane, None)

    def clear(self) -> None:
        """Drop every lane: those partitions are somebody else's now, or will be read again."""
        self._lanes.clear()
