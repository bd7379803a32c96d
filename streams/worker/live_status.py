"""Takes snapshots of a stage's counters regularly, and its status when somebody asks for it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, metadata
from time import monotonic

from streams import __version__
from streams.telemetry.history import INTERVAL_SECONDS, History, take_snapshot
from streams.telemetry.metrics import StageMetrics
from streams.telemetry.status import PartitionStatus, Stage, State, Status
from streams.worker.readiness import Readiness

__all__ = ["LiveStatus", "documentation_of"]


class LiveStatus:
    """The status of a stage.

    Args:
        stage: which one.
        metrics: its metrics.
        lag: yields (partition, events), for partitions with a known lag.
        oldest_waiting: yields (partition, seconds) for every assigned partition.
        in_flight: returns the number of events in flight.
        versions: returns what it is connected to, besides its own version.
        interval_seconds: time between two snapshots.
        now: returns the time in seconds since any moment.
    """

    def __init__(
        self,
        stage: Stage,
        metrics: StageMetrics,
        *,
        lag: Callable[[], Iterable[tuple[int, int]]],
        oldest_waiting: Callable[[], Iterable[tuple[int, float]]],
        in_flight: Callable[[], int],
        versions: Callable[[], Mapping[str, str | None]],
        interval_seconds: float = INTERVAL_SECONDS,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._stage = stage
        self._metrics = metrics
        self._lag = lag
        self._oldest_waiting = oldest_waiting
        self._in_flight = in_flight
        self._versions = versions
        self._interval_seconds = interval_seconds
        self._now = now
        self._documentation = _documentation()
        self._began = self._state_since = now()
        self._state: State = "starting"
        self._history = History(take_snapshot(metrics, at=self._began))

    async def watch(self) -> None:
        """Take a snapshot regularly, indefinitely."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            self._history.record(take_snapshot(self._metrics, at=self._now()))

    def notice(self, readiness: Readiness) -> None:
        """Notice the readiness; to be called often, because only changes that are noticed are shown."""
        if readiness.stopping:
            state: State = "stopping"
        elif readiness.ready:
            state = "ready"
        else:
            state = "starting" if self._state == "starting" else "not_ready"
        if state != self._state:
            self._state, self._state_since = state, self._now()

    def status(self, readiness: Readiness) -> Status:
        """The current status.

        Args:
            readiness: the current one.
        """
        self.notice(readiness)
        snapshot = take_snapshot(self._metrics, at=self._now())
        lag = dict(self._lag())
        return Status(
            stage=self._stage,
            at=datetime.now(UTC),
            uptime_seconds=snapshot.at - self._began,
            state=self._state,
            state_seconds=snapshot.at - self._state_since,
            problems=readiness.public_problems,
            dependencies=readiness.dependencies,
            partitions=[
                PartitionStatus(partition, lag.get(partition), seconds)
                for partition, seconds in sorted(self._oldest_waiting())
            ],
            in_flight=self._in_flight(),
            figures=self._history.figures(snapshot),
            versions={"anabranch": __version__, **self._versions()},
            documentation=self._documentation,
        )


def documentation_of(project_urls: Iterable[str]) -> str | None:
    """The address of the documentation in a distribution's metadata ("Documentation, https://…"), or None."""
    for entry in project_urls:
        label, _, address = entry.partition(",")
        if label.strip().lower() == "documentation" and address.strip().startswith("https://"):
            return address.strip()
    return None


def _documentation() -> str | None:
    try:
        return documentation_of(metadata("anabranch").get_all("Project-URL") or ())
    except PackageNotFoundError:
        return None
