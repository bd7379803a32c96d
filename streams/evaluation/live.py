"""Live mode: publishes events to the input topic, and reads the results and dead letters."""

import asyncio
from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord

from streams.broker.clients import new_consumer, new_producer
from streams.broker.topics import partitions_of
from streams.core.errors import TerminalError
from streams.core.messages import QueryEmbedding
from streams.evaluation.query_runner import Answered, DeadLettered, Outcome, Unanswered
from streams.wire import Codec
from streams.wire.deadletter import CODE_HEADER, MESSAGE_HEADER

__all__ = ["LivePipeline"]

# A broker may delay an empty fetch response; the delay would count as the pipeline's latency.
_FETCH_WAIT_MS = 10


class LivePipeline:
    """A running pipeline. An async context manager.

    Args:
        options: keyword arguments of the Kafka clients.
        codec: encodes events and decodes results.
        timeout_seconds: how long to wait for one answer.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        codec: Codec,
        input_topic: str,
        output_topic: str,
        dead_letter_topic: str,
        timeout_seconds: float,
    ) -> None:
        self._options = options
        self._codec = codec
        self._input_topic = input_topic
        self._topics = (output_topic, dead_letter_topic)
        self._timeout = timeout_seconds
        self._waiting: dict[bytes, asyncio.Future[tuple[ConsumerRecord, float]]] = {}
        self._producer: AIOKafkaProducer | None = None
        self._consumer: AIOKafkaConsumer | None = None
        self._reading: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        """Raise KafkaError if the broker cannot be reached, MissingTopics if a topic does not exist."""
        await partitions_of(self._options, (self._input_topic, *self._topics))
        # Without a group: nothing is committed, and no partitions are taken from other consumers.
        consumer = new_consumer(
            self._options, *self._topics, auto_offset_reset="latest", fetch_max_wait_ms=_FETCH_WAIT_MS
        )
        producer = new_producer(self._options, linger_ms=0)
        try:
            await consumer.start()
            await self._seek_to_end(consumer)
            await producer.start()
            await producer.partitions_for(
                self._input_topic
            )  # so that the first query does not have to wait for it
        except BaseException:
            await producer.stop()
            await consumer.stop()
            raise
        self._consumer, self._producer = consumer, producer
        self._reading = asyncio.create_task(self._read(consumer))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._producer is not None:
            await self._producer.stop()
        if self._consumer is not None:
            await self._consumer.stop()

    async def _seek_to_end(self, consumer: AIOKafkaConsumer) -> None:
        """Seek to the end of both topics now, not at the first fetch, so that no answer is missed."""
        for partition, end in (await consumer.end_offsets(list(consumer.assignment()))).items():
            consumer.seek(partition, end)

    async def ask(self, event: QueryEmbedding) -> Outcome:
        """Publish one event, and wait for its result or dead letter.

        Raises:
            KafkaError: the broker is unreachable.
        """
        if self._producer is None:
            raise RuntimeError("the pipeline is not open")
        if self._failure is not None:
            raise self._failure
        # Result and dead letter have the event's key, so that other records can be skipped without decoding.
        key = str(event.event_id).encode()
        answer = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        started = perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._producer.send_and_wait(
                    self._input_topic, value=self._codec.encode_query(event), key=key
                )
                record, received = await answer
        except TimeoutError:
            return Unanswered(f"no answer within {self._timeout:g} s")
        finally:
            del self._waiting[key]
        if record.topic != self._topics[0]:
            headers = {name: value.decode(errors="replace") for name, value in record.headers}
            return DeadLettered(headers.get(CODE_HEADER, "unknown"), headers.get(MESSAGE_HEADER, ""))
        try:
            return Answered(self._codec.decode_result(record.value), (received - started) * 1000)
        except TerminalError as error:
            return Unanswered(f"the result cannot be read: {error.code}: {error}")

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        try:
            async for record in consumer:
                answer = self._waiting.get(record.key)
                if (
                    answer is not None and not answer.done()
                ):  # otherwise it is another client's, a duplicate, or too late
                    answer.set_result((record, perf_counter()))
        except Exception as error:  # noqa: BLE001  # any error is passed on to the waiting tasks
            self._failure = error
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)
