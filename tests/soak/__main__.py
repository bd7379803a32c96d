"""``python -m tests.soak``: one worker under load, a fault each minute; exit code 1 where anything grew or was lost."""

import argparse
import asyncio
import logging
import os
import platform
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from tests.evaluate.outcome import table
from tests.faults.fault import Fault
from tests.faults.load import Event, good_events, poisoned
from tests.faults.stack import CONCURRENCY, Servers, Stack, open_stack
from tests.integration.kafka.apache_kafka import VERSION, KafkaUnavailable, jars
from tests.soak.flatness import Finding, bounds, judge
from tests.soak.injections import dealt
from tests.soak.plot import draw
from tests.soak.record import Injection, Record
from tests.soak.watch import Watch
from tests.soak.worker import LEAKS

_WIDTH: Final = 118
_READY_SECONDS: Final = 60.0
_RECOVERY_SECONDS: Final = 90.0
_SETTLE_SECONDS: Final = 180.0
_END_SECONDS: Final = 30.0
_ONE_BAD_IN: Final = 50
# Two for each event in work and one for the probe.
_POOL: Final = 2 * CONCURRENCY + 1


def _events() -> Iterator[Event]:
    """Most of them good."""
    return poisoned(good_events(), every=_ONE_BAD_IN)


class Soak:
    """One run.

    Args:
        every_seconds: from one fault to the next; a late recovery puts the next one off.
        record: what becomes of it.
    """

    def __init__(self, console: Console, rng: random.Random, *, every_seconds: float, record: Record) -> None:
        self._console = console
        self._rng = rng
        self._every = every_seconds
        self._record = record

    async def run(self, *, per_second: float, leaks: Sequence[str]) -> None:
        program = ["-m", "tests.soak.worker", *leaks]
        async with (
            Servers(jars()) as servers,
            open_stack(
                servers, brokers=1, rng=self._rng, per_second=per_second, events=_events, program=program
            ) as stack,
        ):
            worker = stack.start_worker()
            await worker.until_ready(seconds=_READY_SECONDS)
            await stack.load.start()
            watch = Watch(
                worker, store=stack.store_proxy.port, kafka=[proxy.port for proxy in stack.cluster.proxies]
            )
            self._record.samples = watch.samples
            try:
                async with watch.watching():
                    await self._inject_faults(servers, stack, watch)
                    self._record.seconds = watch.seconds
                await self._settle(stack)
                code, _ = await worker.terminate(seconds=_END_SECONDS)
                assert code == 0, f"exit code {code} after SIGTERM"
            except AssertionError as error:
                self._record.failures.append(str(error))
            if self._record.failures:
                self._console.print(stack.logs, soft_wrap=True, markup=False, highlight=False)

    async def _inject_faults(self, servers: Servers, stack: Stack, watch: Watch) -> None:
        [worker] = stack.members
        due = self._every / 2
        for fault in dealt(self._rng):
            # The last one too is followed by a lull.
            if max(due, watch.seconds) > self._record.seconds - self._every:
                break
            await asyncio.sleep(due - watch.seconds)
            injection = await self._inject(fault, servers, stack, watch)
            self._record.injections.append(injection)
            self._console.print(
                f"{injection.began / 60:5.1f} min  {injection.name:<30}"
                f" {injection.repaired - injection.began:5.1f} s,"
                f" and well {injection.recovered - injection.repaired:.1f} s later"
                f"{f'  [red]✗[/] {injection.failure}' if injection.failure else ''}",
                soft_wrap=True,
            )
            assert worker.process.poll() is None, (
                f"the worker ended in {injection.name}:\n{worker.log[-4000:]}"
            )
            due = max(due + self._every, injection.recovered + self._every / 3)
        await asyncio.sleep(self._record.seconds - watch.seconds)

    async def _inject(self, fault: Fault, servers: Servers, stack: Stack, watch: Watch) -> Injection:
        began = repaired = watch.seconds
        failure = None
        try:
            await fault.inject(stack)
            repaired = watch.seconds
            await stack.until_recovered(_RECOVERY_SECONDS)
        except Exception as error:  # noqa: BLE001  # half an hour is not thrown away for one fault's sake
            repaired = max(repaired, watch.seconds) if repaired == began else repaired
            failure = f"{fault.name}: {type(error).__name__}: {error}"
            self._record.failures.append(failure)
            stack.repair()
            await servers.store()
            await stack.cluster.until_up()
            await stack.until_recovered(_RECOVERY_SECONDS)
        return Injection(fault.name, began, repaired, watch.seconds, failure)

    async def _settle(self, stack: Stack) -> None:
        verdict = await stack.settle(_SETTLE_SECONDS)
        self._record.failures += verdict.violations
        self._record.facts.append(
            f"{verdict.events:,} events, {len(verdict.lost):,} lost, {verdict.repeats:,} repeats"
        )


def _show(console: Console, record: Record, findings: list[Finding]) -> None:
    shown = table("over the second half", "level", "growth", "at most", "highest in a lull", "at most")
    for finding in findings:
        unit, bound = finding.bound.unit, finding.bound
        digits = 1 if unit > 1 else 0
        colour = "red" if finding.failures else "green"
        shown.add_row(
            f"[{colour}]{'✗' if finding.failures else '✓'}[/] {bound.title}",
            f"{finding.level / unit:.{digits}f}",
            f"{finding.growth / unit:+.1f}",
            "–" if finding.limit is None else f"{finding.limit / unit:.1f}",
            f"{finding.highest / unit:.{digits}f}",
            "–" if bound.ceiling is None else f"{bound.ceiling / unit:.{digits}f}",
        )
    console.print()
    console.print(shown)
    console.print()
    for fact in record.facts:
        console.print(fact)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of load")
    parser.add_argument(
        "--seed", type=int, default=None, help="of what is random; printed, and drawn by default"
    )
    parser.add_argument(
        "--every", type=float, default=60.0, metavar="SECONDS", help="from one fault to the next"
    )
    parser.add_argument("--per-second", type=float, default=30.0, metavar="EVENTS", help="the load")
    parser.add_argument(
        "--leak", choices=LEAKS, nargs="+", default=[], help="see a worker fail that leaks on purpose"
    )
    parser.add_argument(
        "--into", type=Path, default=Path("build/soak"), help="folder for soak.json and soak.png"
    )
    parser.add_argument("--again", type=Path, metavar="JSON", help="judge and draw what was seen before")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    if options.again is not None:
        record = Record.load(options.again)
    else:
        seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
        title = (
            f"{options.minutes:g} minutes, {options.per_second:g} events a second, one in {_ONE_BAD_IN} bad,"
            f" a fault every {options.every:g} s, seed {seed}"
            f"{', leaking ' if options.leak else ''}{' and '.join(options.leak)}"
        )
        record = Record(seconds=60 * options.minutes, settle_seconds=options.every / 6)
        machine = (
            f"{os.cpu_count()} processors ({platform.machine()}), Python {platform.python_version()},"
            f" Apache Kafka {VERSION}"
        )
        record.facts = [title, machine]
        console.print(f"[bold]Anabranch in a soak:[/] {title}; on {machine}")
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # brokers that are away are the point
        soak = Soak(console, random.Random(seed), every_seconds=options.every, record=record)
        try:
            asyncio.run(soak.run(per_second=options.per_second, leaks=options.leak))
        except KafkaUnavailable as error:
            console.print(f"[red]✗[/] {error}")
            return 1
        finally:
            record.save(options.into / "soak.json")
    options.into.mkdir(parents=True, exist_ok=True)
    run, _, *facts = record.facts
    draw(record, options.into / "soak.png", title="\n".join([run, *facts]))
    findings = [judge(record, bound) for bound in bounds(pool=_POOL)]
    _show(console, record, findings)
    failures = [*record.failures, *(line for finding in findings for line in finding.failures)]
    for line in failures:
        console.print(f"[red]✗[/] {line}", soft_wrap=True)
    if not failures:
        console.print("[green]✓[/] nothing grew, and nothing was lost")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
