"""Measures live recall: repeats a few of the events' searches exactly, after their answers were published.

One search at a time, on a connection of its own, with the event's principals. Nothing waits for it: no answer, no
rebalance, no shutdown. Meanwhile, one search and the distances of its rows are kept in memory. No text is read.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Final, Protocol

from streams.core.errors import SearchTimeout, TransientError
from streams.core.live_recall import ALL_ROWS, NORMAL_ROWS, Budget, NotMeasured, ScopeSize, draw, recall
from streams.retrieval import ArmResult, Retrieved, Search
from streams.telemetry.metrics import Metrics

__all__ = ["ExactStore", "LiveRecall"]

logger = logging.getLogger(__name__)

_MAX_ROWS: Final[Sequence[tuple[ScopeSize, int]]] = (("normal", NORMAL_ROWS), ("large", ALL_ROWS))


class ExactStore(Protocol):
    """The store, searched exactly. Raises only TransientError subclasses or unexpected exceptions."""

    async def search_exactly(self, search: Search, *, max_rows: int, timeout_seconds: float) -> ArmResult: ...


class LiveRecall:
    """Measures the recall of a sample of the searches.

    Args:
        store: has a connection that events do not use.
        budget: how much time this may take.
        paused: whether something is more urgent: events wait, or the store is not well.
        metrics: where the measures go.
        chance: returns a random number, uniform in [0, 1).
        now: returns the time in seconds since any moment.
    """

    def __init__(
        self,
        store: ExactStore,
        budget: Budget,
        *,
        paused: Callable[[], bool],
        metrics: Metrics,
        chance: Callable[[], float] = random.random,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self._store = store
        self._budget = budget
        self._paused = paused
        self._metrics = metrics
        self._chance = chance
        self._now = now
        self._running: asyncio.Task[None] | None = None
        self._ended = False

    def offer(self, retrieved: Retrieved) -> None:
        """An event was answered: perhaps start to repeat one of its searches."""
        # Before the event's own searches add to the budget: otherwise, slow ones would be chosen more often.
        possible = (
            self._running is None and not self._ended and self._budget.seconds_for("normal") is not None
        )
        self._budget.earn(sum(retrieved.arm_seconds.values()))
        drawn = draw(len(retrieved.searches), self._chance())
        for number, (search, result) in enumerate(retrieved.searches.values()):
            if result.exact:
                self._skip(NotMeasured.EXACT)
            elif possible and number == drawn:
                k = retrieved.result.k_effective
                self._running = asyncio.create_task(
                    self._measure(
                        replace(search, limit=k, expand_parents=False, with_passages=False),
                        sorted(candidate.distance for candidate in result.candidates)[:k],
                    )
                )
                self._running.add_done_callback(self._on_done)
            else:
                self._skip(NotMeasured.NOT_DRAWN)

    def end(self) -> None:
        """Measure nothing any more, and cancel the search that is running."""
        self._ended = True
        if self._running is not None:
            self._running.cancel()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and (defect := task.exception()) is not None:
            # Only its type: its text may quote the event.
            logger.error("unexpected %s while measuring live recall", type(defect).__name__)
            self._skip(NotMeasured.FAILED)

    async def _measure(self, search: Search, found: Sequence[float]) -> None:
        measured = await self._search(search)
        if isinstance(measured, NotMeasured):
            self._skip(measured)
            return
        size, nearest = measured
        share = recall(found, nearest)
        if share is None:
            self._skip(NotMeasured.EMPTY)
        else:
            self._metrics.observe_live_recall(size, share)

    async def _search(self, search: Search) -> tuple[ScopeSize, Sequence[float]] | NotMeasured:
        """The size of the scope, and the distances of its nearest rows; or why they are not known."""
        for size, max_rows in _MAX_ROWS:
            if self._paused():
                return NotMeasured.PAUSED
            if (seconds := self._budget.seconds_for(size)) is None:
                return NotMeasured.TOO_LARGE
            began, timed_out = self._now(), False
            try:
                result = await self._store.search_exactly(search, max_rows=max_rows, timeout_seconds=seconds)
            except SearchTimeout:
                timed_out = True
                return NotMeasured.TIMEOUT if size == "normal" else NotMeasured.TOO_LARGE
            except TransientError as fault:
                logger.debug("cannot measure live recall (%s)", fault.code)
                return NotMeasured.FAILED
            finally:
                spent = self._now() - began
                self._budget.spend(size, spent, timed_out=timed_out)
                self._metrics.live_recall_seconds.inc(spent)
            if result.exact:
                return size, [candidate.distance for candidate in result.candidates]
        return NotMeasured.TOO_LARGE

    def _skip(self, reason: NotMeasured) -> None:
        self._metrics.live_recall_skipped.labels(reason.value).inc()
