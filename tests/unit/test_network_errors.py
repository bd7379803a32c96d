"""A host with several addresses, as localhost often has, on none of which a server listens."""

import socket
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from streams.broker.connection import BrokerConnection
from streams.broker.diagnosis import diagnose
from streams.cli.connections import run_on_store
from streams.cli.errors import Failed

_HOST = "two.addresses"


@pytest.fixture(autouse=True)
def _two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve: Callable[..., list[Any]] = socket.getaddrinfo

    def resolve_own(host: object, *args: Any, **kwargs: Any) -> list[Any]:
        if host != _HOST:
            return resolve(host, *args, **kwargs)
        return [found for own in ("127.0.0.1", "127.0.0.2") for found in resolve(own, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_own)


async def test_kafka_s() -> None:
    found = await diagnose(BrokerConnection(bootstrap_servers=f"{_HOST}:1", security_protocol="PLAINTEXT"))
    assert str(found) == (
        f"Kafka at {_HOST}:1: cannot connect (connection refused); check KAFKA_BOOTSTRAP_SERVERS, and that the broker"
        " is running"
    )


def test_postgresql_s() -> None:
    with pytest.raises(Failed) as failed:
        run_on_store(asyncpg.connect(f"postgresql://me@{_HOST}:1/app"), "DATABASE_CONNECTION_STRING")
    assert str(failed.value) == (
        "PostgreSQL: cannot connect (connection refused); check DATABASE_CONNECTION_STRING, and that the server is"
        " running"
    )


async def _late() -> None:
    raise TimeoutError


def test_a_timeout_is_said_in_words() -> None:
    with pytest.raises(Failed, match=r"^PostgreSQL: cannot connect \(no answer in time\); check A, and that"):
        run_on_store(_late(), "A")
