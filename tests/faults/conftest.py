"""Servers for the faults that are tests: Apache Kafka and PostgreSQL, each test with proxies of its own before them."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.stack import Servers
from tests.integration.kafka.apache_kafka import KafkaUnavailable, jars


@pytest.fixture(scope="session")
def kafka_jars() -> Path:
    try:
        return jars()
    except KafkaUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(kafka_jars: Path) -> AsyncIterator[Servers]:
    """For a whole module, whose tests share an event loop."""
    async with Servers(kafka_jars) as opened:
        yield opened
