"""CPU time of processes and all their descendants, by name."""

import os
from collections.abc import Mapping
from contextlib import suppress

import psutil

__all__ = ["CpuMeter", "resident_bytes"]


class CpuMeter:
    """Reads the CPU seconds that groups of processes have used since their start.

    Args:
        roots: name to process id; a process counts with its descendants, those that have ended included. This process
            counts alone: the others may be its children.
    """

    def __init__(self, roots: Mapping[str, int]) -> None:
        self._roots = {name: psutil.Process(pid) for name, pid in roots.items()}

    def read(self) -> dict[str, float]:
        """CPU seconds by name."""
        return {name: _tree_seconds(process) for name, process in self._roots.items()}


def _tree_seconds(root: psutil.Process) -> float:
    times = root.cpu_times()
    if root.pid == os.getpid():
        return float(times.user + times.system)
    # The children that have ended, as far as the root has waited for them.
    seconds = times.user + times.system + times.children_user + times.children_system
    for child in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            own = child.cpu_times()
            seconds += own.user + own.system
    return float(seconds)


def resident_bytes(pid: int) -> int:
    """Resident memory of one process."""
    return int(psutil.Process(pid).memory_info().rss)
