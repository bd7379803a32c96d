"""Faults of the network: every connection of the workers to the store, or to Kafka, reset, slow, narrow, cut."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tests.faults.fault import REPEATS_OF_A_MEMBER, Fault
from tests.faults.proxy import Proxy
from tests.faults.stack import CONCURRENCY, Stack

__all__ = ["FAULTS"]

_Proxies = Callable[[Stack], Sequence[Proxy]]
_Inject = Callable[[Stack], Awaitable[None]]


def reset(proxies: _Proxies) -> _Inject:
    async def inject(stack: Stack) -> None:
        """Every connection, again and again."""
        broken = 0
        for _ in range(10):
            for proxy in proxies(stack):
                broken += await proxy.reset()
            await asyncio.sleep(stack.rng.uniform(0.1, 0.8))
        assert broken, "there was no connection to break off"

    return inject


def delay(proxies: _Proxies) -> _Inject:
    async def inject(stack: Stack) -> None:
        """Half a second, each way."""
        for proxy in proxies(stack):
            proxy.delay_seconds = 0.5
        await asyncio.sleep(15)
        for proxy in proxies(stack):
            proxy.repair()

    return inject


def throttle(proxies: _Proxies) -> _Inject:
    async def inject(stack: Stack) -> None:
        """A few events a second fit through each connection."""
        for proxy in proxies(stack):
            proxy.bytes_per_second = 16 * 1024
        await asyncio.sleep(15)
        for proxy in proxies(stack):
            proxy.repair()

    return inject


def cut(proxies: _Proxies) -> _Inject:
    async def inject(stack: Stack) -> None:
        """Nothing passes for 30 s, and nobody is told."""
        for proxy in proxies(stack):
            proxy.cut()
        await asyncio.sleep(30)
        for proxy in proxies(stack):
            proxy.repair()

    return inject


def _store(stack: Stack) -> Sequence[Proxy]:
    return [stack.store_proxy]


def _kafka(stack: Stack) -> Sequence[Proxy]:
    return stack.cluster.proxies


FAULTS = [
    Fault("store-connections-reset", reset(_store), rounds=3, repeats=4 * CONCURRENCY, combinable=True),
    Fault("store-delayed-500-ms", delay(_store), repeats=4 * CONCURRENCY, combinable=True),
    Fault("store-throttled", throttle(_store), repeats=4 * CONCURRENCY, combinable=True),
    Fault("store-cut-30-s", cut(_store), repeats=4 * CONCURRENCY),
    *(
        Fault(
            name,
            inject,
            rounds=rounds,
            limit_seconds=60,
            repeats=2 * REPEATS_OF_A_MEMBER,
            combinable=combinable,
        )
        for name, inject, rounds, combinable in (
            ("kafka-connections-reset", reset(_kafka), 3, True),
            ("kafka-delayed-500-ms", delay(_kafka), 1, True),
            ("kafka-throttled", throttle(_kafka), 1, True),
            ("kafka-cut-30-s", cut(_kafka), 1, False),
        )
    ),
]
