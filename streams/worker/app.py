"""The composition root: settings become a worker with everything wired together.

Faust's part is the consumer group, the agent and the web server. What is committed, and when, is decided by
`streams.worker.delivery`; the trap that a Faust setting avoids stands beside it.
"""

import logging
import signal
import tempfile
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import faust
from faust.app.base import BootStrategy
from faust.types import EventT
from faust.types.tuples import TP
from mode.types import ServiceT

from streams.broker.connection import BrokerConnection
from streams.broker.diagnosis import diagnose
from streams.broker.publisher import Publisher
from streams.configured import broker_connection, load_profiles, open_codec
from streams.core.errors import StoreMisconfigured, TransientError
from streams.settings import Settings
from streams.store.postgres import PostgresStore
from streams.store.preflight import Finding, inspect
from streams.telemetry.metrics import CONTENT_TYPE, Metrics
from streams.tokens import count_tokens
from streams.worker.delivery import Delivery
from streams.worker.kafka_health import KafkaHealth
from streams.worker.processor import OutagePolicy, Processor
from streams.worker.store_health import StartupRefused, StoreHealth
from streams.worker.transport import Transport

__all__ = ["WorkerApp"]

logger = logging.getLogger(__name__)

# A rebalance waits for a member to hear of it, at its next heartbeat, and to drain. Both must end well before the group
# gives up on it: two members that are given up on in turn throw each other out for ever.
_HEARTBEAT_SHARE_OF_REBALANCE = 0.1
_DRAIN_SHARE_OF_REBALANCE = 0.6
_COMMIT_INTERVAL_SECONDS = 0.25
_PROBE_TIMEOUT_SECONDS = 2.0
# By then only a probe can still be under way, perhaps behind a lock.
_CLOSE_TIMEOUT_SECONDS = 1.0


class _Input:
    """A Faust event as the processor and the delivery see it."""

    __slots__ = ("_event", "generation", "headers", "key", "offset", "partition", "read_at", "topic", "value")

    def __init__(self, event: EventT[Any]) -> None:
        message = event.message
        self._event = event
        self.topic: str = message.topic
        self.partition: int = message.partition
        self.offset: int = message.offset
        self.generation: int = message.generation_id or 0
        self.key: bytes | None = message.key
        self.value: bytes | None = message.value
        headers: Any = message.headers or ()
        self.headers: Sequence[tuple[str, bytes]] = list(
            headers.items() if isinstance(headers, Mapping) else headers
        )
        self.read_at = perf_counter()

    def acknowledge(self) -> None:
        self._event.ack()


class _Boot(BootStrategy):
    """Start order. The web server comes first, so that liveness is answered while Kafka is waited for.

    Faust's own producer is not started: it reports a failed send as sent, and waits for twenty minutes.
    """

    enable_kafka_producer = False

    app: "_App"

    def server(self) -> Iterable[ServiceT]:
        root = self.app.root
        return self._chain(
            self.sensors(),
            self.web_server(),
            [root.publisher],
            self.kafka_consumer(),
            self.agents(),
            self.kafka_conductor(),
            self.tables(),
        )


class _App(faust.App):
    """Faust's app, with the hooks that it leaves to subclasses handed to the composition root.

    Nothing else belongs here: Faust keeps its own state under plain names on the same object.
    """

    BootStrategy = _Boot
    logger = logging.getLogger("mode")  # each step of a service's life, as told by Faust's own
    root: "WorkerApp"

    def _new_transport(self) -> Transport:
        return Transport(
            self.conf.broker_consumer,
            self,
            fetch_max_wait_seconds=self.root.settings.anabranch_fetch_max_wait_seconds,
        )

    async def on_start(self) -> None:
        await super().on_start()
        await self.root.open()

    async def on_stop(self) -> None:
        await super().on_stop()
        await self.root.close()

    async def _on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        self.root.reopen()
        await super()._on_partitions_assigned(assigned, generation_id)

    async def _consumer_wait_empty(self, consumer: Any, logger: Any) -> None:  # noqa: ARG002
        """Called when partitions are revoked, and on stop: fetching has ended, nothing is committed yet."""
        await self.root.drain(stopping=self.should_stop)
        await consumer.commit()


class WorkerApp:
    """Everything that a worker is made of.

    Args:
        settings: the environment.

    Attributes:
        app: the Faust app that runs it.
        refused: working on this store was found to be unsafe.

    Raises:
        SettingsError: something that a worker needs is missing or unusable; one line.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._connection = broker_connection(settings)
        self.app = _faust_app(settings, self._connection)
        self.app.root = self
        self._store = PostgresStore(
            settings.store_dsn,
            # Two for each event in work, so that no arm ever waits for one; one for the probe.
            connections=2 * settings.anabranch_concurrency + 1,
            search_timeout_seconds=settings.anabranch_search_timeout_seconds,
            principals_setting=settings.anabranch_principals_setting,
            exact_scan_rows=settings.anabranch_exact_scan_rows,
        )
        self._metrics = Metrics(pool=self._store.connections, lag=self._lag)
        self._health = StoreHealth(
            probe=lambda: self._store.probe(timeout_seconds=_PROBE_TIMEOUT_SECONDS), inspect=self._inspect
        )
        self.refused = False
        self._starting = True
        self._kafka_reachable = True
        self._trouble = KafkaHealth(lambda: diagnose(self._connection))
        self.publisher = Publisher(
            self._connection.client_options(),
            on_fault=self._kafka_failed,
            on_success=self._kafka_answered,
            wait_seconds=(settings.anabranch_retry_base_seconds, settings.anabranch_retry_max_seconds),
        )
        processor = Processor(
            codec=open_codec(settings),
            store=self._store,
            health=self._health,
            count_tokens=count_tokens,
            publish=self.publisher.publish,
            metrics=self._metrics,
            profiles=load_profiles(settings),
            default_profile=settings.anabranch_default_profile,
            embedding_model=settings.anabranch_embedding_model,
            output_topic=settings.anabranch_output_topic,
            dead_letter_topic=settings.anabranch_dead_letter_topic,
            outage=OutagePolicy(
                then=settings.anabranch_store_outage,
                attempts=settings.anabranch_retry_attempts,
                base_seconds=settings.anabranch_retry_base_seconds,
                max_seconds=settings.anabranch_retry_max_seconds,
            ),
        )
        self._delivery: Delivery[_Input] = Delivery(
            processor.handle,
            generation=lambda: int(self.app.consumer_generation_id),
            concurrency=settings.anabranch_concurrency,
            on_defect=self._delivery_failed,
        )
        self._metrics.in_flight.set_function(lambda: self._delivery.in_flight)
        self._mount()

    async def look(self) -> None:
        """Look at Kafka and the store once, before anything starts.

        Raises:
            Refused: Kafka refuses us, working on the store would not be safe, or its connection string is unusable.
                What else is wrong, an absent server included, is waited for.
        """
        diagnosis = await diagnose(self._connection)
        if diagnosis is not None and diagnosis.refused:
            raise StartupRefused(str(diagnosis))
        await self._store.open()
        try:
            await self._health.look()
        finally:
            await self._store.close(timeout_seconds=_CLOSE_TIMEOUT_SECONDS)
        self._starting = False

    async def open(self) -> None:
        """Before any service starts. The store is connected to later, so an absent one is no error."""
        await self._store.open()
        self.app.add_future(self._watch_store())
        self.app.add_future(self._trouble.watch())

    async def drain(self, *, stopping: bool) -> None:
        """Let the events in work end, within the grace period; in a rebalance, before the group loses patience."""
        seconds = self.settings.anabranch_grace_period_seconds
        if not stopping:
            patience = self.settings.anabranch_rebalance_timeout_seconds
            seconds = min(seconds, patience * _DRAIN_SHARE_OF_REBALANCE)
        await self._delivery.drain(seconds)

    def reopen(self) -> None:
        """Partitions have been assigned."""
        self._delivery.reopen()

    async def close(self) -> None:
        """After the last event."""
        await self._store.close(timeout_seconds=_CLOSE_TIMEOUT_SECONDS)

    def _mount(self) -> None:
        """The agent and the pages."""
        app = self.app
        source = app.topic(self.settings.anabranch_input_topic, key_serializer="raw", value_serializer="raw")

        @app.agent(source, name="retrieval")
        async def retrieval(stream: Any) -> None:
            events: AsyncIterable[EventT[Any]] = stream.noack().events()
            async for event in events:
                await self._delivery.admit(_Input(event))

        @app.page("/metrics")
        async def metrics(web: Any, request: Any) -> Any:
            del request
            return web.bytes(self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

        @app.page("/healthz/live")
        async def live(web: Any, request: Any) -> Any:
            del request
            return web.json({"live": True})

        @app.page("/healthz/ready")
        async def ready(web: Any, request: Any) -> Any:
            del request
            partitions = len(self._partitions())
            kafka_is_up = self._kafka_reachable and self._trouble.reason is None
            is_ready = self._health.ready and partitions > 0 and kafka_is_up
            body = {
                "ready": is_ready,
                "store": self._health.state.value,
                "kafka": "up" if kafka_is_up else "down",
                "partitions": partitions,
            }
            return web.json(body, status=200 if is_ready else 503)

    async def _watch_store(self) -> None:
        count_tokens("")  # reads the vocabulary: a quarter of a second that the first event need not pay
        try:
            await self._store.warm_up()
        except TransientError:
            logger.debug("the pool could not be warmed up; the probe will say why")
        try:
            await self._health.watch()
        except StartupRefused as verdict:
            logger.critical("refused: %s", verdict)
            self.refused = True
            signal.raise_signal(
                signal.SIGTERM
            )  # ends as an operator would end it: what is in work is seen through

    async def _inspect(self) -> Sequence[Finding]:
        setting = self.settings.anabranch_principals_setting
        try:
            findings: Sequence[Finding] = await self._store.inspect(
                lambda connection: inspect(connection, principals_setting=setting)
            )
        except StoreMisconfigured as fault:
            if fault.before_connect and self._starting:
                raise StartupRefused(str(fault)) from None
            raise  # a file that it names may be about to be replaced
        return findings

    def _delivery_failed(self, defect: BaseException) -> None:
        # Its event stays unacknowledged; whoever starts next reads it again.
        logger.critical("a delivery failed with %s; ending", type(defect).__name__)
        self.app.add_future(self.app.crash(defect))

    def _kafka_failed(self, error: BaseException) -> None:
        self._metrics.retries.labels("kafka_unavailable").inc()
        if self._kafka_reachable:
            logger.error("Kafka is not reachable or refuses (%s); trying on", type(error).__name__)
        self._trouble.occurred()
        self._kafka_reachable = False

    def _kafka_answered(self) -> None:
        if not self._kafka_reachable:
            logger.info("Kafka answers again")
        self._kafka_reachable = True

    def _partitions(self) -> Sequence[TP]:
        """What this member is assigned of the input topic."""
        try:
            assignment = self.app.consumer.assignment()
        except Exception:  # noqa: BLE001  # not started yet: Faust has several exceptions for that
            return []
        return [tp for tp in assignment if tp.topic == self.settings.anabranch_input_topic]

    def _lag(self) -> Iterable[tuple[int, int]]:
        consumer: Any = self.app.consumer
        for tp in self._partitions():
            end = consumer.highwater(tp)
            done = consumer._committed_offset.get(tp)  # noqa: SLF001  # Faust tells it nowhere else
            # Just after a rebalance nobody knows yet what is committed; taken for nothing, it would be the whole log.
            is_known = tp in consumer._read_offset  # noqa: SLF001  # likewise
            if end is not None and is_known:
                yield tp.partition, max(0, end - (done or 0))


def _faust_app(settings: Settings, connection: BrokerConnection) -> _App:
    session = settings.anabranch_session_timeout_seconds
    rebalance = settings.anabranch_rebalance_timeout_seconds
    return _App(
        settings.anabranch_consumer_group,
        broker=connection.faust_broker(),
        broker_credentials=connection.faust_credentials(),
        # Bytes in: Faust acknowledges what its own serializers cannot decode before anybody hears of it.
        value_serializer="raw",
        key_serializer="raw",
        consumer_auto_offset_reset="earliest",
        broker_commit_interval=_COMMIT_INTERVAL_SECONDS,
        broker_session_timeout=session,
        broker_heartbeat_interval=min(session / 4, rebalance * _HEARTBEAT_SHARE_OF_REBALANCE),
        broker_rebalance_timeout=rebalance,
        broker_request_timeout=max(rebalance, session) + 10.0,
        broker_max_poll_interval=settings.anabranch_max_poll_interval_seconds,
        # Faust's default would hold 4,096 embeddings of 6 KB.
        stream_buffer_maxsize=2 * settings.anabranch_concurrency,
        # It waits without limit for events that are never acknowledged; `_consumer_wait_empty` has one.
        stream_wait_empty=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        table_standby_replicas=0,
        # Nothing is kept there; a read-only root file system has to do.
        datadir=tempfile.gettempdir() + "/anabranch",
        web_port=settings.anabranch_web_port,
        web_stats_enabled=False,
        web_graph_enabled=False,
        web_router_enabled=False,
        web_tables_enabled=False,
        web_metrics_enabled=False,
        autodiscover=False,
    )
