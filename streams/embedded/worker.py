"""A worker as a process of its own, on servers of this machine."""

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

from streams.embedded.ports import HOST

__all__ = ["WorkerError", "WorkerProcess"]

_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 15.0


class WorkerError(Exception):
    """The worker ended, or does not become ready; the message says why in one line."""


class WorkerProcess:
    """Starts a worker, which listens on this machine only.

    Args:
        program: arguments of the Python interpreter.
        environment: its settings; nothing else of this process's environment but PATH.
        log_file: for its output.
        port: of its web pages; a free one of this machine.
        directory: where it runs; None: where this process does.
    """

    def __init__(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path,
        *,
        port: int,
        directory: Path | None = None,
    ) -> None:
        self.port = port
        self._log_file = log_file
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  # a trusted module
                [sys.executable, *program],
                env={
                    "PATH": os.environ.get("PATH", ""),
                    "ANABRANCH_WEB_PORT": str(self.port),
                    "ANABRANCH_WEB_BIND_ADDRESS": HOST,
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                # Ctrl-C on the terminal must reach only this process, which then stops the worker.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, of the Python interpreter."""
        return self._process.pid

    async def until_ready(self) -> None:
        """Wait until the worker has joined its group and can search.

        Raises:
            WorkerError: it ended, or is not ready in time.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise WorkerError(
                    f"the worker exited with code {self._process.returncode}: {self._last_line()}"
                )
            if await asyncio.to_thread(self._is_ready):
                return
            await asyncio.sleep(0.05)
        raise WorkerError(f"the worker was not ready within {_START_SECONDS:.0f} s: {self._last_line()}")

    def stop(self) -> None:
        """Stop it by SIGTERM, so that it commits what it has answered; kill it if it does not end in time."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _is_ready(self) -> bool:
        try:
            url = f"http://{HOST}:{self.port}/healthz/ready"
            with urllib.request.urlopen(url, timeout=2) as answer:  # a local http URL
                return bool(answer.status == HTTPStatus.OK)
        except (urllib.error.URLError, OSError):
            return False

    def _last_line(self) -> str:
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"
