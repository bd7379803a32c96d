"""The same workers as next door, on Apache Kafka: ``broker`` is the real one here."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))

from apache_kafka import ApacheKafka  # noqa: E402  # found through the path above


@pytest.fixture(scope="session")
def kafka(kafka_jars: Path) -> Iterator[ApacheKafka]:
    """One broker for the whole run."""
    with ApacheKafka(kafka_jars) as started:
        yield started


@pytest.fixture
def broker(kafka: ApacheKafka) -> Iterator[ApacheKafka]:
    """What ``channel`` stands on. A test may stop it, and need not mind how it leaves it."""
    yield kafka
    if not kafka.is_running:
        kafka.start()
