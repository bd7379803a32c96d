"""The publisher on uvloop, as in a worker, whose connections are reset just before it writes."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
import uvloop

from streams.broker.publisher import Publisher
from streams.embedded.broker import EmbeddedBroker
from tests.integration.harness import open_channel


def _producer_of(publisher: Publisher) -> Any:
    assert publisher._producer is not None
    return publisher._producer


@asynccontextmanager
async def reset_unnoticed(publisher: Publisher) -> AsyncIterator[None]:
    """Breaks every connection off; aiokafka is not told before the end, which stretches a moment that may be short."""
    unreported = []
    for connection in _producer_of(publisher).client._conns.values():
        transport = connection._writer.transport
        unreported.append(transport.get_protocol())
        transport.set_protocol(asyncio.Protocol())
        transport.abort()
    await asyncio.sleep(0.05)
    try:
        yield
    finally:
        for protocol in unreported:
            protocol.connection_lost(None)


async def publish(publisher: Publisher, topic: str) -> None:
    await publisher.publish(topic, b"key", b"value", [])


async def update_metadata(publisher: Publisher, topic: str) -> None:
    del topic
    await _producer_of(publisher).client.force_metadata_update()


@pytest.mark.parametrize("write", [publish, update_metadata])
def test_publishing_goes_on_after_a_reset(
    broker: EmbeddedBroker, write: Callable[[Publisher, str], Awaitable[None]]
) -> None:
    errors: list[BaseException] = []

    async def run() -> None:
        options = {"bootstrap_servers": broker.bootstrap_servers}
        async with open_channel(broker.bootstrap_servers, f"p{uuid4().hex[:8]}") as channel:
            publisher = Publisher(
                options, on_fault=errors.append, on_success=lambda: None, wait_seconds=(0.1, 0.2)
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
    assert errors == []


def _fail_when_it_drains(publisher: Publisher) -> None:
    _producer_of(publisher)._message_accumulator.drain_by_nodes = _defect


def _fail_when_it_sends(publisher: Publisher) -> None:
    _producer_of(publisher)._sender._send_produce_req = _defect


def _defect(*_: object, **__: object) -> None:
    raise RuntimeError("unexpected")


@pytest.mark.parametrize("fail", [_fail_when_it_drains, _fail_when_it_sends])
def test_a_producer_whose_sender_has_ended_is_replaced(
    broker: EmbeddedBroker, fail: Callable[[Publisher], None]
) -> None:
    errors: list[BaseException] = []

    async def run() -> None:
        options = {"bootstrap_servers": broker.bootstrap_servers}
        async with open_channel(broker.bootstrap_servers, f"p{uuid4().hex[:8]}") as channel:
            publisher = Publisher(
                options, on_fault=errors.append, on_success=lambda: None, wait_seconds=(0.1, 0.2)
            )
            await publisher.on_start()
            try:
                await publish(publisher, channel.output)
                first = publisher._producer
                fail(publisher)
                async with asyncio.timeout(30):
                    await asyncio.gather(*(publish(publisher, channel.output) for _ in range(5)))
                assert publisher._producer is not first
            finally:
                await publisher.on_stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert {type(error).__name__ for error in errors} == {"KafkaError"}
    gc.collect()  # what aiokafka leaves behind is logged now, and not in the middle of another test
