"""The accounting sees what it is for: workers and embedding stages that acknowledge wrongly, and what they lose.

Each has a fault that makes it lose events at once.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import count
from typing import Final

import pytest

from tests.accounting import Verdict
from tests.embedding.imitation import status
from tests.faults import store
from tests.faults.broken import WAYS
from tests.faults.load import Event, good_events, questions
from tests.faults.network import FAULTS as NETWORK
from tests.faults.stack import Servers, Stack, open_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESETS = next(fault for fault in NETWORK if fault.name == "store-connections-reset")


def some_slow() -> Iterator[Event]:
    """One in ten takes two seconds, so that later events finish first."""
    quick, slow = good_events(), good_events(principals=["user:slow"])
    for number in count():
        yield next(slow if number % 10 == 5 else quick)


async def kill(stack: Stack) -> None:
    """During long searches."""
    for _ in range(2):
        await asyncio.sleep(stack.rng.uniform(2, 3))
        await stack.replace(stack.members[0]).until_ready(seconds=60)


async def kill_behind_a_slow_line(stack: Stack) -> None:
    """Each event is in flight for a second or more."""
    for _ in range(2):
        stack.store_proxy.delay_seconds = 0.05
        await asyncio.sleep(stack.rng.uniform(2, 3))
        worker = stack.replace(stack.members[0])
        stack.repair()
        await worker.until_ready(seconds=60)


async def kill_after_resets(stack: Stack) -> None:
    stack.store_proxy.delay_seconds = 0.02  # so that there is something in flight to interrupt
    await RESETS.inject(stack)
    stack.repair()
    await kill(stack)


LONGEST: Final = "on_exception"
INJECTIONS = {
    "before_publishing": kill_behind_a_slow_line,
    "out_of_order": kill,
    "on_exception": kill_after_resets,
}


async def account_for(
    servers: Servers,
    injections: list[Callable[[Stack], Awaitable[None]]],
    *program: str,
    per_second: float,
) -> Verdict:
    async with open_stack(
        servers,
        brokers=1,
        rng=random.Random(7),
        per_second=per_second,
        events=some_slow,
        program=("-m", *program),
    ) as stack:
        await store.make_some_slow(stack)
        await stack.start_worker().until_ready(seconds=60)
        await stack.load.start()
        for inject in injections:
            await inject(stack)
        verdict = await stack.settle(120)
        print(f"{verdict}\n{stack.logs}")
        return verdict


def shorter(ways: Iterable[str]) -> list[str]:
    """Without the one that takes longest."""
    return [way for way in ways if way != LONGEST]


async def assert_a_worker_loses(servers: Servers, way: str) -> None:
    verdict = await account_for(servers, [INJECTIONS[way]], "tests.faults.broken", way, per_second=8)
    assert verdict.lost
    assert verdict.violations[0].startswith(f"{len(verdict.lost)} lost: ")
    assert verdict.lost[0] in verdict.violations[0]


@pytest.mark.parametrize("way", shorter(WAYS))
async def test_the_accounting_names_what_a_broken_acknowledgement_loses(servers: Servers, way: str) -> None:
    await assert_a_worker_loses(servers, way)


@pytest.mark.long
async def test_the_accounting_names_what_is_lost_on_an_exception(servers: Servers) -> None:
    await assert_a_worker_loses(servers, LONGEST)


@pytest.mark.long  # in `make test`, the subset of `make faults` shows it
async def test_the_same_injections_cost_an_unbroken_worker_nothing(servers: Servers) -> None:
    verdict = await account_for(
        servers, [kill_behind_a_slow_line, kill_after_resets], "streams", "worker", per_second=4
    )
    assert verdict.violations == []
    assert verdict.events > 100


# Embedding stages: from the question to the result


async def kill_behind_a_slow_provider(stack: Stack) -> None:
    """Each question is in flight for a second or more."""
    assert stack.provider is not None
    stack.provider.delay_seconds = 1
    await asyncio.sleep(stack.rng.uniform(2, 3))
    (embedder,) = (worker for worker in stack.members if stack.is_embedder(worker))
    embedder = stack.replace(embedder)
    stack.provider.delay_seconds = 0
    await embedder.until_ready(seconds=60)


async def break_the_provider(stack: Stack) -> None:
    """It answers every call with an error for a while."""
    assert stack.provider is not None
    stack.provider.failing = status(500)
    await asyncio.sleep(3)
    stack.provider.failing = None


# `out_of_order` is in the code that both stages share.
EMBEDDER_INJECTIONS = {
    "before_publishing": kill_behind_a_slow_provider,
    "on_exception": break_the_provider,
}


@pytest.mark.parametrize("way", shorter(EMBEDDER_INJECTIONS))
async def test_the_accounting_names_what_a_broken_embedding_stage_loses(servers: Servers, way: str) -> None:
    await assert_a_stage_loses(servers, way)


@pytest.mark.long
async def test_the_accounting_names_what_a_stage_loses_on_an_exception(servers: Servers) -> None:
    await assert_a_stage_loses(servers, LONGEST)


async def assert_a_stage_loses(servers: Servers, way: str) -> None:
    async with open_stack(
        servers, brokers=1, rng=random.Random(7), per_second=8, events=questions, texts=True
    ) as stack:
        stack.embedder_program = ("-m", "tests.faults.broken", way, "embedder")
        for member in (stack.start_worker(), stack.start_embedder()):
            await member.until_ready(seconds=60)
        await stack.load.start()
        await EMBEDDER_INJECTIONS[way](stack)
        verdict = await stack.settle(120)
        print(f"{verdict}\n{stack.logs}")
    assert verdict.lost
    assert verdict.violations[0].startswith(f"{len(verdict.lost)} lost: ")
