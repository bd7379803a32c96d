"""`anabranch demo --keep` in a process of its own, and what its lines do in another terminal."""

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["KeptDemo", "kept_demo"]

_START_SECONDS: Final = 90
_STOP_SECONDS: Final = 30


@dataclass(frozen=True)
class KeptDemo:
    """A demo that has answered its questions, and still runs.

    Attributes:
        output: what it has printed.
        pid: its process.
        folder: where it runs.
    """

    output: str
    pid: int
    folder: Path
    _command: Path
    _environment: Mapping[str, str]

    def paste(self, *more: str) -> list[str]:
        """What its lines print in a shell of their own, and then some more."""
        lines = [line for line in self.output.splitlines() if line.startswith(("export ", "anabranch "))]
        done = subprocess.run(
            ["/bin/sh", "-e"],
            input="\n".join([*lines, *more]),
            env=dict(self._environment) | {"PATH": f"{self._command.parent}:{self._environment['PATH']}"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()


@contextmanager
def kept_demo(
    command: Path,
    folder: Path,
    environment: Mapping[str, str],
    *,
    settings: Mapping[str, str] | None = None,
    end: signal.Signals = signal.SIGTERM,
) -> Iterator[KeptDemo]:
    """Start a demo, and end it with a signal.

    Args:
        command: `anabranch`.
        folder: where it runs.
        environment: the variables that other terminals have too.
        settings: more variables, which other terminals do not have.
        end: the signal.
    """
    output = folder / "output"
    # Interrupted as from a terminal, in spite of what this process ignores.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with output.open("wb") as sink:
            demo = subprocess.Popen(
                [command, "demo", "--keep"],
                env=dict(environment) | dict(settings or {}),
                cwd=folder,
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (shown := output.read_text()).endswith("\n") or "\nanabranch ask " not in shown:
            assert demo.poll() is None, shown
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
        yield KeptDemo(shown, demo.pid, folder, command, environment)
    finally:
        demo.send_signal(end)
        try:
            demo.wait(_STOP_SECONDS)
        finally:
            demo.terminate()  # whatever became of it, the next test begins without it
            demo.wait(_STOP_SECONDS)
