"""Sends the golden questions over Kafka, and collects the answers."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import Any
from uuid import UUID, uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition

from streams.broker.clients import running_consumer, running_producer
from streams.core.messages import SCHEMA_VERSION, QueryEmbedding, RetrievalResult, in_oldest_version
from streams.demo.stack import DemoError, Stack
from streams.sample import Corpus, GoldenQuery
from streams.wire import Codec
from streams.wire.deadletter import CODE_HEADER, MESSAGE_HEADER

__all__ = ["WRONG_DIMENSIONS", "Answer", "DeadLetter", "run_conversation"]

_ANSWER_SECONDS = 20.0
# Another model's number of dimensions: the demo's intentional error.
WRONG_DIMENSIONS = 384


@dataclass(frozen=True, slots=True)
class Answer:
    """A result, its question, and the milliseconds from publishing the question to reading the result."""

    question: GoldenQuery
    result: RetrievalResult
    latency_ms: float


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that can never succeed."""

    code: str
    reason: str


async def run_conversation(stack: Stack, corpus: Corpus) -> AsyncIterator[Answer | DeadLetter]:
    """Publish the golden questions one after another, and one invalid event; yield the answers.

    Raises:
        DemoError: there was no answer in time, or an unexpected one.
    """
    topics = (stack.settings.anabranch_output_topic, stack.settings.anabranch_dead_letter_topic)
    async with (
        running_consumer(
            stack.client_options, auto_offset_reset="earliest", fetch_max_wait_ms=10
        ) as consumer,
        running_producer(stack.client_options, linger_ms=0) as producer,
    ):
        # Without a group nothing is committed, and there is no member to wait for.
        consumer.assign(
            [TopicPartition(topic, partition) for topic in topics for partition in range(stack.partitions)]
        )
        client = _Client(stack, corpus, producer, consumer)
        middle = len(corpus.queries) // 2
        for question in corpus.queries[:middle]:
            yield await client.ask(question)
        yield await client.ask_with_wrong_dimensions(corpus.queries[middle])
        for question in corpus.queries[middle:]:
            yield await client.ask(question)


class _Client:
    """Sends one question at a time, and waits for its answer."""

    def __init__(
        self, stack: Stack, corpus: Corpus, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer
    ) -> None:
        self._settings = stack.settings
        self._corpus = corpus
        self._producer = producer
        self._consumer = consumer
        self._codec = Codec()

    async def ask(self, question: GoldenQuery) -> Answer:
        event = in_oldest_version(QueryEmbedding.parse(self._event(question)))
        value = self._codec.encode_query(event)
        sent = perf_counter()
        record = await self._exchange(event.event_id, value)
        latency_ms = (perf_counter() - sent) * 1000
        if record.topic != self._settings.anabranch_output_topic:
            raise DemoError(f"a question became a dead letter: {_dead_letter(record).reason}")
        result = self._codec.decode_result(record.value)
        if result.event_id != event.event_id:
            raise DemoError("the answer belongs to another question")
        return Answer(question, result, latency_ms)

    async def ask_with_wrong_dimensions(self, question: GoldenQuery) -> DeadLetter:
        """Send plain JSON, as a user would by hand."""
        event = self._event(question)
        event["embedding"] = event["embedding"][:WRONG_DIMENSIONS]
        record = await self._exchange(UUID(event["event_id"]), json.dumps(event).encode())
        if record.topic != self._settings.anabranch_dead_letter_topic:
            raise DemoError("the invalid event was answered")
        return _dead_letter(record)

    async def _exchange(self, event_id: UUID, value: bytes) -> ConsumerRecord:
        await self._producer.send(
            self._settings.anabranch_input_topic, value=value, key=str(event_id).encode()
        )
        try:
            return await asyncio.wait_for(self._consumer.getone(), _ANSWER_SECONDS)
        except TimeoutError:
            raise DemoError(f"no answer within {_ANSWER_SECONDS:.0f} s") from None

    def _event(self, question: GoldenQuery) -> dict[str, Any]:
        """The question as the contract's JSON; of the text it contains only a hash."""
        return {
            "schema_version": SCHEMA_VERSION,
            "event_id": str(uuid4()),
            "occurred_at": datetime.now(UTC).isoformat(),
            "principals": list(question.principals),
            "embedding": [float(component) for component in self._corpus.query_embedding(question)],
            "session_id": None if question.session_id is None else str(question.session_id),
            "topic_id": None if question.topic_id is None else str(question.topic_id),
            "profile": question.profile,
            "filters": None if question.filters is None else dict(question.filters),
            "embedding_model": self._corpus.embedding_model,
            "query_hash": hashlib.sha256(question.text.encode()).hexdigest(),
        }


def _dead_letter(record: ConsumerRecord) -> DeadLetter:
    headers = {name: value.decode() for name, value in record.headers}
    return DeadLetter(headers[CODE_HEADER], headers[MESSAGE_HEADER])
