"""A producer sends broken events; an operator replays dead letters."""

import asyncio
from functools import partial
from itertools import islice
from typing import Final

from tests.faults.load import good_events, name_of, poisoned
from tests.integration.harness import anabranch, until
from tests.ops.installation import Installation
from tests.ops.judge import Expectation
from tests.ops.scenario import Scenario, end_background

__all__ = ["POISON_FLOOD", "REPLAY", "SCENARIOS"]

# One event in ten, with the ten good ones per second.
_BAD_EVERY_SECONDS: Final = 0.8
_REPLAYED: Final = 300
_PROFILE: Final = "added-later"


async def flood(installation: Installation) -> None:
    async def send() -> None:
        for event in poisoned(good_events(), every=1):
            installation.stack.load.send(event)
            await asyncio.sleep(_BAD_EVERY_SECONDS)

    installation.background.append(asyncio.create_task(send()))


async def start_with_dead_letters(installation: Installation) -> None:
    """Events of a profile that the workers did not have were dead-lettered. Now they have it."""
    stack = installation.stack
    before = stack.start_worker()
    await before.until_ready(seconds=60)
    for event in islice(good_events(profile=_PROFILE), _REPLAYED):
        stack.load.send(event)
    await stack.output_reader.until(dead_letters=_REPLAYED)
    stack.members.remove(before)
    await before.terminate()
    profiles = stack.folder / "profiles.toml"
    profiles.write_text(f"[{_PROFILE}]\nk_default = 1\nk_min = 1\nk_max = 1\n", encoding="utf-8")
    for _ in range(2):
        stack.start_worker(ANABRANCH_PROFILES_FILE=str(profiles))


async def replay(installation: Installation) -> None:
    stack = installation.stack
    names = [name_of(record) for record in stack.output_reader.dead_letters]
    assert len(names) == _REPLAYED
    done = await asyncio.to_thread(
        partial(anabranch, "replay", "--code", "unknown_profile", "--apply", channel=stack.channel)
    )
    assert done.returncode == 0, done.stderr
    assert f"replayed {_REPLAYED} to" in done.stdout + done.stderr, done.stdout + done.stderr
    await stack.until_committed(60)
    await until(
        lambda: stack.published().keys() >= {*names},
        lambda: f"{len({*names} - stack.published().keys())} replayed events have no result",
        seconds=30,
    )
    installation.replayed = _REPLAYED
    installation.figures.append(f"{_REPLAYED} dead letters replayed")


POISON_FLOOD = Scenario(
    "poison-flood",
    Expectation({"DeadLettersHigh": 8}),
    flood,
    end_background,
    fault_minutes=9,
    runbook="a producer sends broken events",
)
REPLAY = Scenario(
    "replay", Expectation(recovery=None), replay, start=start_with_dead_letters, accounted=False
)
SCENARIOS = [POISON_FLOOD, REPLAY]
