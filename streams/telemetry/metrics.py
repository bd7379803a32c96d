"""The metrics of SPEC section 7, in their own registry. Durations are in seconds; every label's values are bounded."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from streams.core.errors import dead_letter_codes

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# 0.25 and 2.0 are SLO limits: a limit between two bucket boundaries could only be estimated.
_DURATION = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_AGE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_STAGE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_PASSAGES = (0, 1, 2, 3, 5, 7, 9, 10, 12, 15, 20, 50)
_TOKENS = (0, 100, 250, 500, 1000, 2000, 3500, 5000, 10_000, 20_000)

OUTCOMES = ("answered", "dead_lettered", "skipped")
STAGES = ("decode", "search", "assemble", "encode", "publish")
SCOPES = ("local", "global")
RETRY_CAUSES = (
    "store_unavailable",
    "search_timeout",
    "store_misconfigured",
    "internal_error",
    "kafka_unavailable",
    "commit_failed",
)


class _ScrapeCollector(Collector):
    """Gauges that are computed on each scrape, so that nothing has to keep them up to date."""

    def __init__(
        self,
        pool: Callable[[], Iterable[tuple[str, int]]],
        lag: Callable[[], Iterable[tuple[int, int]]],
        replication_lag: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._lag = lag
        self._replication_lag = replication_lag

    def collect(self) -> Iterator[GaugeMetricFamily]:
        pool = GaugeMetricFamily(
            "anabranch_pool_connections", "Database connections of this worker.", labels=["state"]
        )
        for state, connections in self._pool():
            pool.add_metric([state], connections)
        yield pool
        lag = GaugeMetricFamily(
            "anabranch_consumer_lag",
            "Events in the partition that are not yet acknowledged.",
            labels=["partition"],
        )
        for partition, events in self._lag():
            lag.add_metric([str(partition)], events)
        yield lag
        yield GaugeMetricFamily(
            "anabranch_store_replication_lag_seconds",
            "How old the searched data may be; 0 on a primary, infinite if a replica cannot tell.",
            value=self._replication_lag(),
        )


class Metrics:
    """One worker's metrics.

    Args:
        pool: yields (state, connections) with state ``idle`` or ``busy``.
        lag: yields (partition, events) for every assigned partition of the input topic.
        replication_lag: how old the searched data may be, in seconds.
    """

    def __init__(
        self,
        *,
        pool: Callable[[], Iterable[tuple[str, int]]] = lambda: (),
        lag: Callable[[], Iterable[tuple[int, int]]] = lambda: (),
        replication_lag: Callable[[], float] = lambda: math.nan,
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.events = Counter(
            "anabranch_events_total", "Events finished and acknowledged.", ["outcome"], registry=registry
        )
        self.event_duration = Histogram(
            "anabranch_event_duration_seconds",
            "Time from fetching an event to the broker's acknowledgement of its result.",
            ["profile"],
            buckets=_DURATION,
            registry=registry,
        )
        self.event_age = Histogram(
            "anabranch_event_age_seconds",
            "Time from occurred_at to the broker's acknowledgement of the result; excludes replayed events.",
            buckets=_AGE,
            registry=registry,
        )
        self.stage_duration = Histogram(
            "anabranch_stage_duration_seconds",
            "Duration of one stage of an event.",
            ["stage"],
            buckets=_STAGE,
            registry=registry,
        )
        self.search_duration = Histogram(
            "anabranch_search_duration_seconds",
            "Duration of one arm's search, including the wait for a connection.",
            ["scope"],
            buckets=_STAGE,
            registry=registry,
        )
        self.passages_returned = Histogram(
            "anabranch_passages_returned",
            "Passages in a result.",
            ["profile"],
            buckets=_PASSAGES,
            registry=registry,
        )
        self.tokens_used = Histogram(
            "anabranch_tokens_used", "Tokens in a result.", ["profile"], buckets=_TOKENS, registry=registry
        )
        self.dead_letters = Counter(
            "anabranch_dead_letters_total",
            "Events written to the dead-letter topic.",
            ["code"],
            registry=registry,
        )
        self.retries = Counter(
            "anabranch_retries_total",
            "Failed attempts that are retried.",
            ["cause"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "anabranch_in_flight_events",
            "Events that have started and are not yet acknowledged.",
            registry=registry,
        )
        Info("anabranch_build", "The running release.", registry=registry).info({"version": _version()})
        registry.register(_ScrapeCollector(pool, lag, replication_lag))
        # Create all series at start: a rate over a counter that appears with its first event would miss that event.
        for code in dead_letter_codes():
            self.dead_letters.labels(code)
        for cause in RETRY_CAUSES:
            self.retries.labels(cause)
        for outcome in OUTCOMES:
            self.events.labels(outcome)
        for stage in STAGES:
            self.stage_duration.labels(stage)
        for scope in SCOPES:
            self.search_duration.labels(scope)

    @cached_property
    def stage(self) -> Callable[[str], Histogram]:
        """`stage_duration` of one stage. Prometheus takes longer to find a child than to count."""
        return cache(self.stage_duration.labels)

    @cached_property
    def search(self) -> Callable[[str], Histogram]:
        """`search_duration` of one scope."""
        return cache(self.search_duration.labels)

    @cached_property
    def outcome(self) -> Callable[[str], Counter]:
        """`events` with one outcome."""
        return cache(self.events.labels)

    @cached_property
    def of_profile(self) -> Callable[[str], tuple[Histogram, Histogram, Histogram]]:
        """`event_duration`, `passages_returned` and `tokens_used` of one profile."""
        return cache(
            lambda profile: (
                self.event_duration.labels(profile),
                self.passages_returned.labels(profile),
                self.tokens_used.labels(profile),
            )
        )

    def exposition(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)


def _version() -> str:
    try:
        return version("anabranch")
    except PackageNotFoundError:
        return "unknown"
