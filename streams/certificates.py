"""Explains OpenSSL's verify codes: why a server's certificate is not trusted."""

import ssl
from enum import Enum

__all__ = ["CertificateProblem", "certificate_problem"]

_NOT_YET, _EXPIRED = 9, 10
_OTHER_HOST = {62, 64}  # a name, an address


class CertificateProblem(Enum):
    """The value is the error message."""

    NOT_YET_VALID = "the server's certificate is not valid yet"
    EXPIRED = "the server's certificate has expired"
    OTHER_HOST = "the server's certificate is for a different host"
    UNKNOWN_AUTHORITY = "the server's certificate is not signed by a trusted CA"


def certificate_problem(error: ssl.SSLCertVerificationError) -> CertificateProblem:
    """The problem with the certificate; an unknown CA if it is none of the others."""
    code = getattr(error, "verify_code", 0)  # OpenSSL sets it, the constructor does not
    if code in _OTHER_HOST:
        return CertificateProblem.OTHER_HOST
    return {_NOT_YET: CertificateProblem.NOT_YET_VALID, _EXPIRED: CertificateProblem.EXPIRED}.get(
        code, CertificateProblem.UNKNOWN_AUTHORITY
    )
