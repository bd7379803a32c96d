"""A broker that is too old for dead letters, which are compressed with zstd."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from streams.broker.connection import BrokerConnection
from streams.broker.diagnosis import diagnose
from streams.configured import broker_connection
from streams.embedded.broker import EmbeddedBroker
from streams.settings import load
from tests.integration.harness import Channel, anabranch

# An entry of the answer to "which requests in which versions?": produce, from version 0 to 11; before Kafka 2.1 to 6.
_NEW, _OLD = bytes([0, 0, 0, 0, 0, 11]), bytes([0, 0, 0, 0, 0, 6])
_API_VERSIONS = 18

NOWHERE = "postgresql://worker@127.0.0.1:1/nowhere"


@pytest.fixture
def broker(embedded_broker: EmbeddedBroker) -> EmbeddedBroker:
    return embedded_broker


@asynccontextmanager
async def old(broker: EmbeddedBroker) -> AsyncIterator[str]:
    """The address of the same broker, which claims to be older."""

    async def relay(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await reader.readexactly(4)
                writer.write(size + change(await reader.readexactly(int.from_bytes(size))))
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", broker.port)
        asked: set[bytes] = set()  # the correlation ids of requests for versions

        def request(data: bytes) -> bytes:
            if int.from_bytes(data[:2]) == _API_VERSIONS:
                asked.add(data[4:8])
            return data

        def answer(data: bytes) -> bytes:
            return data.replace(_NEW, _OLD) if data[:4] in asked else data

        await asyncio.gather(relay(reader, back, request), relay(there, writer, answer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def connection_to(servers: str) -> BrokerConnection:
    return broker_connection(load({"KAFKA_BOOTSTRAP_SERVERS": servers}))


async def test_a_broker_older_than_zstd_is_refused(broker: EmbeddedBroker, channel: Channel) -> None:
    assert await diagnose(connection_to(broker.bootstrap_servers)) is None
    async with old(broker) as address:
        diagnosis = await diagnose(connection_to(address))
        assert diagnosis is not None
        assert diagnosis.refused
        assert "Kafka 2.1" in str(diagnosis)
        done = await asyncio.to_thread(
            anabranch, "check", channel=channel, dsn=NOWHERE, KAFKA_BOOTSTRAP_SERVERS=address
        )
        assert done.returncode == 1
        assert "Kafka 2.1" in " ".join(done.stdout.split())
