"""What Kafka clients of ours, and others beside them in the same process, do and leave as it is."""

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import IncompatibleBrokerVersion

from streams.broker.aiokafka_internals import patch_connection_resets
from streams.broker.clients import running_consumer
from streams.broker.records import MAX_HEADERS, Unreadable
from streams.embedded.broker import EmbeddedBroker
from tests.integration.harness import Channel


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
async def test_a_request_that_the_broker_does_not_support_costs_no_connection(
    broker: EmbeddedBroker, channel: Channel
) -> None:
    patch_connection_resets()
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


async def read_first(consumer: AIOKafkaConsumer, topic: str) -> Any:
    consumer.assign([TopicPartition(topic, 0)])
    await consumer.seek_to_beginning()
    async with asyncio.timeout(30):
        return (await consumer.getone()).value


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
async def test_another_consumer_of_the_process_reads_as_aiokafka_does(channel: Channel) -> None:
    options = {"bootstrap_servers": channel.bootstrap_servers, "fetch_max_wait_ms": 20}
    await channel.send(b"value", headers=[("", b"")] * (2 * MAX_HEADERS + 1), partition=0)
    async with AIOKafkaConsumer(**options) as earlier, running_consumer(options) as own:
        async with AIOKafkaConsumer(**options) as later:
            assert await read_first(later, channel.input) == b"value"
        assert await read_first(earlier, channel.input) == b"value"
        assert isinstance(await read_first(own, channel.input), Unreadable)
