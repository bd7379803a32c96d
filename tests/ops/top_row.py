"""What an operator sees in the first row of the overview, by its own queries."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from k8s.observability import dashboards
from tests.ops.clock import PARAMETERS
from tests.ops.prometheus import JOB, Prometheus

__all__ = ["STATES", "TopRow", "first_row", "top_row"]

STATES: Final = ("WELL", "DEGRADED", "OUT")


@dataclass(frozen=True)
class TopRow:
    """None: the panel shows "No data".

    Attributes:
        state: index in STATES.
        oldest: seconds.
    """

    state: int | None
    oldest: float | None
    pages: int
    tickets: int
    ready: int | None
    wanted: int | None

    def __str__(self) -> str:
        state = "no data" if self.state is None else STATES[self.state]
        oldest = "no data" if self.oldest is None else f"{self.oldest:.1f} s"
        ready, wanted = ("?" if number is None else number for number in (self.ready, self.wanted))
        return (
            f"{state}, oldest {oldest}, {self.pages} pages, {self.tickets} tickets, ready {ready} of {wanted}"
        )


@cache
def first_row() -> Mapping[str, Sequence[str]]:
    """The queries of its panels, by title."""
    panels: list[dict[str, Any]] = json.loads(dashboards.render(PARAMETERS)["anabranch-overview.json"])[
        "panels"
    ]
    start, end, *_ = [number for number, panel in enumerate(panels) if panel["type"] == "row"]
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels[start + 1 : end]
    }


async def top_row(prometheus: Prometheus, namespace: str, at: float) -> TopRow:
    async def value(expression: str) -> float | None:
        chosen = expression.replace("$namespace", namespace).replace("$job", JOB)
        found = await prometheus.query(chosen, at)
        assert len(found) <= 1, f"{chosen} returns {len(found)} values"
        return found[0][1] if found else None

    row = first_row()
    [state] = row["State"]
    [oldest] = row["Oldest waiting event"]
    pages, tickets = row["Firing alerts"]
    enough, too_few, wanted = row["Workers ready"]
    ready = [await value(enough), await value(too_few)]
    return TopRow(
        state=_whole(await value(state)),
        oldest=await value(oldest),
        pages=_whole(await value(pages)) or 0,
        tickets=_whole(await value(tickets)) or 0,
        ready=_whole(next((number for number in ready if number is not None), None)),
        wanted=_whole(await value(wanted)),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
