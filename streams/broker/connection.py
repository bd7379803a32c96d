"""The connection to Kafka, as options for each client library."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faust import auth

__all__ = ["BrokerConnection", "UnusableCertificate"]


class UnusableCertificate(Exception):
    """A certificate or key cannot be used; the message is one line that names the setting."""


@dataclass(frozen=True, slots=True)
class BrokerConnection:
    """The brokers' addresses and the client's credentials.

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

    @property
    def with_tls(self) -> bool:
        return self.security_protocol.endswith("SSL")

    @property
    def with_login(self) -> bool:
        return self.security_protocol.startswith("SASL")

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments of an aiokafka client.

        Raises:
            UnusableCertificate: a file cannot be read, or does not contain what it should.
        """
        from streams.broker.aiokafka_internals import (  # noqa: PLC0415  # imports aiokafka, see below
            bound_tls_shutdown,
            patch_connection_resets,
        )

        patch_connection_resets()
        bound_tls_shutdown()
        options: dict[str, Any] = {
            "bootstrap_servers": self.servers,
            "security_protocol": self.security_protocol,
            "ssl_context": self._ssl_context(),
        }
        if self.with_login:
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
        """The ``broker_credentials`` setting of a Faust app; None without TLS and SASL.

        Raises:
            UnusableCertificate: a file cannot be read, or does not contain what it should.
        """
        from faust import auth  # noqa: PLC0415  # takes half a second, and `anabranch topics` does not need it

        context = self._ssl_context()
        if self.with_login:
            return auth.SASLCredentials(
                username=self.username,
                password=self.password,
                mechanism=self.sasl_mechanism,
                ssl_context=context,
            )
        return None if context is None else auth.SSLCredentials(context)

    def _ssl_context(self) -> ssl.SSLContext | None:
        if not self.with_tls:
            return None
        # OpenSSL reports that a file is missing, but not which one.
        for name, path in (("CAFILE", self.cafile), ("CERTFILE", self.certfile), ("KEYFILE", self.keyfile)):
            if path is not None:
                _check_readable(f"KAFKA_SSL_{name}", path)
        try:
            context = ssl.create_default_context(cafile=None if self.cafile is None else str(self.cafile))
        except ssl.SSLError:
            raise UnusableCertificate(
                "KAFKA_SSL_CAFILE: the file does not contain a PEM certificate"
            ) from None
        if self.certfile is not None:
            self._load_chain(context, self.certfile)
        return context

    def _load_chain(self, context: ssl.SSLContext, certfile: Path) -> None:
        key = certfile if self.keyfile is None else self.keyfile
        setting = "KAFKA_SSL_CERTFILE" if self.keyfile is None else "KAFKA_SSL_KEYFILE"
        try:
            # Without a password, OpenSSL would prompt for it on the terminal and wait.
            context.load_cert_chain(certfile, self.keyfile, self.key_password or "")
        except (ssl.SSLError, ValueError) as error:  # ValueError: a passphrase of more than a kilobyte
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
                why = f"{setting}: the key does not match the certificate in KAFKA_SSL_CERTFILE"
            elif b"ENCRYPTED" in key.read_bytes():
                why = f"KAFKA_SSL_KEY_PASSWORD is not set, or does not decrypt the key in {setting}"
            else:
                why = "KAFKA_SSL_CERTFILE, KAFKA_SSL_KEYFILE: the files do not contain a PEM certificate and key"
            raise UnusableCertificate(why) from None


def _check_readable(setting: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise UnusableCertificate(f"{setting} cannot be read: {error.strerror}") from None


class _DropSaslRequests(logging.Filter):
    """aiokafka logs every request at DEBUG; the login request of PLAIN contains the password."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not any(type(argument).__name__.startswith("SaslAuthenticate") for argument in arguments)


logging.getLogger("aiokafka.conn").addFilter(_DropSaslRequests())
