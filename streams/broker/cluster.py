"""What a Kafka cluster reports about itself."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.admin import ApiVersionRequest

__all__ = ["Cluster", "describe_cluster"]

logger = logging.getLogger(__name__)

# How long one broker may take to answer before the next one is asked.
_NODE_SECONDS: Final = 5.0

_PRODUCE, _FETCH, _LIST_OFFSETS = 0, 1, 2
# Brokers do not report their version, only the versions of each request that they accept. A release of Kafka, and a
# version of a request that it was the first to accept; the newest first.
_RELEASES: Final = (
    ("4.1 or later", _PRODUCE, 13),
    ("4.0", _PRODUCE, 12),
    ("3.9", _FETCH, 17),
    ("3.8", _PRODUCE, 11),
    ("3.7", _FETCH, 16),
    ("3.5", _FETCH, 15),
    ("3.1", _FETCH, 13),
    ("3.0", _LIST_OFFSETS, 7),
    ("2.8", _PRODUCE, 9),
    ("2.7", _FETCH, 12),
    ("2.4", _PRODUCE, 8),
    ("2.3", _FETCH, 11),
    ("2.1", _PRODUCE, 7),
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Kafka cluster.

    Attributes:
        brokers: ``host:port`` of each, as clients have to reach them.
        protocol: the newest release of Kafka whose protocol it supports, as far as known; None: older than 2.1.
    """

    brokers: Sequence[str]
    protocol: str | None


async def describe_cluster(options: Mapping[str, Any]) -> Cluster:
    """Ask the brokers, one after the other, until one answers.

    Args:
        options: from `BrokerConnection.client_options`.

    Raises:
        KafkaError: no broker can be reached, or it rejects the client.
    """
    client = AIOKafkaClient(**options)
    try:
        await client.bootstrap()
        brokers = sorted(client.cluster.brokers(), key=lambda broker: broker.nodeId)
        accepted = await _accepted_versions(client, [broker.nodeId for broker in brokers])
    finally:
        await client.close()
    return Cluster(
        [f"{broker.host}:{broker.port}" for broker in brokers],
        next((release for release, key, version in _RELEASES if accepted.get(key, -1) >= version), None),
    )


async def _accepted_versions(client: AIOKafkaClient, nodes: Sequence[int]) -> Mapping[int, int]:
    """The newest accepted version of each request, by its number."""
    for node in nodes:
        try:
            async with asyncio.timeout(_NODE_SECONDS):
                response = await client.send(node, ApiVersionRequest())
        except (KafkaError, OSError, TimeoutError) as error:
            logger.debug("broker %s does not report what it accepts (%s)", node, type(error).__name__)
        else:
            return {key: newest for key, _, newest in response.api_versions}
    raise KafkaConnectionError("no broker reports what it accepts")
