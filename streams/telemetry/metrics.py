"""The metrics of SPEC section 7, in a registry of their own. Durations in seconds; every label is bounded."""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from streams.core.errors import dead_letter_codes

__all__ = ["CONTENT_TYPE", "Metrics", "metric_names"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# 0.25 and 2.0 are SLO limits: a limit between two boundaries could only be estimated.
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
)


class _AtScrape(Collector):
    """Gauges read when somebody looks, so that nothing has to keep them up to date."""

    def __init__(
        self,
        pool: Callable[[], Iterable[tuple[str, int]]],
        lag: Callable[[], Iterable[tuple[int, int]]],
    ) -> None:
        self._pool = pool
        self._lag = lag

    def collect(self) -> Iterator[GaugeMetricFamily]:
        pool = GaugeMetricFamily(
            "anabranch_pool_connections", "Database connections of this worker.", labels=["state"]
        )
        for state, connections in self._pool():
            pool.add_metric([state], connections)
        yield pool
        lag = GaugeMetricFamily(
            "anabranch_consumer_lag",
            "Events behind the end of the partition that are not yet acknowledged.",
            labels=["partition"],
        )
        for partition, events in self._lag():
            lag.add_metric([str(partition)], events)
        yield lag


class Metrics:
    """One worker's metrics.

    Args:
        pool: yields (state, connections) with state ``idle`` or ``busy``.
        lag: yields (partition, events) for every assigned partition of the input topic.
    """

    def __init__(
        self,
        *,
        pool: Callable[[], Iterable[tuple[str, int]]] = lambda: (),
        lag: Callable[[], Iterable[tuple[int, int]]] = lambda: (),
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.events = Counter(
            "anabranch_events_total", "Events finished and acknowledged.", ["outcome"], registry=registry
        )
        self.event_duration = Histogram(
            "anabranch_event_duration_seconds",
            "From reading an event to the broker's acknowledgement of its result.",
            ["profile"],
            buckets=_DURATION,
            registry=registry,
        )
        self.event_age = Histogram(
            "anabranch_event_age_seconds",
            "From occurred_at to the broker's acknowledgement of the result.",
            buckets=_AGE,
            registry=registry,
        )
        self.stage_duration = Histogram(
            "anabranch_stage_duration_seconds",
            "Time in one stage.",
            ["stage"],
            buckets=_STAGE,
            registry=registry,
        )
        self.search_duration = Histogram(
            "anabranch_search_duration_seconds",
            "Time of one arm's search, waiting for a connection included.",
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
            "Events put on the dead-letter topic.",
            ["code"],
            registry=registry,
        )
        self.retries = Counter(
            "anabranch_retries_total",
            "Attempts that failed and are tried again.",
            ["cause"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "anabranch_in_flight_events", "Events read and not yet acknowledged.", registry=registry
        )
        Info("anabranch_build", "The release that runs here.", registry=registry).info(
            {"version": _version()}
        )
        registry.register(_AtScrape(pool, lag))
        # Series exist from the start: a rate over a counter that appears with its first event misses that event.
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

    def exposition(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self.registry)


def metric_names() -> dict[str, frozenset[str]]:
    """Every sample name in the exposition and its label names: what a dashboard may ask for."""
    metrics = Metrics(pool=lambda: [("idle", 0)], lag=lambda: [(0, 0)])
    metrics.event_duration.labels("extraction")
    metrics.passages_returned.labels("extraction")
    metrics.tokens_used.labels("extraction")
    names: dict[str, frozenset[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            names[sample.name] = names.get(sample.name, frozenset()) | frozenset(sample.labels)
    return names


def _version() -> str:
    try:
        return version("anabranch")
    except PackageNotFoundError:
        return "unknown"
