"""Faults of the two stages together: either is killed or frozen, the provider fails; from question to result."""

import asyncio

from tests.embedding.imitation import hang_up
from tests.faults.fault import REPEATS_OF_A_MEMBER, Fault
from tests.faults.load import questions
from tests.faults.stack import Stack
from tests.faults.workers import freeze, kill, slow_down

__all__ = ["FAULTS"]

_READY_SECONDS = 60.0
_OUTAGE_SECONDS = 10.0
_PER_SECOND = 20.0


async def lose_the_provider(stack: Stack) -> None:
    """Every connection to the provider is closed, until all embedding stages have noticed and for longer."""
    assert stack.provider is not None
    embedders = [worker for worker in stack.members if stack.is_embedder(worker)]
    stack.provider.failing = hang_up
    try:
        await asyncio.gather(*(each.until_ready(ready=False, seconds=_READY_SECONDS) for each in embedders))
        await asyncio.sleep(_OUTAGE_SECONDS)
        for each in embedders:
            assert each.is_live(), "an embedding stage is not alive"
    finally:
        stack.provider.failing = None


FAULTS = [
    Fault(
        "either-stage-killed",
        kill,
        prepare=slow_down,
        per_second=_PER_SECOND,
        events=questions,
        embedders=2,
        rounds=20,
        limit_seconds=60,
        # What an embedding stage repeats, a worker answers again.
        repeats=REPEATS_OF_A_MEMBER,
    ),
    Fault(
        "either-stage-zombie",
        freeze,
        prepare=slow_down,
        per_second=_PER_SECOND,
        events=questions,
        embedders=2,
        rounds=4,
        limit_seconds=60,
        repeats=3 * REPEATS_OF_A_MEMBER,
    ),
    Fault(
        "provider-cut-off",
        lose_the_provider,
        per_second=_PER_SECOND,
        events=questions,
        embedders=2,
        rounds=2,
        limit_seconds=60,
        repeats=0,
    ),
]
