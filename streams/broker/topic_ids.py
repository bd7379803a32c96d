"""Which topics exist, with how many partitions, and the id that Kafka assigns to a topic on creation.

A topic that was deleted and created again has the same name but a different id; offsets of one mean nothing in the
other. aiokafka requests metadata in a version that does not have ids yet.
"""

import asyncio
import logging
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar, Final
from uuid import UUID

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError, KafkaError, UnknownTopicOrPartitionError
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

__all__ = ["TopicProbe", "topic_ids"]

logger = logging.getLogger(__name__)

_NO_ID: Final = UUID(int=0)


class _Uuid:
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))

    @classmethod
    def repr(cls, value: UUID) -> str:
        return str(value)


class _TopicIdsResponse(Response):  # type: ignore[misc]  # aiokafka has no types
    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("topic_authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _TopicIdsStruct(RequestStruct):  # type: ignore[misc]  # aiokafka has no types
    FLEXIBLE_VERSION: ClassVar[bool] = True
    API_KEY = 3
    API_VERSION = 12
    RESPONSE_TYPE = _TopicIdsResponse
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", _Uuid), ("topic", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _TopicIdsRequest(Request[_TopicIdsStruct]):  # type: ignore[misc]  # aiokafka has no types
    API_KEY = 3

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[_TopicIdsStruct]) -> _TopicIdsStruct:
        return request_struct_class([(_NO_ID, topic, {}) for topic in self._topics], False, False, {})  # noqa: FBT003  # positional fields


@dataclass(frozen=True, slots=True)
class _ExistingTopic:
    """A topic that exists.

    Attributes:
        id: empty if the broker has no ids (before Kafka 3.1).
        partitions: their number; None if the broker does not report it: it does not authorize this client, or is just
            creating the topic.
    """

    id: str
    partitions: int | None


# How long one broker may take to answer before the next one is asked.
_NODE_SECONDS: Final = 5.0


async def topic_ids(client: AIOKafkaClient, topics: Collection[str]) -> Mapping[str, str]:
    """Each existing topic's id; empty if the broker has no ids (before Kafka 3.1). Missing topics are omitted.

    Raises:
        KafkaError: every broker is unreachable or rejects the request.
    """
    return {name: topic.id for name, topic in (await _existing_topics(client, topics)).items()}


async def _existing_topics(client: AIOKafkaClient, topics: Collection[str]) -> Mapping[str, _ExistingTopic]:
    """Those of the topics that exist. Brokers are asked in random order until one answers.

    Raises:
        KafkaError: every broker is unreachable or rejects the request.
    """
    nodes = [broker.nodeId for broker in client.cluster.brokers()]
    if not nodes:
        raise KafkaConnectionError("no broker is known")
    random.shuffle(nodes)
    for node in nodes[:-1]:
        try:
            async with asyncio.timeout(_NODE_SECONDS):
                return await _existing_topics_from(client, node, topics)
        except (KafkaError, OSError, TimeoutError) as error:
            logger.debug("broker %s does not report topic ids (%s)", node, type(error).__name__)
    return await _existing_topics_from(client, nodes[-1], topics)


async def _existing_topics_from(
    client: AIOKafkaClient, node: int, topics: Collection[str]
) -> Mapping[str, _ExistingTopic]:
    response: Any
    try:
        response = await client.send(node, _TopicIdsRequest(topics))
    except NotImplementedError:  # aiokafka's error if the broker is too old for the request
        response = await client.send(node, MetadataRequest(list(topics), allow_auto_topic_creation=False))
    return {
        found["topic"]: _ExistingTopic(
            str(found["topic_id"]) if found.get("topic_id", _NO_ID) != _NO_ID else "",
            len(found["partitions"]) or None,
        )
        for found in response.to_object()["topics"]
        if found["error_code"] != UnknownTopicOrPartitionError.errno
    }


class TopicProbe:
    """Looks repeatedly, over one connection, which topics exist.

    Args:
        options: keyword arguments of an aiokafka client.
        topics: the topics' names.
        timeout_seconds: timeout of one request.
    """

    def __init__(
        self, options: Mapping[str, Any], topics: Collection[str], *, timeout_seconds: float
    ) -> None:
        self._options = {**options, "request_timeout_ms": int(1000 * timeout_seconds)}
        self._topics = topics
        self._client: AIOKafkaClient | None = None

    async def fetch(self) -> Mapping[str, str]:
        """See `topic_ids`.

        Raises:
            KafkaError: the broker is unreachable or rejects the request; the next call connects again.
        """
        return {name: topic.id for name, topic in (await self._fetch()).items()}

    async def fetch_partitions(self) -> Mapping[str, int | None]:
        """The number of partitions of each topic that exists; None: the broker does not report it.

        Raises:
            KafkaError: as above.
        """
        return {name: topic.partitions for name, topic in (await self._fetch()).items()}

    async def _fetch(self) -> Mapping[str, _ExistingTopic]:
        try:
            if self._client is None:
                self._client = AIOKafkaClient(**self._options)
                await self._client.bootstrap()
            return await _existing_topics(self._client, self._topics)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
