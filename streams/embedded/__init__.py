"""Services that run out of a wheel, for the demo and the tests: nothing has to be installed beforehand."""

from streams.embedded.broker import EmbeddedBroker, EmbeddedBrokerError
from streams.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError

__all__ = ["EmbeddedBroker", "EmbeddedBrokerError", "EmbeddedPostgres", "EmbeddedPostgresError"]
