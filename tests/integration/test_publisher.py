"""The publisher on uvloop, as in a worker, whose connections are reset just before it writes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
import uvloop

from streams.broker.publisher import Publisher
from streams.embedded.broker import EmbeddedBroker
from tests.integration.harness import open_channel


@asynccontextmanager
async def reset_unnoticed(publisher: Publisher) -> AsyncIterator[None]:
    """Breaks every connection off; aiokafka is not told before the end, which stretches a moment that may be short."""
    untold = []
    for connection in publisher._producer.client._conns.values():
        transport = connection._writer.transport
        untold.append(transport.get_protocol())
        transport.set_protocol(asyncio.Protocol())
        transport.abort()
    await asyncio.sleep(0.05)
    try:
        yield
    finally:
        for protocol in untold:
            protocol.connection_lost(None)


async def publish(publisher: Publisher, topic: str) -> None:
    await publisher.publish(topic, b"key", b"value", [])


async def update_metadata(publisher: Publisher, topic: str) -> None:
    del topic
    await publisher._producer.client.force_metadata_update()


@pytest.mark.parametrize("write", [publish, update_metadata])
def test_publishing_goes_on_after_a_reset(
    broker: EmbeddedBroker, write: Callable[[Publisher, str], Awaitable[None]]
) -> None:
    faults: list[BaseException] = []

    async def run() -> None:
        options = {"bootstrap_servers": broker.bootstrap_servers}
        async with open_channel(broker.bootstrap_servers, f"p{uuid4().hex[:8]}") as channel:
            publisher = Publisher(
                options, on_fault=faults.append, on_success=lambda: None, wait_seconds=(0.1, 0.2)
            )
            await publisher.on_start()
            try:
                await publish(publisher, channel.output)
                async with reset_unnoticed(publisher), asyncio.timeout(30):
                    await write(publisher, channel.output)
                    await publish(publisher, channel.output)
            finally:
                await publisher.on_stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert faults == []
