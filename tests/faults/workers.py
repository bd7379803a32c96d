"""Faults of the workers themselves: killed, told to end, frozen, more of them and fewer."""

import asyncio
import signal

from tests.faults.fault import REPEATS_OF_A_MEMBER, Fault
from tests.faults.stack import CONCURRENCY, Stack

__all__ = ["FAULTS"]

_SESSION_SECONDS = 6.0
_READY_SECONDS = 60.0


async def slow_down(stack: Stack) -> None:
    """Each round trip to the store takes a while, so that there is work in the middle of which to die."""
    stack.store_proxy.delay_seconds = 0.005


async def kill(stack: Stack) -> None:
    """kill -9, at any moment; another one is started at once, as Kubernetes would."""
    await asyncio.sleep(stack.rng.uniform(0.2, 1.5))
    async with stack.one_of_the_workers() as worker:
        stack.replace(worker)


async def terminate(stack: Stack) -> None:
    """SIGTERM, with work in the middle; another one is started when it has ended."""
    await asyncio.sleep(stack.rng.uniform(0.2, 1.5))
    async with stack.one_of_the_workers() as worker:
        stack.members.remove(worker)
        code, _ = await worker.terminate(seconds=30)
        assert code == 0, f"exit code {code} after SIGTERM"
        stack.start_worker()


async def freeze(stack: Stack) -> None:
    """SIGSTOP until the group has given up on it, then SIGCONT: what it knew is out of date.

    Then it is killed, and one of those who took over: where anybody committed what he should not have, that is lost.
    """
    async with stack.one_of_the_workers() as worker, stack.commits_only_advance():
        worker.process.send_signal(signal.SIGSTOP)
        stack.members.remove(worker)
        try:
            await asyncio.sleep(_SESSION_SECONDS + stack.rng.uniform(1, 3))
            await stack.until_assigned(seconds=60)
        finally:
            worker.process.send_signal(signal.SIGCONT)
            stack.members.append(worker)
        await asyncio.sleep(stack.rng.uniform(0.0, 2.0))
        assert worker.process.poll() is None, "the zombie ended"
        stack.replace(worker)
    async with stack.one_of_the_workers(like=worker) as other:
        stack.replace(other)


async def scale(stack: Stack) -> None:
    """One worker, three, one, two."""
    async with stack.commits_only_advance():
        joining = [stack.start_worker(), stack.start_worker()]
        for worker in joining:
            await worker.until_ready(seconds=_READY_SECONDS)
        await asyncio.sleep(2)
        for _ in range(2):
            await leave(stack)
        await asyncio.sleep(2)
        await stack.start_worker().until_ready(seconds=_READY_SECONDS)


async def leave(stack: Stack) -> None:
    async with stack.one_of_the_workers() as worker:
        stack.members.remove(worker)
        code, _ = await worker.terminate(seconds=30)
        assert code == 0, f"exit code {code} after SIGTERM"


async def join_and_leave(stack: Stack) -> None:
    """One more joins, and one of them all leaves in order, with work in the middle."""
    await stack.start_worker().until_ready(seconds=_READY_SECONDS)
    await asyncio.sleep(stack.rng.uniform(0.2, 1.5))
    await leave(stack)


# What one of them alone can serve, through a slow line and on a busy machine.
_PER_SECOND = 20.0

FAULTS = [
    Fault(
        "worker-kill",
        kill,
        prepare=slow_down,
        per_second=_PER_SECOND,
        rounds=50,
        limit_seconds=60,
        combinable=True,
    ),
    Fault(
        "worker-sigterm",
        terminate,
        prepare=slow_down,
        per_second=_PER_SECOND,
        rounds=5,
        limit_seconds=60,
        repeats=4 * CONCURRENCY,
        combinable=True,
    ),
    Fault(
        "worker-zombie",
        freeze,
        prepare=slow_down,
        per_second=_PER_SECOND,
        rounds=3,
        limit_seconds=60,
        repeats=3 * REPEATS_OF_A_MEMBER,
        combinable=True,
    ),
    Fault(
        "worker-scale-1-3-1-2",
        scale,
        prepare=slow_down,
        per_second=_PER_SECOND,
        workers=1,
        limit_seconds=60,
        repeats=5 * CONCURRENCY,
    ),
    # Who is asked to give its partitions back finishes what it has begun, and says so.
    Fault(
        "worker-join-and-leave",
        join_and_leave,
        prepare=slow_down,
        per_second=_PER_SECOND,
        rounds=50,
        limit_seconds=60,
        repeats=0,
    ),
]
