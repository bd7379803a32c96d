"""Processes one event: decode, retrieve, encode, publish; or write it to the dead-letter topic.

Belongs here: which error leads to a retry, and which to the dead-letter topic. Does not belong here: Faust,
acknowledgement order, SQL. `handle` returns when the broker has acknowledged the result or the dead letter.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Literal, Protocol

from tenacity import RetryCallState, wait_random_exponential

from streams.broker.records import Unreadable
from streams.core.errors import (
    INTERNAL_ERROR,
    Expired,
    GaveUp,
    ResultTooLarge,
    SearchTimeout,
    StoreMisconfigured,
    StoreUnavailable,
    TerminalError,
    TransientError,
)
from streams.core.headers import Headers
from streams.core.messages import QueryEmbedding, RetrievalResult
from streams.core.profiles import Profile, RetrievalParams, resolve_params
from streams.retries import retry
from streams.retrieval import Store, Tokenizer, retrieve
from streams.telemetry.metrics import Metrics
from streams.wire import Codec
from streams.wire.deadletter import error_headers, fit_headers, placeholder_headers
from streams.wire.replay_headers import replay_source
from streams.worker.delivery import InterruptibleWaits
from streams.worker.store_health import StoreHealth

__all__ = ["InputRecord", "OutagePolicy", "Processor", "Publish"]

logger = logging.getLogger(__name__)

# An event is dead-lettered after this many failures.
_MAX_TIMEOUTS = 3
_MAX_DEFECTS = 3
# Longer events are decoded in a thread: decoding megabytes of JSON may take longer than a second.
_LONG_EVENT_BYTES = 256 * 1024

Publish = Callable[[str, bytes | None, bytes, Headers], Awaitable[None]]


class InputRecord(Protocol):
    """An event as it was read; key, value and headers byte for byte. Or the placeholder of an unreadable batch."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def key(self) -> bytes | None: ...

    @property
    def value(self) -> bytes | Unreadable | None: ...

    @property
    def headers(self) -> Headers: ...

    @property
    def read_at(self) -> float: ...

    @property
    def timestamp(self) -> float | None:
        """When it was written to Kafka, in seconds since the epoch; None: unknown."""
        ...


@dataclass(frozen=True, slots=True)
class OutagePolicy:
    """How to handle an event during an outage of the store.

    Attributes:
        then: after `attempts`, keep retrying (``block``) or dead-letter the event (``dead_letter``).
        attempts: number of attempts before that.
        base_seconds: back-off after the first attempt.
        max_seconds: maximum back-off.
    """

    then: Literal["block", "dead_letter"]
    attempts: int
    base_seconds: float
    max_seconds: float


class Processor:
    """Answers events.

    Args:
        publish: writes a record to a topic; returns when the broker has acknowledged it.
        publish_dead_letter: the same, with compression.
        embedding_model: the store's model; events with another model are rejected. None: accept any.
        waits: for waiting until the next attempt, or for the store.
    """

    def __init__(
        self,
        *,
        codec: Codec,
        store: Store,
        health: StoreHealth,
        count_tokens: Tokenizer,
        publish: Publish,
        publish_dead_letter: Publish,
        metrics: Metrics,
        profiles: Mapping[str, Profile],
        default_profile: str,
        embedding_model: str | None,
        output_topic: str,
        dead_letter_topic: str,
        outage: OutagePolicy,
        waits: InterruptibleWaits,
    ) -> None:
        self._codec = codec
        self._store = store
        self._health = health
        self._count_tokens = count_tokens
        self._publish = publish
        self._publish_dead_letter = publish_dead_letter
        self._metrics = metrics
        self._profiles = profiles
        self._default_profile = default_profile
        self._embedding_model = embedding_model
        self._output_topic = output_topic
        self._dead_letter_topic = dead_letter_topic
        self._outage = outage
        self._waits = waits
        self._last_success = -1.0
        # A single thread: a decoded event may take thirty times its size in memory until unknown fields are dropped.
        self._decoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._back_off = wait_random_exponential(
            multiplier=2 * outage.base_seconds, min=outage.base_seconds, max=outage.max_seconds
        )

    async def handle(self, record: InputRecord) -> None:
        """Process one event until the broker has acknowledged its result or dead letter."""
        if record.value is None:  # a tombstone is not an event
            self._metrics.outcome("skipped").inc()
            return
        if isinstance(record.value, Unreadable):
            await self._dead_letter_unreadable(record, record.value)
            return
        tracker = _AttemptTracker(self._outage, began=time.monotonic())
        try:
            await self._answer_with_retries(record, record.value, tracker)
        except TerminalError as error:
            if tracker.decoded is not None:
                error.event_id = tracker.decoded[0].event_id
            await self._dead_letter(record, record.value, error)

    async def _answer_with_retries(
        self, record: InputRecord, value: bytes, tracker: "_AttemptTracker"
    ) -> None:
        await retry(
            partial(self._attempt, record, value, tracker),
            retriable=_is_retriable,
            # The wait is random between base and a bound that grows from twice the base to max.
            wait=self._back_off,
            sleep=self._waits.sleep,
        )

    async def _attempt(self, record: InputRecord, value: bytes, tracker: "_AttemptTracker") -> None:
        """Try once.

        Raises:
            TerminalError: the event cannot succeed, or has failed often enough.
            Exception: any other error; the event is retried.
        """
        try:
            await self._answer(record, value, tracker)
        except TerminalError:
            raise
        except TransientError as fault:
            self._metrics.retries.labels(fault.code).inc()
            self._health.report(fault)
            tracker.count(fault, others_succeed=await self._others_succeed(fault, tracker.began))
            raise
        except Exception as defect:
            self._metrics.retries.labels(INTERNAL_ERROR).inc()
            logger.error(  # noqa: TRY400  # the exception's own text may quote the event
                "unexpected error",
                extra={
                    "error": _where(defect),
                    **_position(record, record.offset),
                    "event_id": None if tracker.decoded is None else str(tracker.decoded[0].event_id),
                },
            )
            tracker.count_defect(defect)
            raise

    async def _others_succeed(self, fault: TransientError, began: float) -> bool:
        """Whether a timeout is caused by this event itself.

        This cannot require that another event succeeds during the same attempt: while this event is unacknowledged, it
        may block all others. A success before the store froze proves nothing, hence the ping.
        """
        return isinstance(fault, SearchTimeout) and self._last_success > began and await self._health.ping()

    async def _answer(self, record: InputRecord, value: bytes, tracker: "_AttemptTracker") -> None:
        metrics = self._metrics
        if tracker.decoded is None:
            clock = perf_counter()
            query = await self._decode(value)
            tracker.decoded = query, self._resolve_params(query)
            metrics.stage("decode").observe(perf_counter() - clock)
        query, params = tracker.decoded

        with self._waits.pause():
            await self._health.wait_admitted()
        _refuse_expired(query)  # waiting may have taken long
        retrieved = await retrieve(
            query,
            params,
            self._store,
            self._count_tokens,
            started=record.read_at,
            on_stage=tracker.enter,
        )
        self._last_success = time.monotonic()
        self._health.report_success()
        metrics.stage("search").observe(retrieved.search_seconds)
        metrics.stage("assemble").observe(retrieved.assemble_seconds)
        for scope, seconds in retrieved.arm_seconds.items():
            metrics.search(scope).observe(seconds)

        tracker.enter("encode")
        clock = perf_counter()
        payload = self._codec.encode_result(retrieved.result)
        metrics.stage("encode").observe(perf_counter() - clock)

        tracker.enter("publish")
        clock = perf_counter()
        await self._publish(self._output_topic, record.key, payload, record.headers)
        metrics.stage("publish").observe(perf_counter() - clock)
        self._count_answer(query, retrieved.result, record)

    async def _decode(self, value: bytes) -> QueryEmbedding:
        if len(value) <= _LONG_EVENT_BYTES:
            return self._codec.decode_query(value)
        return await asyncio.get_running_loop().run_in_executor(
            self._decoding, self._codec.decode_query, value
        )

    def _resolve_params(self, query: QueryEmbedding) -> RetrievalParams:
        """Check what the contract cannot: this worker's profiles, its model, and the time.

        Raises:
            UnknownProfile, ModelMismatch, Expired: if the respective check fails.
        """
        try:
            params = resolve_params(
                query, self._profiles, self._default_profile, embedding_model=self._embedding_model
            )
            _refuse_expired(query)
        except TerminalError as error:
            error.event_id = query.event_id
            raise
        return params

    def _count_answer(self, query: QueryEmbedding, result: RetrievalResult, record: InputRecord) -> None:
        metrics = self._metrics
        metrics.outcome("answered").inc()
        duration, passages, tokens = metrics.of_profile(result.profile)
        duration.observe(perf_counter() - record.read_at)
        # The age of a replayed event depends on when somebody replayed it.
        if replay_source(record.headers) is None:
            # Clocks differ between machines: an event from the future has age 0.
            metrics.event_age.observe(max(0.0, (datetime.now(UTC) - query.occurred_at).total_seconds()))
        for code in result.warnings:
            metrics.warnings.labels(code).inc()
        passages.observe(result.k_returned)
        tokens.observe(result.tokens_used)

    async def _dead_letter(self, record: InputRecord, value: bytes, error: TerminalError) -> None:
        headers = error_headers(error, topic=record.topic, partition=record.partition, offset=record.offset)
        try:
            await self._publish_dead_letter(
                self._dead_letter_topic, record.key, value, [*record.headers, *headers]
            )
        except ResultTooLarge:
            at = record.offset
            headers = [*headers, *placeholder_headers(first=at, last=at, size=len(value))]
            await self._publish_placeholder(record.key, record.headers, headers)
        self._count_dead_letter(record, record.offset, error)

    async def _dead_letter_unreadable(self, record: InputRecord, batch: Unreadable) -> None:
        """Dead-letter an unreadable batch: only the offsets of its events are known."""
        headers = [
            *error_headers(batch.error, topic=record.topic, partition=record.partition, offset=batch.first),
            *placeholder_headers(first=batch.first, last=batch.last, size=batch.size),
        ]
        await self._publish_placeholder(None, (), headers)
        self._count_dead_letter(record, batch.first, batch.error)

    async def _publish_placeholder(
        self, key: bytes | None, own: Headers, added: Sequence[tuple[str, bytes]]
    ) -> None:
        """Dead-letter an event without its value, with as much of its key and headers as the topic accepts."""
        await retry(
            partial(self._try_placeholder, key, own, added),
            # There is no other place for it: the partition is blocked until the topic is fixed.
            retriable=lambda error: isinstance(error, ResultTooLarge),
            wait=self._back_off,
            sleep=self._waits.sleep,
            before_sleep=self._log_dlq_too_small,
        )

    async def _try_placeholder(
        self, key: bytes | None, own: Headers, added: Sequence[tuple[str, bytes]]
    ) -> None:
        room = len(key or b"") + sum(len(name.encode()) + len(value or b"") for name, value in own)
        while True:
            kept_key, kept = fit_headers(key, own, room)
            try:
                await self._publish_dead_letter(self._dead_letter_topic, kept_key, b"", [*kept, *added])
            except ResultTooLarge:
                if room == 0:
                    raise
                room //= 2
            else:
                self._metrics.placeholders.inc()
                break

    def _count_dead_letter(self, record: InputRecord, offset: int, error: TerminalError) -> None:
        self._metrics.dead_letters.labels(error.code).inc()
        self._metrics.outcome("dead_lettered").inc()
        if isinstance(error, Expired) and error.expires_at.timestamp() <= (record.timestamp or 0.0):
            self._metrics.expired_on_arrival.inc()
        logger.warning(
            "dead letter",
            extra={
                "code": error.code,
                **_position(record, offset),
                "event_id": None if error.event_id is None else str(error.event_id),
                "reason": str(error),
            },
        )

    def _log_dlq_too_small(self, attempts: RetryCallState) -> None:
        if attempts.attempt_number == 1:
            logger.error(
                "%s rejects even a dead letter without its event; set its max.message.bytes at least 64 KiB above the"
                " input topic's: run `anabranch check`",
                self._dead_letter_topic,
            )


class _AttemptTracker:
    """Counts the failed attempts of one event, and decides when to give up.

    Attributes:
        began: time of the first attempt (monotonic, seconds).
        decoded: the event and its retrieval parameters; None until an attempt has decoded it.
        stage: the stage that was entered last.
    """

    def __init__(self, outage: OutagePolicy, *, began: float) -> None:
        self.began = began
        self.decoded: tuple[QueryEmbedding, RetrievalParams] | None = None
        self.stage = "decode"
        self._outage = outage
        self._outages = 0
        self._timeouts = 0
        self._defects = 0

    def enter(self, stage: str) -> None:
        self.stage = stage

    def count(self, fault: TransientError, *, others_succeed: bool) -> None:
        """Count a transient error.

        Args:
            fault: the attempt's error.
            others_succeed: the store answers, and has answered another event since this event's first attempt.

        Raises:
            GaveUp: the event has failed too often.
        """
        if isinstance(fault, StoreMisconfigured):
            return  # the event is not at fault: never a dead letter
        if isinstance(fault, SearchTimeout) and others_succeed:
            # So this event is the cause, and it must not block its partition indefinitely.
            self._timeouts += 1
            if self._timeouts >= _MAX_TIMEOUTS:
                raise GaveUp(
                    fault.code, f"the search timed out {self._timeouts} times while other events succeeded"
                )
        self._outages += 1
        if self._outage.then == "dead_letter" and self._outages >= self._outage.attempts:
            raise GaveUp(StoreUnavailable.code, f"the store was unavailable in {self._outages} attempts")

    def count_defect(self, defect: Exception) -> None:
        """Count an unexpected exception.

        Raises:
            GaveUp: the event has failed too often.
        """
        self._defects += 1
        if self._defects >= _MAX_DEFECTS:
            raise GaveUp(INTERNAL_ERROR, f"unexpected {_where(defect)}", stage=self.stage) from defect


def _refuse_expired(query: QueryEmbedding) -> None:
    if query.expires_at is not None and query.expires_at <= datetime.now(UTC):
        raise Expired("expires_at has passed", expires_at=query.expires_at)


def _position(record: InputRecord, offset: int) -> Mapping[str, object]:
    """An event's position, as fields of a log line."""
    return {"topic": record.topic, "partition": record.partition, "offset": offset}


def _is_retriable(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, TerminalError)


def _where(error: BaseException) -> str:
    """An exception's class and the line that raised it, without its text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" in {trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}"
    return type(error).__name__ + place
