"""``python -m tests.ops``: real faults, and which alerts fire; exit code 1 if not exactly those that should."""

import argparse
import asyncio
import logging
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.integration.kafka.apache_kafka import VERSION, KafkaUnavailable, jars
from tests.ops import health, outages, recall, traffic, workers
from tests.ops.clock import FACTOR
from tests.ops.exporter import exporter_program
from tests.ops.judge import Fired
from tests.ops.panels import load_dashboards
from tests.ops.prometheus import JOB, Unavailable, program
from tests.ops.runner import open_place_for, run_all
from tests.ops.scenario import Outcome, Scenario
from tests.ops.top_row import STATES
from tests.ops.units import formatted

SCENARIOS: Final = [
    *health.SCENARIOS,
    *outages.SCENARIOS,
    *workers.SCENARIOS,
    *traffic.SCENARIOS,
    *recall.SCENARIOS,
]
_WIDTH: Final = 150
_LANES: Final = 2


def _time(uncompressed_minutes: float) -> str:
    total = round(abs(uncompressed_minutes) * 60)
    return f"{'-' if uncompressed_minutes < 0 else ''}{total // 60}:{total % 60:02d}"


def _alert(alert: Fired, outcome: Outcome) -> str:
    limit = outcome.scenario.expected.within.get(alert.name)
    wanted = f" (≤ {_time(limit)})" if limit is not None else ""
    return f"{alert.name} {_time(alert.after)}{wanted}"


def _overview(outcome: Outcome) -> Iterator[str]:
    """When the state first was worse, and the last moment of the fault."""
    assert outcome.observed is not None
    moments = outcome.observed.moments
    for state in (1, 2):
        if first := next((each for each in moments if each.row.state == state), None):
            yield f"{STATES[state]} from {_time(first.after)}"
    if moments:
        yield f"at {_time(moments[-1].after)}: {moments[-1].row}"


def _recovered(outcome: Outcome) -> str:
    if outcome.scenario.expected.recovery is None:
        return "–"
    recovered = outcome.observed.recovered if outcome.observed is not None else None
    return "no" if recovered is None else _time(recovered)


def _table(outcomes: Sequence[Outcome]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 1, 0))
    for heading in ("scenario", "fired after", "silent", "top row of the overview", "recovered", "took s"):
        made.add_column(heading)
    for outcome in outcomes:
        colour = "red" if outcome.failures else "green"
        name = f"[{colour}]{'✗' if outcome.failures else '✓'}[/] {outcome.scenario.name}"
        if outcome.observed is None:
            made.add_row(name, "–", "–", "–", "–", f"{outcome.seconds:.0f}")
            continue
        fired = {alert.name for alert in outcome.observed.fired}
        missing = [alert for alert in outcome.scenario.expected.within if alert not in fired]
        made.add_row(
            name,
            "\n".join(_alert(alert, outcome) for alert in outcome.observed.fired) or "nothing",
            "\n".join(missing) + "\nwrongly" if missing else "all others",
            "\n".join(_overview(outcome)),
            _recovered(outcome),
            f"{outcome.seconds:.0f}",
        )
    return made


def _panels(outcomes: Sequence[Outcome]) -> Table:
    """Every panel: what it showed last in the first scenario, and the range of its values in all of them."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in (
        "dashboard",
        "panel",
        f"last, {outcomes[0].scenario.name}",
        "least to greatest",
        "in scenarios",
    ):
        made.add_column(heading)
    first = {(panel.dashboard, panel.title): panel for panel in outcomes[0].panels}
    for (dashboard, title), panel in first.items():
        same = [
            each
            for outcome in outcomes
            for each in outcome.panels
            if (each.dashboard, each.title) == (dashboard, title) and each.series
        ]
        values = [
            value
            for each in same
            for series in each.series
            for _, value in series.points
            if math.isfinite(value)
        ]
        span = [formatted(value, panel.unit) for value in (min(values), max(values))] if values else []
        last = [formatted(series.last, panel.unit) for series in panel.series if math.isfinite(series.last)]
        made.add_row(
            dashboard.removeprefix("Anabranch "),
            title,
            (last[0] + (f", … ({len(last)} series)" if len(last) > 1 else "")) if last else "–",
            " to ".join(span) or "–",
            f"{len(same)} of {len(outcomes)}",
        )
    return made


def _draw(outcomes: Sequence[Outcome], folder: Path) -> None:
    """A picture of each dashboard of each scenario."""
    from tests.ops.draw import draw  # noqa: PLC0415  # matplotlib is not installed for the tests

    folder.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        for dashboard in load_dashboards(FACTOR):
            if outcome.panels and ("store" not in dashboard["uid"] or outcome.scenario.exporter):
                name = f"{outcome.scenario.name}-{dashboard['uid'].removeprefix('anabranch-')}.png"
                draw(dashboard, outcome.panels, folder / name, hide=[outcome.scenario.name, JOB])


async def _run(console: Console, chosen: Sequence[Scenario], *, lanes: int, logs: bool) -> list[Outcome]:
    def report(outcome: Outcome) -> None:
        console.print(
            "[red]✗[/]" if outcome.failures else "[green]✓[/]",
            outcome.scenario.name,
            f"[dim]{outcome.seconds:.0f} s; {'; '.join(outcome.figures)}[/]",
        )
        for line in outcome.failures:
            console.print(f"  [red]✗[/] {line}", soft_wrap=True, markup=True)
        if outcome.failures and logs:
            console.print(outcome.logs, soft_wrap=True, markup=False, highlight=False)

    async with open_place_for(chosen, jars()) as place:
        return await run_all(chosen, place, lanes=lanes, report=report)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make ops", description=__doc__)
    parser.add_argument("--lanes", type=int, default=_LANES, help="scenarios that run side by side")
    parser.add_argument(
        "--logs", action="store_true", help="show the workers' last log lines after a failure"
    )
    parser.add_argument("--list", action="store_true", help="list the scenarios, and exit")
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help="draw the dashboards of each scenario (needs make .venv/.soak)",
    )
    parser.add_argument("scenarios", nargs="*", help="some of them; all by default")
    options = parser.parse_args()
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    if options.list:
        print("\n".join(by_name))
        return 0
    if unknown := {*options.scenarios} - {*by_name}:
        parser.error(f"unknown scenario: {', '.join(sorted(unknown))}")
    chosen = [by_name[name] for name in options.scenarios] or SCENARIOS
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    console.print(
        f"[bold]Alerts on real faults[/], all intervals of the rules divided by {FACTOR:g}, on {os.cpu_count()}"
        f" processors ({platform.machine()}), Python {platform.python_version()}, Apache Kafka {VERSION}"
    )
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # brokers that do not answer are intended
    began = perf_counter()
    try:
        program()
        if any(scenario.exporter for scenario in chosen):
            exporter_program()
        outcomes = asyncio.run(_run(console, chosen, lanes=options.lanes, logs=options.logs))
    except (KafkaUnavailable, Unavailable) as error:
        console.print(f"[red]✗[/] {error}")
        return 1
    except KeyboardInterrupt:
        console.print("[red]✗[/] interrupted")
        return 1
    console.print()
    console.print("Times are uncompressed minutes and seconds.")
    console.print(_table(outcomes))
    console.print("The dashboards' panels:")
    console.print(_panels(outcomes))
    console.print(f"[dim]{perf_counter() - began:.0f} s[/]")
    if options.pictures:
        _draw(outcomes, options.pictures)
    failed = [outcome for outcome in outcomes if outcome.failures]
    for outcome in failed:
        for line in outcome.failures:
            console.print(f"[red]✗[/] {outcome.scenario.name}: {line}", soft_wrap=True)
    if not failed:
        console.print("[green]✓[/] exactly the right alerts fired, in time")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
