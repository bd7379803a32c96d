"""The composition root: settings become a Faust app with everything wired together.

Faust's part is the consumer group, the agent and the web server. What it commits, and when, is decided by
`streams.worker.delivery`; docs of the traps that this avoids stand at each setting.
"""

import asyncio
import logging
import tempfile
import tomllib
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import faust
from faust.app.base import BootStrategy
from faust.types import EventT
from faust.types.tuples import TP
from mode import Service

from streams.broker.connection import BrokerConnection
from streams.broker.publisher import Publisher
from streams.core.profiles import SHIPPED, Profile, ProfileError, overlay
from streams.settings import Settings, SettingsError
from streams.store.postgres import PostgresStore
from streams.store.preflight import Finding, inspect
from streams.telemetry.metrics import CONTENT_TYPE, Metrics
from streams.tokens import count_tokens
from streams.wire import BadWriterSchema, Codec
from streams.worker.delivery import Delivery
from streams.worker.health import StoreHealth
from streams.worker.processor import OutagePolicy, Processor

__all__ = ["Anabranch", "broker_connection", "load_profiles", "open_codec"]

logger = logging.getLogger(__name__)

# Rebalances wait for the drain, so it must end well before the group gives up on this member.
_DRAIN_SHARE_OF_REBALANCE = 0.6
_COMMIT_INTERVAL_SECONDS = 0.25
_PROBE_TIMEOUT_SECONDS = 2.0
_CLOSE_TIMEOUT_SECONDS = 3.0


def broker_connection(settings: Settings) -> BrokerConnection:
    """Kafka's part of the settings."""

    def secret(value: Any) -> str | None:
        return None if value is None else value.get_secret_value()

    return BrokerConnection(
        bootstrap_servers=settings.kafka_bootstrap_servers,
        security_protocol=settings.kafka_security_protocol,
        sasl_mechanism=settings.kafka_sasl_mechanism,
        username=settings.kafka_sasl_username,
        password=secret(settings.kafka_sasl_password),
        cafile=settings.kafka_ssl_cafile,
        certfile=settings.kafka_ssl_certfile,
        keyfile=settings.kafka_ssl_keyfile,
        key_password=secret(settings.kafka_ssl_key_password),
    )


def load_profiles(settings: Settings) -> Mapping[str, Profile]:
    """The shipped profiles, with the operator's file laid over them.

    Raises:
        SettingsError: the file cannot be read, is no TOML, or has a profile that is malformed; one line.
    """
    profiles: Mapping[str, Profile] = SHIPPED
    if settings.anabranch_profiles_file is not None:
        try:
            tables = tomllib.loads(settings.anabranch_profiles_file.read_text(encoding="utf-8"))
            profiles = overlay(SHIPPED, tables)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ProfileError) as error:
            raise SettingsError(f"ANABRANCH_PROFILES_FILE: {error}") from None
    if settings.anabranch_default_profile not in profiles:
        raise SettingsError(f"ANABRANCH_DEFAULT_PROFILE: there is no profile of this name; there are {', '.join(profiles)}")
    return profiles


def open_codec(settings: Settings) -> Codec:
    """The codec, with the writer schemas of `ANABRANCH_SCHEMA_PATH`.

    Raises:
        SettingsError: a schema there cannot be used.
    """
    try:
        return Codec(settings.anabranch_schema_path)
    except (BadWriterSchema, OSError) as error:
        raise SettingsError(f"ANABRANCH_SCHEMA_PATH: {error}") from None


class _Input:
    """A Faust event as the processor and the delivery see it."""

    __slots__ = ("_event", "generation", "headers", "key", "offset", "partition", "read_at", "topic", "value")

    def __init__(self, event: EventT) -> None:
        message = event.message
        self._event = event
        self.topic: str = message.topic
        self.partition: int = message.partition
        self.offset: int = message.offset
        self.generation: int = message.generation_id or 0
        self.key: bytes | None = message.key
        self.value: bytes | None = message.value
        headers: Any = message.headers or ()
        self.headers: Sequence[tuple[str, bytes]] = list(headers.items() if isinstance(headers, Mapping) else headers)
        self.read_at = perf_counter()

    def acknowledge(self) -> None:
        self._event.ack()


class _Boot(BootStrategy):
    """Start order. The web server comes first, so that liveness is answered while Kafka is waited for.

    Faust's own producer is not started: it reports a failed send as sent, and waits for twenty minutes.
    """

    enable_kafka_producer = False

    def server(self) -> Iterable[Service]:
        app: Anabranch = self.app
        return self._chain(
            self.sensors(),
            self.web_server(),
            [app.publisher],
            self.kafka_consumer(),
            self.agents(),
            self.kafka_conductor(),
            self.tables(),
        )


class Anabranch(faust.App):  # type: ignore[misc]  # Faust is untyped to us
    """The worker as a Faust app.

    Args:
        settings: the environment.

    Raises:
        SettingsError: something that a worker needs is missing or unusable; one line.
    """

    BootStrategy = _Boot

    def __init__(self, settings: Settings) -> None:
        connection = broker_connection(settings)
        try:
            client_options = connection.client_options()
            credentials = connection.faust_credentials()
        except OSError as error:
            raise SettingsError(f"KAFKA_SSL_*: a certificate or key cannot be used: {error.strerror}") from None
        self._anabranch_settings = settings
        self.store = PostgresStore(
            settings.store_dsn,
            # Two for each event in work, so that no arm ever waits for one; one for the probe.
            connections=2 * settings.anabranch_concurrency + 1,
            search_timeout_seconds=settings.anabranch_search_timeout_seconds,
            principals_setting=settings.anabranch_principals_setting,
            exact_scan_rows=settings.anabranch_exact_scan_rows,
        )
        self.anabranch_metrics = Metrics(pool=self.store.connections, lag=self._lag)
        self.health = StoreHealth(
            probe=lambda: self.store.probe(timeout_seconds=_PROBE_TIMEOUT_SECONDS), inspect=self._inspect
        )
        self._kafka_reachable = True
        self.publisher = Publisher(
            client_options,
            on_fault=self._kafka_failed,
            on_success=self._kafka_answered,
            wait_seconds=(settings.anabranch_retry_base_seconds, settings.anabranch_retry_max_seconds),
        )
        self._processor = Processor(
            codec=open_codec(settings),
            store=self.store,
            health=self.health,
            count_tokens=count_tokens,
            publish=self.publisher.publish,
            metrics=self.anabranch_metrics,
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
            self._processor.handle,
            generation=lambda: self.consumer_generation_id,
            concurrency=settings.anabranch_concurrency,
            on_defect=self._delivery_failed,
        )
        self._acknowledged: dict[int, int] = {}
        self.anabranch_metrics.in_flight.set_function(lambda: self._delivery.in_flight)
        rebalance = settings.anabranch_rebalance_timeout_seconds
        session = settings.anabranch_session_timeout_seconds
        super().__init__(
            settings.anabranch_consumer_group,
            broker=connection.faust_broker(),
            broker_credentials=credentials,
            # Bytes in: Faust acknowledges what its own serializers cannot decode before anybody hears of it.
            value_serializer="raw",
            key_serializer="raw",
            consumer_auto_offset_reset="earliest",
            broker_commit_interval=_COMMIT_INTERVAL_SECONDS,
            broker_session_timeout=session,
            broker_heartbeat_interval=session / 4,
            broker_rebalance_timeout=rebalance,
            broker_request_timeout=max(rebalance, session) + 10.0,
            broker_max_poll_interval=settings.anabranch_max_poll_interval_seconds,
            # Small buffers: 4,096 embeddings of 6 KB in each would be the default, and repeats after a crash grow.
            stream_buffer_maxsize=2 * settings.anabranch_concurrency,
            broker_max_poll_records=500,
            # Waits without limit for events that are never acknowledged; ours is `_consumer_wait_empty`.
            stream_wait_empty=False,
            topic_disable_leader=True,
            topic_allow_declare=False,
            table_standby_replicas=0,
            # A read-only root file system has to do; nothing is kept there.
            datadir=tempfile.gettempdir() + "/anabranch",
            web_port=settings.anabranch_web_port,
            web_stats_enabled=False,
            web_graph_enabled=False,
            web_router_enabled=False,
            web_tables_enabled=False,
            web_metrics_enabled=False,
            autodiscover=False,
        )
        self._mount()

    # -- what Faust calls ------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Before any other service: the store's pool. It connects later, so an absent store is no error."""
        await super().on_start()
        await self.store.open()
        self.add_future(self._watch_store())

    async def on_stop(self) -> None:
        """Fetching stops, events in work end or are given up, offsets are committed; then the store is closed."""
        await super().on_stop()
        await self.store.close(timeout_seconds=_CLOSE_TIMEOUT_SECONDS)

    async def _consumer_wait_empty(self, consumer: Any, logger: Any) -> None:  # noqa: ARG002
        """Called when partitions are revoked, and on stop: fetching has ended, nothing is committed yet."""
        settings = self._anabranch_settings
        seconds = settings.anabranch_grace_period_seconds
        if not self.should_stop:
            seconds = min(seconds, settings.anabranch_rebalance_timeout_seconds * _DRAIN_SHARE_OF_REBALANCE)
        await self._delivery.drain(seconds)
        await consumer.commit()
        self._acknowledged.clear()

    # -- the agent and the pages -----------------------------------------------------------------------------------

    def _mount(self) -> None:
        source = self.topic(
            self._anabranch_settings.anabranch_input_topic, key_serializer="raw", value_serializer="raw"
        )

        @self.agent(source, name="retrieval")  # type: ignore[untyped-decorator]
        async def retrieval(stream: Any) -> None:
            events: AsyncIterable[EventT] = stream.noack().events()
            async for event in events:
                await self._delivery.admit(_Input(event))

        @self.page("/metrics")  # type: ignore[untyped-decorator]
        async def metrics(web: Any, request: Any) -> Any:
            del request
            return web.bytes(self.anabranch_metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

        @self.page("/healthz/live")  # type: ignore[untyped-decorator]
        async def live(web: Any, request: Any) -> Any:
            del request
            return web.json({"live": True})

        @self.page("/healthz/ready")  # type: ignore[untyped-decorator]
        async def ready(web: Any, request: Any) -> Any:
            del request
            partitions = len(self._assignment())
            is_ready = self.health.ready and partitions > 0 and self._kafka_reachable
            body = {
                "ready": is_ready,
                "store": self.health.state.value,
                "kafka": "up" if self._kafka_reachable else "down",
                "partitions": partitions,
            }
            return web.json(body, status=200 if is_ready else 503)

    # -- watching --------------------------------------------------------------------------------------------------

    async def _watch_store(self) -> None:
        await self._warm_up()
        await self.health.watch()  # raises Refused, which ends the worker

    async def _warm_up(self) -> None:
        try:
            await self.store.warm_up()
        except Exception:  # noqa: BLE001  # only haste: the probe that follows says what is wrong
            logger.debug("the pool could not be warmed up")

    async def _inspect(self) -> Sequence[Finding]:
        setting = self._anabranch_settings.anabranch_principals_setting
        findings: Sequence[Finding] = await self.store.inspect(
            lambda connection: inspect(connection, principals_setting=setting)
        )
        return findings

    def _delivery_failed(self, defect: BaseException) -> None:
        # Its event stays unacknowledged; whoever starts next reads it again.
        logger.critical("a delivery failed with %s; ending", type(defect).__name__)
        asyncio.ensure_future(self.crash(defect))  # noqa: RUF006  # the app keeps what it crashes with

    def _kafka_failed(self, error: BaseException) -> None:
        self.anabranch_metrics.retries.labels("kafka_unavailable").inc()
        if self._kafka_reachable:
            logger.error("Kafka is not reachable or refuses (%s); trying on", type(error).__name__)
        self._kafka_reachable = False

    def _kafka_answered(self) -> None:
        if not self._kafka_reachable:
            logger.info("Kafka answers again")
        self._kafka_reachable = True

    def _assignment(self) -> Iterable[TP]:
        if self._consumer is None:
            return ()
        topic = self._anabranch_settings.anabranch_input_topic
        try:
            return [tp for tp in self._consumer.assignment() if tp.topic == topic]
        except Exception:  # noqa: BLE001  # not started yet: Faust has several exceptions for that
            return []

    def _lag(self) -> Iterable[tuple[int, int]]:
        for tp in self._assignment():
            end = self._consumer.highwater(tp)
            done = self._consumer._committed_offset.get(tp)  # noqa: SLF001  # kept nowhere else
            if end is not None and done is not None:
                yield tp.partition, max(0, end - done)
