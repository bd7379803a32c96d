"""Looks at one worker's process, again and again, from outside and through its metrics."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress

import psutil

from tests.integration.harness import Samples, Worker
from tests.soak.record import Sample

__all__ = ["Watch"]

_EVERY_SECONDS = 2.0


class Watch:
    """Takes samples of a worker.

    Args:
        worker: whose.
        store: the port on which it finds the store.
        kafka: those on which it finds the brokers.
    """

    def __init__(self, worker: Worker, *, store: int, kafka: Collection[int]) -> None:
        self._worker = worker
        self._process = psutil.Process(worker.process.pid)
        self._store = store
        self._kafka = kafka
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._sample_loop())
        try:
            yield
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    async def _sample_loop(self) -> None:
        while self._worker.process.poll() is None:
            at = self.seconds
            with suppress(psutil.NoSuchProcess):  # whoever struck will say so
                self.samples.append(Sample(at, await asyncio.to_thread(self._sample)))
            await asyncio.sleep(max(0.0, _EVERY_SECONDS - (self.seconds - at)))

    def _sample(self) -> dict[str, float]:
        process = self._process
        rss, descriptors = process.memory_info().rss, process.num_fds()
        # In whatever state: one that the other side has closed and this one has not is a leak too.
        far = [there.raddr.port for there in process.net_connections("tcp") if there.raddr]  # type: ignore[redundant-expr]  # no address while it listens, whatever the stubs say
        store, kafka = far.count(self._store), sum(port in self._kafka for port in far)
        seen: dict[str, float] = {
            "rss": rss,
            "descriptors": descriptors,
            "postgres": store,
            "kafka": kafka,
            "files": descriptors - store - kafka,
        }
        status, text = self._worker.page("/metrics")
        if status == 200:  # a frozen one tells nothing
            loaded = Samples(text)
            seen |= {
                "tasks": loaded.value("soak_tasks"),
                "blocks": loaded.value("soak_blocks"),
                "lag": loaded.total("anabranch_consumer_lag"),
            }
        return seen
