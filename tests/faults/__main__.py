"""``python -m tests.faults``: every fault, under load, on real servers; exit code 1 where an event was lost."""

import argparse
import asyncio
import logging
import os
import platform
import random
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.faults import (
    batches,
    brokers,
    embedders,
    flow,
    log_gaps,
    network,
    rejections,
    store,
    topics,
    workers,
)
from tests.faults.combined import combine
from tests.faults.fault import CannotBeHad, Fault, Outcome, run
from tests.faults.stack import Servers
from tests.integration.kafka.apache_kafka import VERSION, KafkaUnavailable, jars

FAULTS: Final = [
    *workers.FAULTS,
    *embedders.FAULTS,
    *brokers.FAULTS,
    *store.FAULTS,
    *network.FAULTS,
    *log_gaps.FAULTS,
    *rejections.FAULTS,
    *batches.FAULTS,
    *flow.FAULTS,
    *topics.FAULTS,
]
_WIDTH: Final = 118


def _table() -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("fault", no_wrap=True)
    for heading in ("rounds", "events", "lost", "repeats", "overtaken", "recovery s", "at most", "took s"):
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def _row(outcome: Outcome) -> Sequence[str]:
    verdict = outcome.verdict
    colour = "red" if outcome.failures else "green"
    return (
        f"[{colour}]{'✗' if outcome.failures else '✓'}[/] {outcome.fault.name}",
        str(outcome.rounds),
        "–" if verdict is None else f"{verdict.events:,}",
        "–" if verdict is None else f"{len(verdict.lost):,}",
        "–" if verdict is None else f"{verdict.repeats:,}",
        "–" if verdict is None else f"{verdict.overtaken:,}",
        "–" if not outcome.recovery else f"{max(outcome.recovery):.1f}",
        f"{outcome.fault.limit_seconds:.0f}",
        f"{outcome.seconds:.0f}",
    )


async def _run_all(
    console: Console, faults: Sequence[Fault], *, seed: int, rounds: int | None, logs: bool
) -> list[Outcome]:
    outcomes = []
    async with Servers(jars()) as servers:
        for number, fault in enumerate(faults, start=1):
            console.print(
                f"[dim]{number}/{len(faults)}[/] {fault.name}{fault.of and f': {fault.of}'} …", end=" "
            )
            try:
                outcome = await run(fault, servers, random.Random(f"{seed} {fault.name}"), rounds=rounds)
            except CannotBeHad as reason:
                console.print(f"[yellow]left out[/]: {reason}")
                continue
            outcomes.append(outcome)
            console.print("[red]✗[/]" if outcome.failures else "[green]✓[/]", f"{outcome.seconds:.0f} s")
            for line in outcome.failures:
                console.print(f"  [red]✗[/] {line}", soft_wrap=True, markup=True)
            if outcome.failures or logs:
                console.print(outcome.logs, soft_wrap=True, markup=False, highlight=False)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=None, help="of what is random; printed, and drawn by default"
    )
    parser.add_argument("--rounds", type=int, default=None, help="of each fault, instead of its own number")
    parser.add_argument("--combinations", type=int, default=3, help="draws of several faults at once")
    parser.add_argument(
        "--logs", action="store_true", help="show the workers' last words, whatever came of it"
    )
    parser.add_argument("--list", action="store_true", help="name the faults, and end")
    parser.add_argument("faults", nargs="*", help="some of them, or 'combined'; all by default")
    options = parser.parse_args()
    by_name = {fault.name: fault for fault in FAULTS}
    if options.list:
        print("\n".join(by_name))
        return 0
    if unknown := {*options.faults} - {*by_name, "combined"}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    combinations = combine(FAULTS, seed, options.combinations)
    chosen = [by_name[name] for name in options.faults if name in by_name]
    if "combined" in options.faults:
        chosen += combinations
    chosen = chosen or [*FAULTS, *combinations]
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    console.print(
        f"[bold]Anabranch under faults[/] with seed {seed}, on {os.cpu_count()} processors"
        f" ({platform.machine()}), Python {platform.python_version()}, Apache Kafka {VERSION}"
    )
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # brokers that are away are the point
    began = perf_counter()
    try:
        outcomes = asyncio.run(_run_all(console, chosen, seed=seed, rounds=options.rounds, logs=options.logs))
    except KafkaUnavailable as error:
        console.print(f"[red]✗[/] {error}")
        return 1
    table = _table()
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    console.print()
    console.print(table)
    console.print(f"\n[dim]{perf_counter() - began:.0f} s[/]")
    failed = [outcome for outcome in outcomes if outcome.failures]
    for outcome in failed:
        for line in outcome.failures:
            console.print(f"[red]✗[/] {outcome.fault.name}: {line}", soft_wrap=True)
    if not failed:
        console.print("[green]✓[/] nothing was lost, and every promise held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
