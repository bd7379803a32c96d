"""Publishing: a record counts as published only when every in-sync replica has acknowledged it."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    BrokerResponseError,
    CorruptRecordException,
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownError,
    UnknownTopicOrPartitionError,
)
from aiokafka.partitioner import DefaultPartitioner
from mode import Service
from tenacity import RetryCallState, wait_random_exponential

from streams.broker.aiokafka_internals import name_invalid_records, sender_task
from streams.broker.clients import MAX_BATCH_BYTES, new_producer
from streams.broker.opening import Opening
from streams.core.errors import ResultTooLarge
from streams.core.headers import Headers
from streams.core.replies import ReplyRefused, ReplyTarget
from streams.core.warning_codes import WarningCode
from streams.retries import retry

__all__ = ["TOO_LARGE_ERRORS", "CheckTarget", "Publisher"]

logger = logging.getLogger(__name__)

TOO_LARGE_ERRORS = (MessageSizeTooLargeError, RecordListTooLargeError)
"""What a producer raises for a record that is larger than its topic accepts."""

# No wait: results that become ready during a request form the next batch. Every event would pay a wait as latency.
_LINGER_MS = 0
_REQUEST_TIMEOUT_MS = 15_000
_STOP_SECONDS = 5.0
# A reply whose caller has stopped waiting is still attempted for this long: the caller's clock may be wrong.
_LAST_ATTEMPT_SECONDS = 5.0
# With these answers a broker rejects the record, or it has a problem of its own. Before Kafka 2.4, CorruptRecord also
# means a record without a key for a compacted topic.
_AMBIGUOUS_REJECTIONS = (UnknownError, CorruptRecordException)
_MAX_AMBIGUOUS_REJECTIONS = 3


class CheckTarget(Protocol):
    """Checks whether a reply's topic and partition exist."""

    async def __call__(self, target: ReplyTarget, *, again: bool) -> None:
        """Check it.

        Args:
            target: where to.
            again: they existed, but an attempt has failed: ask the broker.

        Raises:
            ReplyRefused: they do not.
            KafkaError: the broker does not answer.
        """
        ...


class Publisher(Service):
    """One producer. As a service, it has started when a broker can be reached, however long that takes.

    Args:
        options: keyword arguments of an aiokafka client.
        on_fault: called after every failed attempt that is retried.
        on_success: called after every successful attempt.
        on_last_reply: called when a reply has ended, sent or not, and no other is being published.
        wait_seconds: minimum and maximum seconds between two attempts; grows exponentially, with jitter.
        compression: one of Kafka's codecs; None: no compression.
        sleep: waits between two attempts of `publish`; an exception that it raises ends `publish`.
        stop_seconds: returns how long the producer may take to close; called when it closes.
        connect_first: whether it has started only when it is connected; otherwise the first record connects it.
    """

    logger = logging.getLogger("mode")  # logs each step of a service's life cycle

    def __init__(
        self,
        options: dict[str, Any],
        *,
        on_fault: Callable[[BaseException], None],
        on_success: Callable[[], None],
        wait_seconds: tuple[float, float],
        compression: str | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        stop_seconds: Callable[[], float] = lambda: _STOP_SECONDS,
        connect_first: bool = True,
        on_last_reply: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._options = options
        self._on_fault = on_fault
        self._on_success = on_success
        self._on_last_reply = on_last_reply
        self._compression = compression
        min_wait, max_wait = wait_seconds
        self._wait = wait_random_exponential(multiplier=min_wait, max=max_wait)
        self._sleep = sleep
        self._stop_seconds = stop_seconds
        self._connect_first = connect_first
        self._producer: AIOKafkaProducer | None = None
        self._replacement = Opening(self._replace_producer)
        self._replies = 0  # being published
        self._is_stopped = False

    async def on_start(self) -> None:
        """Connect; retry until it succeeds."""
        if self._connect_first:
            await self._retry(self._connect, asyncio.sleep)

    async def on_stop(self) -> None:
        """Close the producer. Every awaited `publish` has already returned."""
        self._is_stopped = True
        await self._replacement.stop(min(_STOP_SECONDS, self._stop_seconds()))
        producer, self._producer = self._producer, None
        if producer is not None:
            await _close(producer, self._stop_seconds())

    async def publish(self, topic: str, key: bytes | None, value: bytes, headers: Headers) -> None:
        """Publish one record; returns when the broker has acknowledged it.

        Retries indefinitely while the broker is unreachable or rejects the request with a retriable error.

        Raises:
            ResultTooLarge: the topic does not accept a record of this size.
        """

        async def send() -> None:
            producer = await self._healthy_producer()
            await producer.send_and_wait(topic, value=value, key=key, headers=list(headers))

        await self._publish(send)

    async def publish_reply(
        self,
        target: ReplyTarget,
        key: bytes | None,
        value: bytes,
        headers: Headers,
        *,
        check: CheckTarget,
        expires_at: datetime | None = None,
    ) -> None:
        """Publish one record where a caller wants it; returns when the broker has acknowledged it.

        Retries like `publish`, as long as the target exists and the caller waits.

        Args:
            target: the topic and the partition.
            key: the record's key.
            value: its value.
            headers: its headers.
            check: called before each attempt; raises ReplyRefused if the target does not exist.
            expires_at: until when the caller waits; None: indefinitely.

        Raises:
            ReplyRefused: the target does not exist, the broker does not authorize the worker to write there or rejects
                the record for a reason that no retry cures, or the caller has stopped waiting.
            ResultTooLarge: the topic does not accept a record of this size.
        """
        name_invalid_records()
        deadline = _deadline(expires_at)
        exists = False
        attempts = 0
        rejections = 0

        async def send() -> None:
            nonlocal exists, attempts, rejections
            _refuse_late(deadline)  # a library may have ignored the cancellation
            attempts += 1
            await check(target, again=exists)
            exists = True
            producer = await self._healthy_producer()
            try:
                await _send_reply(producer, target, key, value, headers)
            except TopicAuthorizationFailedError:
                raise ReplyRefused(WarningCode.REPLY_NOT_AUTHORIZED) from None
            except BrokerResponseError as error:
                if error.retriable or isinstance(error, TOO_LARGE_ERRORS):
                    raise
                rejections += 1
                if isinstance(error, _AMBIGUOUS_REJECTIONS) and rejections < _MAX_AMBIGUOUS_REJECTIONS:
                    raise
                logger.warning("%s rejects a reply: %s", target.topic, type(error).__name__)
                raise ReplyRefused(WarningCode.REPLY_REJECTED) from None

        self._replies += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._publish(send)
        except TimeoutError:  # of the block above: an attempt's leads to the next
            raise ReplyRefused(WarningCode.REPLY_EXPIRED) from None
        except ReplyRefused as refused:
            # With any other code, the broker has answered since the last failure.
            if refused.code is not WarningCode.REPLY_EXPIRED and (exists or attempts > 1):
                self._on_success()
            raise
        finally:
            self._replies -= 1
            if self._replies == 0:
                self._on_last_reply()

    async def _publish(self, send: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._retry(send, self._sleep)
        except TOO_LARGE_ERRORS as error:
            raise ResultTooLarge("the broker does not accept a record of this size") from error

    async def _healthy_producer(self) -> AIOKafkaProducer:
        """The producer, replaced by a new one if its sender has ended: such a producer fails every further record.

        Raises:
            KafkaError: there is no producer, and no broker can be reached.
        """
        if self._producer is not None and not sender_task(self._producer).done():
            return self._producer
        return await self._replacement.result()

    async def _replace_producer(self) -> AIOKafkaProducer:
        if self._producer is not None:
            logger.error("the producer has failed; replacing it")
            failed, self._producer = self._producer, None
            await _close(failed, _STOP_SECONDS)
        if self._is_stopped:
            raise KafkaError("the producer is stopped")
        return await self._connect()

    async def _connect(self) -> AIOKafkaProducer:
        # No idempotence: a duplicate is harmless (the result's id follows from the event's), and a permanently broken
        # sequence would require a restart.
        producer = new_producer(
            self._options,
            linger_ms=_LINGER_MS,
            request_timeout_ms=_REQUEST_TIMEOUT_MS,
            compression_type=self._compression,
            client_id="anabranch",
        )
        try:
            await producer.start()
        except BaseException:
            await producer.stop()
            raise
        self._producer = producer
        return producer

    async def _retry(
        self, attempt: Callable[[], Awaitable[None]], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        await retry(
            attempt, retriable=_is_retriable, wait=self._wait, before_sleep=self._report_fault, sleep=sleep
        )
        self._on_success()

    def _report_fault(self, state: RetryCallState) -> None:
        if state.outcome is not None and (error := state.outcome.exception()) is not None:
            self._on_fault(error)


def _deadline(expires_at: datetime | None) -> float | None:
    """Until when a reply is attempted, by the event loop's clock; None: indefinitely."""
    if expires_at is None:
        return None
    seconds = max(_LAST_ATTEMPT_SECONDS, (expires_at - datetime.now(UTC)).total_seconds())
    return asyncio.get_running_loop().time() + seconds


def _refuse_late(deadline: float | None) -> None:
    if deadline is not None and asyncio.get_running_loop().time() >= deadline:
        raise ReplyRefused(WarningCode.REPLY_EXPIRED)


async def _send_reply(
    producer: AIOKafkaProducer, target: ReplyTarget, key: bytes | None, value: bytes, headers: Headers
) -> None:
    await _wait_for_partition(producer, target)
    try:
        await producer.send_and_wait(
            target.topic, value=value, key=key, partition=target.partition, headers=list(headers)
        )
    except BrokerResponseError as error:
        if (
            error.retriable
            or isinstance(error, TopicAuthorizationFailedError)
            or len(value) > MAX_BATCH_BYTES
        ):
            raise
        # A broker rejects a whole batch, perhaps because of another caller's record.
        await _send_alone(producer, target, key, value, headers)


async def _send_alone(
    producer: AIOKafkaProducer, target: ReplyTarget, key: bytes | None, value: bytes, headers: Headers
) -> None:
    """Send one record in a batch of its own."""
    partition = target.partition
    if partition is None:
        partitions = sorted(await producer.partitions_for(target.topic))
        # As the producer chooses it.
        partition = random.choice(partitions) if key is None else DefaultPartitioner()(key, partitions, [])  # noqa: S311  # not a secret
    batch = producer.create_batch()
    batch.append(key=key, value=value, timestamp=None, headers=list(headers))
    batch.close()
    await (await producer.send_batch(batch, target.topic, partition=partition))


async def _wait_for_partition(producer: AIOKafkaProducer, target: ReplyTarget) -> None:
    """Wait until the producer's metadata, which may be minutes old, have the partition: aiokafka asserts that."""
    if target.partition is None or target.partition in await producer.partitions_for(target.topic):
        return
    await producer.client.force_metadata_update()
    if target.partition not in await producer.partitions_for(target.topic):
        raise UnknownTopicOrPartitionError(f"{target.topic}[{target.partition}]")


async def _close(producer: AIOKafkaProducer, seconds: float) -> None:
    """Close a producer; records that it has not sent within that time are dropped."""
    try:
        async with asyncio.timeout(seconds):
            await producer.stop()
    except TimeoutError:
        # The producer waits for the broker's answers even when it is cancelled. So close the connections first, then
        # do not wait for it: it may be waiting for metadata that is never fetched again.
        await producer.client.close()
        sender_task(producer).cancel()


def _is_retriable(error: BaseException) -> bool:
    return isinstance(error, (KafkaError, OSError, TimeoutError)) and not isinstance(error, TOO_LARGE_ERRORS)
