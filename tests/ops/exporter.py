"""A real postgres_exporter with the options of docker-compose.yml."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

import yaml

from tests.integration.harness import free_port
from tests.ops.prometheus import Unavailable

__all__ = ["exporter_program", "open_exporter"]

_COMPOSE: Final = Path(__file__).parents[2] / "docker-compose.yml"
_START_SECONDS: Final = 20.0
_STOP_SECONDS: Final = 10.0


def exporter_program() -> str:
    """Its path; one beside the interpreter comes first.

    Raises:
        Unavailable: there is none.
    """
    for name in ("postgres_exporter", "prometheus-postgres-exporter"):
        for path in (str(Path(sys.executable).parent), None):
            if found := shutil.which(name, path=path):
                return found
    raise Unavailable("postgres_exporter is not installed; on Debian: .ci/postgres-exporter")


@asynccontextmanager
async def open_exporter(dsn: str) -> AsyncIterator[int]:
    """Its port.

    Args:
        dsn: of a database; its tables are in the metrics.
    """
    port = free_port()
    with TemporaryDirectory(prefix="anabranch-exporter-") as folder:
        log_file = Path(folder) / "log"
        process = _start(dsn, port, log_file)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not await asyncio.to_thread(_is_up, port):
                assert process.poll() is None, log_file.read_text()
                assert time.monotonic() < deadline, log_file.read_text()
                await asyncio.sleep(0.1)
            yield port
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, _STOP_SECONDS)


def _start(dsn: str, port: int, log_file: Path) -> subprocess.Popen[bytes]:
    services = yaml.safe_load(_COMPOSE.read_text(encoding="utf-8"))["services"]
    options = services["postgres-exporter"]["command"]
    with log_file.open("wb") as log:
        return subprocess.Popen(
            [exporter_program(), *options, f"--web.listen-address=127.0.0.1:{port}"],
            env={**os.environ, "DATA_SOURCE_NAME": f"{dsn}?sslmode=disable"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _is_up(port: int) -> bool:
    """Whether it is connected to PostgreSQL."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            return "\npg_up 1\n" in str(response.read(), "utf-8")
    except (URLError, OSError):
        return False
