"""Whether the dashboards' panels show what they should. Pure: everything is an argument."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.ops.panels import PanelResult

__all__ = ["OF_WORKERS", "Sent", "panel_problems"]

OF_WORKERS: Final[Collection[str]] = ("Workers that can search", "Replication lag")
"""The panels of the store's dashboard that need no postgres_exporter."""

_STORE: Final = "Anabranch store"
_COUNTER: Final = "Events in the selected time"
# Prometheus extrapolates an increase to the selected time.
_TOLERANCE: Final = 0.02


@dataclass(frozen=True)
class Sent:
    """How many events the counters must show.

    Attributes:
        events: sent in the selected time.
        beyond: by so many the counters may differ.
    """

    events: int
    beyond: float


def panel_problems(panels: Sequence[PanelResult], sent: Sent | None, *, exporter: bool) -> Iterator[str]:
    """Yield what is wrong.

    Args:
        panels: of all dashboards, of one installation.
        sent: None: the counters are not compared.
        exporter: whether its store has a postgres_exporter.
    """
    for panel in panels:
        if panel.problem and (panel.dashboard != _STORE or exporter or panel.title in OF_WORKERS):
            yield f"{panel.dashboard}, {panel.title}: {panel.problem}"
    if sent is None:
        return
    [counter] = [panel for panel in panels if panel.title == _COUNTER]
    shown = {series.name.partition(" ")[0]: series.last for series in counter.series}
    finished = shown["answered"] + shown["dead_lettered"]
    for name, number in (("received", shown["received"]), ("finished", finished)):
        if abs(number - sent.events) > _TOLERANCE * sent.events + sent.beyond:
            yield f"{counter.title}: {number:,.0f} {name}, but {sent.events:,} were sent"
