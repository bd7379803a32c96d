"""Ways in which a broker is away."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.kafka.apache_kafka import ApacheKafka

__all__ = ["frozen", "killed"]


@contextmanager
def frozen(broker: ApacheKafka) -> Iterator[None]:
    """Every connection stands, and nothing is answered."""
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        broker.restart(kill=True)  # thawed, it would take a while until it serves


@contextmanager
def killed(broker: ApacheKafka) -> Iterator[None]:
    """Every connection is closed, and none is accepted."""
    broker.stop(kill=True)
    try:
        yield
    finally:
        broker.start()
