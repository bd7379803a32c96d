"""Questions in words, their topics, and the accounting from the question to the result."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord

from streams.broker.topics import create_topics
from streams.core.messages import QueryEmbedding
from streams.core.replies import CORRELATION_ID_HEADER, ReplyTarget, reply_request_headers
from streams.wire import Codec
from tests import accounting
from tests.accounting import Answer, Asked, Logged, Verdict
from tests.integration.harness import (
    PARTITIONS,
    Channel,
    Headers,
    OutputReader,
    read_result,
    topic_specs_of,
    until,
)

__all__ = ["Texts", "account_for", "code_of", "open_texts", "question", "read_queries"]


def question(text: str, **fields: Any) -> dict[str, Any]:
    """A question in words, now, with an id of its own, as a JSON dictionary."""
    return {
        "schema_version": "1.0.0",
        "event_id": str(uuid4()),
        "occurred_at": datetime.now(UTC).isoformat(),
        "principals": ["user:1"],
        "text": text,
    } | fields


@dataclass
class Texts:
    """The embedding stage's topics, and what was put on the first of them.

    Attributes:
        channel: the topics behind them.
        asked: every event, in order.
        log: where each of them is.
        dead_letters: the stage's own.
    """

    channel: Channel
    asked: list[Asked] = field(default_factory=list)
    log: list[Logged] = field(default_factory=list)
    dead_letters: list[ConsumerRecord] = field(default_factory=list)

    @property
    def input(self) -> str:
        return f"{self.channel.name}.texts"

    @property
    def dead_letter_topic(self) -> str:
        return f"{self.channel.name}.text-dead"

    @property
    def settings(self) -> Mapping[str, str]:
        return {
            "ANABRANCH_TEXT_TOPIC": self.input,
            "ANABRANCH_TEXT_DEAD_LETTER_TOPIC": self.dead_letter_topic,
            "ANABRANCH_EMBEDDER_GROUP": f"{self.channel.name}-embedder",
        }

    async def send(
        self,
        event: Mapping[str, Any] | bytes,
        *,
        expects: str | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> str:
        """Put a question on the topic, with its id as its key; returns that. It asks for a reply."""
        name = str(uuid4()) if isinstance(event, bytes) else event["event_id"]
        value = event if isinstance(event, bytes) else json.dumps(event).encode()
        target = ReplyTarget(self.channel.replies, len(self.asked) % PARTITIONS)
        sent = await self.channel.producer.send_and_wait(
            self.input,
            value,
            key=name.encode(),
            headers=[*headers, *reply_request_headers(target, name.encode())],
            partition=partition,
        )
        self.asked.append(Asked(name, name.encode(), expects, wants_reply=True))
        self.log.append(Logged(name, sent.partition, sent.offset))
        return name

    async def until_answered(self, reader: OutputReader, *, seconds: float) -> None:
        """Wait until each question has at least one answer, of any kind, and a reply."""

        def missing() -> set[bytes]:
            came = {record.key for record in (*reader.results, *reader.dead_letters, *self.dead_letters)}
            return {event.key or b"" for event in self.asked} - (
                came & {record.key for record in reader.replies}
            )

        await until(
            lambda: not missing(),
            lambda: f"{len(missing())} of {len(self.asked)} unanswered",
            seconds=seconds,
        )


@asynccontextmanager
async def open_texts(channel: Channel) -> AsyncIterator[Texts]:
    """Create the topics as `anabranch topics --texts` does, and read the stage's dead letters meanwhile."""
    texts = Texts(channel)
    base = {spec.name: spec for spec in topic_specs_of(channel)}
    specs = [
        replace(base[channel.input], name=texts.input),
        replace(base[channel.dead_letters], name=texts.dead_letter_topic),
    ]
    await create_topics({"bootstrap_servers": channel.bootstrap_servers}, specs)
    consumer = AIOKafkaConsumer(
        texts.dead_letter_topic, bootstrap_servers=channel.bootstrap_servers, auto_offset_reset="earliest"
    )
    await consumer.start()

    async def read() -> None:
        async for record in consumer:
            texts.dead_letters.append(record)

    reading = asyncio.create_task(read())
    try:
        yield texts
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await consumer.stop()


def code_of(record: ConsumerRecord) -> str:
    """A dead letter's."""
    code: bytes = dict(record.headers)["anabranch.error.code"]
    return code.decode()


async def read_queries(channel: Channel, count: int) -> Sequence[tuple[ConsumerRecord, QueryEmbedding]]:
    """The first query events between the stages."""
    consumer = AIOKafkaConsumer(
        channel.input, bootstrap_servers=channel.bootstrap_servers, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        records = [await anext(consumer) for _ in range(count)]
    finally:
        await consumer.stop()
    codec = Codec(dimensions=None)
    return [(record, codec.decode_query(record.value)) for record in records]


def account_for(texts: Texts, reader: OutputReader) -> Verdict:
    """The accounting over both stages. A repeated result must have the same content."""

    def content(record: ConsumerRecord) -> bytes:
        result = read_result(record.value)
        del result["query_time_ms"]
        return repr(result).encode()

    def dead(records: Iterable[ConsumerRecord]) -> list[Answer]:
        return [
            Answer((record.key or b"").decode(), "dead_letter", record.value or b"", code_of(record))
            for record in records
        ]

    results = [
        Answer(str(read_result(record.value)["event_id"]), "result", content(record))
        for record in reader.results
    ]
    answers = [*results, *dead(reader.dead_letters), *dead(texts.dead_letters)]
    replies = [str(dict(record.headers)[CORRELATION_ID_HEADER], "utf-8") for record in reader.replies]
    return accounting.account(texts.asked, texts.log, answers, replies=replies)
