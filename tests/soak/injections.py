"""The faults of a soak: those of the fault suite that leave the same process alive, and some of a lone worker's own."""

import asyncio
import random
import signal
from collections.abc import Iterator
from typing import Final

import asyncpg

from tests.faults import brokers, network, rejections, store
from tests.faults.fault import Fault
from tests.faults.stack import Stack

__all__ = ["FAULTS", "dealt"]

_SESSION_SECONDS = 6.0
_SEARCH_SECONDS = 10.0  # a worker's own default
_READY_SECONDS = 60.0


async def freeze(stack: Stack) -> None:
    """SIGSTOP until the group has given up on it; it comes back as a stranger."""
    [worker] = stack.members
    worker.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(_SESSION_SECONDS + stack.rng.uniform(2, 4))
    finally:
        worker.process.send_signal(signal.SIGCONT)


async def visit(stack: Stack) -> None:
    """A second member comes, takes its share of the partitions, and goes."""
    guest = stack.start_worker()
    try:
        await guest.until_ready(seconds=_READY_SECONDS)
        await asyncio.sleep(stack.rng.uniform(3, 6))
        code, _ = await guest.terminate(seconds=30)
        assert code == 0, f"exit code {code} after SIGTERM"
    finally:
        guest.end()
        stack.members.remove(guest)


async def lock_out(stack: Stack) -> None:
    """A lock is held for longer than a search may take, so that every search times out."""
    admin = await asyncpg.connect(stack.database.admin)
    try:
        async with admin.transaction():
            await admin.execute("LOCK TABLE documents IN ACCESS EXCLUSIVE MODE")
            await asyncio.sleep(_SEARCH_SECONDS + 1)
    finally:
        await admin.close()


_OF_THE_SUITE: Final = {
    fault.name: fault for fault in [*brokers.FAULTS, *store.FAULTS, *network.FAULTS, *rejections.FAULTS]
}

#: So few that the first half of half an hour meets each of them: what happens for the first time may cost memory.
FAULTS: Final = [
    *(
        _OF_THE_SUITE[name]
        for name in (
            "broker-restart",
            "broker-kill",
            "store-immediate-stop",
            "store-frozen-25-s",
            "store-deadlock",
            "store-out-of-connections",
            "store-connections-reset",
            "store-throttled",
            "kafka-connections-reset",
            "kafka-delayed-500-ms",
            "poison-of-the-largest-size",
            "output-unauthorized",
        )
    ),
    Fault("worker-frozen", freeze),
    Fault("second-member-comes-and-goes", visit),
    Fault("store-searches-time-out", lock_out),
]


def dealt(rng: random.Random) -> Iterator[Fault]:
    """For ever, in random order: each of them once before any of them again."""
    while True:
        yield from rng.sample(FAULTS, len(FAULTS))
