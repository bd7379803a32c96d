"""`anabranch bench`: runs the measurements and prints them."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from streams.bench.run import BenchReport, Line, bench_deployment, bench_embedded
from streams.bench.world import Workload
from streams.cli.errors import Unusable
from streams.cli.publish import read_events
from streams.core.messages import QueryEmbedding
from streams.settings import Settings
from streams.terminal import Console, Text, echo, json_text

__all__ = ["as_json", "bench", "read_all", "show"]


def read_all(lines: Iterable[bytes], *, dimensions: int) -> list[QueryEmbedding]:
    """The events of all lines, as `anabranch publish` reads them.

    Raises:
        Unusable: a line is invalid; every such line is reported first.
    """
    valid, invalid = read_events(lines, dimensions=dimensions)
    for line in invalid:
        echo(str(line), err=True)
    if invalid:
        raise Unusable(f"--events: {len(invalid)} of {len(valid) + len(invalid)} lines are invalid")
    return [line.event for line in valid]


async def bench(
    settings: Settings,
    queries: Sequence[QueryEmbedding] | None,
    *,
    chunks: int,
    workload: Workload,
    rate: float | None,
    seconds: float,
) -> BenchReport:
    """Measure a deployment if there are queries and a rate, else embedded servers."""

    def report(step: str) -> None:
        echo(f"• {step}", err=True)

    if queries is None:
        return await bench_embedded(
            chunks=chunks, workload=workload, rate=rate, seconds=seconds, report=report
        )
    if rate is None:
        raise ValueError("a deployment is only measured at a given rate")
    return await bench_deployment(settings, queries, rate=rate, seconds=seconds, report=report)


def as_json(report: BenchReport) -> str:
    """The report as one JSON object; its keys are those of `BenchReport` and `Line`."""
    return json_text(report.to_json())


def show(report: BenchReport) -> None:
    """Print the report."""
    console = Console()
    console.print(Text(report.about, style="bold"))
    latencies = _table("events/s", "p50 ms", "p95", "p99", "max", "unanswered")
    for line in report.lines:
        figures = [f"{value:.1f}" for value in line.latency.values()] or ["–"] * 4
        unanswered = Text(f"{line.unanswered:,}", style="red" if line.unanswered else "")
        latencies.add_row(_name(line), f"{line.per_second:.0f}", *figures, unanswered)
    console.print(latencies)
    processes = list(dict.fromkeys(process for line in report.lines for process in line.cpu))
    cpu = _table(*processes)
    for line in report.lines:
        cpu.add_row(
            _name(line),
            *(f"{line.cpu[process]:,.0f}" if process in line.cpu else "–" for process in processes),
        )
    console.print("\nCPU per event, µs")
    console.print(cpu)
    if report.ratio is not None:
        console.print(
            f"\nThe pipeline reaches {report.ratio:.2f} of the ceiling (the same SQL in a bare loop) per CPU-second of"
            " PostgreSQL and worker."
        )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _name(line: Line) -> str:
    return line.name if line.offered is None else f"{line.name}, {line.offered:.0f}/s offered"
