"""The consumer lag of this member, for the gauge: computed from the broker's log ends, not only from fetches.

Under back-pressure nothing is fetched, so the log end known to the consumer does not advance, just when it matters.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

__all__ = ["Lag", "LogConsumer"]

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 3.0


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
    """

    def __init__(
        self,
        consumer: Callable[[], LogConsumer[P]],
        partitions: Callable[[], Collection[P]],
        *,
        interval_seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        self._consumer = consumer
        self._partitions = partitions
        self._interval_seconds = interval_seconds
        self._bounds: Mapping[P, tuple[int, int]] = {}
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """The assignment has changed: query the broker now."""
        self._changed.set()

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
        try:
            bounds = await self._consumer().log_bounds(tps)
        except Exception as error:  # noqa: BLE001  # a gauge must not stop the worker; others report that Kafka fails
            logger.debug("cannot fetch the log offsets (%s)", type(error).__name__)
        else:
            self._bounds = {tp: self._bounds[tp] for tp in tps if tp in self._bounds} | dict(bounds)

    def __call__(self) -> Iterable[tuple[int, int]]:
        """Yield partition and lag, for partitions with known offsets."""
        consumer = self._consumer()
        for tp in self._partitions():
            committed = consumer.committed(tp)
            if committed is None or tp not in self._bounds:
                continue
            start, end = self._bounds[tp]
            # Fetches are more recent; and events deleted by retention do not count as lag.
            yield tp.partition, max(0, max(end, consumer.highwater(tp) or 0) - max(start, committed))
