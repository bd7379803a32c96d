"""Why a broker cannot be talked to, in one line that names the setting.

aiokafka tells only that no broker could be used, and Kafka, asked in a way that it does not understand, closes the
connection without a word. So each server is asked once more, and where it hangs up, in the other way.
"""

import asyncio
import socket
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
from aiokafka.protocol.admin import SaslHandShakeRequest
from aiokafka.protocol.metadata import MetadataRequest

from streams.broker.connection import BrokerConnection
from streams.certificates import CertificateProblem, certificate_problem

__all__ = ["Diagnosis", "diagnose"]

_TIMEOUT_SECONDS = 5.0

_REMEDIES = {
    CertificateProblem.NOT_YET_VALID: "mend this machine's clock",
    CertificateProblem.EXPIRED: "renew it",
    CertificateProblem.OTHER_HOST: "KAFKA_BOOTSTRAP_SERVERS and the broker's advertised.listeners must name it as the certificate"
    " does",
    CertificateProblem.UNKNOWN_AUTHORITY: "KAFKA_SSL_CAFILE must be the authority that signed it",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why no server could be talked to.

    Attributes:
        server: the one that it was seen at.
        refused: the server was reached, and it refuses or cannot be trusted; waiting alone does not mend that.
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
    """Ask every server who is there; None where one of them answers as it should.

    Raises:
        UnusableCertificate: a file cannot be read, or is not what it should be.
    """
    options = connection.client_options()
    found = []
    for server in options.pop("bootstrap_servers"):
        diagnosis = await _BrokerProbe(server, connection, options).examined()
        if diagnosis is None:
            return None
        found.append(diagnosis)
    # A server that is down says nothing of the settings; one that refuses does.
    return next((diagnosis for diagnosis in found if diagnosis.refused), found[0] if found else None)


class _BrokerProbe:
    """One server."""

    def __init__(self, server: str, connection: BrokerConnection, options: dict[str, Any]) -> None:
        self._server = server
        [(self._host, self._port, _)] = collect_hosts(server)
        self._connection = connection
        self._options = options

    async def examined(self) -> Diagnosis | None:
        try:
            opened = await self._open(**self._options)
            try:
                # Only now does a server that wants a login hang up.
                await opened.send(MetadataRequest([]))
            finally:
                opened.close()
        except (KafkaError, OSError, EOFError, TimeoutError) as error:
            return await self._explain(error)
        except (ValueError, KeyError):
            # What aiokafka's SCRAM meets where the other side does not know the password either.
            return self._refused("its part of the login is wrong", "check KAFKA_BOOTSTRAP_SERVERS")
        return None

    async def _explain(self, error: BaseException) -> Diagnosis:
        if isinstance(error, (ConnectionRefusedError, TimeoutError, socket.gaierror)):
            return self._unreachable(error)
        cause = error.__cause__ if isinstance(error, KafkaConnectionError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            wrong = certificate_problem(cause)
            return self._refused(wrong.value, _REMEDIES[wrong])
        if isinstance(error, KafkaConnectionError) and isinstance(cause, ssl.SSLError):
            # It hung up after the handshake: in TLS 1.3 that is when a client's certificate is looked at.
            return self._client_cert_rejected()
        return self._login(error) or await self._asked_otherwise(error) or self._unreachable(error)

    async def _asked_otherwise(self, error: BaseException) -> Diagnosis | None:
        protocol = self._connection.security_protocol
        if self._connection.with_tls and await self._answers_in_the_clear():
            return self._refused(
                "it does not speak TLS at this port",
                f"check KAFKA_BOOTSTRAP_SERVERS, and KAFKA_SECURITY_PROTOCOL={protocol}",
            )
        if self._connection.with_tls and isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            return self._client_cert_rejected()
        if not self._connection.with_tls and await self._speaks_tls():
            return self._refused(
                "it speaks TLS at this port",
                f"set KAFKA_SECURITY_PROTOCOL to SSL or SASL_SSL; it is {protocol}",
            )
        if not self._connection.with_login and (mechanisms := await self._mechanisms()):
            login = "SASL_SSL" if self._connection.with_tls else "SASL_PLAINTEXT"
            return self._refused(
                f"it wants a login ({', '.join(mechanisms)})",
                f"set KAFKA_SECURITY_PROTOCOL to {login}, KAFKA_SASL_USERNAME and KAFKA_SASL_PASSWORD",
            )
        return None

    def _login(self, error: BaseException) -> Diagnosis | None:
        mechanism = self._connection.sasl_mechanism
        if isinstance(error, SaslAuthenticationFailed):
            return self._refused(
                f"it refuses the login by {mechanism}", "check KAFKA_SASL_USERNAME and KAFKA_SASL_PASSWORD"
            )
        if isinstance(error, UnsupportedSaslMechanismError):
            return self._refused(f"it has no login by {mechanism}", "check KAFKA_SASL_MECHANISM")
        if isinstance(error, IllegalSaslStateError):
            return self._refused(
                "it has no login at this port",
                f"check KAFKA_BOOTSTRAP_SERVERS, and KAFKA_SECURITY_PROTOCOL={self._connection.security_protocol}",
            )
        return None

    def _client_cert_rejected(self) -> Diagnosis:
        if self._connection.certfile is None:
            return self._refused(
                "it wants a client certificate", "set KAFKA_SSL_CERTFILE and KAFKA_SSL_KEYFILE"
            )
        return self._refused(
            "it refuses the client certificate",
            "check KAFKA_SSL_CERTFILE, and the authority that the broker trusts",
        )

    def _refused(self, detail: str, remedy: str) -> Diagnosis:
        return Diagnosis(self._server, refused=True, detail=detail, remedy=remedy)

    def _unreachable(self, error: BaseException) -> Diagnosis:
        return Diagnosis(
            self._server,
            refused=False,
            detail=f"it cannot be reached ({type(error).__name__})",
            remedy="check KAFKA_BOOTSTRAP_SERVERS, and that the broker is up",
        )

    # Asking in another way

    async def _open(self, **options: Any) -> AIOKafkaConnection:
        """Connect, and log in where the options say so."""
        return await create_conn(
            self._host, self._port, request_timeout_ms=int(1000 * _TIMEOUT_SECONDS), **options
        )

    async def _answers_in_the_clear(self) -> bool:
        """Nothing secret is sent: which requests it knows is asked, and no more."""
        try:
            (await self._open()).close()
        except (KafkaError, OSError, EOFError, TimeoutError):
            return False
        return True

    async def _speaks_tls(self) -> bool:
        """A handshake alone, with whoever is there."""
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

    async def _mechanisms(self) -> list[str]:
        """By which mechanisms it lets clients log in; none where it has no login."""
        try:
            opened = await self._open(**self._options)
            try:
                response = await opened.send(SaslHandShakeRequest("NONE"))
            finally:
                opened.close()
        except (KafkaError, OSError, EOFError, TimeoutError):
            return []
        return sorted(response.enabled_mechanisms)
