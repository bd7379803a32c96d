"""Why a server's certificate is not to be trusted, as OpenSSL's verify codes tell."""

import ssl
from enum import Enum

__all__ = ["CertificateProblem", "certificate_problem"]

_NOT_YET, _EXPIRED = 9, 10
_OTHER_HOST = {62, 64}  # a name, an address


class CertificateProblem(Enum):
    """The value is what is wrong, to follow "it"."""

    NOT_YET_VALID = "its certificate is not valid yet"
    EXPIRED = "its certificate has expired"
    OTHER_HOST = "its certificate is another host's"
    UNKNOWN_AUTHORITY = "its certificate is not signed by a known authority"


def certificate_problem(error: ssl.SSLCertVerificationError) -> CertificateProblem:
    """Which of them it is; what is left is an authority that we do not know."""
    code = getattr(error, "verify_code", 0)  # OpenSSL sets it, the constructor does not
    if code in _OTHER_HOST:
        return CertificateProblem.OTHER_HOST
    return {_NOT_YET: CertificateProblem.NOT_YET_VALID, _EXPIRED: CertificateProblem.EXPIRED}.get(
        code, CertificateProblem.UNKNOWN_AUTHORITY
    )
