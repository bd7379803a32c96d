"""What a part of the evaluation comes to: something to read, and the bounds that were missed."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

__all__ = ["Outcome", "mark", "milliseconds", "table"]


@dataclass(frozen=True)
class Outcome:
    """One part's findings.

    Attributes:
        title: of the part.
        shown: tables and remarks, in order.
        missed: a line for each bound that was missed; empty where all hold.
        known: a line for each known limitation; it is reported and fails nothing.
    """

    title: str
    shown: Sequence[RenderableType]
    missed: Sequence[str] = ()
    known: Sequence[str] = ()


def table(*columns: str, words: int = 1) -> Table:
    """A table whose first columns hold words, and whose others hold figures.

    Args:
        columns: their headings.
        words: how many columns are left-aligned.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(columns):
        made.add_column(heading, justify="left" if number < words else "right", no_wrap=True)
    return made


def mark(value: float, text: str, *, bound: float, goal: float, least: bool) -> str:
    """A figure in green where it reaches its goal, in yellow within its bound, else in red."""

    def reaches(limit: float) -> bool:
        return value >= limit if least else value <= limit

    colour = "green" if reaches(goal) else "yellow" if reaches(bound) else "red"
    return f"[{colour}]{text}[/]"


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
