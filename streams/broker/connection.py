"""How to reach Kafka, in the words of each client library."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faust import auth

__all__ = ["BrokerConnection"]


@dataclass(frozen=True, slots=True)
class BrokerConnection:
    """Where the brokers are, and as whom to come.

    Attributes:
        bootstrap_servers: ``host:port``, comma-separated.
        security_protocol: ``PLAINTEXT``, ``SSL``, ``SASL_PLAINTEXT`` or ``SASL_SSL``.
        password: SASL's; never part of the repr.
    """

    bootstrap_servers: str
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "SCRAM-SHA-512"
    username: str | None = None
    password: str | None = None
    cafile: Path | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    key_password: str | None = None

    def __repr__(self) -> str:
        return f"BrokerConnection({self.bootstrap_servers!r}, {self.security_protocol!r})"

    @property
    def servers(self) -> list[str]:
        return [server.strip() for server in self.bootstrap_servers.split(",") if server.strip()]

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments of an aiokafka client.

        Raises:
            OSError, ssl.SSLError: a certificate cannot be read.
        """
        options: dict[str, Any] = {
            "bootstrap_servers": self.servers,
            "security_protocol": self.security_protocol,
            "ssl_context": self._ssl_context(),
        }
        if self.security_protocol.startswith("SASL"):
            options |= {
                "sasl_mechanism": self.sasl_mechanism,
                "sasl_plain_username": self.username,
                "sasl_plain_password": self.password,
            }
        return options

    def faust_broker(self) -> list[str]:
        """The ``broker`` setting of a Faust app."""
        return [f"kafka://{server}" for server in self.servers]

    def faust_credentials(self) -> "auth.Credentials | None":
        """The ``broker_credentials`` setting of a Faust app; None without TLS and SASL."""
        from faust import auth  # noqa: PLC0415  # half a second that `anabranch topics` need not pay

        context = self._ssl_context()
        if self.security_protocol.startswith("SASL"):
            return auth.SASLCredentials(
                username=self.username,
                password=self.password,
                mechanism=self.sasl_mechanism,
                ssl_context=context,
            )
        return None if context is None else auth.SSLCredentials(context)

    def _ssl_context(self) -> ssl.SSLContext | None:
        if self.security_protocol not in {"SSL", "SASL_SSL"}:
            return None
        context = ssl.create_default_context(cafile=None if self.cafile is None else str(self.cafile))
        if self.certfile is not None:
            context.load_cert_chain(self.certfile, self.keyfile, self.key_password)
        return context
