"""What the patches of Kafka clients leave as it is."""

import asyncio

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import IncompatibleBrokerVersion

from streams.broker.aiokafka_internals import patch_clients
from streams.embedded.broker import EmbeddedBroker
from tests.integration.harness import Channel


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
async def test_a_request_that_the_broker_does_not_support_costs_no_connection(
    broker: EmbeddedBroker, channel: Channel
) -> None:
    patch_clients()
    client = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await client.start()
    try:
        topic = ConfigResource(
            ConfigResourceType.TOPIC, channel.input, configs={"max.message.bytes": "5000000"}
        )
        before = set(client._client._conns.values())
        with pytest.raises(IncompatibleBrokerVersion):
            await client.alter_configs([topic])
        await asyncio.sleep(0)
        assert before <= {
            connection for connection in client._client._conns.values() if connection.connected()
        }
    finally:
        await client.close()
