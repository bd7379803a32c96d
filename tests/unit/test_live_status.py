"""What the live page is made from: a stage's readiness, its metrics and its lag."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from streams.telemetry.metrics import Metrics
from streams.telemetry.status import PartitionStatus, Status
from streams.worker.dependency_health import DependencyState
from streams.worker.live_status import LiveStatus, documentation_of
from streams.worker.readiness import Readiness

READY = Readiness(
    dependency="store",
    state=DependencyState.UP,
    problem=None,
    kafka_problem=None,
    partitions=2,
    missing_topics=[],
    stopping=False,
)
DOWN = replace(READY, state=DependencyState.DOWN, problem="store: PostgreSQL at db:5432 as role secret")


class Stage:
    def __init__(self, **options: Any) -> None:
        self.metrics = Metrics(profiles=["docs"])
        self.now = 0.0
        self.live_status = LiveStatus(
            "worker",
            self.metrics,
            lag=lambda: [(3, 7)],
            oldest_waiting=lambda: [(3, 1.5), (1, 0.5)],
            in_flight=lambda: 2,
            versions=lambda: {"postgresql": None},
            now=lambda: self.now,
            **options,
        )

    def status(self, readiness: Readiness = READY) -> Status:
        self.now += 1
        return self.live_status.status(readiness)


def test_a_stage_is_starting_until_it_is_ready_for_the_first_time() -> None:
    stage = Stage()
    states = [
        stage.status(readiness).state
        for readiness in (DOWN, READY, DOWN, READY, replace(DOWN, stopping=True))
    ]
    assert states == ["starting", "ready", "not_ready", "ready", "stopping"]


def test_a_state_lasts_since_it_was_noticed() -> None:
    stage = Stage()
    assert stage.status(DOWN).state_seconds == 1
    stage.live_status.notice(READY)
    stage.now += 100
    stage.live_status.notice(READY)
    status = stage.status(READY)
    assert (status.state, status.state_seconds) == ("ready", 101)
    stage.live_status.notice(DOWN)
    assert stage.status(DOWN).state_seconds == 1


def test_the_status_is_read_when_somebody_asks() -> None:
    stage = Stage()
    stage.metrics.events.labels("answered").inc(3)
    status = stage.status(READY)
    assert status.partitions == [PartitionStatus(1, None, 0.5), PartitionStatus(3, 7, 1.5)]
    assert (status.in_flight, status.uptime_seconds) == (2, 1.0)
    assert status.figures.totals["answered"] == 3
    assert status.dependencies == {"store": "up", "kafka": "up"}
    assert status.versions.keys() == {"anabranch", "postgresql"}


@pytest.mark.parametrize(
    ("readiness", "problems"),
    [
        (READY, {}),
        (DOWN, {"store": "The store is unavailable. The log has the reason."}),
        (
            replace(DOWN, state=DependencyState.MISCONFIGURED, dependency="provider"),
            {
                "provider": "The provider cannot be used until an operator fixes it."
                " The log has the reason and the remedy."
            },
        ),
        (
            replace(READY, kafka_problem="Kafka at broker:9092: why"),
            {"kafka": "Kafka is unreachable or rejects requests. The log has the reason."},
        ),
        (replace(READY, missing_topics=["a", "b"]), {"topics": "Missing topics: a, b."}),
        (replace(READY, stopping=True), {"worker": "The process is stopping."}),
    ],
)
def test_problems_name_what_is_affected_and_quote_nothing(
    readiness: Readiness, problems: dict[str, str]
) -> None:
    assert Stage().status(readiness).problems == problems


async def test_snapshots_are_taken_without_anybody_asking() -> None:
    stage = Stage(interval_seconds=0.001)
    watching = asyncio.create_task(stage.live_status.watch())
    async with asyncio.timeout(5):
        while not stage.live_status.status(READY).figures.intervals:
            stage.now += 1
            await asyncio.sleep(0.001)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


def test_the_documentation_s_address_is_the_distribution_s() -> None:
    entries = ["Source, https://code.example.com/", "Documentation, https://docs.example.com/a,b"]
    assert documentation_of(entries) == "https://docs.example.com/a,b"
    assert documentation_of(entries[:1]) is None
    assert documentation_of(["Documentation, javascript:alert(1)"]) is None
