"""What a worker and an embedding stage share: Faust, ordered delivery, Kafka's health, readiness, the web pages.

Faust provides the consumer group, the agent and the web server. `streams.worker.delivery` decides what is committed,
and when. A comment next to each Faust setting explains which problem it avoids. What a stage does with its events, and
what it needs for that, is a subclass's.
"""

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Collection, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, ClassVar, Literal, cast

from faust.types import EventT
from faust.types.tuples import TP

from streams import __version__
from streams.broker.compression import MISSING_CODECS, MISSING_CODECS_REMEDY, missing_codecs
from streams.broker.connection import BrokerConnection
from streams.broker.diagnosis import diagnose
from streams.broker.publisher import Publisher
from streams.broker.records import Unreadable, memory_bytes
from streams.broker.topic_ids import TopicProbe
from streams.configured import broker_connection
from streams.core.headers import Headers
from streams.settings import Settings
from streams.telemetry import live_page
from streams.telemetry.metrics import StageMetrics
from streams.telemetry.status import Stage, status_document
from streams.worker.delivery import Delivery, InterruptibleWaits
from streams.worker.dependency_health import DependencyHealth, StartupRefused
from streams.worker.event_processor import EventProcessor, OutagePolicy
from streams.worker.faust_internals import App, Consumer
from streams.worker.kafka_health import KafkaHealth
from streams.worker.lag import Lag
from streams.worker.live_status import LiveStatus
from streams.worker.loop_delay import watch_loop_delay
from streams.worker.readiness import Readiness, watch_readiness
from streams.worker.replies import Replies, ReplyTopics
from streams.worker.shutdown import ShutdownDeadline
from streams.worker.topic_watch import TopicWatch

__all__ = ["StageApp"]

logger = logging.getLogger(__name__)

# A rebalance waits until a member learns of it, at its next heartbeat, drains and commits. This must end well before
# the group evicts the member: two members that are evicted in turn would evict each other indefinitely.
_HEARTBEAT_SHARE_OF_REBALANCE = 0.1
_REVOCATION_SHARE_OF_REBALANCE = 0.75
_DRAIN_SHARE_OF_REBALANCE = 0.6  # of the rebalance timeout
_COMMIT_INTERVAL_SECONDS = 0.25
# The maximum size of a decompressed batch, for all partitions together. The manifests' memory limit must have room for
# these, for the running events, and for one more event per partition.
_WAITING_BATCHES = 4
# Topics may be created after the start; they are seen after at most this time.
_TOPICS_INTERVAL_SECONDS = 3.0
_TOPICS_TIMEOUT_SECONDS = 5.0


class _InputEvent:
    """A Faust event in the form that processor and delivery expect."""

    __slots__ = (
        "generation",
        "headers",
        "key",
        "offset",
        "partition",
        "read_at",
        "size",
        "timestamp",
        "topic",
        "value",
    )

    def __init__(self, event: EventT[Any]) -> None:
        message: Any = event.message
        self.topic: str = message.topic
        self.partition: int = message.partition
        self.offset: int = message.offset
        self.generation: int = message.generation_id or 0
        # In seconds since the epoch; not positive in very old formats, and for the placeholder of a batch.
        self.timestamp: float | None = message.timestamp if (message.timestamp or 0.0) > 0 else None
        self.key: bytes | None = message.key
        self.value: bytes | Unreadable | None = message.value
        headers: Any = message.headers or ()
        self.headers: Headers = list(headers.items() if isinstance(headers, Mapping) else headers)
        self.read_at: float = message.fetched_at
        self.size = memory_bytes(self.key, self.value, self.headers)


class StageApp(ABC):
    """The parts of a stage around its processor.

    A subclass sets `metrics`, `health` and the processor in its constructor, in this order: `super().__init__`, its own
    parts, `_deliver`.

    Args:
        settings: the environment, with the stage's own topics and group.

    Attributes:
        app: the Faust app that runs it.
        refused: running has turned out to be unsafe, or impossible with these settings.
        shutdown: the shutdown deadlines.
        publisher: of answers.
        dead_letters: of dead letters.
        reply_publisher: of replies.

    Raises:
        SettingsError: a required setting is missing or unusable; one line.
    """

    #: The stage's name on its pages.
    stage: ClassVar[Stage]
    #: The agent's name in the log.
    agent: ClassVar[str]
    #: What events need, for the readiness page: ``store`` or ``provider``.
    dependency: ClassVar[str]
    #: Whether its topics are the embedding stage's.
    texts: ClassVar[bool] = False

    _metrics: StageMetrics
    _health: DependencyHealth

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.shutdown = ShutdownDeadline(settings.anabranch_grace_period_seconds)
        self._connection = broker_connection(settings)
        self.app = _faust_app(settings, self._connection)
        self.app.root = self
        self._lag: Lag[TP] = Lag(lambda: self._consumer, self._partitions)
        self.refused = False
        self._health_watch: asyncio.Future[Any] | None = None
        # The publishers whose last attempt failed.
        self._failing_publishers: set[str] = set()
        self._kafka_health = KafkaHealth(lambda: diagnose(self._connection))
        self._waits = waits = InterruptibleWaits()
        self.publisher = self._open_publisher("results", waits)
        # The input event may have been compressed, and may fit on the dead-letter topic only if compressed.
        self.dead_letters = self._open_publisher("dead letters", waits, compression="zstd")
        # Its own: a reply topic that is deleted must not delay results. Most events want no reply, so it connects late.
        self.reply_publisher = self._open_publisher("replies", waits, connect_first=False)
        topics = (
            settings.anabranch_input_topic,
            settings.anabranch_output_topic,
            settings.anabranch_dead_letter_topic,
        )
        self._topic_probe = TopicProbe(
            self._connection.client_options(), topics, timeout_seconds=_TOPICS_TIMEOUT_SECONDS
        )
        self._reply_topic_probe = TopicProbe(
            self._connection.client_options(),
            settings.anabranch_reply_topics,
            timeout_seconds=_TOPICS_TIMEOUT_SECONDS,
        )
        self._reply_topics = ReplyTopics(self._reply_topic_probe.fetch_partitions)
        self._topics = TopicWatch(
            self._topic_probe.fetch,
            topics=topics,
            input_topic=settings.anabranch_input_topic,
            assigned_ids=lambda: (
                cast("Consumer", self.app.consumer).topic_ids if self._partitions() else None
            ),
            rejoin=lambda: cast("Consumer", self.app.consumer).rejoin(),
            on_failed=self._kafka_health.report_error,
            interval_seconds=_TOPICS_INTERVAL_SECONDS,
            texts=self.texts,
        )

    @abstractmethod
    async def _check_dependency(self) -> None:
        """Check what events need, before anything starts. An unreachable server is not an error.

        Raises:
            StartupRefused: running would be unsafe, or is impossible with these settings.
        """

    @abstractmethod
    async def _open(self) -> None:
        """Open what events need."""

    @abstractmethod
    async def _watch_dependency(self) -> None:
        """Watch the health of what events need, indefinitely.

        Raises:
            StartupRefused: running would be unsafe, or is impossible with these settings.
        """

    @abstractmethod
    async def _close(self) -> None:
        """Close what events need."""

    def _started_with(self) -> Mapping[str, object]:
        """Further fields of the log line `starting`."""
        return {}

    @abstractmethod
    def _versions(self) -> Mapping[str, str | None]:
        """The versions on the live page, besides the release's."""

    @abstractmethod
    def _stopping(self) -> None:
        """Called when the shutdown begins to wait for events in flight."""

    def _outage(self, then: Literal["block", "dead_letter"]) -> OutagePolicy:
        settings = self.settings
        return OutagePolicy(
            then=then,
            attempts=settings.anabranch_retry_attempts,
            base_seconds=settings.anabranch_retry_base_seconds,
            max_seconds=settings.anabranch_retry_max_seconds,
        )

    def _deliver(self, processor: EventProcessor[Any]) -> None:
        """Deliver the input topic's events to a processor."""
        settings = self.settings
        self._delivery: Delivery[_InputEvent] = Delivery(
            processor.handle,
            acknowledge=lambda partition, offset: self._consumer.acknowledge(self._input(partition), offset),
            generation=lambda: int(self.app.consumer_generation_id),
            concurrency=settings.anabranch_concurrency,
            max_waiting_bytes=_WAITING_BATCHES * settings.anabranch_max_inflated_bytes,
            pause=lambda partition: self._consumer.pause_fetching(self._input(partition)),
            resume=lambda partition: self._consumer.resume_fetching(self._input(partition)),
            on_defect=self._delivery_failed,
            waits=self._waits,
        )
        self._metrics.in_flight.set_function(lambda: self._delivery.in_flight)
        self._live_status = LiveStatus(
            self.stage,
            self._metrics,
            lag=self._lag,
            oldest_waiting=self._lag.oldest_waiting,
            in_flight=lambda: self._delivery.in_flight,
            versions=self._versions,
        )
        self._mount()

    @property
    def revocation_seconds(self) -> float:
        """How long the drain and the commits of a rebalance may take together."""
        return _REVOCATION_SHARE_OF_REBALANCE * self.settings.anabranch_rebalance_timeout_seconds

    def _open_publisher(
        self,
        name: str,
        waits: InterruptibleWaits,
        *,
        compression: str | None = None,
        connect_first: bool = True,
    ) -> Publisher:
        settings = self.settings
        return Publisher(
            self._connection.client_options(),
            on_fault=partial(self._publishing_failed, name),
            on_success=partial(self._publishing_succeeded, name),
            wait_seconds=(settings.anabranch_retry_base_seconds, settings.anabranch_retry_max_seconds),
            sleep=waits.sleep,
            stop_seconds=self.shutdown.seconds_left,
            compression=compression,
            connect_first=connect_first,
            # Nobody waits for one any more, and only the next one will tell whether Kafka accepts it.
            on_last_reply=lambda: self._failing_publishers.discard(name),
        )

    def _replies(self) -> Replies:
        return Replies(
            self.reply_publisher.publish_reply,
            allowed=self.settings.anabranch_reply_topics,
            topics=self._reply_topics,
            count=self._metrics.replies,
        )

    async def preflight(self) -> None:
        """Check Kafka and what events need once, before anything starts.

        Raises:
            StartupRefused: this installation cannot read all of Kafka's codecs, Kafka rejects the client, or running
                would be unsafe, or is impossible with these settings. For all other problems, including an unreachable
                server, it waits.
        """
        if missing := missing_codecs():
            raise StartupRefused(f"{MISSING_CODECS} {', '.join(missing)}; {MISSING_CODECS_REMEDY}")
        diagnosis = await diagnose(self._connection)
        if diagnosis is not None:
            if diagnosis.refused:
                raise StartupRefused(str(diagnosis))
            self._kafka_health.report_unreachable(str(diagnosis))
        await self._check_dependency()

    async def open(self) -> None:
        """Called before any service starts. Servers are connected later, so an unreachable one is not an error yet."""
        settings = self.settings
        logger.info(
            "starting",
            extra={
                "version": __version__,
                "brokers": settings.kafka_bootstrap_servers,
                "group": settings.anabranch_consumer_group,
                "input_topic": settings.anabranch_input_topic,
                "output_topic": settings.anabranch_output_topic,
                "dead_letter_topic": settings.anabranch_dead_letter_topic,
                "reply_topics": [*settings.anabranch_reply_topics],
                **self._started_with(),
                "port": settings.anabranch_web_port,
            },
        )
        await self._open()
        self._health_watch = self.app.add_future(self._watch_health())
        self.app.add_future(self._kafka_health.watch())
        self.app.add_future(self._lag.watch())
        self.app.add_future(self._watch_topics())
        self.app.add_future(watch_readiness(self._readiness))
        self.app.add_future(watch_loop_delay(self._metrics.loop_delay.observe))
        self.app.add_future(self._live_status.watch())

    async def drain(self, *, stopping: bool) -> None:
        """Wait for the events in flight: within the grace period, or in a rebalance within the rebalance timeout."""
        if stopping:
            self._stopping()
        # Earlier steps may have been slow; the final commit still has to follow.
        seconds = min(self.settings.anabranch_grace_period_seconds, self.shutdown.seconds_left())
        if not stopping:
            rebalance_seconds = self.settings.anabranch_rebalance_timeout_seconds
            seconds = min(
                seconds, rebalance_seconds * _DRAIN_SHARE_OF_REBALANCE, self._consumer.seconds_left()
            )
        began = monotonic()
        cancelled = await self._delivery.drain(seconds)
        logger.info(
            "drained",
            extra={
                "cause": "shutdown" if stopping else "rebalance",
                "seconds": round(monotonic() - began, 3),
                "cancelled_events": cancelled,
            },
        )

    def reopen(self, assigned: Collection[TP]) -> None:
        """Called when partitions have been assigned."""
        logger.info(
            "partitions assigned",
            extra={
                "topic": self.settings.anabranch_input_topic,
                "partitions": sorted(tp.partition for tp in assigned),
            },
        )
        self._delivery.reopen(len(assigned))
        # The drain cancelled the attempts, and this member may never write a dead letter again.
        self._failing_publishers.clear()
        self._lag.assigned(assigned)

    def commit_failed(self) -> None:
        """Called when a commit has failed; it will be retried."""
        self._metrics.retries.labels("commit_failed").inc()

    async def close(self) -> None:
        """Called after the last event."""
        # Otherwise it would probe what is closed, and report an outage.
        if self._health_watch is not None:
            self._health_watch.cancel()
            await asyncio.wait([self._health_watch])
        await self._reply_topics.close()
        await self._reply_topic_probe.close()
        await self._close()

    def _mount(self) -> None:
        """Register the agent and the web pages."""
        app = self.app
        source = app.topic(self.settings.anabranch_input_topic, key_serializer="raw", value_serializer="raw")

        @app.agent(source, name=self.agent)
        async def admit(stream: Any) -> None:
            events: AsyncIterable[EventT[Any]] = stream.noack().events()
            async for event in events:
                record = _InputEvent(event)
                if self._delivery.admit(record):
                    self._metrics.received.inc()
                    self._lag.track(self._input(record.partition), record.offset, record.timestamp)

        @app.page("/metrics")
        async def metrics(web: Any, request: Any) -> Any:
            content, content_type = self._metrics.exposition(request.headers.get("Accept", ""))
            return web.bytes(content, headers={"Content-Type": content_type})

        @app.page("/healthz/live")
        async def live(web: Any, request: Any) -> Any:
            del request
            return web.json({"live": True})

        @app.page("/healthz/ready")
        async def ready(web: Any, request: Any) -> Any:
            del request
            readiness = self._readiness()
            return web.json(readiness.page(), status=200 if readiness.ready else 503)

        @app.page("/")
        async def page(web: Any, request: Any) -> Any:
            del request
            content = live_page.render(self._live_status.status(self._readiness()))
            return web.html(content, headers=dict(live_page.HEADERS))

        @app.page("/status")
        async def status(web: Any, request: Any) -> Any:
            del request
            return web.json(
                status_document(self._live_status.status(self._readiness())),
                headers={"Cache-Control": "no-store"},
            )

    def _readiness(self) -> Readiness:
        health = self._health
        failing = ", ".join(sorted(self._failing_publishers))
        readiness = Readiness(
            dependency=self.dependency,
            state=health.state,
            problem=None if health.ready else f"{self.dependency}: {health.reason}",
            kafka_problem=self._kafka_health.reason
            or (f"Kafka does not accept {failing}" if failing else None),
            partitions=len(self._partitions()),
            missing_topics=self._topics.missing,
            stopping=self.shutdown.has_begun,
        )
        self._live_status.notice(readiness)
        return readiness

    async def _watch_topics(self) -> None:
        try:
            await self._topics.watch()
        finally:
            # Not in `close`, after which it would connect again: the watching task is cancelled last.
            await self._topic_probe.close()

    async def _watch_health(self) -> None:
        try:
            await self._watch_dependency()
        except StartupRefused as verdict:
            logger.critical("startup refused: %s", verdict)
            self.refused = True
            signal.raise_signal(signal.SIGTERM)  # stop as on SIGTERM: events in flight are completed

    def _delivery_failed(self, defect: BaseException) -> None:
        # The event stays unacknowledged; it is read again after the restart.
        logger.critical("unexpected %s while delivering an event; stopping the worker", type(defect).__name__)
        self.app.add_future(self.app.crash(defect))

    def _publishing_failed(self, publisher: str, error: BaseException) -> None:
        self._metrics.retries.labels("kafka_unavailable").inc()
        if not self._failing_publishers:
            logger.error("Kafka unreachable or rejecting requests (%s); retrying", type(error).__name__)
        self._kafka_health.report_error()
        self._failing_publishers.add(publisher)

    def _publishing_succeeded(self, publisher: str) -> None:
        if self._failing_publishers == {publisher}:
            logger.info("Kafka accepts requests again")
        self._failing_publishers.discard(publisher)

    @property
    def _consumer(self) -> Any:
        """Faust's consumer, with the additions of `Transport`."""
        return self.app.consumer

    def _input(self, partition: Any) -> TP:
        return TP(self.settings.anabranch_input_topic, partition)

    def _partitions(self) -> Sequence[TP]:
        """The partitions of the input topic that are assigned to this member."""
        try:
            assignment = self.app.consumer.assignment()
        except Exception:  # noqa: BLE001  # not started yet: Faust raises various exceptions then
            return []
        return [tp for tp in assignment if tp.topic == self.settings.anabranch_input_topic]


def _faust_app(settings: Settings, connection: BrokerConnection) -> App:
    session = settings.anabranch_session_timeout_seconds
    rebalance = settings.anabranch_rebalance_timeout_seconds
    return App(
        settings.anabranch_consumer_group,
        broker=connection.faust_broker(),
        broker_credentials=connection.faust_credentials(),
        # Read raw bytes: Faust silently acknowledges events that its own serializers cannot decode.
        value_serializer="raw",
        key_serializer="raw",
        consumer_auto_offset_reset="earliest",
        consumer_metadata_max_age_ms=int(1000 * _TOPICS_INTERVAL_SECONDS),
        broker_commit_interval=_COMMIT_INTERVAL_SECONDS,
        broker_session_timeout=session,
        broker_heartbeat_interval=min(session / 4, rebalance * _HEARTBEAT_SHARE_OF_REBALANCE),
        broker_rebalance_timeout=rebalance,
        broker_request_timeout=max(rebalance, session) + 10.0,
        broker_max_poll_interval=settings.anabranch_max_poll_interval_seconds,
        # Faust's default would buffer 4,096 embeddings of 6 KB, and one fetch may return a megabyte of events.
        stream_buffer_maxsize=2 * settings.anabranch_concurrency,
        broker_max_poll_records=2 * settings.anabranch_concurrency,
        # Faust's own wait has no time limit for events that are never acknowledged; `_consumer_wait_empty` has one.
        stream_wait_empty=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        table_standby_replicas=0,
        web_port=settings.anabranch_web_port,
        web_bind=str(settings.anabranch_web_bind_address),
        web_stats_enabled=False,
        web_graph_enabled=False,
        web_router_enabled=False,
        web_tables_enabled=False,
        web_metrics_enabled=False,
        autodiscover=False,
    )
