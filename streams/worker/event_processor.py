"""Processes one event with retries, until its answer or its dead letter is published; the same for every stage.

Belongs here: which error leads to a retry, and which to the dead-letter topic. Does not belong here: what a stage does
with an event, Faust, acknowledgement order. `handle` returns when the broker has acknowledged the answer or the dead
letter.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar, Generic, Literal, Protocol, TypeVar
from uuid import UUID

from tenacity import RetryCallState, wait_random_exponential

from streams.broker.records import Unreadable
from streams.core.errors import (
    INTERNAL_ERROR,
    Expired,
    GaveUp,
    ResultTooLarge,
    TerminalError,
    TransientError,
)
from streams.core.headers import Headers
from streams.core.warning_codes import WarningCode
from streams.retries import retry
from streams.telemetry.metrics import StageMetrics
from streams.wire.deadletter import error_headers, fit_headers, placeholder_headers
from streams.wire.replay_headers import replay_source
from streams.worker.delivery import InterruptibleWaits
from streams.worker.dependency_health import DependencyHealth
from streams.worker.replies import Replies

__all__ = ["AttemptTracker", "EventProcessor", "InputRecord", "OutagePolicy", "Publish", "refuse_expired"]

logger = logging.getLogger(__name__)

# An event is dead-lettered after this many failures.
_MAX_FAILURES_OF_ITS_OWN = 3
_MAX_DEFECTS = 3
# Longer events are decoded in a thread: decoding megabytes of JSON may take longer than a second.
_LONG_EVENT_BYTES = 256 * 1024

Publish = Callable[[str, bytes | None, bytes, Headers], Awaitable[None]]
T = TypeVar("T")
D = TypeVar("D")


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
    """How to handle an event during an outage of the store or the provider.

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


class EventProcessor(ABC, Generic[D]):
    """Processes events; a subclass has the work of a stage. `D` is a decoded event with all that its attempts keep.

    Args:
        health: of what every event needs; `dependency` in messages.
        publish_dead_letter: writes a record to a topic, with compression; returns when the broker has acknowledged it.
        replies: sends replies to callers.
        metrics: the stage's.
        dead_letter_topic: the name.
        outage: what happens to events while the dependency is unavailable.
        waits: for waiting until the next attempt, or for the dependency.
    """

    #: What an event needs, in messages: "the store".
    dependency: ClassVar[str]
    #: What goes wrong with an event that is at fault itself: "the search timed out".
    failure: ClassVar[str]
    #: The code of events that are dead-lettered because the dependency is unavailable.
    unavailable_code: ClassVar[str]
    #: The stage of that dead letter.
    dependency_stage: ClassVar[str]

    def __init__(
        self,
        *,
        health: DependencyHealth,
        publish_dead_letter: Publish,
        replies: Replies,
        metrics: StageMetrics,
        dead_letter_topic: str,
        outage: OutagePolicy,
        waits: InterruptibleWaits,
    ) -> None:
        self._health = health
        self._publish_dead_letter = publish_dead_letter
        self._replies = replies
        self._stage_metrics = metrics
        self._dead_letter_topic = dead_letter_topic
        self._outage = outage
        self._waits = waits
        self._last_success = -1.0
        # A single thread: a decoded event may take thirty times its size in memory until unknown fields are dropped.
        self._decoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._back_off = wait_random_exponential(
            multiplier=2 * outage.base_seconds, min=outage.base_seconds, max=outage.max_seconds
        )

    @abstractmethod
    async def _answer(self, record: InputRecord, value: bytes, tracker: "AttemptTracker[D]") -> None:
        """Try once to answer an event; returns when the broker has acknowledged the answer.

        Raises:
            TerminalError: the event cannot succeed.
            Exception: any other error.
        """

    @abstractmethod
    def _may_be_at_fault(self, fault: TransientError) -> bool:
        """Whether an event with this error may be its cause, if other events succeed meanwhile."""

    async def handle(self, record: InputRecord) -> None:
        """Process one event until the broker has acknowledged its answer or dead letter."""
        if record.value is None:  # a tombstone is not an event
            self._stage_metrics.outcome("skipped").inc()
            return
        if isinstance(record.value, Unreadable):
            await self._dead_letter_unreadable(record, record.value)
            return
        tracker: AttemptTracker[D] = AttemptTracker(self, self._outage, began=time.monotonic())
        try:
            await self._answer_with_retries(record, record.value, tracker)
        except TerminalError as error:
            if tracker.event_id is not None:
                error.event_id = tracker.event_id
            await self._dead_letter(record, record.value, error, tracker)

    async def _answer_with_retries(
        self, record: InputRecord, value: bytes, tracker: "AttemptTracker[D]"
    ) -> None:
        await retry(
            partial(self._attempt, record, value, tracker),
            retriable=_is_retriable,
            # The wait is random between base and a bound that grows from twice the base to max.
            wait=self._back_off,
            sleep=self._waits.sleep,
        )

    async def _attempt(self, record: InputRecord, value: bytes, tracker: "AttemptTracker[D]") -> None:
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
            self._stage_metrics.retries.labels(fault.code).inc()
            self._health.report(fault)
            tracker.count(fault, is_at_fault=await self._is_at_fault(fault, tracker.began))
            raise
        except Exception as defect:
            self._stage_metrics.retries.labels(INTERNAL_ERROR).inc()
            logger.error(  # noqa: TRY400  # the exception's own text may quote the event
                "unexpected error",
                extra={
                    "error": _where(defect),
                    **_position(record, record.offset),
                    "event_id": None if tracker.event_id is None else str(tracker.event_id),
                },
            )
            tracker.count_defect(defect)
            raise

    async def _is_at_fault(self, fault: TransientError, began: float) -> bool:
        """Whether an error is caused by this event itself.

        This cannot require that another event succeeds during the same attempt: while this event is unacknowledged, it
        may block all others. A success before the outage began proves nothing, hence the ping.
        """
        return self._may_be_at_fault(fault) and self._last_success > began and await self._health.ping()

    def _succeeded(self) -> None:
        """Called when the dependency has done its part for an event."""
        self._last_success = time.monotonic()
        self._health.report_success()

    async def _decode(self, decode: Callable[[bytes], T], value: bytes) -> T:
        if len(value) <= _LONG_EVENT_BYTES:
            return decode(value)
        return await asyncio.get_running_loop().run_in_executor(self._decoding, decode, value)

    def _observe_age(self, record: InputRecord, occurred_at: datetime) -> None:
        # The age of a replayed event depends on when somebody replayed it.
        if replay_source(record.headers) is None:
            # Clocks differ between machines: an event from the future has age 0.
            self._stage_metrics.event_age.observe(max(0.0, (datetime.now(UTC) - occurred_at).total_seconds()))

    async def _dead_letter(
        self, record: InputRecord, value: bytes, error: TerminalError, tracker: "AttemptTracker[D]"
    ) -> None:
        headers = error_headers(error, topic=record.topic, partition=record.partition, offset=record.offset)
        try:
            await self._publish_dead_letter(
                self._dead_letter_topic, record.key, value, [*record.headers, *headers]
            )
        except ResultTooLarge:
            at = record.offset
            headers = [*headers, *placeholder_headers(first=at, last=at, size=len(value))]
            await self._publish_placeholder(record.key, record.headers, headers)
        if tracker.reply_due:
            expires_at = tracker.expires_at or error.expires_at
            await self._replies.fail(record.key, record.headers, error, expires_at=expires_at)
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
                self._stage_metrics.placeholders.inc()
                break

    def _count_dead_letter(self, record: InputRecord, offset: int, error: TerminalError) -> None:
        self._stage_metrics.dead_letters.labels(error.code).inc()
        self._stage_metrics.outcome("dead_lettered").inc()
        if isinstance(error, Expired) and error.expires_at.timestamp() <= (record.timestamp or 0.0):
            self._stage_metrics.expired_on_arrival.inc()
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


class AttemptTracker(Generic[D]):
    """Counts the failed attempts of one event, and decides when to give up.

    Attributes:
        began: time of the first attempt (monotonic, seconds).
        decoded: the event; None until an attempt has decoded it.
        event_id: its id, as soon as it is known.
        expires_at: until when its sender waits; None: not known, or indefinitely.
        stage: the stage that was entered last.
        replied: the caller has its reply.
        reply_refused: why it cannot have the result as its reply; None: it was not refused.
    """

    def __init__(self, processor: EventProcessor[D], outage: OutagePolicy, *, began: float) -> None:
        self.began = began
        self.decoded: D | None = None
        self.event_id: UUID | None = None
        self.expires_at: datetime | None = None
        self.stage = "decode"
        self.replied = False
        self.reply_refused: WarningCode | None = None
        self._processor = processor
        self._outage = outage
        self._outages = 0
        self._own_failures = 0
        self._defects = 0

    @property
    def reply_due(self) -> bool:
        """Whether nothing has been sent to the caller yet, nor refused."""
        return not self.replied and self.reply_refused is None

    def enter(self, stage: str) -> None:
        self.stage = stage

    def count(self, fault: TransientError, *, is_at_fault: bool) -> None:
        """Count a transient error.

        Args:
            fault: the attempt's error.
            is_at_fault: the error may be this event's, and others have succeeded since its first attempt.

        Raises:
            GaveUp: the event has failed too often.
        """
        if fault.needs_fix:
            return  # the event is not at fault: never a dead letter
        processor = self._processor
        if is_at_fault:
            # It must not block its partition indefinitely.
            self._own_failures += 1
            if self._own_failures >= _MAX_FAILURES_OF_ITS_OWN:
                raise GaveUp(
                    fault.code,
                    f"{processor.failure} {self._own_failures} times while other events succeeded",
                    stage=processor.dependency_stage,
                )
        self._outages += 1
        if self._outage.then == "dead_letter" and self._outages >= self._outage.attempts:
            raise GaveUp(
                processor.unavailable_code,
                f"{processor.dependency} was unavailable in {self._outages} attempts",
                stage=processor.dependency_stage,
            )

    def count_defect(self, defect: Exception) -> None:
        """Count an unexpected exception.

        Raises:
            GaveUp: the event has failed too often.
        """
        self._defects += 1
        if self._defects >= _MAX_DEFECTS:
            raise GaveUp(INTERNAL_ERROR, f"unexpected {_where(defect)}", stage=self.stage) from defect


def refuse_expired(expires_at: datetime | None) -> None:
    """Refuse an event that has expired.

    Raises:
        Expired: it has.
    """
    if expires_at is not None and expires_at <= datetime.now(UTC):
        raise Expired("expires_at has passed", expires_at=expires_at)


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
