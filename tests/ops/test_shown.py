"""What the check of the panels says. Real panels: test_panels.py, and `make ops`."""

from collections.abc import Mapping

import pytest

from tests.ops.panels import PanelResult, Series
from tests.ops.shown import Sent, panel_problems


def panel(
    dashboard: str, title: str, values: Mapping[str, float] | None = None, problem: str | None = None
) -> PanelResult:
    series = [Series("A", f"{name} somewhere", {}, [(1.0, value)]) for name, value in (values or {}).items()]
    return PanelResult(
        dashboard=f"Anabranch {dashboard}",
        title=title,
        type="stat",
        series=series,
        unit="locale",
        thresholds=(),
        problem=problem,
        panel={},
        start=0.0,
        end=1.0,
        step=1.0,
    )


def counter(received: float, answered: float, dead_lettered: float) -> PanelResult:
    values = {"received": received, "answered": answered, "dead_lettered": dead_lettered, "skipped": 7}
    return panel("pipeline", "Events in the selected time", values)


@pytest.mark.parametrize(
    ("shown", "exporter", "problems"),
    [
        (panel("overview", "Events", problem="empty"), False, ["Anabranch overview, Events: empty"]),
        (panel("store", "Live rows", problem="empty"), False, []),
        (panel("store", "Live rows", problem="empty"), True, ["Anabranch store, Live rows: empty"]),
        (
            panel("store", "Replication lag", problem="empty"),
            False,
            ["Anabranch store, Replication lag: empty"],
        ),
    ],
)
def test_a_panel_may_be_empty_only_if_nothing_exports_its_metrics(
    shown: PanelResult, problems: list[str], *, exporter: bool
) -> None:
    assert list(panel_problems([shown], None, exporter=exporter)) == problems


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        (counter(1000, 990, 10), []),
        (counter(1025, 965, 10), []),
        (counter(1026, 990, 10), ["1,026 received"]),
        (counter(1000, 965, 9), ["974 finished"]),
        (counter(0, 0, 0), ["0 received", "0 finished"]),
    ],
)
def test_counters_may_differ_by_two_percent_and_what_was_repeated(
    shown: PanelResult, wrong: list[str]
) -> None:
    problems = [f"Events in the selected time: {each}, but 1,000 were sent" for each in wrong]
    assert list(panel_problems([shown], Sent(1000, 5), exporter=False)) == problems
