"""Several faults at once, drawn from a seed: what each survives alone may not add up."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from tests.faults.fault import REPEATS_OF_A_MEMBER, Fault
from tests.faults.load import good_events, poisoned
from tests.faults.stack import Stack

__all__ = ["combine"]

_AT_ONCE = 3
_WITHIN_SECONDS = 5.0


def combine(faults: Sequence[Fault], seed: int, count: int) -> list[Fault]:
    """Combinations of faults that may strike together; the same ones for the same seed."""
    rng = Random(f"{seed} combinations")
    able = [fault for fault in faults if fault.combinable]
    return [_together(f"combined-{number + 1}", rng.sample(able, _AT_ONCE)) for number in range(count)]


def _together(name: str, chosen: Sequence[Fault]) -> Fault:
    async def prepare(stack: Stack) -> None:
        for each in chosen:
            if each.prepare is not None:
                await each.prepare(stack)

    return Fault(
        name,
        _inject_together([fault.inject for fault in chosen]),
        of=" + ".join(fault.name for fault in chosen),
        prepare=prepare,
        rounds=2,
        workers=3,
        per_second=20.0,
        events=lambda: poisoned(good_events(), every=10),
        limit_seconds=90,
        repeats=sum(fault.repeats for fault in chosen) + 2 * REPEATS_OF_A_MEMBER,
    )


def _inject_together(
    injections: Sequence[Callable[[Stack], Awaitable[None]]],
) -> Callable[[Stack], Awaitable[None]]:
    async def inject(stack: Stack) -> None:
        """Each begins when it likes; the last of them to be mended ends it."""

        async def later(one: Callable[[Stack], Awaitable[None]]) -> None:
            await asyncio.sleep(stack.rng.uniform(0, _WITHIN_SECONDS))
            await one(stack)

        async with asyncio.TaskGroup() as together:
            for one in injections:
                together.create_task(later(one))

    return inject
