"""The consumer lag of this member, for the gauges: in events, and as the age of the oldest event.

It is computed from the broker's log ends, not only from fetches. Under back-pressure nothing is fetched, so the log end
known to the consumer does not advance, just when it matters.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Generic, Protocol, TypeVar

__all__ = ["Lag", "LogConsumer"]

logger = logging.getLogger(__name__)

# An event that has not been read may seem older by this much: less than the limit of the SLO for freshness.
_INTERVAL_SECONDS = 1.0
# Beyond this, a broker does not answer: whether events are waiting is not known.
_KNOWN_SECONDS = 15.0
# Maximum number of timestamps per partition. There are only that many while commits fail.
_MAX_TIMESTAMPS = 8192
# Likewise of log ends: one for each request to the broker.
_MAX_ENDS = 512


class _Partition(Protocol):
    @property
    def partition(self) -> int: ...

    def __hash__(self) -> int: ...


P = TypeVar("P", bound=_Partition)


class LogConsumer(Protocol[P]):
    """The consumer's interface for the lag."""

    def committed(self, tp: P) -> int | None:
        """The first offset that is not committed, 0 if nothing is; None while it is being fetched."""
        ...

    def highwater(self, tp: P) -> int | None:
        """The end of the log according to the last fetch."""
        ...

    def next_offset(self, tp: P) -> int | None:
        """The next offset to fetch, past offsets without an event too.

        None if an event before it is not committed, or if it is not known.
        """
        ...

    async def log_bounds(self, tps: Collection[P]) -> Mapping[P, tuple[int, int]]:
        """Fetch the first and the next offset of each log; raises if the broker does not answer in time.

        Logs for which the broker returns nothing are omitted.
        """
        ...


class Lag(Generic[P]):
    """The lag of each assigned partition.

    Args:
        consumer: returns the consumer.
        partitions: returns the currently assigned partitions.
        interval_seconds: time between two requests to the broker.
        now: returns the time since the epoch, in seconds; like the timestamps of events.
        monotonic: returns the time in seconds since any moment.
    """

    def __init__(
        self,
        consumer: Callable[[], LogConsumer[P]],
        partitions: Callable[[], Collection[P]],
        *,
        interval_seconds: float = _INTERVAL_SECONDS,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer = consumer
        self._partitions = partitions
        self._interval_seconds = interval_seconds
        self._now = now
        self._monotonic = monotonic
        self._bounds: Mapping[P, tuple[int, int]] = {}
        # When the broker last reported a partition's bounds; only since the assignment (monotonic).
        self._known_at: dict[P, float] = {}
        # When a partition was assigned (monotonic).
        self._assigned_at: dict[P, float] = {}
        # Log end, and when the broker was asked for it (monotonic), ascending; from the last one that is committed on.
        self._ends: dict[P, deque[tuple[int, float]]] = {}
        # Offset and timestamp of the events that have been read and may not be committed yet, in offset order.
        self._timestamps: dict[P, deque[tuple[int, float]]] = {}
        self._changed = asyncio.Event()

    def assigned(self, tps: Collection[P]) -> None:
        """These partitions have been assigned: their events are read again. Query the broker now."""
        now = self._monotonic()
        self._timestamps = {tp: deque() for tp in tps}
        self._known_at = {}
        # A rebalance does not answer the events that wait in a partition that stays here.
        self._assigned_at = {tp: self._assigned_at.get(tp, now) for tp in tps}
        self._ends = {tp: self._ends.get(tp) or deque() for tp in tps}
        self._changed.set()

    def track(self, tp: P, offset: int, timestamp: float | None) -> None:
        """An event has been read.

        Args:
            tp: its partition.
            offset: its offset.
            timestamp: when it was written, in seconds since the epoch; None: unknown, so now.
        """
        if (timestamps := self._timestamps.get(tp)) is None:
            return  # not assigned any more
        timestamps.append((offset, self._now() if timestamp is None else timestamp))
        if len(timestamps) > _MAX_TIMESTAMPS:
            self._first_uncommitted(tp)  # drops those before it
            if len(timestamps) > _MAX_TIMESTAMPS // 2:
                # The first one counts, and after the next commit one of the last, which are still exact.
                self._timestamps[tp] = deque(islice(timestamps, 0, None, 2))

    async def watch(self) -> None:
        """Query the broker repeatedly."""
        while True:
            self._changed.clear()
            await self.refresh()
            try:
                async with asyncio.timeout(self._interval_seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def refresh(self) -> None:
        """Query the broker once. Where it does not answer, for all partitions or for one, the last values stay."""
        if not (tps := self._partitions()):
            return
        asked_at = self._monotonic()
        try:
            bounds = await self._consumer().log_bounds(tps)
        except Exception as error:  # noqa: BLE001  # a gauge must not stop the worker; others report that Kafka fails
            logger.debug("cannot fetch the log offsets (%s)", type(error).__name__)
            return
        self._bounds = {tp: self._bounds[tp] for tp in tps if tp in self._bounds} | dict(bounds)
        now = self._monotonic()
        for tp, (_, end) in bounds.items():
            self._known_at[tp] = now
            self._add_end(tp, end, asked_at)

    def __call__(self) -> Iterable[tuple[int, int]]:
        """Yield partition and lag, for partitions with known offsets."""
        for tp in self._partitions():
            if (lag := self._lag(tp)) is not None:
                yield tp.partition, lag

    def committed(self) -> Iterable[tuple[int, int]]:
        """Yield partition and the first offset that is not committed, where it is known."""
        for tp in self._partitions():
            if (offset := self._consumer().committed(tp)) is not None:
                yield tp.partition, offset

    def oldest_waiting(self) -> Iterable[tuple[int, float]]:
        """Yield partition and seconds since its oldest event that is not committed was written; 0 if there is none.

        If that event has not been read, since the broker was last known not to have it, or since the assignment.
        Likewise if the broker does not answer: then events may be waiting that the worker does not know about.
        """
        for tp in self._partitions():
            yield tp.partition, self._waiting_seconds(tp)

    def _waiting_seconds(self, tp: P) -> float:
        now, lag = self._monotonic(), self._lag(tp)
        if lag == 0 and now - self._known_at.get(tp, -_KNOWN_SECONDS) < _KNOWN_SECONDS:
            return 0.0
        timestamp = self._first_uncommitted(tp) if lag else None
        if timestamp is None:
            return now - self._absent_at(tp, now)
        return max(0.0, self._now() - timestamp)  # a timestamp may be from another machine

    def _add_end(self, tp: P, end: int, at: float) -> None:
        if (ends := self._ends.get(tp)) is None:
            return  # not assigned any more
        if ends and end < ends[-1][0]:
            ends.clear()  # another topic of this name
        if ends and end == ends[-1][0] and len(ends) > 1:
            ends.pop()  # only the last time matters, but the first entry may be the one that is committed
        ends.append((end, at))
        self._absent_at(tp, at)  # drops those before it
        if len(ends) > _MAX_ENDS:
            self._ends[tp] = deque(islice(ends, 0, None, 2))

    def _absent_at(self, tp: P, now: float) -> float:
        """When the first event that is not committed did not exist yet, as far as is known; or the assignment.

        Not simply when the lag was last 0: under a steady load, it never is.
        """
        committed = self._first(tp)
        if (ends := self._ends.get(tp)) and committed is not None:
            while len(ends) > 1 and ends[1][0] <= committed:
                ends.popleft()
            if ends[0][0] <= committed:
                return ends[0][1]
        return self._assigned_at.get(tp, now)

    def _first_uncommitted(self, tp: P) -> float | None:
        """When the first event that is not committed was written; None if it has not been read."""
        timestamps, committed = self._timestamps.get(tp), self._consumer().committed(tp)
        if not timestamps or committed is None:
            return None
        while timestamps and timestamps[0][0] < committed:
            timestamps.popleft()
        return timestamps[0][1] if timestamps else None

    def _lag(self, tp: P) -> int | None:
        """Number of events that are not committed; None if it is not known."""
        first = self._first(tp)
        if first is None or tp not in self._bounds:
            return None
        start, end = self._bounds[tp]
        # Fetches are more recent; and events deleted by retention do not count as lag.
        return max(0, max(end, self._consumer().highwater(tp) or 0) - max(start, first))

    def _first(self, tp: P) -> int | None:
        """The first offset that is not committed and may be an event's; None if it is not known."""
        consumer = self._consumer()
        if (committed := consumer.committed(tp)) is None:
            return None
        # Markers of transactions and compacted offsets may follow the last event. Nobody commits them.
        return max(committed, consumer.next_offset(tp) or 0)
