"""CPU time of processes and all their descendants, by name."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from streams.bench import BenchError

__all__ = ["CpuMeter", "resident_bytes"]


class CpuMeter:
    """Reads the CPU seconds that groups of processes have used since their start.

    Args:
        roots: name to process id; a process counts with its descendants, those that have ended included. This process
            counts alone: the others may be its children.

    Raises:
        BenchError: one of them is another process, and psutil is not installed.
    """

    def __init__(self, roots: Mapping[str, int]) -> None:
        self._own = [name for name, pid in roots.items() if pid == os.getpid()]
        self._others = {name: _process(pid) for name, pid in roots.items() if name not in self._own}

    def read(self) -> dict[str, float]:
        """CPU seconds by name."""
        own = dict.fromkeys(self._own, time.process_time())
        return own | {name: _tree_seconds(process) for name, process in self._others.items()}


def _process(pid: int) -> Any:
    # A deployment is measured without other processes, so it does not need psutil.
    try:
        import psutil  # noqa: PLC0415  # of the extra
    except ModuleNotFoundError:
        raise BenchError("psutil is not installed; run: pip install 'anabranch[demo]'") from None
    return psutil.Process(pid)


def _tree_seconds(root: Any) -> float:
    import psutil  # noqa: PLC0415  # installed: there is a process of it

    # The children that have ended, as far as the root has waited for them.
    times = root.cpu_times()
    seconds = times.user + times.system + times.children_user + times.children_system
    for child in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            own = child.cpu_times()
            seconds += own.user + own.system
    return float(seconds)


def resident_bytes(pid: int) -> int:
    """Resident memory of one process.

    Raises:
        BenchError: psutil is not installed.
    """
    return int(_process(pid).memory_info().rss)
