"""Whether the worker can answer events: one decision for the readiness page, the metrics and the log."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from streams.telemetry.metrics import WorkerState
from streams.worker.store_health import StoreState

__all__ = ["Readiness", "watch_readiness"]

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """The state of everything that answering an event needs.

    Attributes:
        store: the store's state.
        store_problem: why it cannot be searched, or None.
        kafka_problem: why Kafka cannot be used, or None.
        partitions: number of assigned partitions.
        missing_topics: the topics that do not exist.
        stopping: the worker is shutting down.
    """

    store: StoreState
    store_problem: str | None
    kafka_problem: str | None
    partitions: int
    missing_topics: Sequence[str]
    stopping: bool

    @property
    def problems(self) -> Mapping[str, str]:
        """Why the worker is not ready, by what is affected; empty if it is ready."""
        missing = ", ".join(self.missing_topics)
        found = {
            "worker": "the worker is stopping" if self.stopping else None,
            "kafka": self.kafka_problem,
            "topics": f"missing topics: {missing}" if missing else None,
            "partitions": None if self.partitions else "no partitions are assigned",
            "store": self.store_problem,
        }
        return {name: problem for name, problem in found.items() if problem is not None}

    @property
    def ready(self) -> bool:
        return not self.problems

    def state(self) -> WorkerState:
        """For the gauges."""
        return WorkerState(
            ready=self.ready,
            store_up=self.store is StoreState.UP,
            kafka_up=self.kafka_problem is None,
            assigned_partitions=self.partitions,
        )

    def page(self) -> Mapping[str, object]:
        """For the readiness page."""
        return {
            "ready": self.ready,
            "store": self.store.value,
            "kafka": "up" if self.kafka_problem is None else "down",
            "partitions": self.partitions,
            "missing_topics": self.missing_topics,
        }


async def watch_readiness(
    readiness: Callable[[], Readiness], *, interval_seconds: float = _INTERVAL_SECONDS
) -> None:
    """Log one line when the worker becomes ready, and one when it no longer is, or for another reason; indefinitely.

    Nothing is logged before it is ready for the first time: what it waits for is logged where it is noticed.
    """
    logged: AbstractSet[str] | None = None
    while True:
        await asyncio.sleep(interval_seconds)
        current = readiness()
        problems = current.problems
        if current.stopping or problems.keys() == logged or (logged is None and problems):
            continue
        logged = problems.keys()
        if problems:
            logger.warning("not ready", extra={"reason": "; ".join(problems.values())})
        else:
            logger.info("ready", extra={"partitions": current.partitions})
