"""The report as a self-contained HTML page, without scripts, fonts or network access."""

import html
import math
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.resources import files
from string import Template
from typing import Final

from streams.evaluation.query_runner import Answered
from streams.evaluation.report import Assessment, Report
from streams.evaluation.scoring import HIT_DEPTH, NDCG_DEPTH
from streams.terminal import printable

__all__ = ["render"]

_WORST_SHOWN: Final = 10
# Ranks with their own column.
_RANKS: Final = 10
# With more queries, bars would be thinner than the gaps between them.
_MAX_BARS: Final = 160
_GOOD, _FAIR = 0.8, 0.5

_HALF, _FULL, _HEIGHT = 500, 1036, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 8, 18, 22
_LINE = 15


def _escape(text: str) -> str:
    """Text for HTML. Invisible characters, including bidirectional controls, are shown as escapes."""
    return html.escape(printable(text))


def render(report: Report) -> str:
    """The page. All texts of the report are escaped. It contains the passages' titles, not their texts."""
    total = len(report.assessments)
    mode = "through the live pipeline" if report.mode == "live" else "directly against the store"
    failures = report.failures
    return Template((files(__package__) / "page.html").read_text(encoding="utf-8")).substitute(
        title=f"Golden queries: {_escape(report.golden)}",
        subtitle=f"{_escape(report.golden)} · {_plural(total, 'query', 'queries')} {mode} · "
        f"{report.at:%d %B %Y, %H:%M} UTC",
        verdict='<span class="verdict failed">✗ failed</span>'
        if failures
        else '<span class="verdict passed">✓ passed</span>',
        shortfalls=f'<ul class="wanting">{"".join(f"<li>{_escape(line)}</li>" for line in failures)}</ul>'
        if failures
        else "",
        tiles=_tiles(report),
        ranks=_ranks(report.assessments),
        scores=_similarities(report.assessments),
        ndcg=_ndcg(report),
        latency_caption="Milliseconds from publishing the event to reading its result"
        if report.mode == "live"
        else "Milliseconds for retrieval in this process, without Kafka",
        latency=_latency(report),
        completeness_caption="Share of "
        f"{_plural(report.passages, 'returned passage', 'returned passages')} with the field",
        completeness=_meters(report),
        facts=_facts(report),
        worst=_worst(report),
        number=f"{total:,}",
        all=_table(report.assessments),
        notes=_notes(report),
    )


def _tiles(report: Report) -> str:
    mean, latency, time = report.mean, report.latency, report.query_time
    bounds = report.bounds

    def bound(minimum: float | None, otherwise: str) -> str:
        return otherwise if minimum is None else f"required: at least {minimum:g}"

    tiles = [
        (
            f"{mean.hit:.1%}",
            f"hit rate@{HIT_DEPTH}",
            bound(bounds.min_hit_rate, f"queries with a relevant passage in the top {HIT_DEPTH}"),
        ),
        (
            f"{mean.ndcg:.3f}",
            f"nDCG@{NDCG_DEPTH}",
            bound(bounds.min_ndcg, "ranking quality by grade; 1 is ideal"),
        ),
        (f"{mean.recall:.1%}", "recall@k", "of the expected passages were returned"),
        (f"{mean.reciprocal_rank:.3f}", "MRR", "mean of 1 ÷ rank of the first relevant passage"),
        (
            "–" if latency is None else f"{latency.p50:.0f} ms",
            "latency, median",
            "no answers"
            if latency is None or time is None
            else f"p95 {latency.p95:.0f} ms · in the worker {time.p50:.0f} ms",
        ),
        (
            f"{report.answered:,}",
            "answered",
            f"of {len(report.assessments):,}; {report.unanswered:,} unanswered, {report.dead_lettered:,} dead letters",
        ),
    ]
    return "".join(
        f'<div class="tile"><small>{name}</small><b>{value}</b><small>{note}</small></div>'
        for value, name, note in tiles
    )


# Plots


class _Plot:
    """An SVG with room for axes; `x` and `y` convert values to coordinates."""

    def __init__(
        self, name: str, *, width: int, x: tuple[float, float], y: tuple[float, float], headroom: int = 0
    ) -> None:
        self._parts = [
            f'<svg class="plot" viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{_escape(name)}">'
        ]
        self._width = width
        self._x, self._y = x, y
        self._top = _TOP + headroom

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / (high - low) * (self._width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - self._top - _BOTTOM)

    def add(self, svg: str) -> None:
        self._parts.append(svg)

    def rows(self, values: Sequence[float], form: Callable[[float], str]) -> None:
        for value in values:
            y = self.y(value)
            kind = "axis" if value == self._y[0] else "grid-line"
            self.add(
                f'<line class="{kind}" x1="{_LEFT}" x2="{self._width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            self.add(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{form(value)}</text>')

    def bar(self, left: float, right: float, value: float, tip: str, *, kind: str = "bar") -> None:
        """A bar for `value`, with a gap to its neighbours and rounded corners at the top."""
        gap = min(1.0, (self.x(right) - self.x(left)) * 0.12)
        x0, x1 = self.x(left) + gap, self.x(right) - gap
        top, foot = self.y(value), self.y(self._y[0])
        r = max(0.0, min(4.0, (x1 - x0) / 3, foot - top))
        self.add(
            f'<path class="{kind}" d="M{x0:.2f} {foot:.1f}V{top + r:.2f}Q{x0:.2f} {top:.2f} '
            f"{x0 + r:.2f} {top:.2f}H{x1 - r:.2f}Q{x1:.2f} {top:.2f} {x1:.2f} {top + r:.2f}V{foot:.1f}Z"
            f'"><title>{_escape(tip)}</title></path>'
        )

    def below(self, x: float, label: str, *, anchor: str = "middle") -> None:
        self.add(
            f'<text x="{self.x(x):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">'
            f"{_escape(label)}</text>"
        )

    def above(self, x: float, value: float, label: str) -> None:
        self.add(
            f'<text class="count" x="{self.x(x):.1f}" y="{self.y(value) - 5:.1f}" text-anchor="middle">'
            f"{_escape(label)}</text>"
        )

    def close(self) -> str:
        return "".join([*self._parts, "</svg>"])


def _ranks(assessments: Sequence[Assessment]) -> str:
    names = [*(str(rank) for rank in range(1, _RANKS + 1)), f"{_RANKS + 1}+", "none"]
    counts = Counter(
        "none" if each.first_relevant_rank is None else names[min(each.first_relevant_rank, _RANKS + 1) - 1]
        for each in assessments
    )
    ticks = _counts(max(counts.values()))
    plot = _Plot(
        "Queries by rank of the first relevant passage",
        width=_HALF,
        x=(0, len(names)),
        y=(0, ticks[-1]),
    )
    plot.rows(ticks, _whole)
    for place, name in enumerate(names):
        count = counts[name]
        if count:
            where = "no relevant passage" if name == "none" else f"rank {name}"
            plot.bar(
                place + 0.08,
                place + 0.92,
                count,
                f"{_plural(count, 'query', 'queries')}: {where}",
                kind="bar none" if name == "none" else "bar",
            )
            plot.above(place + 0.5, count, f"{count:,}")
        plot.below(place + 0.5, name)
    return plot.close()


def _similarities(assessments: Sequence[Assessment]) -> str:
    values = [each.first_relevant_score for each in assessments if each.first_relevant_score is not None]
    if not values:
        return '<p class="soft">No query returned a relevant passage.</p>'
    return _histogram("Queries by score of the first relevant passage", values, least_step=0.02, unit="")


def _latency(report: Report) -> str:
    values = [each.outcome.latency_ms for each in report.assessments if isinstance(each.outcome, Answered)]
    if report.latency is None:
        return '<p class="soft">No query was answered.</p>'
    markers = [("p50", report.latency.p50), ("p95", report.latency.p95), ("p99", report.latency.p99)]
    return _histogram("Queries by latency", values, least_step=0.1, unit=" ms", markers=markers)


def _histogram(
    name: str,
    values: Sequence[float],
    *,
    least_step: float,
    unit: str,
    markers: Sequence[tuple[str, float]] = (),
) -> str:
    step = max(least_step, _nice((max(values) - min(values)) / 30))
    first = math.floor(min(values) / step)
    # An empty bin on each side, so that a narrow distribution does not look wide.
    bins = max(math.floor(max(values) / step) - first + 1, 8)
    counts = Counter(min(math.floor(value / step) - first, bins - 1) for value in values)
    ticks = _counts(max(counts.values()))
    plot = _Plot(
        name,
        width=_HALF,
        x=(first * step, (first + bins) * step),
        y=(0, ticks[-1]),
        headroom=_LINE * max(0, len(markers) - 1),
    )
    plot.rows(ticks, _whole)
    digits = max(0, -math.floor(math.log10(step)))
    for place in range(bins):
        low, high = (first + place) * step, (first + place + 1) * step
        if counts[place]:
            tip = f"{_plural(counts[place], 'query', 'queries')}: {low:.{digits}f} to {high:.{digits}f}{unit}"
            plot.bar(low, high, counts[place], tip)
    every = max(1, math.ceil(bins / 8))
    for edge in range(0, bins + 1, every):
        plot.below((first + edge) * step, f"{(first + edge) * step:.{digits}f}")
    width = (first + bins) * step - first * step
    for line, (label, value) in enumerate(markers):
        y = _TOP - 6 + _LINE * line
        # Near the right edge, put the label to the left of its line.
        right = (value - first * step) / width < 0.8  # noqa: PLR2004  # beyond, the label would leave the plot
        plot.add(
            f'<line class="mark" x1="{plot.x(value):.1f}" x2="{plot.x(value):.1f}" y1="{y - 10}" y2="{plot.y(0):.1f}"/>'
            f'<text class="mark-text" x="{plot.x(value) + (5 if right else -5):.1f}" y="{y}" '
            f'text-anchor="{"start" if right else "end"}">{label} {value:.1f}{unit}</text>'
        )
    return plot.close()


def _ndcg(report: Report) -> str:
    ordered = sorted(report.assessments, key=lambda each: -each.scores.ndcg)
    plot = _Plot("nDCG@10 of each query, best to worst", width=_FULL, x=(0, len(ordered)), y=(0, 1))
    plot.rows((0, 0.25, 0.5, 0.75, 1), lambda value: f"{value:g}")
    if len(ordered) <= _MAX_BARS:
        for place, each in enumerate(ordered):
            # A query with score 0 has no bar: show a marker in another colour.
            lost = each.scores.ndcg == 0
            plot.bar(
                place,
                place + 1,
                0.02 if lost else each.scores.ndcg,
                f"{each.scores.ndcg:.3f} {each.label}",
                kind="bar none" if lost else "bar",
            )
    else:
        steps = "".join(
            f"V{plot.y(each.scores.ndcg):.1f}H{plot.x(place + 1):.2f}" for place, each in enumerate(ordered)
        )
        plot.add(f'<path class="bar" d="M{plot.x(0):.1f} {plot.y(0):.1f}{steps}V{plot.y(0):.1f}Z"/>')
    mean = plot.y(report.mean.ndcg)
    plot.add(
        f'<line class="mark" x1="{_LEFT}" x2="{_FULL - _RIGHT}" y1="{mean:.1f}" y2="{mean:.1f}"/>'
        f'<text class="mark-text" x="{_FULL - _RIGHT}" y="{mean - 5:.1f}" text-anchor="end">'
        f"mean {report.mean.ndcg:.3f}</text>"
    )
    perfect = sum(each.scores.ndcg > 1 - 1e-9 for each in ordered)
    nothing = sum(each.scores.ndcg == 0 for each in ordered)
    plot.below(0, f"{_plural(perfect, 'query', 'queries')} with 1", anchor="start")
    plot.below(len(ordered), f"{_plural(nothing, 'query', 'queries')} with 0", anchor="end")
    return plot.close()


# Figures and tables


def _meters(report: Report) -> str:
    rows = []
    for field, share in report.completeness.items():
        shown = "–" if share is None else f"{share:.1%}"
        width = 0 if share is None else share * 100
        rows.append(
            f'<div class="meter"><span>{field}</span><i><span style="width:{width:.2f}%"></span></i>'
            f"<b>{shown}</b></div>"
        )
    return "".join(rows)


def _facts(report: Report) -> str:
    if report.vectors is None:
        vectors = "not counted: no connection to the store"
    elif report.vectors.scope == "store":
        vectors = f"{report.vectors.count:,} in the store"
    else:
        vectors = f"{report.vectors.count:,} readable by the queries' principals"
    facts = [
        ("vectors", vectors),
        ("warnings", _count_table(report.warnings)),
        ("dead letters", _count_table(report.dead_letters)),
    ]
    return "".join(f"<dt>{name}</dt><dd>{_escape(value)}</dd>" for name, value in facts)


def _worst(report: Report) -> str:
    worst = report.worst(_WORST_SHOWN)
    if not worst:
        return ""
    return (
        '<div class="card wide"><h2>Worst queries</h2>'
        '<p class="soft">The queries with the lowest nDCG@10, and their first passage</p>'
        f'<div class="scroll">{_table(worst)}</div></div>'
    )


def _table(assessments: Sequence[Assessment]) -> str:
    head = (
        '<tr><th>query</th><th class="n">nDCG@10</th><th class="n">first relevant</th><th class="n">recall</th>'
        '<th class="n">latency</th><th>first passage</th></tr>'
    )
    return f"<table>{head}{''.join(map(_row, assessments))}</table>"


def _row(each: Assessment) -> str:
    scores, rank = each.scores, each.first_relevant_rank
    kind = "good" if scores.ndcg >= _GOOD else "fair" if scores.ndcg >= _FAIR else "bad"
    if each.trouble is not None:
        first = f'<span class="bad">{_escape(each.trouble)}</span>'
    elif not each.passages:
        first = '<span class="bad">nothing</span>'
    else:
        passage = each.passages[0]
        first = f"{_escape(passage.title or str(passage.document_id))} <span class='soft'>{passage.score:.3f}</span>"
    latency = f"{each.outcome.latency_ms:.0f} ms" if isinstance(each.outcome, Answered) else "–"
    key = f"<small>{_escape(each.query.key)}</small>" if each.query.text else ""
    return (
        f'<tr><td class="q">{_escape(each.label)}{key}</td><td class="n {kind}">{scores.ndcg:.3f}</td>'
        f'<td class="n">{"none" if rank is None else f"rank {rank}"}</td><td class="n">{scores.recall:.0%}</td>'
        f'<td class="n">{latency}</td><td>{first}</td></tr>'
    )


def _notes(report: Report) -> str:
    grade = (
        "Every expected passage is relevant"
        if report.relevant_grade == 1
        else f"A passage is relevant if its grade is {report.relevant_grade} or higher"
    )
    return (
        f"<p>{grade}. nDCG uses all grades, as in trec_eval. recall@k covers all returned passages, up to the limit of"
        " each query’s profile. A query without an answer counts as 0 in every mean.</p>"
        "<p>Each expectation counts once: a second passage of an expected document keeps its rank and scores"
        " nothing.</p>"
    )


def _count_table(counts: dict[str, int]) -> str:
    return ", ".join(f"{code} × {count:,}" for code, count in counts.items()) or "none"


def _plural(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


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
