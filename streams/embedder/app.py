"""The composition root: builds an embedding stage from the settings and wires its parts together."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from time import monotonic

from streams.configured import open_codec
from streams.core.embedding_errors import ProviderMisconfigured, WrongDimension
from streams.core.errors import TransientError
from streams.core.messages import CONTRACT_VERSIONS, QUERY_TEXT_VERSION
from streams.embedder.processor import TextProcessor
from streams.embedding.embedder import Embedder
from streams.providers import make_composer, make_embedder
from streams.settings import EmbedderSettings, EmbeddingSettings, Settings
from streams.telemetry.metrics import EmbedderMetrics
from streams.tokens import count_tokens
from streams.worker.dependency_health import DependencyHealth, PreflightFinding, StartupRefused
from streams.worker.stage_app import StageApp

__all__ = ["EmbedderApp"]

_PROBE_INTERVAL_SECONDS = 5.0
_FIRST_CHECK_SECONDS = 5.0
# A probe is a call, which may be paid for. Events show more often how the provider is.
_IDLE_PROBE_SECONDS = 60.0
# The whole check is a call, too; it is made after every outage anyway.
_CHECK_EVERY = 720


class _Probe:
    """Asks the provider only if no event has shown for a while that it is well.

    Args:
        embedder: the embedder.
        quiet_seconds: how long a success counts.
    """

    def __init__(self, embedder: Embedder, *, quiet_seconds: float = _IDLE_PROBE_SECONDS) -> None:
        self._embedder = embedder
        self._quiet_seconds = quiet_seconds
        self._succeeded_at = -math.inf

    def report(self, error: TransientError | None) -> None:
        """Report a call's error, or None if it succeeded."""
        self._succeeded_at = monotonic() if error is None else -math.inf

    async def run(self) -> None:
        """Probe, if it is due.

        Raises:
            EmbeddingError: the provider fails.
        """
        if monotonic() - self._succeeded_at >= self._quiet_seconds:
            await self.check()

    async def check(self) -> None:
        """Check the provider and the dimensions of its embeddings.

        Raises:
            EmbeddingError: the provider fails.
        """
        await self._embedder.check()
        self.report(None)


class EmbedderApp(StageApp):
    """All parts of an embedding stage.

    Args:
        settings: the worker's settings, with the stage's topics and group.
        own: the stage's.
        embedding: the provider's and the summarizer's.

    Raises:
        SettingsError: a required setting is missing or unusable; one line.
        StartupRefused: a package of the provider is not installed, or its address, key or local model is unusable.
    """

    stage = "embedder"
    agent = "embedding"
    dependency = "provider"
    texts = True

    def __init__(self, settings: Settings, own: EmbedderSettings, embedding: EmbeddingSettings) -> None:
        super().__init__(settings)
        self._provider = embedding.anabranch_embedding_provider
        self._model = embedding.anabranch_embedding_model
        try:
            self._embedder = make_embedder(embedding)
            self._composer = make_composer(embedding)
        except ProviderMisconfigured as error:
            raise StartupRefused(f"{error.code}: {error}") from None
        self._metrics: EmbedderMetrics = EmbedderMetrics(
            lag=self._lag,
            committed=self._lag.committed,
            oldest_waiting=self._lag.oldest_waiting,
            worker=lambda: self._readiness().gauges(),
        )
        self._probe = _Probe(self._embedder)
        self._health = DependencyHealth(
            name="provider",
            probe=self._probe.run,
            inspect=self._inspect,
            interval_seconds=_PROBE_INTERVAL_SECONDS,
            inspect_every=_CHECK_EVERY,
        )
        self._deliver(
            TextProcessor(
                codec=open_codec(settings),
                composer=self._composer,
                embedder=self._embedder,
                health=self._health,
                publish=self.publisher.publish,
                publish_dead_letter=self.dead_letters.publish,
                replies=self._replies(),
                metrics=self._metrics,
                embedding_model=self._model,
                output_topic=settings.anabranch_output_topic,
                dead_letter_topic=settings.anabranch_dead_letter_topic,
                outage=self._outage(own.anabranch_provider_outage),
                waits=self._waits,
                on_provider=self._probe.report,
            )
        )
        self._dimension_confirmed = False

    async def _check_dependency(self) -> None:
        count_tokens("")  # loads the vocabulary, which takes a quarter of a second, before the first event
        # A provider that hangs must not keep the liveness page waiting; the watch continues.
        try:
            async with asyncio.timeout(_FIRST_CHECK_SECONDS):
                await self._health.check()
        except TimeoutError:
            pass
        except StartupRefused:
            await self._close()
            raise

    def _started_with(self) -> Mapping[str, object]:
        return {"provider": self._provider, "model": self._model}

    def _versions(self) -> Mapping[str, str | None]:
        return {"text_contract": QUERY_TEXT_VERSION, "query_contract": CONTRACT_VERSIONS[-1]}

    async def _open(self) -> None:
        """No-op: the provider is connected by its first call."""

    async def _watch_dependency(self) -> None:
        await self._health.watch()

    def _stopping(self) -> None:
        """No-op: a call in flight is an event in flight."""

    async def _close(self) -> None:
        await asyncio.gather(self._embedder.close(), self._composer.close())

    async def _inspect(self) -> Sequence[PreflightFinding]:
        try:
            await self._probe.check()
        except WrongDimension as error:
            if self._dimension_confirmed:
                raise  # it was right with these settings, so the provider has changed, and a restart would not help
            raise StartupRefused(
                f"{error}: set ANABRANCH_EMBEDDING_DIMENSIONS or ANABRANCH_EMBEDDING_MODEL to match the store"
            ) from None
        self._dimension_confirmed = True
        return ()
