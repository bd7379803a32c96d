"""What a client is connected with: each part is opened when it is first needed."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import ClusterAuthorizationFailedError, KafkaError, TopicAuthorizationFailedError

from streams.broker.clients import new_consumer
from streams.broker.connection import BrokerConnection, UnusableCertificate
from streams.broker.diagnosis import diagnose
from streams.broker.publisher import Publisher
from streams.broker.topics import MissingTopics, partitions_of
from streams.client.errors import ConnectionFailed
from streams.client.replies import Replies, stop_consumer

__all__ = ["Connections"]

_RETRY_SECONDS: Final = (0.1, 2.0)
T = TypeVar("T")

# No retry helps against these.
_REJECTIONS: Final = (TopicAuthorizationFailedError, ClusterAuthorizationFailedError)


class Connections:
    """The publisher, the reader of replies, and the consumers of one client.

    The methods raise ConnectionFailed if Kafka is unreachable or rejects the client, or a topic is missing.

    Args:
        broker: the brokers.
        fetch_max_wait_seconds: how long a broker may delay an empty fetch response.

    Attributes:
        publish_fault: why the last attempt to publish has failed; None: it has not.
    """

    def __init__(self, broker: BrokerConnection, *, fetch_max_wait_seconds: float) -> None:
        self._broker = broker
        self._fetch_max_wait_ms = max(1, round(1000 * fetch_max_wait_seconds))
        self._opening = asyncio.Lock()
        self._partitions: dict[str, list[int]] = {}  # of the topics that are known to exist
        self._publisher: Publisher | None = None
        self._replies: Replies | None = None
        self._consumers: set[AIOKafkaConsumer] = set()
        self._openings: set[asyncio.Task[Any]] = set()
        self.publish_fault: BaseException | None = None

    @property
    def reply_fault(self) -> Exception | None:
        """Why replies cannot be read at the moment."""
        return None if self._replies is None else self._replies.fault

    async def close(self) -> None:
        """Close everything. No call uses it any more; an iteration whose body runs may have a consumer."""
        if self._openings:
            await asyncio.wait(self._openings)
        replies, self._replies = self._replies, None
        if replies is not None:
            await replies.close()
        while self._consumers:
            await stop_consumer(self._consumers.pop())
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await publisher.on_stop()

    @asynccontextmanager
    async def explained(self) -> AsyncIterator[None]:
        """Raise Kafka's errors as ConnectionFailed, with a remedy."""
        try:
            yield
        except (MissingTopics, UnusableCertificate) as error:
            raise ConnectionFailed(str(error)) from None
        except (KafkaError, OSError) as error:
            diagnosis = await diagnose(self._broker)
            raise ConnectionFailed(str(diagnosis or f"Kafka: {type(error).__name__}: {error}")) from error

    async def open_publisher(self, topic: str, *, texts: bool = False) -> Publisher:
        """The publisher, after a check that the topic exists.

        Args:
            topic: where events go.
            texts: whether an embedding stage reads it.
        """
        return await self._completely(self._open_publisher(topic, texts=texts))

    async def _open_publisher(self, topic: str, *, texts: bool) -> Publisher:
        async with self._opening, self.explained():
            try:
                await self._partitions_of(topic)
            except MissingTopics as error:
                raise MissingTopics(error.topics, texts=texts) from None
            if self._publisher is None:
                publisher = Publisher(
                    self._broker.client_options(),
                    on_fault=self._set_publish_fault,
                    on_success=lambda: self._set_publish_fault(None),
                    wait_seconds=_RETRY_SECONDS,
                    sleep=self._wait_before_retry,
                )
                await publisher.on_start()
                self._publisher = publisher
            return self._publisher

    async def open_replies(self, topic: str, partition: int | None) -> Replies:
        """The reader of replies.

        Args:
            topic: the reply topic.
            partition: of the topic; None: a random one.
        """
        return await self._completely(self._open_replies(topic, partition))

    async def _open_replies(self, topic: str, partition: int | None) -> Replies:
        async with self._opening, self.explained():
            if self._replies is None:
                partitions = await self._partitions_of(topic)
                if partition is None:
                    partition = secrets.choice(partitions)
                elif partition not in partitions:
                    raise ConnectionFailed(
                        f"{topic} has {len(partitions)} partitions; reply_partition is {partition}"
                    )
                replies = Replies(
                    self._broker.client_options(),
                    TopicPartition(topic, partition),
                    fetch_max_wait_ms=self._fetch_max_wait_ms,
                )
                await replies.start()
                self._replies = replies
            return self._replies

    async def open_consumer(self, topic: str, group: str) -> AIOKafkaConsumer:
        """A new member of a consumer group, from the group's last commit or the beginning; for `close_consumer`."""
        async with self.explained():
            await self._partitions_of(topic)
            consumer = new_consumer(
                self._broker.client_options(),
                topic,
                group_id=group,
                auto_offset_reset="earliest",
                fetch_max_wait_ms=self._fetch_max_wait_ms,
            )
            try:
                await consumer.start()
            except BaseException:
                await stop_consumer(consumer)
                raise
            self._consumers.add(consumer)
            return consumer

    async def close_consumer(self, consumer: AIOKafkaConsumer) -> None:
        """Leave the group."""
        self._consumers.discard(consumer)
        await stop_consumer(consumer)

    async def _completely(self, opening: Coroutine[Any, Any, T]) -> T:
        """Continue if the caller is cancelled: aiokafka leaves a connection open if its bootstrap is cancelled."""
        task = asyncio.ensure_future(opening)
        self._openings.add(task)
        task.add_done_callback(self._opened)
        return await asyncio.shield(task)

    def _opened(self, task: asyncio.Task[Any]) -> None:
        self._openings.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be cancelled, and not look at it

    async def _partitions_of(self, topic: str) -> list[int]:
        if topic not in self._partitions:
            self._partitions |= await partitions_of(self._broker.client_options(), [topic])
        return self._partitions[topic]

    def _set_publish_fault(self, fault: BaseException | None) -> None:
        self.publish_fault = fault

    async def _wait_before_retry(self, seconds: float) -> None:
        if isinstance(self.publish_fault, _REJECTIONS):
            raise ConnectionFailed(f"Kafka does not allow this client to publish: {self.publish_fault}")
        await asyncio.sleep(seconds)
