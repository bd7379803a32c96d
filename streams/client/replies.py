"""Reads replies: each goes to the call whose correlation id it has, all others are ignored."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from secrets import token_bytes
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from streams.broker.aiokafka_internals import client_of
from streams.broker.clients import new_consumer
from streams.core.headers import Headers
from streams.core.replies import CORRELATION_ID_HEADER, ReplyTarget, reply_request_headers

__all__ = ["Replies", "stop_consumer"]

logger = logging.getLogger(__name__)

_CORRELATION_ID_BYTES: Final = 16
_RECONNECT_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 5.0


class Replies:
    """One partition of the reply topic, read from its end by a consumer without a group.

    Args:
        options: keyword arguments of an aiokafka client.
        partition: where replies are sent.
        fetch_max_wait_ms: how long the broker may delay an empty fetch response.

    Attributes:
        fault: why the partition cannot be read at the moment.
    """

    def __init__(
        self, options: Mapping[str, Any], partition: TopicPartition, *, fetch_max_wait_ms: int
    ) -> None:
        # A position that the broker does not know means that the topic was created again: every record is new.
        self._options = {**options, "auto_offset_reset": "earliest", "fetch_max_wait_ms": fetch_max_wait_ms}
        self._partition = partition
        self._position = 0
        self._waiting: dict[bytes, asyncio.Future[ConsumerRecord]] = {}
        self._consumer: AIOKafkaConsumer | None = None
        self._reading: asyncio.Task[None] | None = None
        self.fault: Exception | None = None

    async def start(self) -> None:
        """Find the partition's end and read from there; replies to all requests that are sent later are read.

        Raises:
            KafkaError: the broker is unreachable or rejects the request.
        """
        await self._open(at_end=True)
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Stop reading. No call waits any more."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._consumer is not None:
            await stop_consumer(self._consumer)

    @contextmanager
    def expect(self) -> Iterator[tuple[Headers, "asyncio.Future[ConsumerRecord]"]]:
        """Wait for one reply.

        Yields:
            The request's headers, and what becomes the reply. Later replies with the same id are ignored.
        """
        correlation_id = token_bytes(_CORRELATION_ID_BYTES)
        reply = self._waiting[correlation_id] = asyncio.get_running_loop().create_future()
        target = ReplyTarget(self._partition.topic, self._partition.partition)
        try:
            yield reply_request_headers(target, correlation_id), reply
        finally:
            del self._waiting[correlation_id]

    async def _read(self) -> None:
        """Read until cancelled. A consumer that fails is replaced by one that continues where it ended."""
        while True:
            try:
                async for record in self._consumer or await self._open():
                    self._deliver(record)
            except Exception as error:  # noqa: BLE001  # calls must not wait for a task that has ended
                logger.warning("cannot read replies; reconnecting: %s: %s", type(error).__name__, error)
                self.fault = error
            failed, self._consumer = self._consumer, None
            if failed is not None:
                await stop_consumer(failed)
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _open(self, *, at_end: bool = False) -> AIOKafkaConsumer:
        """Start a consumer at the position, or at the partition's end."""
        consumer = new_consumer(self._options)
        try:
            await consumer.start()
            if at_end:
                [self._position] = (await consumer.end_offsets([self._partition])).values()
        except BaseException:
            await stop_consumer(consumer)
            raise
        consumer.assign([self._partition])
        consumer.seek(self._partition, self._position)
        self._consumer = consumer
        self.fault = None
        return consumer

    def _deliver(self, record: ConsumerRecord) -> None:
        self._position = record.offset + 1
        reply = self._waiting.get(dict(record.headers).get(CORRELATION_ID_HEADER) or b"")
        if reply is not None and not reply.done():
            reply.set_result(record)


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """Stop a consumer within a few seconds, even if its broker is unreachable."""
    # In a task of its own: where a connection was lost, aiokafka cancels tasks that it then waits for.
    stopping = asyncio.ensure_future(consumer.stop())
    try:
        await asyncio.wait([stopping], timeout=_STOP_SECONDS)
    finally:
        if not stopping.done():
            stopping.cancel()
        elif not stopping.cancelled() and (error := stopping.exception()) is not None:
            logger.debug("the consumer did not stop cleanly", exc_info=error)
        await client_of(consumer).close()  # the last step of stopping, which may not have been reached
