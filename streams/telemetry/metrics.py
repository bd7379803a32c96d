"""The metrics of SPEC section 7, in their own registry. Durations are in seconds; every label's values are bounded."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from streams.core.errors import dead_letter_codes
from streams.core.live_recall import NotMeasured, ScopeSize
from streams.core.warning_codes import WarningCode

__all__ = ["CONTENT_TYPE", "OPENMETRICS_CONTENT_TYPE", "Metrics", "WorkerState"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = openmetrics.CONTENT_TYPE_LATEST

_TEXT = "text/plain"
_OPENMETRICS = "application/openmetrics-text"

# 0.25 and 2.0 are SLO limits: a limit between two bucket boundaries could only be estimated.
_DURATION = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_AGE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_STAGE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_PASSAGES = (0, 1, 2, 3, 5, 7, 9, 10, 12, 15, 20, 50)
_TOKENS = (0, 100, 250, 500, 1000, 2000, 3500, 5000, 10_000, 20_000)
# uvloop rounds timers to milliseconds.
_LOOP_DELAY = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

OUTCOMES = ("answered", "dead_lettered", "skipped")
STAGES = ("decode", "search", "assemble", "encode", "publish")
SCOPES = ("local", "global")
SCOPE_SIZES: tuple[ScopeSize, ...] = ("normal", "large")
RETRY_CAUSES = (
    "store_unavailable",
    "search_timeout",
    "store_misconfigured",
    "internal_error",
    "kafka_unavailable",
    "commit_failed",
)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What the gauges show of a worker's state.

    Attributes:
        ready: the worker can answer events: the same decision as on the readiness page.
        store_up: the store answers and can be searched.
        kafka_up: Kafka accepts this worker's requests.
        assigned_partitions: number of partitions of the input topic.
    """

    ready: bool = False
    store_up: bool = False
    kafka_up: bool = False
    assigned_partitions: int = 0


class _ScrapeCollector(Collector):
    """Gauges that are computed on each scrape, so that nothing has to keep them up to date."""

    def __init__(
        self,
        *,
        pool: Callable[[], Iterable[tuple[str, int]]],
        lag: Callable[[], Iterable[tuple[int, int]]],
        committed: Callable[[], Iterable[tuple[int, int]]],
        oldest_waiting: Callable[[], Iterable[tuple[int, float]]],
        replication_lag: Callable[[], float],
        worker: Callable[[], WorkerState],
    ) -> None:
        self._pool = pool
        self._lag = lag
        self._committed = committed
        self._oldest_waiting = oldest_waiting
        self._replication_lag = replication_lag
        self._worker = worker

    def collect(self) -> Iterator[GaugeMetricFamily]:
        worker = self._worker()
        for gauge, documentation, value in (
            ("ready", "1 if the worker can answer events, as on /healthz/ready; else 0.", worker.ready),
            ("store_up", "1 if the store answers and can be searched; else 0.", worker.store_up),
            ("kafka_up", "1 if Kafka accepts this worker's requests; else 0.", worker.kafka_up),
            ("assigned_partitions", "Partitions assigned to this worker.", worker.assigned_partitions),
        ):
            yield GaugeMetricFamily(f"anabranch_{gauge}", documentation, value=value)
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
        committed = GaugeMetricFamily(
            "anabranch_committed_offset",
            "Offset of the first event in the partition that is not yet committed.",
            labels=["partition"],
        )
        for partition, offset in self._committed():
            committed.add_metric([str(partition)], offset)
        yield committed
        oldest = GaugeMetricFamily(
            "anabranch_oldest_waiting_seconds",
            "Age of the oldest event in the partition that is not yet acknowledged; 0 if there is none.",
            labels=["partition"],
        )
        for partition, seconds in self._oldest_waiting():
            oldest.add_metric([str(partition)], seconds)
        yield oldest
        yield GaugeMetricFamily(
            "anabranch_store_replication_lag_seconds",
            "How old the searched data may be; 0 on a primary, infinite if a replica cannot tell.",
            value=self._replication_lag(),
        )


class Metrics:
    """One worker's metrics.

    Args:
        profiles: the names of all profiles that an event can have.
        pool_max: maximum number of database connections.
        pool: yields (state, connections) with state ``idle`` or ``busy``.
        lag: yields (partition, events) for the assigned partitions of the input topic with a known lag.
        committed: yields (partition, offset): the first offset that is not committed, where it is known.
        oldest_waiting: yields (partition, seconds) for every assigned partition.
        replication_lag: how old the searched data may be, in seconds.
        worker: returns the worker's state.
    """

    def __init__(
        self,
        *,
        profiles: Iterable[str] = (),
        pool_max: int = 0,
        pool: Callable[[], Iterable[tuple[str, int]]] = lambda: (),
        lag: Callable[[], Iterable[tuple[int, int]]] = lambda: (),
        committed: Callable[[], Iterable[tuple[int, int]]] = lambda: (),
        oldest_waiting: Callable[[], Iterable[tuple[int, float]]] = lambda: (),
        replication_lag: Callable[[], float] = lambda: math.nan,
        worker: Callable[[], WorkerState] = WorkerState,
    ) -> None:
        # Otherwise each counter and histogram has one more series, which nobody queries. For the whole process.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # as published
        self.registry = registry = CollectorRegistry()
        self.received = Counter(
            "anabranch_events_received_total",
            "Events read from the input topic and admitted, once for each read.",
            registry=registry,
        )
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
        self.placeholders = Counter(
            "anabranch_placeholder_dead_letters_total",
            "Dead letters without their event: unreadable batches, and events that the topic does not accept.",
            registry=registry,
        )
        self.expired_on_arrival = Counter(
            "anabranch_expired_on_arrival_total",
            "Events that had already expired when they were written to Kafka.",
            registry=registry,
        )
        self.warnings = Counter(
            "anabranch_warnings_total",
            "Warnings in published results.",
            ["code"],
            registry=registry,
        )
        self.retries = Counter(
            "anabranch_retries_total",
            "Failed attempts that are retried.",
            ["cause"],
            registry=registry,
        )
        self.live_recall = Counter(
            "anabranch_live_recall_total",
            "Searches by the vector index that were repeated exactly.",
            ["size"],
            registry=registry,
        )
        # Sums that never decrease, like those of a histogram; a counter's name would end with _total.
        self.live_recall_sum = Gauge(
            "anabranch_live_recall_sum",
            "Sum of the recall of these searches.",
            ["size"],
            registry=registry,
        )
        self.live_recall_squares_sum = Gauge(
            "anabranch_live_recall_squares_sum",
            "Sum of the squares of their recall.",
            ["size"],
            registry=registry,
        )
        self.live_recall_skipped = Counter(
            "anabranch_live_recall_skipped_total",
            "Searches of answered events whose recall was not measured.",
            ["reason"],
            registry=registry,
        )
        self.live_recall_seconds = Counter(
            "anabranch_live_recall_seconds_total",
            "Duration of the exact searches that measure recall.",
            registry=registry,
        )
        self.in_flight = Gauge(
            "anabranch_in_flight_events",
            "Events that have started and are not yet acknowledged.",
            registry=registry,
        )
        self.loop_delay = Histogram(
            "anabranch_event_loop_delay_seconds",
            "How late the worker's event loop runs a timer, sampled regularly.",
            buckets=_LOOP_DELAY,
            registry=registry,
        )
        Gauge(
            "anabranch_pool_connections_max", "Maximum number of database connections.", registry=registry
        ).set(pool_max)
        Info("anabranch_build", "The running release.", registry=registry).info({"version": _version()})
        registry.register(
            _ScrapeCollector(
                pool=pool,
                lag=lag,
                committed=committed,
                oldest_waiting=oldest_waiting,
                replication_lag=replication_lag,
                worker=worker,
            )
        )
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        self._create_series(profiles)

    def _create_series(self, profiles: Iterable[str]) -> None:
        """Create all series at start: a rate over a counter that appears with its first event would miss that event."""
        series: tuple[tuple[Counter | Gauge | Histogram, Iterable[str]], ...] = (
            (self.dead_letters, sorted(dead_letter_codes())),
            (self.retries, RETRY_CAUSES),
            (self.events, OUTCOMES),
            (self.stage_duration, STAGES),
            (self.search_duration, SCOPES),
            (self.warnings, WarningCode),
            (self.live_recall, SCOPE_SIZES),
            (self.live_recall_sum, SCOPE_SIZES),
            (self.live_recall_squares_sum, SCOPE_SIZES),
            (self.live_recall_skipped, NotMeasured),
        )
        for metric, labels in series:
            for label in labels:
                metric.labels(label)
        for profile in profiles:
            self.of_profile(profile)

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

    def observe_live_recall(self, size: ScopeSize, recall: float) -> None:
        """Count a search whose recall was measured."""
        self.live_recall.labels(size).inc()
        self.live_recall_sum.labels(size).inc(recall)
        self.live_recall_squares_sum.labels(size).inc(recall**2)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their content type: OpenMetrics if the client prefers it, else Prometheus's text format.

        Args:
            accept: the request's ``Accept`` header.
        """
        if _quality(accept, _OPENMETRICS) > _quality(accept, _TEXT):
            content: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]  # as published
            return content, OPENMETRICS_CONTENT_TYPE
        return generate_latest(self.registry), CONTENT_TYPE


def _quality(accept: str, media_type: str) -> float:
    """How much a client wants a media type (RFC 9110, section 12.5.1); 0 if it does not name it."""
    found = 0.0
    for entry in accept.lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        if name == media_type:
            weights = [
                value for parameter in parameters if (value := parameter.removeprefix("q=")) != parameter
            ]
            try:
                found = max(found, float(weights[0]) if weights else 1.0)
            except ValueError:
                continue
    return found


def _version() -> str:
    try:
        return version("anabranch")
    except PackageNotFoundError:
        return "unknown"
