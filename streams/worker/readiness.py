"""Whether a stage can answer events: one decision for the readiness page, the metrics and the log."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from streams.telemetry.metrics import WorkerState
from streams.worker.dependency_health import DependencyState

__all__ = ["Readiness", "watch_readiness"]

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0

_OF_DEPENDENCY: Final[Mapping[DependencyState, str]] = {
    DependencyState.UNKNOWN: "has not been checked yet.",
    DependencyState.UP: "answers, but the preflight has not passed yet. The log has the reason.",
    DependencyState.DOWN: "is unavailable. The log has the reason.",
    DependencyState.MISCONFIGURED: "cannot be used until an operator fixes it. The log has the reason and the remedy.",
}


@dataclass(frozen=True, slots=True)
class Readiness:
    """The state of everything that answering an event needs.

    Attributes:
        dependency: what events need: ``store`` or ``provider``.
        state: its state.
        problem: why it cannot be used, or None.
        kafka_problem: why Kafka cannot be used, or None.
        partitions: number of assigned partitions.
        missing_topics: the topics that do not exist.
        stopping: the process is shutting down.
    """

    dependency: str
    state: DependencyState
    problem: str | None
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
            self.dependency: self.problem,
        }
        return {name: problem for name, problem in found.items() if problem is not None}

    @property
    def public_problems(self) -> Mapping[str, str]:
        """The same, for everyone who can reach the web port: without addresses, roles and what servers say."""
        texts = {
            "worker": "The process is stopping.",
            "kafka": "Kafka is unreachable or rejects requests. The log has the reason.",
            "topics": f"Missing topics: {', '.join(self.missing_topics)}.",
            "partitions": "No partitions are assigned: the group is rebalancing, or has more members than partitions.",
            self.dependency: f"The {self.dependency} {_OF_DEPENDENCY[self.state]}",
        }
        return {name: texts[name] for name in self.problems}

    @property
    def dependencies(self) -> Mapping[str, str]:
        """The states of what events need."""
        return {self.dependency: self.state.value, "kafka": "up" if self.kafka_problem is None else "down"}

    @property
    def ready(self) -> bool:
        return not self.problems

    def gauges(self) -> WorkerState:
        """For the gauges."""
        return WorkerState(
            ready=self.ready,
            dependency_up=self.state is DependencyState.UP,
            kafka_up=self.kafka_problem is None,
            assigned_partitions=self.partitions,
        )

    def page(self) -> Mapping[str, object]:
        """For the readiness page."""
        return {
            "ready": self.ready,
            **self.dependencies,
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
