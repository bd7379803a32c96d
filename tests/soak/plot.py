"""The plot of a soak: each series over time, with the faults marked on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl

from tests.soak.record import Record

mpl.use("agg")
from matplotlib import pyplot as plt  # it asks where it draws when it is imported

__all__ = ["STYLE", "draw"]

_WATER, _DEEP, _FAULT, _SOFT = "#2a78d6", "#12406f", "#f8eadd", "#5b6268"
_MIB: Final = 1024 * 1024

#: How every plot of the project looks.
STYLE: Final = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": "#1b1f22",
    "axes.edgecolor": "#c9cdc8",
    "axes.labelcolor": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
}

#: Title, unit, and what is drawn: series, colour, name where there are two.
_PANELS: Final[Sequence[tuple[str, float, Sequence[tuple[str, str, str]]]]] = (
    ("resident memory\nMiB", _MIB, [("rss", _WATER, "")]),
    ("Python's blocks\nthousands", 1000, [("blocks", _WATER, "")]),
    ("file\ndescriptors", 1, [("descriptors", _WATER, "")]),
    ("asyncio's\ntasks", 1, [("tasks", _WATER, "")]),
    ("connections", 1, [("postgres", _WATER, "to PostgreSQL"), ("kafka", _DEEP, "to Kafka")]),
    ("lag\nevents", 1, [("lag", _SOFT, "")]),
)


def draw(record: Record, file: Path, *, title: str) -> None:
    """Draws it into a file, whose suffix says how."""
    with mpl.rc_context(STYLE):
        figure, all_axes = plt.subplots(
            len(_PANELS), sharex=True, figsize=(11, 10.5), layout="constrained", facecolor="#fdfdfc"
        )
        for axes, (label, unit, lines) in zip(all_axes, _PANELS, strict=True):
            for injection in record.injections:
                axes.axvspan(
                    injection.began / 60,
                    injection.recovered / 60,
                    facecolor=_FAULT,
                    edgecolor=_FAULT,
                    linewidth=0.5,
                )
            for series, colour, name in lines:
                seen = [
                    (s.seconds / 60, s.values[series] / unit) for s in record.samples if series in s.values
                ]
                axes.plot(*zip(*seen, strict=True), color=colour, linewidth=0.9, label=name or None)
                if series != "lag":
                    lulls = [(at / 60, value / unit) for at, value in record.points(series)]
                    axes.plot(*zip(*lulls, strict=True), "o", color=colour, markersize=3.5)
            axes.set_ylabel(label, rotation=0, ha="right", va="center")
            axes.set_ylim(0, (1.15 if len(lines) == 1 else 1.5) * axes.dataLim.ymax)
            if lines[0][0] == "lag":
                axes.set_yscale("symlog", linthresh=10)  # one outage would hide all others
            axes.margins(x=0)
            axes.grid(axis="y", color="#e2e4e1", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            if len(lines) > 1:
                axes.legend(loc="upper right", frameon=False, ncols=2, borderpad=0)
        figure.align_ylabels(all_axes)
        first, last = all_axes[0], all_axes[-1]
        for injection in record.injections:
            first.annotate(
                injection.name,
                ((injection.began + injection.recovered) / 120, 1.02),
                xycoords=("data", "axes fraction"),
                rotation=55,
                rotation_mode="anchor",
                ha="left",
                va="bottom",
                fontsize=7,
                color="#c93a3a" if injection.failure else _SOFT,
            )
        last.set_xlabel(
            "minutes of load; shaded: from each fault until all was well; dots: what is held in each lull"
        )
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.savefig(file, dpi=110)
        plt.close(figure)
