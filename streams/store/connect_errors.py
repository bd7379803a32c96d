"""Explains in one line why connecting to PostgreSQL fails. Names the setting, never its value.

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
# asyncpg's functions that parse a connection string and load the files it names, before anything is sent. If they are
# renamed some day, such an error is reported as a network error.
_PARSERS: Final = {"_parse_connect_arguments", "_parse_connect_dsn_and_args"}

_REMEDIES: Final = {
    CertificateProblem.NOT_YET_VALID: "correct this machine's clock",
    CertificateProblem.EXPIRED: "renew the certificate",
    CertificateProblem.OTHER_HOST: "use the host name in the certificate in {setting}",
    CertificateProblem.UNKNOWN_AUTHORITY: "set sslrootcert in {setting} to the CA that signed it",
}


def explain(error: BaseException, setting: str = _SETTING) -> StoreMisconfigured | None:
    """The error that an operator has to fix before a connection is possible, or None for any other error.

    Args:
        error: from `asyncpg.connect`, or a pool.
        setting: the name of the setting with the connection string.
    """
    if any(frame.name in _PARSERS for frame in traceback.extract_tb(error.__traceback__)):
        return _unusable(error, setting)
    found = _cause_and_remedy(error)
    if found is None:
        return None
    what, remedy = found
    return StoreMisconfigured(f"PostgreSQL: {what}; {remedy.format(setting=setting)}")


def _unusable(error: BaseException, setting: str) -> StoreMisconfigured:
    if isinstance(error, ssl.SSLError):
        why = "sslcert, sslkey, sslpassword and sslrootcert do not match, or a file is not PEM"
    elif isinstance(error, OSError):
        why = f"sslrootcert, sslcert or sslkey cannot be read: {error.strerror}"
    elif "root certificate" in str(error):
        why = "this sslmode requires sslrootcert, and the file is missing"
    elif str(error).startswith("invalid DSN: scheme"):
        why = "it must start with postgresql:// or postgres://, without a driver as in postgresql+asyncpg://"
    else:
        why = "it cannot be parsed; percent-encode every special character of the password"
    return StoreMisconfigured(f"{setting} is invalid: {why}", before_connect=True)


def _cause_and_remedy(error: BaseException) -> tuple[str, str] | None:
    """What is wrong, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = certificate_problem(error)
        return problem.value, _REMEDIES[problem]
    # In TLS 1.3 the server checks the client certificate after the handshake, when asyncpg already waits for the login.
    cause = error.__cause__ if isinstance(error, asyncpg.ConnectionDoesNotExistError) else error
    if isinstance(cause, ssl.SSLError) and "ALERT" in (getattr(cause, "reason", None) or ""):
        return "the server rejects TLS or the client certificate", "check sslcert and sslkey in {setting}"
    if isinstance(error, ConnectionError) and "rejected SSL upgrade" in str(error):
        return "the server does not use TLS", "check sslmode in {setting}"
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
        return _login(error)
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return (
            "the server has no database of this name",
            "check the name at the end of {setting}, or create the database",
        )
    return None


def _login(error: asyncpg.InvalidAuthorizationSpecificationError) -> tuple[str, str]:
    if isinstance(error, asyncpg.InvalidPasswordError):
        return "the server rejects the user or password", "check {setting}"
    # The error text, if the server's messages are in English; no part of it is quoted.
    if "no encryption" in str(error):
        return (
            "the server rejects logins without TLS",
            "check sslmode in {setting}, or the server's pg_hba.conf",
        )
    if "client certificate" in str(error):
        return "the server requires a client certificate", "set sslcert and sslkey in {setting}"
    return "the server rejects the login", "check {setting}, or the server's pg_hba.conf"
