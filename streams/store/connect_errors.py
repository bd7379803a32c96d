"""Why PostgreSQL cannot be connected to, in one line that names the setting, and never its value.

asyncpg quotes the parts of a connection string that it cannot parse, and one of them may be the password.
"""

import ssl
import traceback
from typing import Final

import asyncpg

from streams.certificates import CertificateProblem, certificate_problem
from streams.core.errors import StoreMisconfigured

__all__ = ["explain"]

_SETTING: Final = "DATABASE_CONNECTION_STRING"
# asyncpg's own functions that read a connection string and load what it names, before anything is sent. Where they
# have other names some day, the fault is told as one of the network.
_PARSERS: Final = {"_parse_connect_arguments", "_parse_connect_dsn_and_args"}

_REMEDIES: Final = {
    CertificateProblem.NOT_YET_VALID: "mend this machine's clock",
    CertificateProblem.EXPIRED: "renew it",
    CertificateProblem.OTHER_HOST: "{setting} must name the host as the certificate does",
    CertificateProblem.UNKNOWN_AUTHORITY: "sslrootcert in {setting} must be the authority that signed it",
}


def explain(error: BaseException, setting: str = _SETTING) -> StoreMisconfigured | None:
    """What an operator has to mend before a connection can be made, or None where it is something else.

    Args:
        error: from `asyncpg.connect`, or a pool.
        setting: the connection string's name.
    """
    if any(frame.name in _PARSERS for frame in traceback.extract_tb(error.__traceback__)):
        return _unusable(error, setting)
    told = _told(error)
    if told is None:
        return None
    what, remedy = told
    return StoreMisconfigured(f"PostgreSQL: {what}; {remedy.format(setting=setting)}")


def _unusable(error: BaseException, setting: str) -> StoreMisconfigured:
    if isinstance(error, ssl.SSLError):
        why = "sslcert, sslkey, sslpassword or sslrootcert do not fit, or are no PEM"
    elif isinstance(error, OSError):
        why = f"sslrootcert, sslcert or sslkey cannot be read: {error.strerror}"
    elif "root certificate" in str(error):
        why = "sslmode needs sslrootcert, which is not there"
    else:
        why = "it cannot be parsed; is every special character of the password percent-encoded?"
    return StoreMisconfigured(f"{setting} cannot be used: {why}", before_connect=True)


def _told(error: BaseException) -> tuple[str, str] | None:
    """What is wrong, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        wrong = certificate_problem(error)
        return wrong.value, _REMEDIES[wrong]
    # In TLS 1.3 a client's certificate is looked at after the handshake, when asyncpg waits for the login already.
    cause = error.__cause__ if isinstance(error, asyncpg.ConnectionDoesNotExistError) else error
    if isinstance(cause, ssl.SSLError) and "ALERT" in (getattr(cause, "reason", None) or ""):
        return "it refuses TLS or our certificate", "check sslcert and sslkey in {setting}"
    if isinstance(error, ConnectionError) and "rejected SSL upgrade" in str(error):
        return "it does not speak TLS", "check sslmode in {setting}"
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
        return _login(error)
    return None


def _login(error: asyncpg.InvalidAuthorizationSpecificationError) -> tuple[str, str]:
    if isinstance(error, asyncpg.InvalidPasswordError):
        return "it refuses the login, user or password", "check {setting}"
    # Its text, where the server speaks English; no part of it is repeated.
    if "no encryption" in str(error):
        return "it refuses the login without TLS", "check sslmode in {setting}, or the server's pg_hba.conf"
    if "client certificate" in str(error):
        return "it wants a client certificate", "set sslcert and sslkey in {setting}"
    return "it refuses the login", "check {setting}, or the server's pg_hba.conf"
