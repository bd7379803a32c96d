"""Certificates and keys that cannot be used, and connection strings that cannot: told by setting, without a secret."""

import logging
import ssl
from pathlib import Path

import asyncpg
import pytest
from aiokafka.protocol.admin import SaslAuthenticateRequest

from streams.broker.connection import BrokerConnection, UnusableCertificate
from streams.configured import broker_connection
from streams.settings import SettingsError, load
from streams.store.connect_errors import explain
from tests.certificates import Certificates

SECRET = "canary-7d1e"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def diagnosis_of(**files: Path | str | None) -> str:
    """What is said of a connection; and of the settings, the same."""
    connection = BrokerConnection("localhost:9092", "SSL", **files)  # type: ignore[arg-type]  # keywords by any name
    with pytest.raises(UnusableCertificate) as caught:
        connection.client_options()
    message = str(caught.value)
    environment = {
        "KAFKA_SECURITY_PROTOCOL": "SSL",
        **{f"KAFKA_SSL_{name.upper()}": str(value) for name, value in files.items()},
    }
    with pytest.raises(SettingsError) as refused:
        broker_connection(load(environment))
    assert str(refused.value) == message
    assert "\n" not in message
    assert SECRET not in message
    return message


def test_files_that_are_not_there_are_named(certificates: Certificates) -> None:
    client = certificates.client("worker")
    absent = Path("/nowhere/file.pem")
    assert diagnosis_of(cafile=absent) == "KAFKA_SSL_CAFILE cannot be read: No such file or directory"
    assert diagnosis_of(certfile=absent) == "KAFKA_SSL_CERTFILE cannot be read: No such file or directory"
    assert diagnosis_of(certfile=client.certificate, keyfile=absent).startswith(
        "KAFKA_SSL_KEYFILE cannot be read"
    )
    assert diagnosis_of(cafile=absent.parent.parent) == "KAFKA_SSL_CAFILE cannot be read: Is a directory"


def test_files_that_are_something_else_are_named(certificates: Certificates, tmp_path: Path) -> None:
    client, other = certificates.client("worker"), certificates.client("other")
    noise = tmp_path / "noise.pem"
    noise.write_text(SECRET)
    assert diagnosis_of(cafile=noise) == "KAFKA_SSL_CAFILE: the file does not contain a PEM certificate"
    assert diagnosis_of(cafile=client.key) == "KAFKA_SSL_CAFILE: the file does not contain a PEM certificate"
    assert "not contain a PEM certificate and key" in diagnosis_of(certfile=noise)
    assert "not contain a PEM certificate and key" in diagnosis_of(
        certfile=client.certificate
    )  # without its key
    assert diagnosis_of(certfile=client.certificate, keyfile=other.key) == (
        "KAFKA_SSL_KEYFILE: the key does not match the certificate in KAFKA_SSL_CERTFILE"
    )


def test_a_locked_key_is_never_asked_for_on_the_terminal(certificates: Certificates) -> None:
    locked = certificates.client("worker", passphrase=SECRET)
    message = "KAFKA_SSL_KEY_PASSWORD is not set, or does not decrypt the key in KAFKA_SSL_KEYFILE"
    assert diagnosis_of(certfile=locked.certificate, keyfile=locked.key) == message
    assert diagnosis_of(certfile=locked.certificate, keyfile=locked.key, key_password=SECRET + "x") == message
    right = BrokerConnection(
        "localhost:9092", "SSL", certfile=locked.certificate, keyfile=locked.key, key_password=SECRET
    )
    assert isinstance(right.client_options()["ssl_context"], ssl.SSLContext)
    assert SECRET not in repr(right)


def test_a_certificate_and_its_key_may_be_one_file(certificates: Certificates) -> None:
    both = certificates.client("worker").both
    options = BrokerConnection("localhost:9092", "SSL", certfile=both).client_options()
    context = options["ssl_context"]
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)


def test_what_logs_in_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """aiokafka tells every request; the filter must fit what it tells, whatever version it speaks."""
    logger = logging.getLogger("aiokafka.conn")
    for request in (
        SaslAuthenticateRequest(SECRET.encode()).prepare({36: (0, 0)}),
        SaslAuthenticateRequest(SECRET.encode()).prepare({36: (0, 1)}),
    ):
        assert SECRET in str(request)
        with caplog.at_level(logging.DEBUG, logger=logger.name):  # whatever other tests left its parents at
            logger.debug("Request to %s:%d %d: %s", "host", 9092, 1, request)
            logger.debug("Request to %s:%d %d: %s", "host", 9092, 2, "another")
    assert [record.args for record in caplog.records] == [("host", 9092, 2, "another")] * 2


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://worker:{SECRET}/x@host/db",  # not percent-encoded: the port is read from the password
        f"postgresql://worker:a{SECRET}?x@host/db",
        f"postgresql://worker:p@host:{SECRET}/db",
        f"postgresql://worker:p@[{SECRET}/db",
        f"postgresql://worker:p@host/db?{SECRET}",
        f"postgresql://worker:p@host/db?sslmode={SECRET}",
        f"postgresql://worker:p@host/db?target_session_attrs={SECRET}",
        f"postgresql://worker:p@host/db?sslmode=require&ssl_min_protocol_version={SECRET}",
        f"postgresql://worker:p@host/db?sslmode=verify-full&sslrootcert=/{SECRET}",
        f"{SECRET}://worker@host/db",
        f"host=db user=worker password={SECRET}",
        SECRET,
    ],
)
async def test_a_connection_string_that_cannot_be_used_is_not_quoted(dsn: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # asyncpg has many for that
        await asyncpg.connect(dsn, timeout=1)
    found = explain(caught.value, "DATABASE_ADMIN_CONNECTION_STRING")
    assert found is not None
    assert found.before_connect
    assert str(found).startswith("DATABASE_ADMIN_CONNECTION_STRING is invalid: ")
    assert SECRET not in str(found)


async def test_a_missing_server_is_not_blamed_on_the_connection_string() -> None:
    for dsn in ("postgresql://a:b@127.0.0.1:1/db", "postgresql://a:b@/db?host=/nowhere"):
        with pytest.raises(OSError) as caught:  # noqa: PT011  # refused, or no such socket
            await asyncpg.connect(dsn, timeout=5)
        assert explain(caught.value) is None
