"""Explains in one line why a broker cannot be used, and names the setting.

aiokafka reports only that no broker was usable, and Kafka closes the connection without an error message if the client
uses the wrong protocol. So each server is probed again, and if it hangs up, with the other protocol.
"""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any

from aiokafka.conn import AIOKafkaConnection, collect_hosts, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.admin import ApiVersionRequest, SaslHandShakeRequest
from aiokafka.protocol.metadata import MetadataRequest

from streams.broker.connection import BrokerConnection
from streams.certificates import CertificateProblem, certificate_problem
from streams.network_errors import connection_problem, is_unreachable

__all__ = ["Diagnosis", "diagnose"]

_TIMEOUT_SECONDS = 5.0

# Dead letters are compressed with zstd, which brokers accept from this version of the produce request on (Kafka 2.1).
_PRODUCE_KEY = 0
_ZSTD_PRODUCE_VERSION = 7

_REMEDIES = {
    CertificateProblem.NOT_YET_VALID: "correct this machine's clock",
    CertificateProblem.EXPIRED: "renew the certificate",
    CertificateProblem.OTHER_HOST: "KAFKA_BOOTSTRAP_SERVERS and the broker's advertised.listeners must use the"
    " host name in the certificate",
    CertificateProblem.UNKNOWN_AUTHORITY: "set KAFKA_SSL_CAFILE to the CA that signed it",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why no server could be used.

    Attributes:
        server: the server that was probed.
        refused: the server was reached, but rejects the client or cannot be trusted; waiting does not fix that.
        detail: what is wrong.
        remedy: what to do, naming the setting.
    """

    server: str
    refused: bool
    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"Kafka at {self.server}: {self.detail}; {self.remedy}"


async def diagnose(connection: BrokerConnection) -> Diagnosis | None:
    """Probe all servers at the same time; None as soon as one of them answers correctly.

    Raises:
        UnusableCertificate: a file cannot be read, or does not contain what it should.
    """
    options = connection.client_options()
    servers = options.pop("bootstrap_servers")
    probes = [asyncio.ensure_future(_BrokerProbe(server, connection, options).run()) for server in servers]
    try:
        for probe in asyncio.as_completed(probes):
            if await probe is None:
                return None
    finally:
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
    found = [diagnosis for probe in probes if (diagnosis := probe.result()) is not None]
    # A server that is down says nothing about the settings; one that rejects the client does.
    return next((diagnosis for diagnosis in found if diagnosis.refused), found[0] if found else None)


class _BrokerProbe:
    """Probes one server."""

    def __init__(self, server: str, connection: BrokerConnection, options: dict[str, Any]) -> None:
        self._server = server
        [(self._host, self._port, _)] = collect_hosts(server)
        self._connection = connection
        self._options = options

    async def run(self) -> Diagnosis | None:
        try:
            opened = await self._open(**self._options)
            try:
                # A server that requires a login hangs up only now.
                await opened.send(MetadataRequest([]))
                supported = await opened.send(ApiVersionRequest())
            finally:
                opened.close()
        except (KafkaError, OSError, EOFError, TimeoutError) as error:
            return await self._explain(error)
        except (ValueError, KeyError):
            # aiokafka's SCRAM raises this if the other side does not know the password either.
            return self._refused("the server's part of the login is wrong", "check KAFKA_BOOTSTRAP_SERVERS")
        if not any(
            key == _PRODUCE_KEY and newest >= _ZSTD_PRODUCE_VERSION
            for key, _, newest in supported.api_versions
        ):
            return self._refused(
                "the server does not accept zstd, with which dead letters are compressed",
                "use Kafka 2.1 or later",
            )
        return None

    async def _explain(self, error: BaseException) -> Diagnosis:
        if is_unreachable(error):
            return self._unreachable(error)
        cause = error.__cause__ if isinstance(error, KafkaConnectionError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            problem = certificate_problem(cause)
            return self._refused(problem.value, _REMEDIES[problem])
        if isinstance(error, KafkaConnectionError) and isinstance(cause, ssl.SSLError):
            # It hung up after the handshake: in TLS 1.3, the server checks the client certificate only then.
            return self._client_cert_rejected()
        return self._login(error) or await self._probe_other_protocols(error) or self._unreachable(error)

    async def _probe_other_protocols(self, error: BaseException) -> Diagnosis | None:
        protocol = self._connection.security_protocol
        if self._connection.with_tls and await self._accepts_plaintext():
            return self._refused(
                "the server does not use TLS on this port",
                f"check KAFKA_BOOTSTRAP_SERVERS, and KAFKA_SECURITY_PROTOCOL={protocol}",
            )
        if self._connection.with_tls and isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            return self._client_cert_rejected()
        if not self._connection.with_tls and await self._speaks_tls():
            return self._refused(
                "the server uses TLS on this port",
                f"set KAFKA_SECURITY_PROTOCOL to SSL or SASL_SSL; it is {protocol}",
            )
        if not self._connection.with_login and (mechanisms := await self._sasl_mechanisms()):
            login = "SASL_SSL" if self._connection.with_tls else "SASL_PLAINTEXT"
            return self._refused(
                f"the server requires a login ({', '.join(mechanisms)})",
                f"set KAFKA_SECURITY_PROTOCOL to {login}, KAFKA_SASL_USERNAME and KAFKA_SASL_PASSWORD",
            )
        return None

    def _login(self, error: BaseException) -> Diagnosis | None:
        mechanism = self._connection.sasl_mechanism
        if isinstance(error, SaslAuthenticationFailed):
            return self._refused(
                f"the server rejects the {mechanism} login",
                "check KAFKA_SASL_USERNAME and KAFKA_SASL_PASSWORD",
            )
        if isinstance(error, UnsupportedSaslMechanismError):
            return self._refused(f"the server does not support {mechanism}", "check KAFKA_SASL_MECHANISM")
        if isinstance(error, IllegalSaslStateError):
            return self._refused(
                "the server does not accept logins on this port",
                f"check KAFKA_BOOTSTRAP_SERVERS, and KAFKA_SECURITY_PROTOCOL={self._connection.security_protocol}",
            )
        return None

    def _client_cert_rejected(self) -> Diagnosis:
        if self._connection.certfile is None:
            return self._refused(
                "the server requires a client certificate", "set KAFKA_SSL_CERTFILE and KAFKA_SSL_KEYFILE"
            )
        return self._refused(
            "the server rejects the client certificate",
            "check KAFKA_SSL_CERTFILE, and the CA that the broker trusts",
        )

    def _refused(self, detail: str, remedy: str) -> Diagnosis:
        return Diagnosis(self._server, refused=True, detail=detail, remedy=remedy)

    def _unreachable(self, error: BaseException) -> Diagnosis:
        return Diagnosis(
            self._server,
            refused=False,
            detail=f"cannot connect ({connection_problem(error)})",
            remedy="check KAFKA_BOOTSTRAP_SERVERS, and that the broker is running",
        )

    # Probes with another protocol

    async def _open(self, **options: Any) -> AIOKafkaConnection:
        """Connect, and log in if the options require it."""
        return await create_conn(
            self._host, self._port, request_timeout_ms=int(1000 * _TIMEOUT_SECONDS), **options
        )

    async def _accepts_plaintext(self) -> bool:
        """Sends no secrets: only asks which requests the server supports."""
        try:
            (await self._open()).close()
        except (KafkaError, OSError, EOFError, TimeoutError):
            return False
        return True

    async def _speaks_tls(self) -> bool:
        """Only a TLS handshake, without verifying the server."""
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    asyncio.Protocol, self._host, self._port, ssl=context
                )
        except (OSError, EOFError, TimeoutError):
            return False
        transport.abort()
        return True

    async def _sasl_mechanisms(self) -> list[str]:
        """The SASL mechanisms that the server supports; empty if it does not accept logins."""
        try:
            opened = await self._open(**self._options)
            try:
                response = await opened.send(SaslHandShakeRequest("NONE"))
            finally:
                opened.close()
        except (KafkaError, OSError, EOFError, TimeoutError):
            return []
        return sorted(response.enabled_mechanisms)
