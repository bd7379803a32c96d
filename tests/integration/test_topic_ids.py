"""The ids of topics, from a cluster of which some brokers cannot be reached."""

from uuid import uuid4

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError
from aiokafka.structs import BrokerMetadata

from streams.broker.topic_ids import topic_ids
from streams.embedded.broker import EmbeddedBroker
from tests.integration.harness import free_port, open_channel


@pytest.fixture
def broker(embedded_broker: EmbeddedBroker) -> EmbeddedBroker:
    return embedded_broker


def lose_brokers(client: AIOKafkaClient, number: int) -> None:
    """Makes the client know brokers that are away."""
    for node in range(1000, 1000 + number):
        client.cluster._brokers[node] = BrokerMetadata(node, "127.0.0.1", free_port(), None)


async def test_another_broker_is_asked_where_one_cannot_be_reached(broker: EmbeddedBroker) -> None:
    async with open_channel(broker.bootstrap_servers, f"i{uuid4().hex[:8]}") as channel:
        client = AIOKafkaClient(bootstrap_servers=broker.bootstrap_servers)
        await client.bootstrap()
        try:
            lose_brokers(client, 3)
            for _ in range(20):
                assert {*await topic_ids(client, [channel.input, "missing"])} == {channel.input}
        finally:
            await client.close()


async def test_no_answer_is_an_error_where_none_can_be_reached(broker: EmbeddedBroker) -> None:
    client = AIOKafkaClient(bootstrap_servers=broker.bootstrap_servers)
    await client.bootstrap()
    try:
        client.cluster._brokers.clear()
        lose_brokers(client, 2)
        with pytest.raises(KafkaError):
            await topic_ids(client, ["any"])
    finally:
        await client.close()
