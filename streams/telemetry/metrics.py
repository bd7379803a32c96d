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

from streams.core.composition import UpstreamWarning
from streams.core.embedding_errors import (
    KeyRejected,
    ProviderMisconfigured,
    ProviderUnavailable,
    WrongDimension,
    text_dead_letter_codes,
)
from streams.core.errors import INTERNAL_ERROR, dead_letter_codes
from streams.core.live_recall import NotMeasured, ScopeSize
from streams.core.replies import REPLY_WARNINGS
from streams.core.warning_codes import WarningCode

__all__ = [
    "CONTENT_TYPE",
    "OPENMETRICS_CONTENT_TYPE",
    "OTHER_WARNING",
    "REPLY_ANSWERED",
    "REPLY_DEAD_LETTERED",
    "EmbedderMetrics",
    "Metrics",
    "StageMetrics",
    "WorkerState",
]

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

#: The label of warnings that another stage added to the event; their codes are not bounded.
OTHER_WARNING = "other"
#: Outcomes of replies; the others are the codes of the warnings.
REPLY_ANSWERED = "answered"
REPLY_DEAD_LETTERED = "dead_lettered"
OUTCOMES = ("answered", "dead_lettered", "skipped")
STAGES = ("decode", "search", "assemble", "encode", "publish")
SCOPES = ("local", "global")
SCOPE_SIZES: tuple[ScopeSize, ...] = ("normal", "large")
_CAUSES_OF_EVERY_STAGE = (INTERNAL_ERROR, "kafka_unavailable", "commit_failed")
RETRY_CAUSES = ("store_unavailable", "search_timeout", "store_misconfigured", *_CAUSES_OF_EVERY_STAGE)
EMBEDDER_STAGES = ("decode", "compose", "embed", "encode", "publish")
EMBEDDER_RETRY_CAUSES = (
    *(kind.code for kind in (ProviderUnavailable, ProviderMisconfigured, KeyRejected, WrongDimension)),
    *_CAUSES_OF_EVERY_STAGE,
)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What the gauges show of the state of a worker or an embedding stage.

    Attributes:
        ready: it can answer events: the same decision as on the readiness page.
        dependency_up: the store answers and can be searched; or the provider embeds texts.
        kafka_up: Kafka accepts its requests.
        assigned_partitions: number of partitions of the input topic.
    """

    ready: bool = False
    dependency_up: bool = False
    kafka_up: bool = False
    assigned_partitions: int = 0


class _ScrapeCollector(Collector):
    """Gauges that are computed on each scrape, so that nothing has to keep them up to date."""

    def __init__(self, gauges: Callable[[], Iterator[GaugeMetricFamily]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeMetricFamily]:
        return self._gauges()


class StageMetrics:
    """What a worker and an embedding stage both measure.

    Args:
        dependency: of the gauge that shows whether it is up: name and documentation.
        stages: of an event.
        codes: of dead letters.
        causes: of retries.
        warnings: the codes of warnings in what is published.
        lag: yields (partition, events) for the assigned partitions of the input topic with a known lag.
        committed: yields (partition, offset): the first offset that is not committed, where it is known.
        oldest_waiting: yields (partition, seconds) for every assigned partition.
        worker: returns the state.

    Attributes:
        duration: time from fetching an event to the broker's acknowledgement of its answer, in seconds.
    """

    duration: Histogram

    def __init__(
        self,
        *,
        dependency: tuple[str, str],
        stages: Iterable[str],
        codes: Iterable[str],
        causes: Iterable[str],
        warnings: Iterable[str],
        lag: Callable[[], Iterable[tuple[int, int]]] = lambda: (),
        committed: Callable[[], Iterable[tuple[int, int]]] = lambda: (),
        oldest_waiting: Callable[[], Iterable[tuple[int, float]]] = lambda: (),
        worker: Callable[[], WorkerState] = WorkerState,
    ) -> None:
        # Otherwise each counter and histogram has one more series, which nobody queries. For the whole process.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # as published
        self.registry = registry = CollectorRegistry()
        self._dependency = dependency
        self._lag = lag
        self._committed = committed
        self._oldest_waiting = oldest_waiting
        self._worker = worker
        self.received = Counter(
            "anabranch_events_received_total",
            "Events read from the input topic and admitted, once for each read.",
            registry=registry,
        )
        self.events = Counter(
            "anabranch_events_total", "Events finished and acknowledged.", ["outcome"], registry=registry
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
        self.replies = Counter(
            "anabranch_replies_total",
            "Replies that the broker has acknowledged, and events whose caller could not be replied to.",
            ["outcome"],
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
        self.loop_delay = Histogram(
            "anabranch_event_loop_delay_seconds",
            "How late the worker's event loop runs a timer, sampled regularly.",
            buckets=_LOOP_DELAY,
            registry=registry,
        )
        Info("anabranch_build", "The running release.", registry=registry).info({"version": _version()})
        registry.register(_ScrapeCollector(self._gauges))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        # All series exist from the start: a rate over a counter that appears with its first event would miss it.
        _create(self.dead_letters, sorted(codes))
        _create(self.retries, causes)
        _create(self.events, OUTCOMES)
        _create(self.stage_duration, stages)
        _create(self.warnings, warnings)
        _create(self.replies, (REPLY_ANSWERED, REPLY_DEAD_LETTERED, *REPLY_WARNINGS))

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        """The gauges that are computed on each scrape."""
        worker = self._worker()
        dependency, documentation = self._dependency
        for gauge, text, value in (
            ("ready", "1 if the worker can answer events, as on /healthz/ready; else 0.", worker.ready),
            (dependency, documentation, worker.dependency_up),
            ("kafka_up", "1 if Kafka accepts this worker's requests; else 0.", worker.kafka_up),
            ("assigned_partitions", "Partitions assigned to this worker.", worker.assigned_partitions),
        ):
            yield GaugeMetricFamily(f"anabranch_{gauge}", text, value=value)
        yield _by_partition(
            "anabranch_consumer_lag", "Events in the partition that are not yet acknowledged.", self._lag()
        )
        yield _by_partition(
            "anabranch_committed_offset",
            "Offset of the first event in the partition that is not yet committed.",
            self._committed(),
        )
        yield _by_partition(
            "anabranch_oldest_waiting_seconds",
            "Age of the oldest event in the partition that is not yet acknowledged; 0 if there is none.",
            self._oldest_waiting(),
        )

    @cached_property
    def stage(self) -> Callable[[str], Histogram]:
        """`stage_duration` of one stage. Prometheus takes longer to find a child than to count."""
        return cache(self.stage_duration.labels)

    @cached_property
    def outcome(self) -> Callable[[str], Counter]:
        """`events` with one outcome."""
        return cache(self.events.labels)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their content type: OpenMetrics if the client prefers it, else Prometheus's text format.

        Args:
            accept: the request's ``Accept`` header.
        """
        if _quality(accept, _OPENMETRICS) > _quality(accept, _TEXT):
            content: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]  # as published
            return content, OPENMETRICS_CONTENT_TYPE
        return generate_latest(self.registry), CONTENT_TYPE


def _by_partition(name: str, documentation: str, values: Iterable[tuple[int, float]]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, documentation, labels=["partition"])
    for partition, value in values:
        gauge.add_metric([str(partition)], value)
    return gauge


def _create(metric: Counter | Gauge | Histogram, labels: Iterable[str]) -> None:
    for label in labels:
        metric.labels(label)


class Metrics(StageMetrics):
    """One worker's metrics.

    Args:
        profiles: the names of all profiles that an event can have.
        pool_max: maximum number of database connections.
        pool: yields (state, connections) with state ``idle`` or ``busy``.
        lag: as in `StageMetrics`, like the next two.
        committed: see there.
        oldest_waiting: see there.
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
        self._pool = pool
        self._replication_lag = replication_lag
        super().__init__(
            dependency=("store_up", "1 if the store answers and can be searched; else 0."),
            stages=STAGES,
            codes=dead_letter_codes(),
            causes=RETRY_CAUSES,
            warnings=[*WarningCode, OTHER_WARNING],
            lag=lag,
            committed=committed,
            oldest_waiting=oldest_waiting,
            worker=worker,
        )
        registry = self.registry
        self.duration = self.event_duration = Histogram(
            "anabranch_event_duration_seconds",
            "Time from fetching an event to the broker's acknowledgement of its result.",
            ["profile"],
            buckets=_DURATION,
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
        Gauge(
            "anabranch_pool_connections_max", "Maximum number of database connections.", registry=registry
        ).set(pool_max)
        _create(self.search_duration, SCOPES)
        for by_size in (self.live_recall, self.live_recall_sum, self.live_recall_squares_sum):
            _create(by_size, SCOPE_SIZES)
        _create(self.live_recall_skipped, NotMeasured)
        for profile in profiles:
            self.of_profile(profile)

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        yield from super()._gauges()
        pool = GaugeMetricFamily(
            "anabranch_pool_connections", "Database connections of this worker.", labels=["state"]
        )
        for state, connections in self._pool():
            pool.add_metric([state], connections)
        yield pool
        yield GaugeMetricFamily(
            "anabranch_store_replication_lag_seconds",
            "How old the searched data may be; 0 on a primary, infinite if a replica cannot tell.",
            value=self._replication_lag(),
        )

    @cached_property
    def search(self) -> Callable[[str], Histogram]:
        """`search_duration` of one scope."""
        return cache(self.search_duration.labels)

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


class EmbedderMetrics(StageMetrics):
    """One embedding stage's metrics. What means the same has a worker's names: the `job` label tells them apart.

    Args:
        lag: as in `StageMetrics`, like the next two.
        committed: see there.
        oldest_waiting: see there.
        worker: returns the stage's state.
    """

    def __init__(
        self,
        *,
        lag: Callable[[], Iterable[tuple[int, int]]] = lambda: (),
        committed: Callable[[], Iterable[tuple[int, int]]] = lambda: (),
        oldest_waiting: Callable[[], Iterable[tuple[int, float]]] = lambda: (),
        worker: Callable[[], WorkerState] = WorkerState,
    ) -> None:
        super().__init__(
            dependency=("provider_up", "1 if the provider embeds texts; else 0."),
            stages=EMBEDDER_STAGES,
            codes=text_dead_letter_codes(),
            causes=EMBEDDER_RETRY_CAUSES,
            warnings=UpstreamWarning,
            lag=lag,
            committed=committed,
            oldest_waiting=oldest_waiting,
            worker=worker,
        )
        # Not anabranch_event_duration_seconds: its objective is a worker's, and a hosted provider takes longer.
        self.duration = self.embedding_duration = Histogram(
            "anabranch_embedding_duration_seconds",
            "Time from fetching a question to the broker's acknowledgement of its query event.",
            buckets=_DURATION,
            registry=self.registry,
        )


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
