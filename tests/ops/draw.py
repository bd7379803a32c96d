"""Draws a dashboard into a PNG, close to how Grafana shows it: the same places, colors, thresholds and texts.

python -m tests.ops.draw http://localhost:9090 --minutes 15 --output build/

It needs matplotlib (`make .venv/.soak`).
"""

import argparse
import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

from tests.ops.panels import PanelResult, Series, load_dashboards, run_panels
from tests.ops.units import formatted

mpl.use("agg")
from matplotlib import pyplot as plt  # it asks where it draws when it is imported
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.dates import DateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

__all__ = ["draw"]

# Grafana's dark theme.
_PAGE, _PANEL, _BORDER, _GRID = "#111217", "#181b1f", "#2c3235", "#2a2d33"
_TEXT, _SOFT = "#ccccdc", "#8e8e99"
_COLORS: Final = {"green": "#56a64b", "orange": "#ff780a", "red": "#e02f44", "text": _TEXT}
_PALETTE: Final = (
    "#73bf69",
    "#f2cc0c",
    "#8ab8ff",
    "#ff780a",
    "#f2495c",
    "#5794f2",
    "#b877d9",
    "#705da0",
    "#37872d",
    "#fade2a",
    "#447ebc",
    "#c15c17",
    "#890f02",
    "#0a437c",
    "#6d1f62",
)
_STYLE: Final = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "text.color": _TEXT,
    "axes.facecolor": _PANEL,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
}
_COLUMNS: Final = 24
# One of Grafana's grid cells is about 66 by 38 pixels on a screen of 1600 pixels.
_CELL: Final = (0.5, 0.30)
_DPI: Final = 110
# In inches: between panels, and what title, legend and axes take inside of one.
_GAP, _TITLE, _LEGEND, _LEFT, _BELOW = 0.06, 0.24, 0.15, 0.48, 0.20
_MAX_LEGENDS: Final = 14
# Seconds between two times at an axis.
_TICKS: Final = (
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10_800,
    21_600,
    43_200,
    86_400,
    7 * 86_400,
)
_HEAT: Final = LinearSegmentedColormap.from_list(
    "heat", ["#1f2530", "#33456b", "#8ab8ff", "#fade2a", "#ff780a"]
)


def draw(
    dashboard: Mapping[str, Any],
    results: Sequence[PanelResult],
    file: Path,
    *,
    rows: int | None = None,
    hide: Sequence[str] = (),
) -> None:
    """Draws it.

    Args:
        dashboard: Grafana's JSON.
        results: of its panels; those of others are ignored.
        file: where to.
        rows: of the grid, from the top; all by default.
        hide: words that say nothing here, and are left out of legends: the only namespace and the only job.
    """
    found = {result.title: result for result in results if result.dashboard == dashboard["title"]}
    panels = [
        panel
        for panel in dashboard["panels"]
        if rows is None or panel["gridPos"]["y"] + panel["gridPos"]["h"] <= rows
    ]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    size = (_COLUMNS * _CELL[0], height * _CELL[1] + _TITLE)
    with mpl.rc_context(_STYLE):
        figure = plt.figure(figsize=size, facecolor=_PAGE)
        page = _Page(figure, size)
        first = next(iter(found.values()))
        page.text(_GAP * 2, size[1] - _TITLE / 2, dashboard["title"], size=10)
        page.text(
            size[0] - _GAP * 2,
            size[1] - _TITLE / 2,
            f"{_clock(first.start)} to {_clock(first.end)} UTC",
            right=True,
        )
        for panel in panels:
            place = panel["gridPos"]
            box = _Box(
                place["x"] * _CELL[0] + _GAP / 2,
                size[1] - _TITLE - (place["y"] + place["h"]) * _CELL[1] + _GAP / 2,
                place["w"] * _CELL[0] - _GAP,
                place["h"] * _CELL[1] - _GAP,
            )
            if panel["type"] == "row":
                page.text(box.x + _GAP, box.y + box.height / 2, f"⌄ {panel['title']}", size=9)
            else:
                _Drawn(page, box, found[panel["title"]], hide).draw()
        figure.savefig(file, dpi=_DPI, facecolor=_PAGE)
        plt.close(figure)


class _Box:
    """A place in inches, from the lower left."""

    def __init__(self, x: float, y: float, width: float, height: float) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height


class _Page:
    """The figure, in inches."""

    def __init__(self, figure: Figure, size: tuple[float, float]) -> None:
        self.figure = figure
        self._size = size

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 7,
        color: str = _TEXT,
        right: bool = False,
        **more: Any,
    ) -> None:
        self.figure.text(
            x / self._size[0],
            y / self._size[1],
            text,
            fontsize=size,
            color=color,
            **{"ha": "right" if right else "left", "va": "center", **more},
        )

    def rectangle(self, box: _Box, color: str, edge: str) -> None:
        width, height = self._size
        self.figure.patches.append(
            FancyBboxPatch(
                (box.x / width, box.y / height),
                box.width / width,
                box.height / height,
                boxstyle="round,pad=0,rounding_size=0.002",
                transform=self.figure.transFigure,
                facecolor=color,
                edgecolor=edge,
                linewidth=0.6,
                zorder=-1,  # behind the axes
            )
        )

    def axes(self, box: _Box) -> Axes:
        width, height = self._size
        return self.figure.add_axes((box.x / width, box.y / height, box.width / width, box.height / height))


class _Drawn:
    """One panel."""

    def __init__(self, page: _Page, box: _Box, result: PanelResult, hide: Sequence[str]) -> None:
        self._page, self._box, self._result = page, box, result
        self._hide = {*hide}
        self._defaults = result.panel["fieldConfig"]["defaults"]
        self._texts: Mapping[str, Mapping[str, Any]] = {
            value: shown
            for one in self._defaults.get("mappings", [])
            for value, shown in one["options"].items()
        }

    def draw(self) -> None:
        result, box = self._result, self._box
        self._page.rectangle(box, _PANEL, _BORDER)
        how: Mapping[str, Callable[[], None]] = {
            "stat": self._stat,
            "state-timeline": self._timeline,
            "heatmap": self._heatmap,
            "timeseries": self._lines,
            "bars": self._bars,
        }
        if any(series.points and not math.isnan(series.last) for series in result.series):
            how[result.type]()
        else:
            self._page.text(
                box.x + box.width / 2,
                box.y + box.height / 2,
                self._defaults["noValue"],
                size=11,
                color=_SOFT,
                ha="center",
            )
        colored = result.type == "stat" and result.panel["options"]["colorMode"] == "background"
        self._page.text(
            box.x + 0.08,
            box.y + box.height - _TITLE / 2,
            result.title,
            size=8,
            color="white" if colored else _TEXT,
        )
        if result.problem:
            self._page.text(
                box.x + box.width - 0.08,
                box.y + box.height - _TITLE / 2,
                "⚠",
                size=9,
                color=_COLORS["red"],
                right=True,
            )

    # The kinds of panels

    def _stat(self) -> None:
        """Values beside each other; the background has the color."""
        values = [series for series in self._result.series if not math.isnan(series.last)]
        background = self._result.panel["options"]["colorMode"] == "background"
        width = self._box.width / len(values)
        for number, series in enumerate(values):
            box = _Box(self._box.x + number * width, self._box.y, width, self._box.height)
            color = self._color_of(series)
            if background:
                self._page.rectangle(box, color, _PANEL)
            names = len(values) > 1
            self._page.text(
                box.x + width / 2,
                box.y + box.height * (0.42 if names else 0.44),
                self._text_of(series.last),
                # A character is 0.6 of the font's size wide; there are 72 points in an inch.
                size=min(
                    0.3 * 72 * box.height, 0.8 * width * 72 / 0.65 / max(3, len(self._text_of(series.last)))
                ),
                color="white" if background else color,
                ha="center",
                weight="bold",
            )
            if names:
                self._page.text(
                    box.x + width / 2,
                    box.y + 0.16,
                    self._name(series),
                    size=min(7.5, width * 72 / 0.65 / len(self._name(series))),
                    color="white" if background else _TEXT,
                    ha="center",
                )

    def _timeline(self) -> None:
        """A row for each series, in the color of its value."""
        axes = self._axes(left=min(1.9, 0.30 * self._box.width), legend=False)
        step = self._result.step
        for number, series in enumerate(reversed(self._result.series)):
            for at, value in series.points:
                shown = self._texts.get(f"{value:g}")
                axes.add_patch(
                    Rectangle(
                        (_date(at), number - 0.38),
                        step / 86_400,
                        0.76,
                        facecolor=_color(shown["color"]) if shown else _SOFT,
                        linewidth=0,
                    )
                )
        axes.set_ylim(-0.5, len(self._result.series) - 0.5)
        axes.set_yticks(
            range(len(self._result.series)), [self._name(series) for series in reversed(self._result.series)]
        )
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        labels = [
            (shown["text"], _color(shown["color"]))
            for shown in sorted(self._texts.values(), key=lambda one: int(one["index"]))
        ]
        self._legend(labels)

    def _lines(self) -> None:
        axes = self._axes()
        drawn = self._named(self._result.series)
        for (series, _), color in zip(drawn, self._palette(), strict=False):
            values = _with_gaps(series, self._result.step)
            axes.plot(
                [_date(at) for at, _ in values],
                [value for _, value in values],
                color=series.color or color,
                linewidth=1.1,
            )
            if len(drawn) == 1:
                axes.fill_between(
                    [_date(at) for at, _ in values],
                    [value for _, value in values],
                    color=color,
                    alpha=0.08,
                    linewidth=0,
                )
        top = max(
            (value for series, _ in drawn for _, value in series.points if math.isfinite(value)), default=0.0
        )
        self._limits(axes, top)
        for (low, color), _ in pairwise([*self._result.thresholds, (math.inf, "")]):
            if math.isfinite(low) and low <= axes.get_ylim()[1]:
                axes.axhline(low, color=_color(color), linewidth=0.8, linestyle=(0, (4, 3)))
        self._legend([(name, color) for (_, name), color in zip(drawn, self._palette(), strict=False)])

    def _bars(self) -> None:
        """Stacked; a legend only for what happened."""
        axes = self._axes()
        # As the legend's table is sorted.
        drawn = sorted(
            ((series, name) for series, name in self._named(self._result.series) if series.total),
            key=lambda one: -one[0].total,
        )
        below: dict[float, float] = {}
        for (series, _), color in zip(drawn, self._palette(), strict=False):
            points = [(at, value) for at, value in series.points if value]
            axes.bar(
                [_date(at) for at, _ in points],
                [value for _, value in points],
                width=0.8 * self._result.step / 86_400,
                bottom=[below.get(at, 0.0) for at, _ in points],
                color=color,
                alpha=0.85,
            )
            for at, value in points:
                below[at] = below.get(at, 0.0) + value
        self._limits(axes, max(below.values(), default=0.0))
        if drawn:
            self._legend(
                [
                    (f"{name}: {series.total:g}", color)
                    for (series, name), color in zip(drawn, self._palette(), strict=False)
                ]
            )
        else:
            self._legend([(f"all {len(self._result.series)} series are 0", _SOFT)])

    def _heatmap(self) -> None:
        axes = self._axes(legend=False)
        by_limit = sorted(self._result.series, key=lambda series: float(series.labels["le"]))
        times = sorted({at for series in by_limit for at, _ in series.points})
        below: Mapping[float, float] = {}
        most = (
            max(
                (value for series in by_limit for _, value in series.points if math.isfinite(value)),
                default=1.0,
            )
            or 1.0
        )
        used = [0]
        for number, series in enumerate(by_limit):
            points = dict(series.points)
            for at in times:
                count = points.get(at, 0.0) - below.get(at, 0.0)
                if count > 1e-6:
                    used.append(number)
                    axes.add_patch(
                        Rectangle(
                            (_date(at) - self._result.step / 86_400, number),
                            self._result.step / 86_400,
                            1,
                            facecolor=_HEAT(min(1.0, 0.25 + count / most)),
                            linewidth=0,
                        )
                    )
            below = points
        names = [
            "∞" if series.labels["le"] == "+Inf" else formatted(float(series.labels["le"]), "s")
            for series in by_limit
        ]
        axes.set_ylim(0, max(used) + 2)
        axes.set_yticks([number + 1 for number in range(max(used) + 1)], names[: max(used) + 1])

    # What they share

    def _axes(self, *, left: float = _LEFT, legend: bool = True) -> Axes:
        box = self._box
        below = _BELOW + _LEGEND * (1 + (legend and self._many())) + 0.03
        axes = self._page.axes(
            _Box(box.x + left, box.y + below, box.width - left - 0.12, box.height - below - _TITLE - 0.04)
        )
        axes.set_xlim(_date(self._result.start), _date(self._result.end))
        start, end = self._result.start, self._result.end
        between = next(step for step in _TICKS if (end - start) / step <= max(2.5, 1.3 * (box.width - left)))
        first = math.ceil(start / between)
        axes.set_xticks([_date(number * between) for number in range(first, math.floor(end / between) + 1)])
        axes.xaxis.set_major_formatter(DateFormatter("%H:%M" if between >= 60 else "%H:%M:%S"))
        axes.grid(visible=True)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0, pad=3)
        return axes

    def _many(self) -> bool:
        return sum(len(self._name(series)) + 4 for series in self._result.series) > 19 * self._box.width

    def _limits(self, axes: Axes, top: float) -> None:
        limit = self._defaults.get("max", top * 1.1 or 1.0)
        axes.set_ylim(0, limit)
        # Whole minutes, hours and days.
        scale = next((one for one in (86_400, 3600, 60) if self._result.unit == "s" and limit > 2 * one), 1)
        axes.set_yticks(
            [scale * tick for tick in MaxNLocator(4).tick_values(0, limit / scale) if scale * tick <= limit]
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formatted(value, self._result.unit)))

    def _legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """Below, in as many lines as there is place for; Grafana's list."""
        x, y = self._box.x + 0.12, self._box.y + 0.10 + _LEGEND * self._many()
        for number, (name, color) in enumerate(entries[:_MAX_LEGENDS]):
            width = 0.2 + 0.058 * len(name)
            if x + width > self._box.x + self._box.width and x > self._box.x + 0.2:
                x, y = self._box.x + 0.12, y - _LEGEND
                if y < self._box.y:
                    return
            self._page.text(x, y, "—", color=color, weight="bold")
            self._page.text(x + 0.14, y, name, size=6.5)
            x += width + 0.06
            if number == _MAX_LEGENDS - 1 and len(entries) > _MAX_LEGENDS:
                self._page.text(x, y, "…", size=6.5)

    def _named(self, series: Sequence[Series]) -> list[tuple[Series, str]]:
        return [(one, self._name(one)) for one in series]

    def _name(self, series: Series) -> str:
        return " ".join(word for word in series.name.split() if word not in self._hide) or series.name

    def _palette(self) -> Iterator[str]:
        number = 0
        while True:
            yield _PALETTE[number % len(_PALETTE)]
            number += 1

    def _color_of(self, series: Series) -> str:
        if series.color:
            return _color(series.color)
        if shown := self._texts.get(f"{series.last:g}"):
            return _color(shown["color"])
        found = [color for low, color in self._result.thresholds if series.last >= low]
        return _color(found[-1]) if found else _COLORS["green"]

    def _text_of(self, value: float) -> str:
        if shown := self._texts.get(f"{value:g}"):
            return str(shown["text"])
        return formatted(value, self._result.unit, self._defaults.get("decimals"))


def _color(name: str) -> str:
    return _COLORS.get(name, name)


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M")


def _date(at: float) -> float:
    return float(date2num(datetime.fromtimestamp(at, UTC)))


def _with_gaps(series: Series, step: float) -> list[tuple[float, float]]:
    """No line where points are missing."""
    found: list[tuple[float, float]] = []
    for at, value in series.points:
        if found and at - found[-1][0] > 1.5 * step:
            found.append((at - step, math.nan))
        found.append((at, value))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ops.draw", description="Draw the dashboards from a Prometheus."
    )
    parser.add_argument("url", help="of Prometheus")
    parser.add_argument(
        "--end", type=float, default=time.time(), help="seconds since the epoch; default: now"
    )
    parser.add_argument("--minutes", type=float, default=180, help="how much time before the end")
    parser.add_argument("--compress", type=float, default=1, help="factor of its rules and intervals")
    parser.add_argument("--hide", nargs="*", default=[], help="words to leave out of legends")
    parser.add_argument("--output", type=Path, default=Path(), help="folder to write to")
    options = parser.parse_args()
    start = options.end - 60 * options.minutes
    results = asyncio.run(run_panels(options.url, start, options.end, compress=options.compress))
    for dashboard in load_dashboards(options.compress):
        draw(dashboard, results, options.output / f"{dashboard['uid']}.png", hide=options.hide)
    for result in results:
        if result.problem:
            print(f"{result.dashboard}, {result.title}: {result.problem}")


if __name__ == "__main__":
    main()
