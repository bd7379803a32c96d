"""Workers with their own topics and store, which Prometheus watches as one namespace."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import psutil

from tests.faults.load import Event, good_events
from tests.faults.proxy import Proxy
from tests.faults.stack import Stack, open_stack
from tests.integration.harness import Worker
from tests.integration.kafka.apache_kafka import free_ports
from tests.ops.clock import WORKER_SETTINGS
from tests.ops.exporter import open_exporter
from tests.ops.place import Place
from tests.ops.prometheus import Prometheus

__all__ = ["Installation", "open_installation"]

_READY_SECONDS = 60.0
_EXPORTER_JOB = "postgres"


@dataclass
class Installation:
    """One namespace.

    Attributes:
        stack: topics, store, workers and load.
        own_proxy: between the store and a worker that `start_behind_proxy` started.
        noticed: real seconds until the affected workers were not ready.
        frozen: processes that stand still.
        background: what a fault leaves running until its fix.
        problems: what a scenario checks itself.
        figures: what a scenario measures itself.
        repeats: answers beyond the first.
        replayed: events that were sent again.
    """

    namespace: str
    stack: Stack
    prometheus: Prometheus
    own_proxy: Proxy
    noticed: float = 0.0
    frozen: list[psutil.Process] = field(default_factory=list)
    background: list[asyncio.Task[None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    repeats: int = 0
    replayed: int = 0
    resources: AsyncExitStack = field(default_factory=AsyncExitStack)

    def discover(self) -> None:
        """Prometheus scrapes those workers that run now."""
        self.prometheus.set_targets(self.namespace, [worker.port for worker in self.stack.members])

    async def watch_store(self) -> None:
        """Prometheus scrapes a postgres_exporter of this store."""
        port = await self.resources.enter_async_context(open_exporter(self.stack.database.admin))
        self.resources.callback(self.prometheus.set_targets, self.namespace, (), job=_EXPORTER_JOB)
        self.prometheus.set_targets(self.namespace, [port], job=_EXPORTER_JOB)

    def start_behind_proxy(self) -> Worker:
        """A worker whose way to the store can be cut, without that of the others."""
        stack, dsn = self.stack, self.stack.dsn
        self.own_proxy.target = stack.store.embedded.port
        stack.dsn = dsn.replace(f":{stack.store_proxy.port}/", f":{self.own_proxy.port}/")
        try:
            return stack.start_worker()
        finally:
            stack.dsn = dsn

    def restart(self, worker: Worker) -> Worker:
        """A killed worker's container starts again, at the same address."""
        again = self.stack.start_worker(ANABRANCH_WEB_PORT=str(worker.port))
        again.port = worker.port
        return again

    async def until_noticed(self, workers: Sequence[Worker], limit_seconds: float = 60) -> None:
        """Waits until none of these workers is ready."""
        began = time.monotonic()
        while any([await asyncio.to_thread(worker.is_ready) for worker in workers]):
            assert time.monotonic() - began < limit_seconds, "workers do not notice the fault"
            await asyncio.sleep(0.1)
        self.noticed = time.monotonic() - began
        self.figures.append(f"noticed by its workers after {self.noticed:.1f} real seconds")

    async def end_background(self) -> None:
        for task in self.background:
            task.cancel()
        ended = await asyncio.gather(*self.background, return_exceptions=True)
        self.background.clear()
        defects = [error for error in ended if isinstance(error, Exception)]
        assert not defects, f"the fault itself failed: {defects}"

    async def until_ready(self) -> None:
        for worker in self.stack.members:
            await worker.until_ready(seconds=_READY_SECONDS)


@asynccontextmanager
async def open_installation(
    place: Place,
    namespace: str,
    *,
    rng: random.Random,
    per_second: float,
    events: Callable[[], Iterator[Event]] = good_events,
    settings: Mapping[str, str] | None = None,
) -> AsyncIterator[Installation]:
    """No worker yet, and no load."""
    async with AsyncExitStack() as open_now:
        servers = await open_now.enter_async_context(place.servers_of(namespace))
        own_proxy = await open_now.enter_async_context(Proxy(free_ports(1)[0]))
        stack = await open_now.enter_async_context(
            open_stack(
                servers,
                brokers=1,
                rng=rng,
                per_second=per_second,
                events=events,
                settings={**WORKER_SETTINGS, **(settings or {})},
                cluster=place.cluster_of(namespace),
            )
        )
        installation = Installation(namespace, stack, place.prometheus, own_proxy)
        open_now.callback(place.prometheus.set_targets, namespace, ())
        open_now.callback(_thaw, installation)
        open_now.push_async_callback(installation.resources.aclose)
        try:
            yield installation
        finally:
            await installation.end_background()


def _thaw(installation: Installation) -> None:
    for process in installation.frozen:
        if process.is_running():
            process.resume()
    installation.frozen.clear()
