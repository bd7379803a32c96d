"""The live page: a status as HTML that needs nothing else, and refreshes itself.

Every text goes through `xml.etree`, which escapes it. The page contains its style and script. Its policy allows only
these two, by their hashes, and no requests except to its own server.
"""

import base64
import hashlib
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.resources import files
from typing import Final

from streams.telemetry.history import WINDOW_SECONDS, CodeCount, Quantiles
from streams.telemetry.status import Stage, State, Status
from streams.terminal import printable

__all__ = ["HEADERS", "render"]

_STYLE: Final = (files(__package__) / "live_page.css").read_text(encoding="utf-8")
_SCRIPT: Final = (files(__package__) / "live_page.js").read_text(encoding="utf-8")
# A browser without scripts loads the page again.
_RELOAD_SECONDS = 10


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


#: The response's headers.
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_NAMES: Final[Mapping[Stage, str]] = {"worker": "Anabranch worker", "embedder": "Anabranch embedding stage"}
_STATES: Final[Mapping[State, tuple[str, str]]] = {
    "starting": ("Starting", "fair"),
    "ready": ("Ready", "good"),
    "not_ready": ("Not ready", "bad"),
    "stopping": ("Stopping", "fair"),
}
_OUTCOMES: Final[Mapping[str, str]] = {
    "answered": "answered",
    "dead_lettered": "dead-lettered",
    "skipped": "skipped",
}
_DURATIONS: Final[Mapping[str, str]] = {
    "duration": "fetched → acknowledged",
    "age": "occurred_at → acknowledged",
}
_VERSIONS: Final[Mapping[str, str]] = {
    "anabranch": "Anabranch",
    "store_schema": "store schema",
    "query_contract": "query contract",
    "result_contract": "result contract",
    "text_contract": "text contract",
    "postgresql": "PostgreSQL",
    "pgvector": "pgvector",
}
# From this age on, the oldest waiting event is late; then, it counts as not answered (docs/metrics.md).
_LATE_SECONDS = 2.0
_UNANSWERED_SECONDS = 60.0
# The chart's size, in its own units; and the least height of a bar, so that a single dead letter is visible.
_CHART_HEIGHT = 100.0
_MIN_BAR_HEIGHT = 2.0

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_MILLION = 1e6
_UNKNOWN = "–"


def render(status: Status) -> str:
    """The page."""
    html = _e("html", _head(status), _e("body", _main(status), _e("script", _SCRIPT)), lang="en")
    return "<!doctype html>\n" + ET.tostring(html, encoding="unicode", method="html")


def _head(status: Status) -> ET.Element:
    label, _ = _STATES[status.state]
    return _e(
        "head",
        _e("meta", charset="utf-8"),
        _e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _e("link", rel="icon", href="data:,"),
        _e("title", f"{label} · {_NAMES[status.stage]}"),
        _e("style", _STYLE),
        _e("noscript", _e("meta", http_equiv="refresh", content=str(_RELOAD_SECONDS))),
    )


def _main(status: Status) -> ET.Element:
    label, kind = _STATES[status.state]
    since = f"for {_age(status.state_seconds)}"
    details = (
        _events(status),
        _e("div", _latency(status), _partitions(status), class_="column"),
        _e("div", _dead_letters(status), _facts(status), class_="column"),
    )
    return _e(
        "main",
        _e(
            "header",
            _logo(),
            _e("div", _e("h1", _NAMES[status.stage]), _live("p", "uptime", *_uptime(status), class_="soft")),
            _e(
                "div",
                # Apart from its duration, which changes all the time: a screen reader reads each new state.
                _live("p", "state", _e("b", label, class_=kind), role="status"),
                _live("p", "since", since, class_="soft"),
                class_="state",
            ),
        ),
        _e("p", id="lost", role="alert", hidden="hidden"),
        _live("section", "problems", *_problems(status), aria_label="Problems"),
        _live("section", "figures", _tiles(status), aria_label="Key figures"),
        _live("section", "details", *details, class_="grid", aria_label="Details"),
        _links(status),
    )


def _e(name: str, /, *content: ET.Element | str, **attributes: str) -> ET.Element:
    """An element with its text, then its children; `class_` is its class, and other underscores are hyphens."""
    element = ET.Element(
        name, {key.rstrip("_").replace("_", "-"): printable(value) for key, value in attributes.items()}
    )
    element.text = "".join(printable(part, lines=True) for part in content if isinstance(part, str))
    element.extend(part for part in content if not isinstance(part, str))
    return element


def _live(name: str, identifier: str, /, *content: ET.Element | str, **attributes: str) -> ET.Element:
    """An element whose content the script replaces."""
    return _e(name, *content, **{"id": identifier, "data-live": "", **attributes})


def _logo() -> ET.Element:
    return _e(
        "svg",
        _e("path", d="M2 20h8c8 0 8-13 16-13s8 13 16 13h8"),
        _e("path", d="M10 20c8 0 8 13 16 13s8-13 16-13", class_="faint"),
        viewBox="0 0 52 40",
        fill="none",
        stroke_width="4",
        stroke_linecap="round",
        aria_hidden="true",
    )


def _uptime(status: Status) -> Iterator[ET.Element | str]:
    yield f"{status.versions.get('anabranch') or _UNKNOWN} · running for {_age(status.uptime_seconds)} · "
    yield _e("time", f"{status.at:%Y-%m-%d %H:%M:%S} UTC", datetime=f"{status.at:%Y-%m-%dT%H:%M:%SZ}")


def _problems(status: Status) -> Iterator[ET.Element]:
    if status.problems:
        yield _e("ul", *(_e("li", problem) for problem in status.problems.values()))


def _tiles(status: Status) -> ET.Element:
    figures = status.figures
    rates = [rate for rate in figures.rates.values() if rate is not None]
    oldest = status.oldest_waiting_seconds
    dead_letters = sum(each.recent for each in figures.dead_letters)
    duration = figures.latency["duration"]
    return _e(
        "dl",
        _tile(
            "events per second",
            _short(sum(rates)) if rates else _UNKNOWN,
            f"finished, {_span(figures.rate_seconds)}",
        ),
        _tile(
            "oldest waiting event",
            _UNKNOWN if oldest is None else _age(oldest, units=1),
            "since it was written to Kafka",
            "" if oldest is None or oldest < _LATE_SECONDS else _late(oldest),
        ),
        _tile("lag", _UNKNOWN if status.lag is None else _compact(status.lag), "events not yet committed"),
        _tile("in flight", _count(status.in_flight), "events started, not yet committed"),
        _tile("duration, p99", _duration(duration.p99, duration), _span(figures.window_seconds)),
        _tile(
            "dead letters",
            _count(dead_letters),
            _span(figures.window_seconds),
            "bad" if dead_letters else "",
        ),
        class_="tiles",
    )


def _tile(name: str, figure: str, note: str, kind: str = "") -> ET.Element:
    return _e(
        "div",
        _e("dt", name),
        _e("dd", figure, class_=f"figure {kind}".rstrip()),
        _e("dd", note, class_="note"),
        class_="tile",
    )


def _late(seconds: float) -> str:
    return "fair" if seconds < _UNANSWERED_SECONDS else "bad"


def _card(title: str, note: str, *content: ET.Element, wide: bool = False) -> ET.Element:
    return _e(
        "div", _e("h2", title), _e("p", note, class_="soft"), *content, class_="card wide" if wide else "card"
    )


def _table(head: Sequence[str], rows: Iterable[tuple[ET.Element, Sequence[str | ET.Element]]]) -> ET.Element:
    """A table whose first column has the rows' headings, and whose other columns have numbers."""
    first, *others = head
    return _e(
        "div",
        _e(
            "table",
            _e(
                "thead",
                _e(
                    "tr",
                    _e("th", first, scope="col"),
                    *(_e("th", each, class_="n", scope="col") for each in others),
                ),
            ),
            _e(
                "tbody",
                *(
                    _e("tr", heading, *(_e("td", cell, class_="n") for cell in cells))
                    for heading, cells in rows
                ),
            ),
        ),
        class_="scroll",
    )


def _heading(text: str, kind: str = "") -> ET.Element:
    return _e("th", _e("span", text, class_=kind) if kind else text, scope="row")


def _events(status: Status) -> ET.Element:
    figures = status.figures
    rates = {outcome: figures.rates.get(outcome) for outcome in _OUTCOMES}
    rows = [
        (
            _heading(name, f"key {outcome}"),
            [
                _UNKNOWN if (rate := rates[outcome]) is None else _short(rate),
                _count(figures.recent.get(outcome, 0)),
                _count(figures.totals.get(outcome, 0)),
            ],
        )
        for outcome, name in _OUTCOMES.items()
    ]
    head = [
        "outcome",
        f"per second, {_span(figures.rate_seconds)}",
        _span(figures.window_seconds),
        "since the start",
    ]
    return _card("Events", "Finished events", *_chart(status), _table(head, rows), wide=True)


def _chart(status: Status) -> Iterator[ET.Element]:
    """Stacked bars, one for each interval."""
    intervals = status.figures.intervals
    highest = max((sum(each.rates.values()) for each in intervals), default=0.0)
    bars = []
    for each in intervals:
        top = _CHART_HEIGHT
        for outcome in _OUTCOMES:
            if rate := each.rates.get(outcome):
                height = max(_MIN_BAR_HEIGHT, _CHART_HEIGHT * rate / highest)
                top -= height
                bars.append(
                    _e(
                        "rect",
                        class_=outcome,
                        x=f"{WINDOW_SECONDS - each.began:.2f}",
                        y=f"{top:.2f}",
                        width=f"{0.8 * (each.began - each.ended):.2f}",
                        height=f"{height:.2f}",
                    )
                )
    above = len(_OUTCOMES) * _MIN_BAR_HEIGHT
    window = _age(WINDOW_SECONDS)
    yield _e(
        "figure",
        _e(
            "svg",
            *bars,
            viewBox=f"0 {-above:.0f} {WINDOW_SECONDS:.0f} {_CHART_HEIGHT + above:.0f}",
            preserveAspectRatio="none",
            role="img",
            aria_label=f"Events per second over the last {window}, at most {_short(highest)}",
        ),
        _e(
            "figcaption",
            _e("span", f"{window} ago"),
            _e("span", f"highest: {_short(highest)} per second"),
            _e("span", "now"),
        ),
    )


def _latency(status: Status) -> ET.Element:
    figures = status.figures
    rows = [
        (
            _heading(_DURATIONS.get(name, name)),
            [_duration(value, found) for value in (found.p50, found.p95, found.p99)],
        )
        for name, found in figures.latency.items()
    ]
    note = f"Of answered events, {_span(figures.window_seconds)}; estimated from the histograms"
    return _card("Latency", note, _table(["", "p50", "p95", "p99"], rows))


def _dead_letters(status: Status) -> ET.Element:
    figures = status.figures
    if not figures.dead_letters:
        return _card("Dead letters", "None since the start")
    rows: list[tuple[ET.Element, Sequence[str | ET.Element]]] = [
        (_heading(each.code), [_ago(status, each), _count(each.recent), _count(each.total)])
        for each in figures.dead_letters
    ]
    head = ["code", "last", _span(figures.window_seconds), "since the start"]
    return _card("Dead letters", "The latest code first", _table(head, rows))


def _ago(status: Status, each: CodeCount) -> ET.Element:
    at = status.at - timedelta(seconds=each.seconds_ago)
    return _e("time", f"{_age(each.seconds_ago, units=1)} ago", datetime=f"{at:%Y-%m-%dT%H:%M:%SZ}")


def _partitions(status: Status) -> ET.Element:
    if not status.partitions:
        return _card("Partitions", "None are assigned")
    rows = [
        (
            _heading(str(each.partition)),
            [_UNKNOWN if each.lag is None else _count(each.lag), _age(each.oldest_waiting_seconds)],
        )
        for each in status.partitions
    ]
    note = f"{_count(len(status.partitions))} of the input topic are assigned"
    return _card("Partitions", note, _table(["partition", "lag", "oldest waiting event"], rows))


def _facts(status: Status) -> ET.Element:
    names = {"kafka": "Kafka"}
    facts = {
        **{names.get(name, name): state for name, state in status.dependencies.items()},
        **{_VERSIONS.get(name, name): version or _UNKNOWN for name, version in status.versions.items()},
    }
    entries = [element for name, fact in facts.items() for element in (_e("dt", name), _e("dd", fact))]
    return _card("Connections and versions", "Of this process", _e("dl", *entries, class_="facts"))


def _links(status: Status) -> ET.Element:
    # Relative: a proxy may serve the page below another path.
    links = {
        "Metrics": "metrics",
        "Readiness": "healthz/ready",
        "Liveness": "healthz/live",
        "This page as JSON": "status",
    }
    if status.documentation is not None:
        links["Documentation"] = status.documentation
    return _e(
        "nav",
        _e("ul", *(_e("li", _e("a", name, href=address)) for name, address in links.items())),
        aria_label="More",
    )


def _count(number: float) -> str:
    return f"{number:,.0f}" if math.isfinite(number) else _UNKNOWN


def _compact(number: float) -> str:
    """With a unit, where it would not fit a tile."""
    return _count(number) if number < _MILLION else f"{_short(number / _MILLION)} M"


def _short(number: float) -> str:
    """With two or three digits, more only before the point; not zero unless it is."""
    if number == 0 or not number < 99.95:  # noqa: PLR2004  # three digits
        return _count(number)
    if number < 0.01:  # noqa: PLR2004  # would have an exponent
        return "< 0.01"
    return f"{number:.1f}" if number >= 0.995 else f"{number:.2g}"  # noqa: PLR2004  # one when rounded


def _duration(seconds: float | None, quantiles: Quantiles) -> str:
    """A quantile."""
    if seconds is None:
        return _UNKNOWN
    if seconds >= quantiles.longest:
        return f"≥ {quantiles.longest:g} s"
    return f"{_short(1000 * seconds)} ms" if seconds < 1 else f"{_short(seconds)} s"


def _span(seconds: float) -> str:
    """What a figure covers; not to the second, so that it does not change all the time."""
    minutes = round(seconds / _MINUTE)
    return f"last {minutes} min" if minutes else f"last {_age(seconds)}"


def _age(seconds: float, *, units: int = 2) -> str:
    """A time in its largest units."""
    if not math.isfinite(seconds):
        return _UNKNOWN
    rest = max(0, int(seconds))
    parts: list[tuple[int, str]] = []
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min"), (1, "s")):
        if rest >= unit or parts or unit == 1:
            parts.append((rest // unit, name))
            rest %= unit
    return " ".join(f"{number} {name}" for number, name in parts[:units] if number or len(parts) == 1)
