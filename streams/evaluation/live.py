"""Through the live pipeline: events to the input topic, results and dead letters from theirs."""

import asyncio
from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord

from streams.core.errors import TerminalError
from streams.core.messages import QueryEmbedding
from streams.evaluation.query_runner import Answered, DeadLettered, EvaluationError, Outcome, Unanswered
from streams.wire import Codec
from streams.wire.deadletter import CODE_HEADER, MESSAGE_HEADER

__all__ = ["LivePipeline"]

# A broker may hold a fetch that has nothing to bring; what it holds would count as the pipeline's latency.
_FETCH_WAIT_MS = 10


class LivePipeline:
    """A running pipeline. An async context manager.

    Args:
        options: keyword arguments of the Kafka clients.
        codec: encodes events, decodes results.
        timeout_seconds: how long one answer is waited for.
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
        """Raises KafkaError where the broker cannot be reached, EvaluationError where a topic is missing."""
        # Without a group: nothing is committed, and no one's partitions are taken.
        consumer = AIOKafkaConsumer(
            *self._topics,
            **self._options,
            enable_auto_commit=False,
            auto_offset_reset="latest",
            fetch_max_wait_ms=_FETCH_WAIT_MS,
        )
        producer = AIOKafkaProducer(**self._options, acks="all")
        try:
            await consumer.start()
            await self._take_place(consumer)
            await producer.start()
            await producer.partitions_for(self._input_topic)  # which the first query would wait for otherwise
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

    async def _take_place(self, consumer: AIOKafkaConsumer) -> None:
        """At the end of both topics now, not at the first fetch: an answer must not come before its reader."""
        missing = sorted({self._input_topic, *self._topics} - await consumer.topics())
        if missing:
            raise EvaluationError(f"there is no topic {', '.join(missing)}; `anabranch topics` creates them")
        for partition, end in (await consumer.end_offsets(list(consumer.assignment()))).items():
            consumer.seek(partition, end)

    async def ask(self, event: QueryEmbedding) -> Outcome:
        """Publish one event, and wait for what becomes of it.

        Raises:
            KafkaError: the broker is gone.
        """
        if self._producer is None:
            raise RuntimeError("the pipeline is not open")
        if self._failure is not None:
            raise self._failure
        # Result and dead letter bear the event's key: nobody else's records need to be decoded to be passed over.
        key = str(event.event_id).encode()
        answer = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        asked = perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._producer.send_and_wait(
                    self._input_topic, value=self._codec.encode_query(event), key=key
                )
                record, came = await answer
        except TimeoutError:
            return Unanswered(f"nothing came within {self._timeout:g} s")
        finally:
            del self._waiting[key]
        if record.topic != self._topics[0]:
            headers = {name: value.decode(errors="replace") for name, value in record.headers}
            return DeadLettered(headers.get(CODE_HEADER, "unknown"), headers.get(MESSAGE_HEADER, ""))
        try:
            return Answered(self._codec.decode_result(record.value), (came - asked) * 1000)
        except TerminalError as error:
            return Unanswered(f"the result cannot be read: {error.code}: {error}")

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        try:
            async for record in consumer:
                answer = self._waiting.get(record.key)
                if answer is not None and not answer.done():  # else somebody else's, a repeat, or too late
                    answer.set_result((record, perf_counter()))
        except Exception as error:  # noqa: BLE001  # whatever it is, those who wait are told
            self._failure = error
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)
