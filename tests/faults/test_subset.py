"""Some of the faults that `make faults` runs, as tests.

Slow events, bursts, topics that come late or again, and Kafka gone at SIGTERM are tested in tests/integration.
"""

import random

import pytest

from tests.faults import batches, brokers, flow, log_gaps, rejections, store, workers
from tests.faults.fault import run
from tests.faults.stack import Servers

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAULTS = {
    fault.name: fault
    for module in (workers, brokers, store, log_gaps, rejections, batches, flow)
    for fault in module.FAULTS
}


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("worker-kill", 5),
        ("worker-sigterm", 1),
        ("worker-zombie", 1),
        ("store-immediate-stop", 1),
        ("broker-kill", 1),
        ("gaps-by-aborted-transactions", 1),
        ("batches-of-every-codec", 1),
        ("batch-unreadable", 1),
        ("batch-inflates-without-end", 1),
        ("dead-letter-too-large", 1),
        ("results-unauthorized", 1),
        ("worker-join-and-leave", 1),
        ("sender-killed", 2),
        ("commits-rejected", 1),
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
