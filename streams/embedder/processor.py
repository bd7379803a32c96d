"""What an embedding stage does with a question in words: decode, compose, embed, publish the query event.

Does not belong here: retries and dead letters, which `streams.worker.event_processor` has, Faust, the providers.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from time import perf_counter

from streams.core.composition import UpstreamWarning
from streams.core.embedding_errors import ProviderUnavailable
from streams.core.errors import TransientError
from streams.core.headers import result_headers
from streams.core.messages import QueryText
from streams.core.replies import reply_headers
from streams.embedding.embedder import Embedder
from streams.embedding.summarizers import Composed, Composer
from streams.telemetry.metrics import EmbedderMetrics
from streams.wire import Codec
from streams.worker.delivery import InterruptibleWaits
from streams.worker.dependency_health import DependencyHealth
from streams.worker.event_processor import (
    AttemptTracker,
    EventProcessor,
    InputRecord,
    OutagePolicy,
    Publish,
    refuse_expired,
)
from streams.worker.replies import Replies

__all__ = ["TextProcessor"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Decoded:
    """A decoded event, and what is embedded for it once that is known: a summary is paid for, so it is made once."""

    event: QueryText
    composed: Composed | None = None


class TextProcessor(EventProcessor[_Decoded]):
    """Turns questions in words into query events.

    Args:
        composer: composes what is embedded.
        embedder: embeds it.
        publish: writes a record to a topic; returns when the broker has acknowledged it.
        publish_dead_letter: the same, with compression.
        embedding_model: the model's name, for the query events.
        output_topic: the workers' input topic.
        waits: for waiting until the next attempt, or for the provider.
        on_provider: called with the provider's error, or None if it has embedded a text.
    """

    dependency = "the provider"
    failure = "the provider failed"
    unavailable_code = ProviderUnavailable.code
    dependency_stage = "embed"

    def __init__(
        self,
        *,
        codec: Codec,
        composer: Composer,
        embedder: Embedder,
        health: DependencyHealth,
        publish: Publish,
        publish_dead_letter: Publish,
        replies: Replies,
        metrics: EmbedderMetrics,
        embedding_model: str | None,
        output_topic: str,
        dead_letter_topic: str,
        outage: OutagePolicy,
        waits: InterruptibleWaits,
        on_provider: Callable[[TransientError | None], None] = lambda _: None,
    ) -> None:
        super().__init__(
            health=health,
            publish_dead_letter=publish_dead_letter,
            replies=replies,
            metrics=metrics,
            dead_letter_topic=dead_letter_topic,
            outage=outage,
            waits=waits,
        )
        self._codec = codec
        self._composer = composer
        self._embedder = embedder
        self._publish = publish
        self._metrics = metrics
        self._embedding_model = embedding_model
        self._output_topic = output_topic
        self._on_provider = on_provider
        self._summaries_fail = False

    async def _answer(self, record: InputRecord, value: bytes, tracker: AttemptTracker[_Decoded]) -> None:
        metrics = self._metrics
        if tracker.decoded is None:
            clock = perf_counter()
            event = await self._decode(self._codec.decode_text, value)
            tracker.event_id, tracker.expires_at = event.event_id, event.expires_at
            refuse_expired(event.expires_at)
            tracker.decoded = _Decoded(event)
            metrics.stage("decode").observe(perf_counter() - clock)
        decoded = tracker.decoded
        event = decoded.event

        with self._waits.pause():
            await self._health.wait_admitted()
        refuse_expired(event.expires_at)  # waiting may have taken long
        if decoded.composed is None:
            tracker.enter("compose")
            clock = perf_counter()
            decoded.composed = await self._composer.compose(event.question)
            metrics.stage("compose").observe(perf_counter() - clock)
            self._log_summaries(decoded.composed)

        tracker.enter("embed")
        clock = perf_counter()
        # In an outage, the retries of one call take longer than a drain may.
        with nullcontext() if self._health.ready else self._waits.pause():
            try:
                embedding = await self._embedder.embed(decoded.composed.text)
            except TransientError as error:
                self._on_provider(error)
                raise
        self._on_provider(None)
        self._succeeded()
        metrics.stage("embed").observe(perf_counter() - clock)

        tracker.enter("encode")
        clock = perf_counter()
        warnings = [*decoded.composed.warnings]
        if embedding.truncated:
            warnings.append(UpstreamWarning.TEXT_TRUNCATED)
        query = event.with_embedding(embedding.vector, model=self._embedding_model, warnings=warnings)
        payload = self._codec.encode_query(query)
        metrics.stage("encode").observe(perf_counter() - clock)

        tracker.enter("publish")
        clock = perf_counter()
        headers = [*result_headers(record.headers), *reply_headers(record.headers)]  # the worker replies
        await self._publish(self._output_topic, record.key, payload, headers)
        metrics.stage("publish").observe(perf_counter() - clock)
        metrics.outcome("answered").inc()
        metrics.embedding_duration.observe(perf_counter() - record.read_at)
        self._observe_age(record, event.occurred_at)
        for code in warnings:
            metrics.warnings.labels(code).inc()

    def _may_be_at_fault(self, fault: TransientError) -> bool:
        # A provider may fail at one text; the other errors say nothing about the text.
        return isinstance(fault, ProviderUnavailable) and fault.status == HTTPStatus.INTERNAL_SERVER_ERROR

    def _log_summaries(self, composed: Composed) -> None:
        """Log when summaries begin to fail: the texts are embedded without them, so nothing else shows the reason."""
        error = composed.summary_error
        if error is not None and not self._summaries_fail:
            logger.warning("no summaries, embedding the texts alone: %s: %s", error.code, error)
        self._summaries_fail = error is not None
