"""What only Apache Kafka can show: ``broker`` is that one here, and the embedded one takes no part."""

from collections.abc import Iterator

import pytest

from tests.integration.kafka.apache_kafka import ApacheKafka


@pytest.fixture
def broker(kafka: ApacheKafka) -> Iterator[ApacheKafka]:
    """What ``channel`` stands on. A test may stop it, and need not mind how it leaves it."""
    yield kafka
    if not kafka.is_running:
        kafka.start()
