"""Servers for the faults that are tests: Apache Kafka and PostgreSQL, with proxies before both."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.faults.stack import Servers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(kafka_jars: Path) -> AsyncIterator[Servers]:
    """For a whole module, whose tests share an event loop."""
    async with Servers(kafka_jars) as opened:
        yield opened
