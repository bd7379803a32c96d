"""Rates, quantiles and dead letters of the last minutes, against the metrics that a worker has."""

import math
from bisect import bisect_left
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.telemetry.history import (
    INTERVAL_SECONDS,
    WINDOW_SECONDS,
    Buckets,
    Figures,
    History,
    Snapshot,
    quantile,
    take_snapshot,
)
from streams.telemetry.metrics import EMBEDDER_STAGES, STAGES, EmbedderMetrics, Metrics

BOUNDS = (0.1, 0.25, 1.0, math.inf)


class Run:
    """A worker's metrics, and their history, at times that a test chooses."""

    def __init__(self) -> None:
        self.metrics = Metrics(profiles=["docs", "chat"])
        self.now = 1000.0
        self.history = History(self.snapshot())

    def snapshot(self) -> Snapshot:
        return take_snapshot(self.metrics, at=self.now)

    def step(self, events: int = 0, *, outcome: str = "answered", seconds: float = INTERVAL_SECONDS) -> None:
        self.metrics.events.labels(outcome).inc(events)
        self.now += seconds
        self.history.record(self.snapshot())

    def figures(self) -> Figures:
        return self.history.figures(self.snapshot())


def test_a_new_process_has_no_rate_and_no_quantile() -> None:
    figures = Run().figures()
    assert figures.rates == {"answered": None, "dead_lettered": None, "skipped": None}
    assert figures.intervals == []
    assert figures.dead_letters == []
    assert {(each.p50, each.p95, each.p99) for each in figures.latency.values()} == {(None, None, None)}


def test_rates_are_of_the_last_minute_and_counts_of_the_window() -> None:
    run = Run()
    for _ in range(60):
        run.step(10)
    run.metrics.events.labels("dead_lettered").inc(30)
    figures = run.figures()
    assert figures.rates == {"answered": 2.0, "dead_lettered": 0.5, "skipped": 0.0}
    assert (figures.rate_seconds, figures.window_seconds) == (60, WINDOW_SECONDS)
    assert figures.recent == {"answered": 600, "dead_lettered": 30, "skipped": 0}
    for _ in range(30):
        run.step(0)
    figures = run.figures()
    assert figures.rates["answered"] == 0
    assert figures.recent["answered"] == 300
    assert figures.totals["answered"] == 600


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1000), st.sampled_from(["answered", "dead_lettered", "skipped"]), st.floats(1, 100)
        ),
        max_size=100,
    )
)
def test_intervals_add_up_to_what_was_counted_in_the_window(steps: Sequence[tuple[int, str, float]]) -> None:
    run = Run()
    for events, outcome, seconds in steps:
        run.step(events, outcome=outcome, seconds=seconds)
    figures = run.figures()
    for outcome, recent in figures.recent.items():
        of_intervals = [each.rates[outcome] * (each.began - each.ended) for each in figures.intervals]
        assert sum(of_intervals) == pytest.approx(recent)
        assert 0 <= recent <= figures.totals[outcome]
    # At most one interval reaches back beyond the window.
    assert [each for each in figures.intervals[1:] if each.began > WINDOW_SECONDS + 1e-6] == []


def test_a_long_run_keeps_few_snapshots() -> None:
    run = Run()
    for _ in range(1000):
        run.step(1)
    assert len(run.figures().intervals) == WINDOW_SECONDS / INTERVAL_SECONDS


def test_dead_letters_are_listed_by_code_with_the_time_of_the_last() -> None:
    run = Run()
    run.metrics.dead_letters.labels("undecodable").inc(2)
    run.step()
    run.metrics.dead_letters.labels("expired").inc()
    run.now += 3
    # Noticed when somebody looks, and by the next snapshot once.
    assert [
        (each.code, each.recent, each.total, each.seconds_ago) for each in run.figures().dead_letters
    ] == [
        ("expired", 1, 1, 0),
        ("undecodable", 2, 2, 3),
    ]
    run.step()
    assert [(each.code, each.seconds_ago) for each in run.figures().dead_letters] == [
        ("expired", 5),
        ("undecodable", 8),
    ]
    for _ in range(100):
        run.step()
    assert [(each.code, each.recent, each.total) for each in run.figures().dead_letters] == [
        ("expired", 0, 1),
        ("undecodable", 0, 2),
    ]


def test_profiles_count_together_and_stages_apart() -> None:
    run = Run()
    for profile in ("docs", "chat"):
        run.metrics.event_duration.labels(profile).observe(0.06)
    run.metrics.stage("search").observe(0.002)
    latency = run.figures().latency
    assert list(latency) == ["duration", "age", *STAGES]
    assert {name: found.events for name, found in latency.items() if found.events} == {
        "duration": 2,
        "search": 1,
    }
    assert 0.05 < (latency["duration"].p50 or 0) <= 0.075


def test_an_embedding_stage_has_the_same_figures() -> None:
    metrics = EmbedderMetrics()
    metrics.embedding_duration.observe(3)
    snapshot = take_snapshot(metrics, at=0)
    assert list(snapshot.durations) == ["duration", "age", *EMBEDDER_STAGES]
    assert snapshot.durations["duration"].counts[-1] == 1


@given(st.lists(st.floats(0.0001, 2.0), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    counts = tuple(sum(value <= bound for value in values) for bound in BOUNDS)
    found = quantile(share, Buckets(BOUNDS, counts))
    true = sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]
    place = bisect_left(BOUNDS, true)
    assert found is not None
    if math.isinf(BOUNDS[place]):
        assert found == BOUNDS[-2]
    else:
        assert (0, *BOUNDS)[place] <= found <= BOUNDS[place]


def test_a_quantile_is_interpolated_as_prometheus_does() -> None:
    buckets = Buckets(BOUNDS, (0, 10, 20, 20))
    assert quantile(0.5, buckets) == 0.25
    assert quantile(0.75, buckets) == pytest.approx(0.625)
    assert quantile(0.5, Buckets(BOUNDS, (0, 0, 0, 0))) is None
