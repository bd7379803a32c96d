"""Probing brokers that accept connections and do not answer."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from streams.broker import diagnosis
from streams.broker.connection import BrokerConnection
from streams.broker.diagnosis import diagnose

_SECONDS = 0.5


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Five of them."""
    monkeypatch.setattr(diagnosis, "_TIMEOUT_SECONDS", _SECONDS)
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
        yield [f"127.0.0.1:{one.getsockname()[1]}" for one in listening]


def connection_to(*servers: str) -> BrokerConnection:
    return BrokerConnection(bootstrap_servers=",".join(servers), security_protocol="PLAINTEXT")


async def test_all_are_probed_at_the_same_time(silent: list[str]) -> None:
    began = time.monotonic()
    found = await diagnose(connection_to(*silent))
    assert time.monotonic() - began < 3 * _SECONDS
    assert found is not None
    assert (found.server, found.refused) == (silent[0], False)


async def test_an_unknown_host_is_reported_in_words() -> None:
    found = await diagnose(connection_to("broker.invalid:9092"))
    assert str(found) == (
        "Kafka at broker.invalid:9092: cannot connect (the host name cannot be resolved); check"
        " KAFKA_BOOTSTRAP_SERVERS, and that the broker is running"
    )


async def test_nothing_is_left_behind(silent: list[str]) -> None:
    before = asyncio.all_tasks()
    await diagnose(connection_to(*silent))
    assert asyncio.all_tasks() == before
