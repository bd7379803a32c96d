"""The composition root: builds a worker from the settings and wires its parts together."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from streams.configured import load_profiles, open_codec, result_contract
from streams.core.errors import StoreMisconfigured, TransientError
from streams.core.live_recall import ALL_ROWS, LARGE_SECONDS, Budget
from streams.core.messages import CONTRACT_VERSIONS
from streams.settings import Settings
from streams.store.catalog import read_versions
from streams.store.postgres import PooledConnection, PostgresStore
from streams.store.preflight import Finding, inspect
from streams.store.reference import SCHEMA_VERSION
from streams.telemetry.metrics import Metrics
from streams.tokens import count_tokens
from streams.worker.dependency_health import DependencyHealth, StartupRefused
from streams.worker.live_recall import LiveRecall
from streams.worker.processor import Processor
from streams.worker.stage_app import StageApp

__all__ = ["WorkerApp"]

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_SECONDS = 2.0
# The limit of the SLO for an event's age. While an event waits longer, recall is not measured.
_MAX_WAITING_SECONDS = 2.0
# At this point only a probe may still be running, perhaps blocked by a lock.
_CLOSE_TIMEOUT_SECONDS = 1.0


class WorkerApp(StageApp):
    """All parts of a worker.

    Args:
        settings: the environment.

    Raises:
        SettingsError: a required setting is missing or unusable; one line.
    """

    stage = "worker"
    agent = "retrieval"
    dependency = "store"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._starting = True
        self._server_versions: Mapping[str, str] = {}
        self._store = PostgresStore(
            settings.store_dsn,
            connections=settings.pool_size,
            search_timeout_seconds=settings.anabranch_search_timeout_seconds,
            exact_scan_rows=settings.anabranch_exact_scan_rows,
            statement_cache_size=settings.anabranch_statement_cache_size,
            max_replication_lag_seconds=settings.anabranch_max_replication_lag_seconds,
        )
        # A connection of its own: exact searches must not keep the events' searches waiting.
        self._exact_store = PostgresStore(
            settings.store_dsn,
            connections=1,
            search_timeout_seconds=LARGE_SECONDS,
            exact_scan_rows=ALL_ROWS,
            statement_cache_size=settings.anabranch_statement_cache_size,
            max_replication_lag_seconds=settings.anabranch_max_replication_lag_seconds,
            application_name="anabranch live recall",
        )
        profiles = load_profiles(settings)
        self._metrics = Metrics(
            profiles=profiles,
            pool_max=settings.pool_size,
            pool=self._store.connections,
            lag=self._lag,
            committed=self._lag.committed,
            oldest_waiting=self._lag.oldest_waiting,
            replication_lag=self._store.replication_lag_seconds,
            worker=lambda: self._readiness().gauges(),
        )
        self._health = DependencyHealth(
            probe=lambda: self._store.probe(timeout_seconds=_PROBE_TIMEOUT_SECONDS), inspect=self._inspect
        )
        self._live_recall = LiveRecall(
            self._exact_store,
            Budget(settings.anabranch_live_recall_share),
            paused=self._is_busy,
            metrics=self._metrics,
        )
        processor = Processor(
            codec=open_codec(settings),
            store=self._store,
            health=self._health,
            count_tokens=count_tokens,
            publish=self.publisher.publish,
            publish_dead_letter=self.dead_letters.publish,
            replies=self._replies(),
            reply_only=settings.anabranch_replied_results == "reply_only",
            metrics=self._metrics,
            profiles=profiles,
            default_profile=settings.anabranch_default_profile,
            embedding_model=settings.anabranch_embedding_model,
            output_topic=settings.anabranch_output_topic,
            dead_letter_topic=settings.anabranch_dead_letter_topic,
            outage=self._outage(settings.anabranch_store_outage),
            waits=self._waits,
            result_contract=result_contract(settings),
            on_answer=self._live_recall.offer,
        )
        self._deliver(processor)

    async def _check_dependency(self) -> None:
        await self._store.open()
        try:
            await self._health.check()
        finally:
            await self._store.close(timeout_seconds=_CLOSE_TIMEOUT_SECONDS)
        self._starting = False

    def _started_with(self) -> Mapping[str, object]:
        return {"default_profile": self.settings.anabranch_default_profile}

    def _versions(self) -> Mapping[str, str | None]:
        return {
            "store_schema": str(SCHEMA_VERSION),
            "query_contract": CONTRACT_VERSIONS[-1],
            "result_contract": result_contract(self.settings),
            "postgresql": self._server_versions.get("postgresql"),
            "pgvector": self._server_versions.get("pgvector"),
        }

    async def _open(self) -> None:
        await self._store.open()
        await self._exact_store.open()

    def _stopping(self) -> None:
        self._live_recall.end()  # so that the server ends its search while events are waited for

    async def _close(self) -> None:
        self._live_recall.end()
        await asyncio.gather(
            *(
                store.close(timeout_seconds=_CLOSE_TIMEOUT_SECONDS)
                for store in (self._store, self._exact_store)
            )
        )

    def _is_busy(self) -> bool:
        """Whether events wait, or the store is not well; then recall is not measured."""
        return (
            not self._health.ready
            or self._delivery.waiting > 0
            or any(seconds > _MAX_WAITING_SECONDS for _, seconds in self._lag.oldest_waiting())
        )

    async def _watch_dependency(self) -> None:
        count_tokens("")  # loads the vocabulary, which takes a quarter of a second, before the first event
        try:
            await self._store.warm_up()
        except TransientError:
            logger.debug("cannot warm up the connection pool; the probe will log the reason")
        await self._health.watch()

    async def _inspect(self) -> Sequence[Finding]:
        try:
            findings: Sequence[Finding] = await self._store.inspect(self._inspect_on)
        except StoreMisconfigured as fault:
            if fault.before_connect and self._starting:
                raise StartupRefused(str(fault)) from None
            raise  # a file named in the settings may be about to be replaced
        return findings

    async def _inspect_on(self, connection: PooledConnection) -> Sequence[Finding]:
        self._server_versions = await read_versions(connection)
        return await inspect(
            connection,
            principals_setting=self.settings.anabranch_principals_setting,
            dimensions=self.settings.anabranch_embedding_dimensions,
        )
