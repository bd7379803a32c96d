"""Faults of the workers themselves: killed, told to end, frozen, more of them and fewer."""

import asyncio

from tests.faults.fault import Fault
from tests.faults.stack import Stack

__all__ = ["FAULTS"]


async def kill(stack: Stack) -> None:
    """kill -9, at any moment; another one is started at once, as Kubernetes would."""
    await asyncio.sleep(stack.rng.uniform(0.2, 1.5))
    async with stack.one_of_the_workers() as worker:
        worker.kill()
        stack.members.remove(worker)
        stack.start_worker()


FAULTS = [Fault("worker-kill", kill, rounds=50, limit_seconds=40)]
