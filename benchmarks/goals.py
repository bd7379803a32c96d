"""The goals, as ratios of medians within one run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contestants import Figures
from streams.bench.world import Workload

__all__ = ["Goal", "goals_of", "show_goals", "table_of"]


class Measurements(Protocol):
    """What a run has measured."""

    loads: list[dict[str, float]]
    access: dict[str, list[float]]

    def throughput_ratio(self, name: str) -> float: ...

    def cpu_ratio(self, name: str) -> float: ...

    def recall(self, name: str, workload: Workload, kind: str) -> float: ...

    def median(self, contestant: str, workload: Workload, value: Callable[[Figures], float]) -> float: ...


@dataclass(frozen=True)
class Goal:
    """One line of the table.

    Attributes:
        title: what is measured.
        value: None if this run does not measure it.
        limit: the goal.
        direction: whether the value must be at least or at most the goal.
        unit: printed after both.
        digits: after the decimal point.
    """

    title: str
    value: float | None
    limit: float
    direction: Literal["≥", "≤"]
    unit: str = ""
    digits: int = 2

    @property
    def reached(self) -> bool:
        if self.value is None or np.isnan(self.value):
            return False
        return self.value >= self.limit if self.direction == "≥" else self.value <= self.limit

    @property
    def shown(self) -> str:
        return f"{self.value:,.{self.digits}f}{self.unit}"

    @property
    def bound(self) -> str:
        return f"{self.direction} {self.limit:,g}{self.unit}"


def goals_of(run: Measurements) -> list[Goal]:
    """The table of goals; the last two rows come from `make bench-long`."""
    half = next(line for line in run.loads if line["share"] == 0.5)  # half load
    low = run.loads[0]
    access = float(np.median(run.access["with"]) / np.median(run.access["without"]))
    worker_cpu = run.median("pipeline", "mixed", lambda each: each.cpu["worker"])

    def ratio(name: str) -> float | None:
        value = run.throughput_ratio(name)
        return None if np.isnan(value) else value

    return [
        Goal(
            "throughput, pipeline / ceiling, per CPU-second of PostgreSQL + worker",
            run.cpu_ratio("ceiling"),
            0.85,
            "≥",
        ),
        Goal(
            "throughput, pipeline / plain statements at equal recall (or ef_search 1,000)",
            ratio("plain"),
            1.5,
            "≥",
        ),
        Goal("throughput, pipeline / FastStream, likewise", ratio("faststream"), 2.5, "≥"),
        Goal("throughput, pipeline / LangChain loop, likewise", ratio("langchain"), 5, "≥"),
        Goal(
            "recall@15, extraction, grown collection",
            run.recall("pipeline", "extraction", "extraction"),
            0.99,
            "≥",
            digits=3,
        ),
        Goal("worker CPU per event", worker_cpu, 1000, "≤", " µs", 0),
        Goal("time outside SQL at half load, p99", 1000 * half["outside p99"], 5, "≤", " ms", 1),
        Goal(
            "chat event's search time / the slower of its two arms, median at low load",
            low["fan-out p50"],
            1.15,
            "≤",
        ),
        Goal(
            "p99 event duration at half load / p99 of the slower arm of the same events",
            half["duration p99"] / half["slower p99"],
            1.3,
            "≤",
        ),
        Goal("with access control / without", access, 1.15, "≤"),
        Goal("100,000 chunks / 10,000 chunks, p50 of a search", None, 1.5, "≤"),
        Goal("RSS after 200,000 events / after 10,000", None, 1.05, "≤"),
    ]


def table_of(*columns: str, first: str) -> Table:
    """A table with figures in all columns but the first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def show_goals(console: Console, goals: Sequence[Goal]) -> None:
    """Print the table of goals."""
    table = table_of("measured", "goal", "", first="goals")
    for goal in goals:
        colour, mark = ("green", "✓") if goal.reached else ("red", "✗")
        table.add_row(
            goal.title,
            "–" if goal.value is None else f"[{colour}]{goal.shown}[/]",
            goal.bound,
            "bench-long" if goal.value is None else f"[{colour}]{mark}[/]",
        )
    console.print()
    console.print(table)
