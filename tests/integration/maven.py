"""What the tests run on and no wheel has, resolved with Maven.

It is kept in the checkout (``.anabranch/``, which git ignores), and resolved once, whoever asks first.
"""

import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

__all__ = ["Artifact", "Unresolved", "resolved"]

_PLUGIN: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_CACHE = Path(__file__).resolve().parents[2] / ".anabranch"
_SECONDS = 300

# Group, name, version.
Artifact = tuple[str, str, str]


class Unresolved(Exception):
    """Maven is missing, or it cannot resolve them; the message says which, and why."""


def resolved(
    name: str, artifacts: Sequence[Artifact], *, unpack: Callable[[Path, Path], None] | None = None
) -> Path:
    """The folder that holds the artifacts' jars and those that they need.

    Args:
        name: the folder's; with the version in it.
        artifacts: what to resolve.
        unpack: makes a folder (its second argument) out of that of the jars (its first), which is then kept instead.

    Raises:
        Unresolved: it is not there, and cannot be had.
    """
    folder = _CACHE / name
    _CACHE.mkdir(exist_ok=True)
    with (_CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs in one checkout
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=_CACHE) as scratch:
                made = _copy(Path(scratch), name, artifacts)
                if unpack is not None:
                    unpack(made, Path(scratch, "unpacked"))
                    made = Path(scratch, "unpacked")
                made.rename(folder)  # all of it, or none
    return folder


def _copy(scratch: Path, name: str, artifacts: Sequence[Artifact]) -> Path:
    maven = shutil.which("mvn")
    if maven is None:
        raise Unresolved(f"{name} is not in {_CACHE}, and Maven (mvn) is not installed")
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version></dependency>"
        for group, artifact, version in artifacts
    )
    Path(scratch, "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>anabranch.tests</groupId><artifactId>tests</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    try:
        done = subprocess.run(
            [maven, "-q", "-B", _PLUGIN, "-DoutputDirectory=jars"],
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unresolved(f"Maven did not resolve {name} in {_SECONDS} s") from None
    if done.returncode != 0:
        raise Unresolved(f"Maven cannot resolve {name}: {(done.stdout + done.stderr)[:500]}")
    return scratch / "jars"
