"""A worker that ends again and again, and a partition that does not move."""

import asyncio
import time
from typing import Final

from tests.accounting import Asked
from tests.faults.load import Event
from tests.integration.harness import Worker
from tests.ops.clock import FACTOR, SCRAPE_SECONDS
from tests.ops.installation import Installation
from tests.ops.judge import Expectation
from tests.ops.outages import CONSEQUENCES
from tests.ops.scenario import Scenario, end_background

__all__ = ["CRASH_LOOP", "SCENARIOS", "STUCK_PARTITION"]

# Up for 45 s, down for 45 s. A start is not compressed: a worker is up until it has been scraped, which may take
# longer, and is down for the rest of the cycle.
_UP_SECONDS: Final = 45 / FACTOR
_CYCLE_SECONDS: Final = 90 / FACTOR
_MIN_DOWN_SECONDS: Final = 1.0
_SCRAPED_SECONDS: Final = 2 * SCRAPE_SECONDS
_STUCK: Final = 0
# Less than a dead letter without its event needs.
_TINY_TOPIC_BYTES: Final = "100"


async def crash_again_and_again(installation: Installation) -> None:
    installation.background.append(asyncio.create_task(_crash(installation, installation.stack.members[0])))


async def _crash(installation: Installation, worker: Worker) -> None:
    down = _CYCLE_SECONDS - _UP_SECONDS
    while True:
        worker.kill()
        installation.stack.members.remove(worker)
        try:
            await asyncio.sleep(down)
        finally:
            worker = installation.restart(worker)
        began = time.monotonic()
        while not await asyncio.to_thread(worker.is_live):  # noqa: ASYNC110  # it is another process
            await asyncio.sleep(0.1)
        await asyncio.sleep(max(_SCRAPED_SECONDS, began + _UP_SECONDS - time.monotonic()))
        down = max(_MIN_DOWN_SECONDS, began + _CYCLE_SECONDS - time.monotonic())


async def stick(installation: Installation) -> None:
    """The dead-letter topic accepts no dead letter, not even one without its event; and one event needs one."""
    stack = installation.stack
    await stack.configure_topic(stack.channel.dead_letters, {"max.message.bytes": _TINY_TOPIC_BYTES})
    stack.load.send(Event(Asked("stuck", b"stuck", "undecodable"), b"\xff not an event"), _STUCK)


async def correct_topic(installation: Installation) -> None:
    """The runbook: correct the topic, as `anabranch check` says."""
    await installation.stack.configure_topic(installation.stack.channel.dead_letters, {})


CRASH_LOOP = Scenario(
    "crash-loop",
    Expectation({"CrashLoop": 5}, state=1, state_within=5, recovery=18),
    crash_again_and_again,
    end_background,
    fault_minutes=8,
    runbook="crash loop",
    countable=False,
)
STUCK_PARTITION = Scenario(
    "stuck-partition",
    # The fix lets a dead letter without its event be written, which is a ticket for an hour.
    Expectation(
        {"PartitionStuck": 5},
        CONSEQUENCES,
        lasting=frozenset({"PlaceholderDeadLetters"}),
        state=1,
        state_within=5,
    ),
    stick,
    correct_topic,
    runbook="stuck partition",
)
SCENARIOS = [CRASH_LOOP, STUCK_PARTITION]
