"""Runs scenarios on one Prometheus: the healthy ones in the background, and a few of the others side by side."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tests.ops.place import Place, open_place
from tests.ops.scenario import Outcome, Scenario, run

__all__ = ["open_place_for", "run_all"]


def open_place_for(scenarios: Sequence[Scenario], jars: Path) -> AbstractAsyncContextManager[Place]:
    """With all servers that these scenarios need."""
    return open_place(
        jars,
        own_brokers=[scenario.name for scenario in scenarios if scenario.own_broker],
        own_stores=[scenario.name for scenario in scenarios if scenario.own_store],
    )


async def run_all(
    scenarios: Sequence[Scenario],
    place: Place,
    *,
    lanes: int,
    report: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """The outcomes, in the order of the scenarios.

    Args:
        scenarios: what to run.
        place: where.
        lanes: how many scenarios run side by side, without those in the background.
        report: called after each.
    """
    others_done = asyncio.Event()
    free = asyncio.Semaphore(lanes)

    async def one(scenario: Scenario) -> Outcome:
        if scenario.background:
            outcome = await run(scenario, place, until=others_done)
        else:
            async with free:
                outcome = await run(scenario, place)
        report(outcome)
        return outcome

    background = [asyncio.create_task(one(scenario)) for scenario in scenarios if scenario.background]
    others = [
        asyncio.create_task(one(scenario))
        for scenario in scenarios
        if not scenario.background and not scenario.alone
    ]
    try:
        await asyncio.gather(*others)
        for scenario in scenarios:
            if scenario.alone:
                others.append(asyncio.create_task(one(scenario)))
                await others[-1]
        others_done.set()
        await asyncio.gather(*background)
    finally:
        for task in (*background, *others):
            if not task.cancelling():  # a second time would interrupt its cleanup
                task.cancel()
        await asyncio.gather(*background, *others, return_exceptions=True)
    outcomes = {task.result().scenario.name: task.result() for task in (*background, *others)}
    return [outcomes[scenario.name] for scenario in scenarios]
