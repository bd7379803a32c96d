"""Some of the faults that `make faults` runs, as tests.

And proof that the accounting sees what it is for: workers that acknowledge wrongly, in three ways, and what they lose.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from itertools import count

import pytest

from tests.faults import batches, brokers, flow, log_gaps, store, topics, workers
from tests.faults.accounting import Verdict
from tests.faults.broken import WAYS
from tests.faults.fault import run
from tests.faults.load import Event, good_events
from tests.faults.network import FAULTS as NETWORK
from tests.faults.stack import Servers, Stack, open_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAULTS = {
    fault.name: fault
    for faults in (workers, brokers, store, log_gaps, batches, flow, topics)
    for fault in [*faults.FAULTS, *NETWORK]
}


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("worker-kill", 10),
        ("worker-sigterm", 2),
        ("worker-zombie", 1),
        ("worker-scale-1-3-1-2", 1),
        ("store-immediate-stop", 2),
        ("store-away-longer-than-poll", 1),
        ("broker-kill", 1),
        ("gaps-by-aborted-transactions", 1),
        ("batches-of-every-codec", 1),
        ("batch-unreadable", 1),
        ("batch-inflates-without-end", 1),
        ("dead-letter-too-large", 1),
        ("worker-join-and-leave", 3),
        ("slow-events", 1),
        ("burst", 1),
        ("sender-killed", 2),
        ("commits-rejected", 1),
        ("kafka-gone-at-sigterm", 1),
        ("topic-recreated", 2),
    ],
)
async def test_nothing_is_lost(servers: Servers, name: str, rounds: int) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    outcome = await run(FAULTS[name], servers, random.Random(seed), rounds=rounds)
    print(f"seed {seed}: {outcome.verdict}, recovery {outcome.recovery}\n{outcome.logs}")
    assert outcome.failures == []
    assert outcome.rounds == rounds
    assert outcome.verdict is not None
    assert outcome.verdict.events > 100


# A worker that acknowledges wrongly, with a fault that finds it out at once.


def some_slow() -> Iterator[Event]:
    """One in ten takes two seconds, so that those behind it are done before it."""
    quick, slow = good_events(), good_events(principals=["user:slow"])
    for number in count():
        yield next(slow if number % 10 == 5 else quick)


async def kill(stack: Stack) -> None:
    """In the middle of searches that take long."""
    for _ in range(2):
        await asyncio.sleep(stack.rng.uniform(2, 3))
        await stack.replace(stack.members[0]).until_ready(seconds=60)


async def kill_behind_a_slow_line(stack: Stack) -> None:
    """Each event is in work for a second or more."""
    for _ in range(2):
        stack.store_proxy.delay_seconds = 0.05
        await asyncio.sleep(stack.rng.uniform(2, 3))
        worker = stack.replace(stack.members[0])
        stack.repair()
        await worker.until_ready(seconds=60)


async def kill_after_resets(stack: Stack) -> None:
    stack.store_proxy.delay_seconds = 0.02  # so that there is something in work to break off
    await FAULTS["store-connections-reset"].inject(stack)
    stack.repair()
    await kill(stack)


STRIKES = {
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


@pytest.mark.parametrize("way", WAYS)
async def test_the_accounting_names_what_a_broken_acknowledgement_loses(servers: Servers, way: str) -> None:
    verdict = await account_for(servers, [STRIKES[way]], "tests.faults.broken", way, per_second=8)
    assert verdict.lost
    assert verdict.violations[0].startswith(f"{len(verdict.lost)} lost: ")
    assert verdict.lost[0] in verdict.violations[0]


async def test_the_same_injections_cost_an_unbroken_worker_nothing(servers: Servers) -> None:
    verdict = await account_for(
        servers, [kill_behind_a_slow_line, kill_after_resets], "streams", "worker", per_second=4
    )
    assert verdict.violations == []
    assert verdict.events > 100
