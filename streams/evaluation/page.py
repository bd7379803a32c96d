"""The report as a self-contained HTML page, without scripts, fonts or network access."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import jinja2

from streams.evaluation.query_runner import Answered
from streams.evaluation.report import Assessment, Report
from streams.terminal import printable

__all__ = ["render"]

_WORST_SHOWN: Final = 10
# Ranks with their own column.
_RANKS: Final = 10


def render(report: Report) -> str:
    """The page. It contains the passages' titles, not their texts."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        # Invisible characters, including bidirectional controls, are shown as escapes.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    page = environment.from_string((files(__package__) / "page.html").read_text(encoding="utf-8"))
    return page.render(
        report=report,
        plural=_plural,
        live=report.mode == "live",
        worst=report.worst(_WORST_SHOWN),
        ranks=_ranks(report.assessments),
        scores=_histogram(
            [
                each.first_relevant_score
                for each in report.assessments
                if each.first_relevant_score is not None
            ],
            least_step=0.02,
        ),
        ndcg=_ndcg(report.assessments),
        perfect=sum(each.scores.ndcg > 1 - 1e-9 for each in report.assessments),
        lost=sum(each.scores.ndcg == 0 for each in report.assessments),
        latency=_latency(report),
    )


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar with its tooltip; `missing` bars have another colour."""

    value: float
    tip: str
    missing: bool = False


@dataclass(frozen=True, slots=True)
class _Chart:
    """Bars of equal width, side by side.

    Attributes:
        ticks: values on the vertical axis, ascending from 0.
        labels: texts below the bars, with their places: 0 is the left end, 100 the right end.
        lines: texts of vertical dashed lines, with their places.
    """

    bars: Sequence[_Bar]
    ticks: Sequence[float]
    labels: Sequence[tuple[float, str]] = ()
    lines: Sequence[tuple[float, str]] = ()


def _ranks(assessments: Sequence[Assessment]) -> _Chart:
    names = [*(str(rank) for rank in range(1, _RANKS + 1)), f"{_RANKS + 1}+", "none"]
    counts = Counter(
        "none" if each.first_relevant_rank is None else names[min(each.first_relevant_rank, _RANKS + 1) - 1]
        for each in assessments
    )
    wheres = [*(f"rank {name}" for name in names[:-1]), "no relevant passage"]
    return _Chart(
        [
            _Bar(counts[name], f"{_plural(counts[name], 'query', 'queries')}: {where}", name == "none")
            for name, where in zip(names, wheres, strict=True)
        ],
        _counts(max(counts.values())),
        [(100 * (place + 0.5) / len(names), name) for place, name in enumerate(names)],
    )


def _latency(report: Report) -> _Chart | None:
    latency = report.latency
    values = [each.outcome.latency_ms for each in report.assessments if isinstance(each.outcome, Answered)]
    lines = latency and [("p50", latency.p50), ("p95", latency.p95), ("p99", latency.p99)]
    return _histogram(values, least_step=0.1, unit=" ms", lines=lines or ())


def _histogram(
    values: Sequence[float],
    *,
    least_step: float,
    unit: str = "",
    lines: Sequence[tuple[str, float]] = (),
) -> _Chart | None:
    """The distribution of the values; None if there are none."""
    if not values:
        return None
    step = max(least_step, _nice((max(values) - min(values)) / 30))
    first = math.floor(min(values) / step)
    # At least 8 bins, so that a narrow distribution does not look wide.
    bins = max(math.floor(max(values) / step) - first + 1, 8)
    counts = Counter(math.floor(value / step) - first for value in values)
    digits = max(0, -math.floor(math.log10(step)))
    edges = [f"{(first + place) * step:.{digits}f}" for place in range(bins + 1)]
    return _Chart(
        [
            _Bar(
                counts[place],
                f"{_plural(counts[place], 'query', 'queries')}: {edges[place]} to {edges[place + 1]}{unit}",
            )
            for place in range(bins)
        ],
        _counts(max(counts.values())),
        [(100 * place / bins, edges[place]) for place in range(0, bins + 1, math.ceil(bins / 8))],
        [(100 * (value / step - first) / bins, f"{name} {value:.1f}{unit}") for name, value in lines],
    )


def _ndcg(assessments: Sequence[Assessment]) -> _Chart:
    return _Chart(
        [
            # A query with score 0 would have no bar.
            _Bar(each.scores.ndcg or 0.02, f"{each.scores.ndcg:.3f} {each.label}", each.scores.ndcg == 0)
            for each in sorted(assessments, key=lambda each: -each.scores.ndcg)
        ],
        (0, 0.25, 0.5, 0.75, 1),
    )


def _plural(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def _nice(step: float) -> float:
    """The step rounded up to 1, 2 or 5 times a power of ten."""
    if step <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _counts(maximum: int) -> list[float]:
    """Integer ticks from 0 to at least `maximum`."""
    step = max(1.0, _nice(maximum / 4))
    return [step * tick for tick in range(math.ceil(maximum / step) + 1)]
