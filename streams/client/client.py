"""The client: asks questions and waits for their results, publishes events, and reads results."""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self, Unpack
from uuid import UUID

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError

from streams.broker.connection import BrokerConnection
from streams.broker.records import Unreadable
from streams.client.connections import Connections
from streams.client.errors import (
    ClientClosed,
    InvalidEvent,
    PublishTimeout,
    RetrievalFailed,
    RetrievalTimeout,
    UnreadableResult,
)
from streams.client.events import Embedding, QueryOptions, make_event
from streams.configured import broker_connection
from streams.core.errors import ContractViolation, RecordTooLarge, ResultTooLarge, TerminalError
from streams.core.headers import Headers
from streams.core.messages import DIMENSIONS, QueryEmbedding, QueryText, RetrievalResult
from streams.settings import SettingsError, load, load_embedder
from streams.wire import BadWriterSchema, Codec
from streams.wire.deadletter import CODE_HEADER, MESSAGE_HEADER

__all__ = ["Client"]

logger = logging.getLogger(__name__)

_CLOSED: Final = "the client is closed"


class Client:
    """Connects to Kafka when it is first needed. An async context manager; leaving it closes the client.

    It belongs to the event loop in which it is first used. Any number of tasks may use it at the same time.

    Args:
        connection: ``host:port``, comma-separated, or a `BrokerConnection` with TLS and login.
        input_topic: where events with embeddings go.
        text_topic: where events with texts go.
        output_topic: where `results` reads.
        reply_topic: where workers reply to `retrieve`; they must allow it (``ANABRANCH_REPLY_TOPICS``).
        reply_partition: of the reply topic; None: a random one.
        dimensions: the number of components that embeddings must have; None: what the contract allows.
        schema_path: a directory with schemas of newer workers (``ANABRANCH_SCHEMA_PATH``).
        fetch_max_wait_seconds: how long a broker may delay an empty fetch response. Kafka answers as soon as there are
            records; the embedded broker always waits that long.

    Raises:
        BadWriterSchema: a file in ``schema_path`` is unusable.
    """

    def __init__(
        self,
        connection: str | BrokerConnection = "localhost:9092",
        *,
        input_topic: str = "retrieval.query-embeddings.v1",
        text_topic: str = "retrieval.query-texts.v1",
        output_topic: str = "retrieval.results.v1",
        reply_topic: str = "retrieval.replies.v1",
        reply_partition: int | None = None,
        dimensions: int | None = DIMENSIONS,
        schema_path: Path | None = None,
        fetch_max_wait_seconds: float = 0.5,
    ) -> None:
        self._connections = Connections(
            BrokerConnection(connection) if isinstance(connection, str) else connection,
            fetch_max_wait_seconds=fetch_max_wait_seconds,
        )
        self._input_topic = input_topic
        self._text_topic = text_topic
        self._output_topic = output_topic
        self._reply_topic = reply_topic
        self._reply_partition = reply_partition
        self._dimensions = dimensions
        self._codec = Codec(schema_path, dimensions=dimensions)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_idle = asyncio.Event()
        self._is_closed = False

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, *, reply_partition: int | None = None
    ) -> Self:
        """A client with the settings of the commands: ``KAFKA_*``, ``ANABRANCH_INPUT_TOPIC`` and the other topics,
        ``ANABRANCH_EMBEDDING_DIMENSIONS``, ``ANABRANCH_SCHEMA_PATH``, ``ANABRANCH_FETCH_MAX_WAIT_SECONDS``. Replies go
        to the first topic in ``ANABRANCH_REPLY_TOPICS``.

        Args:
            environment: used instead of the process's environment.
            reply_partition: of the reply topic; None: a random one.

        Raises:
            SettingsError: the message is one line that names every invalid setting.
        """
        settings = load(environment)
        _, texts = load_embedder(environment)
        try:
            return cls(
                broker_connection(settings),
                input_topic=settings.anabranch_input_topic,
                text_topic=texts.anabranch_text_topic,
                output_topic=settings.anabranch_output_topic,
                reply_topic=settings.anabranch_reply_topics[0],
                reply_partition=reply_partition,
                dimensions=settings.anabranch_embedding_dimensions,
                schema_path=settings.anabranch_schema_path,
                fetch_max_wait_seconds=settings.anabranch_fetch_max_wait_seconds,
            )
        except (BadWriterSchema, OSError) as error:
            raise SettingsError(f"ANABRANCH_SCHEMA_PATH: {error}") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Calls that wait, and iterations of `results`, raise `ClientClosed`."""
        self._is_closed = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0)
        if self._deadlines:
            await self._is_idle.wait()
        await self._connections.close()

    async def retrieve(
        self,
        *,
        principals: Iterable[str],
        embedding: Embedding | None = None,
        text: str | None = None,
        timeout: float = 30.0,  # noqa: ASYNC109  # also becomes the event's `expires_at`
        **options: Unpack[QueryOptions],
    ) -> RetrievalResult:
        """Ask one question and wait for its result. Cancelling the call leaves nothing behind.

        Args:
            principals: whom the caller acts as, 1 to 64: what they may read is searched.
            embedding: finite, not all zeros, of any length. Either this or ``text``.
            text: needs an embedding stage, which embeds it.
            timeout: seconds, from sending to the reply.
            options: see `QueryOptions`.

        Raises:
            InvalidEvent: the event violates its contract; it was not sent.
            RetrievalFailed: the event was dead-lettered.
            RetrievalTimeout: there was no reply in time.
            UnreadableResult: the reply cannot be decoded.
            ConnectionFailed: Kafka is unreachable or rejects the client, or a topic is missing.
            ClientClosed: the client was closed.
            TypeError: not exactly one of embedding and text is given, or an option or filter does not exist or belongs
                to the other.
            ValueError: the timeout is not a positive number.
        """
        if not (math.isfinite(timeout) and timeout > 0):
            raise ValueError("timeout must be a positive number of seconds")
        now = datetime.now(UTC)
        if options.get("expires_at") is None:
            options["expires_at"] = now + timedelta(seconds=timeout)
        event = self._event(principals, embedding, text, options, now)
        is_sent = False
        try:
            async with self._limit(timeout):
                replies = await self._connections.open_replies(self._reply_topic, self._reply_partition)
                with replies.expect() as (headers, reply):
                    await self._send(event, options, headers)
                    is_sent = True
                    record = await reply
        except TimeoutError:
            raise RetrievalTimeout(
                self._why_no_reply(event, timeout) if is_sent else self._why_not_sent(timeout),
                event_id=event.event_id,
            ) from None
        return self._result_of(record, event.event_id)

    async def publish(
        self,
        *,
        principals: Iterable[str],
        embedding: Embedding | None = None,
        text: str | None = None,
        timeout: float | None = 30.0,  # noqa: ASYNC109  # as in `retrieve`
        **options: Unpack[QueryOptions],
    ) -> UUID:
        """Publish one event; returns its id when all in-sync replicas have it. The result goes to the output topic.

        A call waits while the broker is slower than the callers, so memory is bounded by their number.

        Args:
            principals: as in `retrieve`.
            embedding: as in `retrieve`.
            text: as in `retrieve`.
            timeout: seconds; None: try until it succeeds.
            options: see `QueryOptions`.

        Raises:
            InvalidEvent: the event violates its contract; it was not sent.
            PublishTimeout: the broker did not acknowledge the event in time.
            ConnectionFailed: Kafka is unreachable or rejects the client, or the topic is missing.
            ClientClosed: the client was closed.
            TypeError: as in `retrieve`.
        """
        event = self._event(principals, embedding, text, options, datetime.now(UTC))
        try:
            async with self._limit(timeout):
                await self._send(event, options)
        except TimeoutError:
            raise PublishTimeout(self._why_not_sent(timeout or 0), event_id=event.event_id) from None
        return event.event_id

    async def results(self, *, group: str, remember: int = 100_000) -> AsyncGenerator[RetrievalResult, None]:
        """Read the output topic as a member of a consumer group, from the group's last commit or the beginning.

        A result's offset is committed when the next one is asked for, which is after the loop's body. After a crash, or
        if the body raises or breaks, its result is delivered again. A result is skipped if its ``result_id`` is among
        the last ones that this iteration delivered.

        Args:
            group: the consumer group.
            remember: how many ids to remember; about 230 bytes each.

        Yields:
            Each result.

        Raises:
            UnreadableResult: the record cannot be decoded; it is not committed.
            ConnectionFailed: Kafka is unreachable or rejects the client when the iteration begins, or the topic is
                missing.
            ClientClosed: the client was closed.
        """
        seen: OrderedDict[bytes, None] = OrderedDict()  # the latest last
        async with self._limit(None):
            consumer = await self._connections.open_consumer(self._output_topic, group)
        try:
            while True:
                async with self._limit(None), self._connections.explained():
                    record = await consumer.getone()
                if record.value is None:
                    continue
                result = self._decode(record)
                identity = result.result_id.bytes
                if identity not in seen:
                    yield result
                seen[identity] = None
                seen.move_to_end(identity)
                if len(seen) > remember:
                    seen.popitem(last=False)
                await self._commit(consumer, record)
        finally:
            await self._connections.close_consumer(consumer)

    # Calls

    @asynccontextmanager
    async def _limit(self, seconds: float | None) -> AsyncIterator[None]:
        """Limit what waits: TimeoutError after that time, ClientClosed when the client is closed."""
        if self._is_closed:
            raise ClientClosed(_CLOSED)
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if loop is not self._loop:
            raise RuntimeError("the client belongs to another event loop; create one client for each")
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                self._is_idle.clear()
                yield
        except TimeoutError:
            if self._is_closed:
                raise ClientClosed(_CLOSED) from None
            raise
        finally:
            self._deadlines.discard(deadline)
            if not self._deadlines:
                self._is_idle.set()

    def _event(
        self,
        principals: Iterable[str],
        embedding: Embedding | None,
        text: str | None,
        options: QueryOptions,
        now: datetime,
    ) -> QueryEmbedding | QueryText:
        return make_event(
            principals=principals,
            embedding=embedding,
            text=text,
            options=options,
            dimensions=self._dimensions,
            now=now,
        )

    async def _send(
        self, event: QueryEmbedding | QueryText, options: QueryOptions, headers: Headers = ()
    ) -> None:
        if isinstance(event, QueryText):
            topic, value = self._text_topic, self._codec.encode_text(event)
        else:
            topic, value = self._input_topic, self._codec.encode_query(event)
        key = options.get("key")
        if key is None:
            key = str(event.event_id).encode()
        publisher = await self._connections.open_publisher(topic, texts=isinstance(event, QueryText))
        try:
            # Of each name, the last header counts.
            await publisher.publish(topic, key, value, [*(options.get("headers") or ()), *headers])
        except ResultTooLarge:
            raise InvalidEvent(
                RecordTooLarge.code, f"{topic} does not accept an event of this size"
            ) from None

    def _why_not_sent(self, seconds: float) -> str:
        fault = self._connections.publish_fault
        return f"Kafka did not acknowledge the event within {seconds:g} s" + (
            "" if fault is None else f": {type(fault).__name__}"
        )

    def _why_no_reply(self, event: QueryEmbedding | QueryText, seconds: float) -> str:
        if (fault := self._connections.reply_fault) is not None:
            return (
                f"no reply within {seconds:g} s: {self._reply_topic} cannot be read: {type(fault).__name__}"
            )
        runs = "an embedding stage and a worker run" if isinstance(event, QueryText) else "a worker runs"
        return (
            f"no reply within {seconds:g} s; check that {runs}, and that ANABRANCH_REPLY_TOPICS there contains"
            f" {self._reply_topic}"
        )

    # Results

    def _result_of(self, record: ConsumerRecord, event_id: UUID) -> RetrievalResult:
        headers = dict(record.headers)
        if not record.value and CODE_HEADER in headers:
            code, reason = (
                (headers.get(name) or b"").decode(errors="replace") for name in (CODE_HEADER, MESSAGE_HEADER)
            )
            raise RetrievalFailed(code, reason, event_id=event_id)
        result = self._decode(record)
        if result.event_id != event_id:
            raise UnreadableResult(ContractViolation.code, f"event_id is another event's; {_place(record)}")
        return result

    def _decode(self, record: ConsumerRecord) -> RetrievalResult:
        try:
            if isinstance(record.value, Unreadable):
                raise record.value.error
            return self._codec.decode_result(record.value or b"")
        except TerminalError as error:
            raise UnreadableResult(error.code, f"{error}; {_place(record)}") from None

    async def _commit(self, consumer: AIOKafkaConsumer, record: ConsumerRecord) -> None:
        async with self._limit(None), self._connections.explained():
            try:
                await consumer.commit({TopicPartition(record.topic, record.partition): record.offset + 1})
            except (CommitFailedError, IllegalStateError):
                logger.info("the partition of a result was reassigned; the result may be delivered again")


def _place(record: ConsumerRecord) -> str:
    return f"{record.topic}[{record.partition}], offset {record.offset}"
