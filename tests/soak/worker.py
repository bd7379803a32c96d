"""The real worker, with gauges of what is inside it: ``python -m tests.soak.worker [LEAK]``.

Tasks and blocks of memory are no operator's business, so the worker itself does not tell them. With a leak's name it
leaks that on purpose: a soak that calls every worker flat would be worth nothing.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any, Final

import asyncpg
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from streams.cli import main
from streams.settings import Settings
from streams.worker.app import WorkerApp
from streams.worker.event_processor import EventProcessor
from streams.worker.processor import Processor

__all__ = ["LEAKS"]

_ONE_IN = 50


class _Inside(Collector):
    """What the process holds that /proc does not show."""

    def __init__(self, anabranch: WorkerApp) -> None:
        self._app: Any = anabranch.app

    def collect(self) -> Iterator[GaugeMetricFamily]:
        # Faust's consumer lives on a thread, with an event loop of its own.
        loops = {asyncio.get_running_loop(), self._app.consumer._thread.thread_loop}
        yield GaugeMetricFamily(
            "soak_tasks",
            "Tasks of asyncio that have not ended.",
            value=sum(len(asyncio.all_tasks(loop)) for loop in loops),
        )
        yield GaugeMetricFamily(
            "soak_blocks", "Blocks of memory that Python's objects hold.", value=sys.getallocatedblocks()
        )


def show_the_inside() -> None:
    made = WorkerApp.__init__

    def make(self: WorkerApp, settings: Settings) -> None:
        made(self, settings)
        self._metrics.registry.register(_Inside(self))

    WorkerApp.__init__ = make  # type: ignore[method-assign]  # this process is there to be altered


# Leaks: what each event leaves behind

_kept: Final[list[Any]] = []


async def memory(number: int) -> None:
    """A few kilobytes for each event."""
    del number
    _kept.append(bytearray(4096))


async def tasks(number: int) -> None:
    """A task that waits for what never comes."""
    if number % _ONE_IN == 0:
        _kept.append(asyncio.create_task(asyncio.Event().wait()))


async def files(number: int) -> None:
    """An open file."""
    if number % _ONE_IN == 0:
        _kept.append(os.open(os.devnull, os.O_RDONLY))


async def connections(number: int) -> None:
    """A connection to the store."""
    if number % _ONE_IN == 0:
        with suppress(
            OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError
        ):  # the store is away
            _kept.append(await asyncpg.connect(os.environ["DATABASE_CONNECTION_STRING"], timeout=1))


LEAKS: Final = {leak.__name__: leak for leak in (memory, tasks, files, connections)}


def spring(leak: Callable[[int], Any]) -> None:
    handle = Processor.handle
    numbers = count()

    async def leak_and_handle(self: EventProcessor[Any], record: Any) -> None:
        await leak(next(numbers))
        await handle(self, record)

    Processor.handle = leak_and_handle  # type: ignore[method-assign]  # this process is there to be altered


if __name__ == "__main__":
    show_the_inside()
    for name in sys.argv[1:]:
        spring(LEAKS[name])
    sys.argv = ["anabranch", "worker"]
    main()
