"""One decision on readiness, and what is logged of it."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from streams.telemetry.metrics import WorkerState
from streams.worker.dependency_health import DependencyState
from streams.worker.readiness import Readiness, watch_readiness

READY = Readiness(
    dependency="store",
    state=DependencyState.UP,
    problem=None,
    kafka_problem=None,
    partitions=3,
    missing_topics=[],
    stopping=False,
)
DOWN: dict[str, Any] = {"state": DependencyState.DOWN, "problem": "store: why"}


@pytest.mark.parametrize(
    ("changes", "problems", "shown"),
    [
        ({}, {}, WorkerState(ready=True, dependency_up=True, kafka_up=True, assigned_partitions=3)),
        (DOWN, {"store": "store: why"}, WorkerState(kafka_up=True, assigned_partitions=3)),
        (
            # The store answers, but no preflight has passed since the start.
            {"problem": "store: why"},
            {"store": "store: why"},
            WorkerState(dependency_up=True, kafka_up=True, assigned_partitions=3),
        ),
        (
            {"kafka_problem": "Kafka: why"},
            {"kafka": "Kafka: why"},
            WorkerState(dependency_up=True, assigned_partitions=3),
        ),
        (
            {"missing_topics": ["a", "b"]},
            {"topics": "missing topics: a, b"},
            WorkerState(dependency_up=True, kafka_up=True, assigned_partitions=3),
        ),
        (
            {"partitions": 0},
            {"partitions": "no partitions are assigned"},
            WorkerState(dependency_up=True, kafka_up=True),
        ),
        (
            {"stopping": True},
            {"worker": "the worker is stopping"},
            WorkerState(dependency_up=True, kafka_up=True, assigned_partitions=3),
        ),
    ],
)
def test_everything_that_an_answer_needs_counts(
    changes: dict[str, Any], problems: dict[str, str], shown: WorkerState
) -> None:
    readiness = replace(READY, **changes)
    assert readiness.problems == problems
    assert readiness.public_problems.keys() == problems.keys()
    assert readiness.ready is not bool(problems)
    assert readiness.gauges() == shown
    assert readiness.page()["ready"] is shown.ready is readiness.ready


async def logged_of(steps: list[Readiness], caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, Any]]:
    caplog.set_level(logging.INFO, logger="streams")
    left = [*steps, steps[-1]]
    watching = asyncio.create_task(
        watch_readiness(lambda: left.pop(0) if len(left) > 1 else left[0], interval_seconds=0.001)
    )
    async with asyncio.timeout(5):
        while len(left) > 1:  # noqa: ASYNC110  # nobody says when
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return [
        (line.levelname, line.getMessage(), vars(line).get("reason", vars(line).get("partitions")))
        for line in caplog.records
    ]


async def test_each_change_is_one_line_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    down = replace(READY, **DOWN)
    other_error = replace(down, problem="store: another error")
    both = replace(down, kafka_problem="Kafka: why")
    joining = replace(READY, partitions=0)
    steps = [joining, joining, READY, READY, down, down, other_error, both, both, joining, READY]
    assert await logged_of(steps, caplog) == [
        ("INFO", "ready", 3),
        ("WARNING", "not ready", "store: why"),
        ("WARNING", "not ready", "Kafka: why; store: why"),
        ("WARNING", "not ready", "no partitions are assigned"),
        ("INFO", "ready", 3),
    ]


async def test_the_end_of_the_worker_is_not_reported_as_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    stopping = replace(READY, stopping=True)
    assert await logged_of([READY, stopping, replace(stopping, partitions=0)], caplog) == [
        ("INFO", "ready", 3)
    ]
