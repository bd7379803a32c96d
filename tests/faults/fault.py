"""What a fault is, and one run of it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.accounting import Verdict
from tests.faults.load import Event, good_events
from tests.faults.stack import CONCURRENCY, Cluster, Servers, Stack, open_stack

__all__ = ["REPEATS_OF_A_MEMBER", "CannotBeHad", "Fault", "Outcome", "run"]

#: Most answers that one member's sudden end repeats: what was in work, and what was acknowledged since its last
#: commit, a quarter of a second ago, at the pace of catching up; commits too take their time on a busy machine.
REPEATS_OF_A_MEMBER = CONCURRENCY + 200

_SETTLE_SECONDS = 60.0
_READY_SECONDS = 30.0
_CALM_SECONDS = 2.0


class CannotBeHad(Exception):
    """This machine, or this user, does not let us break that; the message says why."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong under load, and is mended.

    Args:
        name: on the command line.
        inject: breaks something, and mends it before it returns; raises AssertionError where it did not bite.
        prepare: once, before the first worker starts.
        rounds: how often it strikes.
        workers: how many there are.
        embedders: how many embedding stages there are; with any, the events are questions in words.
        brokers: how many there are.
        per_second: the load.
        events: what the load is.
        settings: of the workers.
        program: what Python runs as a worker.
        limit_seconds: a round has failed when not all is well so long after it was mended.
        repeats: most repeats that a round may cause.
        combinable: whether it may strike while others do.
        of: what it is combined of.
        disk: where its broker keeps the records; a broker of its own then.
    """

    name: str
    inject: Callable[[Stack], Awaitable[None]]
    prepare: Callable[[Stack], Awaitable[None]] | None = None
    rounds: int = 1
    workers: int = 2
    embedders: int = 0
    brokers: int = 1
    per_second: float = 30.0
    events: Callable[[], Iterator[Event]] = good_events
    settings: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = ("-m", "streams", "worker")
    limit_seconds: float = 30.0
    repeats: int = REPEATS_OF_A_MEMBER
    combinable: bool = False
    of: str = ""
    disk: Callable[[], AbstractContextManager[Path]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Attributes:
        rounds: that were run.
        verdict: None where it did not come to an account.
        recovery: seconds from each mending until all was well.
        failures: a line for each promise that was broken; empty where all held.
    """

    fault: Fault
    rounds: int
    verdict: Verdict | None
    recovery: list[float]
    failures: list[str]
    seconds: float
    logs: str = ""


async def run(fault: Fault, servers: Servers, rng: Random, *, rounds: int | None = None) -> Outcome:
    """Runs one fault from start to account.

    Raises:
        CannotBeHad: not here.
    """
    began = time.monotonic()
    recovery: list[float] = []
    verdict, logs = None, ""
    failures = []
    struck = 0
    async with AsyncExitStack() as open_now:
        cluster = None
        if fault.disk is not None:
            data = open_now.enter_context(fault.disk()) / "data"
            cluster = await open_now.enter_async_context(Cluster(servers.jars, brokers=1, data=data))
        stack = await open_now.enter_async_context(
            open_stack(
                servers,
                brokers=fault.brokers,
                rng=rng,
                per_second=fault.per_second,
                events=fault.events,
                settings=fault.settings,
                program=fault.program,
                cluster=cluster,
                texts=fault.embedders > 0,
            )
        )
        try:
            if fault.prepare is not None:
                await fault.prepare(stack)
            for _ in range(fault.workers):
                stack.start_worker()
            for _ in range(fault.embedders):
                stack.start_embedder()
            for worker in stack.members:
                await worker.until_ready(seconds=_READY_SECONDS)
            await stack.load.start()
            await asyncio.sleep(_CALM_SECONDS)
            await stack.until_committed(_READY_SECONDS)
            for _ in range(rounds or fault.rounds):
                await fault.inject(stack)
                recovery.append(await stack.until_recovered(fault.limit_seconds))
                struck += 1
            await asyncio.sleep(_CALM_SECONDS)  # and it goes on
            verdict = await stack.settle(_SETTLE_SECONDS)
        except Exception as error:  # noqa: BLE001  # whatever it is, the account is due, and other faults' turn
            failures += [
                str(each) if isinstance(each, AssertionError) else f"{type(each).__name__}: {each}"
                for each in getattr(error, "exceptions", [error])
            ]
            verdict = await stack.account_for_the_worst(_SETTLE_SECONDS)
        failures += verdict.violations
        if verdict.repeats > fault.repeats * struck:
            failures.append(f"{verdict.repeats} repeats, over {fault.repeats} a round")
        logs = stack.logs
    return Outcome(fault, struck, verdict, recovery, failures, time.monotonic() - began, logs)
