"""The plots of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import matplotlib as mpl

from tests.soak.plot import STYLE

mpl.use("agg")
from matplotlib import pyplot as plt  # it asks where it draws when it is imported

__all__ = ["latencies", "lines", "throughput"]

_WATER, _DEEP, _SAND, _SOFT = "#2a78d6", "#12406f", "#c98a3c", "#5b6268"
_STYLE: Final = STYLE | {"axes.spines.top": False, "axes.spines.right": False}


def latencies(loads: Sequence[Mapping[str, float]], file: Path) -> None:
    """Latency percentiles against load: end to end, and within the worker."""
    with mpl.rc_context(_STYLE):
        figure, all_axes = plt.subplots(
            1, 2, figsize=(10, 3.8), layout="constrained", facecolor="#fdfdfc", sharey=True
        )
        x = [line["per_second"] for line in loads]
        for axes, column, title in (
            (all_axes[0], "latency", "due to result read"),
            (all_axes[1], "duration", "read to acknowledged, in the worker"),
        ):
            for percentile, colour in (("p50", _WATER), ("p95", _DEEP), ("p99", _SAND)):
                y = [1000 * line[f"{column} {percentile}"] for line in loads]
                axes.plot(x, y, "o-", color=colour, markersize=4, label=percentile)
            axes.set(title=title, xlabel="events/s offered", yscale="log")
            axes.grid(visible=True, axis="y", color="#e8eae6")
        all_axes[0].set_ylabel("ms")
        all_axes[0].legend(frameon=False)
        _save(figure, file)


def throughput(rates: Mapping[str, Sequence[float]], file: Path) -> None:
    """Throughput side by side: medians, with the spread over rounds."""
    shown = {name: each for name, each in rates.items() if each}
    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(
            figsize=(9, 0.5 * len(shown) + 1.2), layout="constrained", facecolor="#fdfdfc"
        )
        for row, (name, each) in enumerate(shown.items()):
            ordered = sorted(each)
            middle = median(ordered)
            colour = _WATER if name.startswith("a") else _SOFT
            axes.barh(row, middle, color=colour, height=0.6)
            axes.plot([ordered[0], ordered[-1]], [row, row], color=_DEEP, linewidth=2)
            axes.text(ordered[-1], row, f"  {middle:.0f}", va="center")
        axes.set_yticks(range(len(shown)), list(shown))
        axes.invert_yaxis()
        axes.set_xlabel("events/s, mixed, closed loop; the line is the spread over rounds")
        _save(figure, file)


def lines(
    panels: Sequence[tuple[str, str, str, Mapping[str, Sequence[tuple[float | str, float]]]]], file: Path
) -> None:
    """Panels of (title, x label, y label, name to points); where x is a name, points are not connected."""
    with mpl.rc_context(_STYLE):
        columns = 3
        rows = -(-len(panels) // columns)
        figure, grid = plt.subplots(
            rows, columns, figsize=(11, 3 * rows), layout="constrained", facecolor="#fdfdfc", squeeze=False
        )
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, x, y, series) in zip(grid.flat, panels, strict=False):
            for (name, points), colour in zip(series.items(), (_WATER, _DEEP, _SAND, _SOFT), strict=False):
                named = isinstance(points[0][0], str)
                axes.plot(
                    *zip(*points, strict=True), "o" if named else "o-", color=colour, markersize=4, label=name
                )
                if named:
                    axes.tick_params(axis="x", labelrotation=35)
                    plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
            axes.set(title=title, xlabel=x, ylabel=y, ylim=(0, None))
            if len(series) > 1:
                axes.legend(frameon=False)
        _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=120)
    plt.close(figure)
