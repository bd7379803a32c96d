"""One event's way: decode, retrieve, encode, publish; or the dead-letter topic.

What may live here: which fault means another attempt, and which the dead-letter topic. Not: Faust, acknowledgement
order, SQL. `handle` returns when the broker has acknowledged what became of the event.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import Literal, Protocol

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    retry_if_exception_type,
    wait_random_exponential,
)

from streams.core.errors import (
    INTERNAL_ERROR,
    Expired,
    GaveUp,
    ModelMismatch,
    ResultTooLarge,
    SearchTimeout,
    StoreMisconfigured,
    StoreUnavailable,
    TerminalError,
    TransientError,
)
from streams.core.messages import QueryEmbedding, RetrievalResult
from streams.core.profiles import Profile, RetrievalParams, resolve_params
from streams.retrieval import Store, Tokenizer, retrieve
from streams.telemetry.metrics import Metrics
from streams.wire import Codec
from streams.wire.deadletter import error_headers
from streams.worker.store_health import StoreHealth

__all__ = ["InputRecord", "OutagePolicy", "Processor", "Publish"]

logger = logging.getLogger(__name__)

# One event may be this unlucky before it is put aside.
_MAX_TIMEOUTS = 3
_MAX_DEFECTS = 3

Publish = Callable[[str, bytes | None, bytes, Sequence[tuple[str, bytes]]], Awaitable[None]]


class InputRecord(Protocol):
    """An event as it was read; key, value and headers byte for byte."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def key(self) -> bytes | None: ...

    @property
    def value(self) -> bytes | None: ...

    @property
    def headers(self) -> Sequence[tuple[str, bytes]]: ...

    @property
    def read_at(self) -> float: ...


@dataclass(frozen=True, slots=True)
class OutagePolicy:
    """What an outage of the store does to an event.

    Attributes:
        then: after `attempts`, keep retrying (``block``) or put the event aside (``dead_letter``).
        attempts: how many before that.
        base_seconds: back-off after the first.
        max_seconds: longest back-off.
    """

    then: Literal["block", "dead_letter"]
    attempts: int
    base_seconds: float
    max_seconds: float


class Processor:
    """Answers events.

    Args:
        publish: puts a record on a topic; returns when the broker has acknowledged it.
        embedding_model: the store's; events of another model are refused. None: any.
    """

    def __init__(
        self,
        *,
        codec: Codec,
        store: Store,
        health: StoreHealth,
        count_tokens: Tokenizer,
        publish: Publish,
        metrics: Metrics,
        profiles: Mapping[str, Profile],
        default_profile: str,
        embedding_model: str | None,
        output_topic: str,
        dead_letter_topic: str,
        outage: OutagePolicy,
    ) -> None:
        self._codec = codec
        self._store = store
        self._health = health
        self._count_tokens = count_tokens
        self._publish = publish
        self._metrics = metrics
        self._profiles = profiles
        self._default_profile = default_profile
        self._embedding_model = embedding_model
        self._output_topic = output_topic
        self._dead_letter_topic = dead_letter_topic
        self._outage = outage
        self._last_success = -1.0
        self._back_off = wait_random_exponential(
            multiplier=2 * outage.base_seconds, min=outage.base_seconds, max=outage.max_seconds
        )

    async def handle(self, record: InputRecord) -> None:
        """See one event through to the broker's acknowledgement."""
        if record.value is None:  # a tombstone asks nothing
            self._metrics.events.labels("skipped").inc()
            return
        try:
            await self._answer_with_retries(record, record.value)
        except TerminalError as error:
            await self._dead_letter(record, record.value, error)

    async def _answer_with_retries(self, record: InputRecord, value: bytes) -> None:
        tracker = _AttemptTracker(self._outage, began=time.monotonic())
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(_is_retriable),
            # Between base and twice as much at first, between base and max in the end: jitter all the way.
            wait=self._back_off,
            reraise=True,
        ):
            with attempt:
                await self._attempt(record, value, tracker)

    async def _attempt(self, record: InputRecord, value: bytes, tracker: "_AttemptTracker") -> None:
        """Try once.

        Raises:
            TerminalError: the event cannot succeed, or has failed often enough.
            Exception: anything else is worth another attempt.
        """
        try:
            await self._answer(record, value)
        except TerminalError:
            raise
        except TransientError as fault:
            self._metrics.retries.labels(fault.code).inc()
            self._health.report(fault)
            tracker.count(fault, others_succeed=await self._others_succeed(fault, tracker.began))
            raise
        except Exception as defect:
            self._metrics.retries.labels(INTERNAL_ERROR).inc()
            # The traceback names code only; an exception's own text may quote the event.
            logger.error(  # noqa: TRY400
                "unforeseen %s at %s[%d]@%d", _where(defect), record.topic, record.partition, record.offset
            )
            tracker.count_defect(defect)
            raise

    async def _others_succeed(self, fault: TransientError, began: float) -> bool:
        """Whether a timeout is this event's own.

        Another event's success during the very attempt cannot be asked for: while this one is not acknowledged, it may
        hold all others back. A success from before the store froze proves nothing, hence the sign of life.
        """
        return (
            isinstance(fault, SearchTimeout) and self._last_success > began and await self._health.answers()
        )

    async def _answer(self, record: InputRecord, value: bytes) -> None:
        metrics = self._metrics
        clock = perf_counter()
        query = self._codec.decode_query(value)
        rules = self._judge(query)
        metrics.stage_duration.labels("decode").observe(perf_counter() - clock)

        await self._health.admitted()
        _refuse_expired(query)  # that may have been a long wait
        retrieved = await retrieve(query, rules, self._store, self._count_tokens, started=record.read_at)
        self._last_success = time.monotonic()
        self._health.succeeded()
        metrics.stage_duration.labels("search").observe(retrieved.search_seconds)
        metrics.stage_duration.labels("assemble").observe(retrieved.assemble_seconds)
        for scope, seconds in retrieved.arm_seconds.items():
            metrics.search_duration.labels(scope).observe(seconds)

        clock = perf_counter()
        payload = self._codec.encode_result(retrieved.result)
        metrics.stage_duration.labels("encode").observe(perf_counter() - clock)

        clock = perf_counter()
        await self._publish(self._output_topic, record.key, payload, record.headers)
        metrics.stage_duration.labels("publish").observe(perf_counter() - clock)
        self._count_answer(query, retrieved.result, record.read_at)

    def _judge(self, query: QueryEmbedding) -> RetrievalParams:
        """Look at what the contract cannot know: this worker's profiles, its model, the time.

        Raises:
            UnknownProfile, ModelMismatch, Expired: what they say.
        """
        rules = resolve_params(query, self._profiles, self._default_profile)
        model = self._embedding_model
        if model is not None and query.embedding_model is not None and query.embedding_model != model:
            raise ModelMismatch("the event was embedded by another model than the store's")
        _refuse_expired(query)
        return rules

    def _count_answer(self, query: QueryEmbedding, result: RetrievalResult, read_at: float) -> None:
        metrics, profile = self._metrics, result.profile
        metrics.events.labels("answered").inc()
        metrics.event_duration.labels(profile).observe(perf_counter() - read_at)
        # Clocks differ between machines: an event from the future has no age.
        metrics.event_age.observe(max(0.0, (datetime.now(UTC) - query.occurred_at).total_seconds()))
        metrics.passages_returned.labels(profile).observe(result.k_returned)
        metrics.tokens_used.labels(profile).observe(result.tokens_used)

    async def _dead_letter(self, record: InputRecord, value: bytes, error: TerminalError) -> None:
        headers = [
            *record.headers,
            *error_headers(error, topic=record.topic, partition=record.partition, offset=record.offset),
        ]
        async for attempt in AsyncRetrying(
            # There is nowhere else to put it: until the topic is mended, the partition stands still.
            retry=retry_if_exception_type(ResultTooLarge),
            wait=self._back_off,
            before_sleep=self._log_dlq_too_small,
        ):
            with attempt:
                await self._publish(self._dead_letter_topic, record.key, value, headers)
        self._metrics.dead_letters.labels(error.code).inc()
        self._metrics.events.labels("dead_lettered").inc()
        logger.warning(
            "dead letter %s at %s[%d]@%d: %s",
            error.code,
            record.topic,
            record.partition,
            record.offset,
            error,
        )

    def _log_dlq_too_small(self, attempts: RetryCallState) -> None:
        if attempts.attempt_number == 1:
            logger.error(
                "%s does not take a dead letter of this size; its max.message.bytes has to be 64 KiB above the input"
                " topic's: run `anabranch check`",
                self._dead_letter_topic,
            )


class _AttemptTracker:
    """What has befallen one event, and when it has been enough."""

    def __init__(self, outage: OutagePolicy, *, began: float) -> None:
        self.began = began
        self._outage = outage
        self._outages = 0
        self._timeouts = 0
        self._defects = 0

    def count(self, fault: TransientError, *, others_succeed: bool) -> None:
        """Count a transient fault.

        Args:
            fault: what the attempt met.
            others_succeed: the store answers, and has answered another event since this one was first attempted.

        Raises:
            GaveUp: it has been enough.
        """
        if isinstance(fault, StoreMisconfigured):
            return  # no event's fault: never a dead letter
        if isinstance(fault, SearchTimeout) and others_succeed:
            # So it is this event, and it must not block its partition for ever.
            self._timeouts += 1
            if self._timeouts >= _MAX_TIMEOUTS:
                raise GaveUp(fault.code, f"timed out {self._timeouts} times while others succeeded")
        self._outages += 1
        if self._outage.then == "dead_letter" and self._outages >= self._outage.attempts:
            raise GaveUp(StoreUnavailable.code, f"the store was unavailable {self._outages} times")

    def count_defect(self, defect: Exception) -> None:
        """Count an exception that nobody foresaw.

        Raises:
            GaveUp: it has been enough.
        """
        self._defects += 1
        if self._defects >= _MAX_DEFECTS:
            raise GaveUp(INTERNAL_ERROR, f"unforeseen {_where(defect)}", stage="assemble") from defect


def _refuse_expired(query: QueryEmbedding) -> None:
    if query.expires_at is not None and query.expires_at <= datetime.now(UTC):
        raise Expired("expires_at has passed")


def _is_retriable(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, TerminalError)


def _where(error: BaseException) -> str:
    """An exception's class and the line that raised it, without its text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" in {trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}"
    return type(error).__name__ + place
