"""Certificates that a test makes: an authority, servers (right, for another host, expired), and clients."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

__all__ = ["Certificates", "Identity"]

_HERE: Final = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, as PEM files.

    Attributes:
        both: the key and the certificate in one file, as Kafka takes them.
    """

    certificate: Path
    key: Path
    both: Path


class Certificates:
    """One authority and what it signs, in a folder.

    Args:
        folder: where the files go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.authority = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.authority)
        # Somebody else's.
        self._untrusted = trustme.CA()
        self.untrusted = folder / "stranger.pem"
        self._untrusted.cert_pem.write_to_path(self.untrusted)

    def server(self, *hosts: str, expired: bool = False) -> Identity:
        """A server's; by default it is this machine's, under any of its names."""
        name = "-".join(hosts) or "server"
        end = datetime.now(UTC) - timedelta(hours=1)
        issued = self._authority.issue_cert(
            *(hosts or _HERE),
            not_before=end - timedelta(days=1) if expired else None,
            not_after=end if expired else None,
        )
        return self._write(f"{name}-expired" if expired else name, issued)

    def client(self, name: str, *, passphrase: str | None = None, trusted: bool = True) -> Identity:
        """A client's, for the user of this name.

        Args:
            name: the common name.
            passphrase: what the key is encrypted with.
            trusted: signed by the authority that servers know, and not by another one.
        """
        authority = self._authority if trusted else self._untrusted
        issued = authority.issue_cert("client.example.org", common_name=name)
        kind = "trusted" if trusted else "strange"
        return self._write(
            f"client-{name}-{kind}{'' if passphrase is None else '-locked'}", issued, passphrase
        )

    def _write(self, name: str, issued: trustme.LeafCert, passphrase: str | None = None) -> Identity:
        written = Identity(*(self._folder / f"{name}.{suffix}" for suffix in ("crt", "key", "pem")))
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        key = load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
            Encoding.PEM,
            PrivateFormat.PKCS8,  # the only one that Kafka reads
            NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase.encode()),
        )
        written.certificate.write_bytes(chain)
        for secret, content in ((written.key, key), (written.both, key + chain)):
            secret.touch(mode=0o600)  # PostgreSQL takes no key that others may read
            secret.write_bytes(content)
        return written
