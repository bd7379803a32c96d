"""A PostgreSQL that speaks TLS: the wheel's is built without it.

The server comes from Maven, as Apache Kafka does; pgvector is the wheel's, of the same major version.
"""

import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres, _find_install
from tests.certificates import Certificates, Identity
from tests.integration.maven import Unresolved, resolved

__all__ = ["SYSTEM_USER", "install", "tls_postgres"]

_MAJOR: Final = 18
_VERSION: Final = "18.1.0"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64v8"}
SYSTEM_USER: Final = "nobody"

# The socket is for those who set the server up.
_HBA: Final = """\
local   all all scram-sha-256
hostssl all by_certificate 127.0.0.1/32 cert
hostssl all all 127.0.0.1/32 scram-sha-256
"""


def install() -> Path:
    """Its binaries, with pgvector.

    Raises:
        Unresolved: they cannot be had here.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if sys.platform != "linux" or architecture is None:
        raise Unresolved(f"no PostgreSQL with TLS for {sys.platform} on {platform.machine()}")
    name = f"embedded-postgres-binaries-linux-{architecture}"
    return resolved(f"postgres-{_VERSION}", [("io.zonky.test.postgres", name, _VERSION)], unpack=_unpack)


def _unpack(jars: Path, folder: Path) -> None:
    [jar] = jars.glob("embedded-postgres-binaries-*.jar")
    with ZipFile(jar) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(".txz")]
        with archive.open(member) as packed, tarfile.open(fileobj=packed, mode="r:xz") as tar:
            tar.extractall(folder, filter="tar")
    wheel = _find_install(_MAJOR)
    libraries, share = (
        Path(_of(wheel, "--pkglibdir")),
        Path(_of(wheel, "--sharedir")) / "extension",
    )
    shutil.copy(libraries / "vector.so", folder / "lib" / "postgresql")
    for file in share.glob("vector*"):
        shutil.copy(file, folder / "share" / "postgresql" / "extension")


def _of(wheel: Path, what: str) -> str:
    return subprocess.run(
        [str(wheel / "bin" / "pg_config"), what], capture_output=True, text=True, check=True
    ).stdout.strip()


def tls_postgres(
    binaries: Path, folder: Path, certificates: Certificates, identity: Identity | None = None
) -> EmbeddedPostgres:
    """A server that lets nobody in over the network without TLS, and ``by_certificate`` by certificate alone.

    Args:
        binaries: from `install`.
        folder: where what it reads lies; its system user must be able to enter.
        certificates: whom it trusts.
        identity: what it shows; by default a certificate that is right.
    """
    identity = identity or certificates.server()
    folder.mkdir(parents=True, exist_ok=True)
    hba = folder / "pg_hba.conf"
    hba.write_text(_HBA)
    shown = {"cert": identity.certificate, "key": identity.key, "ca": certificates.authority}
    for name, file in shown.items():
        copy = folder / f"{name}.pem"
        shutil.copy(file, copy)
        if os.geteuid() == 0:
            shutil.chown(copy, SYSTEM_USER)
    return EmbeddedPostgres(
        version=_MAJOR,
        install=binaries,
        account=SYSTEM_USER,
        settings={
            **THROW_AWAY,
            "ssl": "on",
            "hba_file": str(hba),
            **{f"ssl_{name}_file": str(folder / f"{name}.pem") for name in shown},
        },
    )
