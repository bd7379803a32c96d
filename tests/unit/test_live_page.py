"""The live page and its JSON: complete, escaped, readable, and without anything from elsewhere."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.telemetry.history import CodeCount, Figures, Interval, Quantiles
from streams.telemetry.live_page import HEADERS, render
from streams.telemetry.status import PartitionStatus, Status, status_document
from streams.terminal import printable

OUTCOMES = ("answered", "dead_lettered", "skipped")


def figures(**changes: Any) -> Figures:
    found = Figures(
        window_seconds=300,
        rate_seconds=60,
        rates={"answered": 12.34, "dead_lettered": 0.017, "skipped": 0.0},
        recent={"answered": 3700, "dead_lettered": 2, "skipped": 0},
        totals={"answered": 1234567, "dead_lettered": 10, "skipped": 1},
        intervals=[
            Interval(10, 5, dict.fromkeys(OUTCOMES, 1.0)),
            Interval(5, 0, dict.fromkeys(OUTCOMES, 0.0)),
        ],
        latency={
            "duration": Quantiles(3700, 0.00912, 0.0231, 60.0, longest=60.0),
            "age": Quantiles(3700, 0.2, 1.23, 12.3, longest=3600.0),
            "search": Quantiles(0, None, None, None, longest=10.0),
        },
        dead_letters=[CodeCount("zero_embedding", 2, 9, 61), CodeCount("expired", 0, 1, 90000)],
    )
    return replace(found, **changes)


def status(**changes: Any) -> Status:
    found = Status(
        stage="worker",
        at=datetime(2031, 5, 4, 3, 2, 1, tzinfo=UTC),
        uptime_seconds=7600.5,
        state="ready",
        state_seconds=7500,
        problems={},
        dependencies={"store": "up", "kafka": "up"},
        partitions=[PartitionStatus(0, 3, 0.25), PartitionStatus(4, 0, 0.0)],
        in_flight=8,
        figures=figures(),
        versions={"anabranch": "1.2.3", "store_schema": "3", "postgresql": None},
        documentation=None,
    )
    return replace(found, **changes)


class Page(HTMLParser):
    """The elements in order, and the text outside of style and script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.raw: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in {"meta", "link"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in {"style", "script"}:
            self.raw[self._open[-1]] = self.raw.get(self._open[-1], "") + data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def test_the_page_shows_everything() -> None:
    page = Page(render(status())).texts
    for text in (
        *("Anabranch worker", "Ready", "for 2 h 5 min", "12.3", "0.017", "3,700", "1,234,567"),
        *("9.1 ms", "23.1 ms", "≥ 60 s", "1.2 s", "zero_embedding", "1 min ago", "1 d ago"),
        *("1.2.3", "store schema", "3", "Metrics", "Readiness", "This page as JSON"),
    ):
        assert text in page, text
    assert "Documentation" not in page
    documented = render(status(documentation="https://docs.example.com/"))
    assert ("a", "href", "https://docs.example.com/") in Page(documented).attributes


@pytest.mark.parametrize(
    ("state", "label"),
    [("starting", "Starting"), ("ready", "Ready"), ("not_ready", "Not ready"), ("stopping", "Stopping")],
)
@pytest.mark.parametrize(
    ("stage", "name"), [("worker", "Anabranch worker"), ("embedder", "Anabranch embedding stage")]
)
def test_each_state_has_a_word(state: str, label: str, stage: str, name: str) -> None:
    html = render(status(state=state, stage=stage, problems={"store": "The store is unavailable."}))
    assert f"<title>{label} · {name}</title>" in html
    assert {label, name, "The store is unavailable."} <= set(Page(html).texts)


def test_what_is_not_known_is_a_dash() -> None:
    unknown = figures(rates=dict.fromkeys(OUTCOMES), intervals=[], dead_letters=[], window_seconds=0)
    page = Page(render(status(partitions=[], figures=unknown))).text
    assert "None since the start" in page
    assert "None are assigned" in page
    assert page.count("–") >= 6


NUMBERS = st.floats(min_value=0) | st.just(math.nan)
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["<script>alert(1)</script>", '"><img src=//x onerror=y>', "&lt;", "</style>", "\u202e", "]]>", "'"]
)


@settings(max_examples=50)
@given(NUMBERS, NUMBERS, NUMBERS, st.one_of(st.none(), st.integers(0, 2**63)))
def test_no_number_is_shown_as_not_a_number(
    oldest: float, uptime: float, rate: float, lag: int | None
) -> None:
    finite = rate if math.isfinite(rate) else None
    shown = status(
        partitions=[PartitionStatus(0, lag, oldest)],
        uptime_seconds=uptime,
        figures=figures(
            rates=dict.fromkeys(OUTCOMES, finite),
            latency={
                "duration": Quantiles(1, finite, finite, finite, longest=60.0),
            },
        ),
    )
    assert not re.search(r"\b(nan|inf|None)\b|\de[+-]\d", Page(render(shown)).text, re.IGNORECASE)
    json.dumps(status_document(shown), allow_nan=False)


def with_text(text: str) -> Status:
    return status(
        problems={"store": text},
        dependencies={text: text},
        versions={"anabranch": text, text: text},
        documentation=text,
        figures=figures(dead_letters=[CodeCount(text, 1, 1, 1)]),
    )


@settings(max_examples=200)
@given(TEXTS)
def test_no_text_becomes_an_element_or_an_attribute(text: str) -> None:
    plain, page = Page(render(with_text("text"))), Page(render(with_text(text)))
    assert page.tags == plain.tags
    assert [(tag, name) for tag, name, _ in page.attributes] == [
        (tag, name) for tag, name, _ in plain.attributes
    ]
    assert page.raw == plain.raw
    assert all(printable(char) == char or char == "\n" for char in page.text)


def test_the_policy_allows_this_style_and_this_script_alone() -> None:
    page = Page(render(status()))
    policy = dict(entry.strip().split(" ", 1) for entry in HEADERS["Content-Security-Policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
        assert page.tags.count(kind) == 1
    assert policy == {
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    # It would not apply to these.
    assert not [name for _, name, _ in page.attributes if name == "style" or name.startswith("on")]


def test_nothing_comes_from_elsewhere() -> None:
    html = render(status())
    assert "//" not in re.sub(r"^\s*//.*", "", html, flags=re.MULTILINE)
    addresses = [value for _, name, value in Page(html).attributes if name in {"href", "src"}]
    assert addresses == ["data:,", "metrics", "healthz/ready", "healthz/live", "status"]
    assert "url(" not in html
    assert "@import" not in html


def test_whoever_cannot_see_the_chart_can_read_it() -> None:
    attributes = Page(render(status())).attributes
    assert ("svg", "aria-label", "Events per second over the last 5 min, at most 3.0") in attributes
    assert ("html", "lang", "en") in attributes


def _luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    dark, light = sorted([_luminance(one), _luminance(other)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_texts_contrast_with_their_ground(theme: int) -> None:
    style = Page(render(status())).raw["style"]
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", style.split(":root")[theme + 1]))
    for ground in ("page", "card"):
        for text in ("ink", "soft", "focus", "good", "fair", "bad"):
            assert _contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
        for shape in ("water", "quiet", "bad"):
            assert _contrast(colors[shape], colors["card"]) >= 2.4, shape


def test_the_json_has_its_documented_form() -> None:
    problems = {"store": "The store is unavailable. The log has the reason."}
    shown = status(state="not_ready", problems=problems, documentation="https://docs.example.com/")
    assert json.loads(json.dumps(status_document(shown))) == {
        "stage": "worker",
        "at": "2031-05-04T03:02:01Z",
        "state": "not_ready",
        "since": "2031-05-04T00:57:01Z",
        "uptime_seconds": 7600.5,
        "problems": problems,
        "dependencies": {"store": "up", "kafka": "up"},
        "partitions": [
            {"partition": 0, "lag": 3, "oldest_waiting_seconds": 0.25},
            {"partition": 4, "lag": 0, "oldest_waiting_seconds": 0.0},
        ],
        "lag": 3,
        "oldest_waiting_seconds": 0.25,
        "in_flight": 8,
        "window_seconds": 300,
        "events": {
            "answered": {"per_second": 12.34, "recent": 3700, "total": 1234567},
            "dead_lettered": {"per_second": 0.017, "recent": 2, "total": 10},
            "skipped": {"per_second": 0.0, "recent": 0, "total": 1},
        },
        "latency_seconds": {
            "duration": {"events": 3700, "p50": 0.00912, "p95": 0.0231, "p99": 60.0},
            "age": {"events": 3700, "p50": 0.2, "p95": 1.23, "p99": 12.3},
            "search": {"events": 0, "p50": None, "p95": None, "p99": None},
        },
        "dead_letters": [
            {"code": "zero_embedding", "recent": 2, "total": 9, "last_at": "2031-05-04T03:01:00Z"},
            {"code": "expired", "recent": 0, "total": 1, "last_at": "2031-05-03T02:02:01Z"},
        ],
        "versions": {"anabranch": "1.2.3", "store_schema": "3", "postgresql": None},
        "documentation": "https://docs.example.com/",
    }


def test_a_lag_that_is_not_known_of_one_partition_is_not_known() -> None:
    assert status(partitions=[PartitionStatus(0, 3, 0.0), PartitionStatus(1, None, 2.0)]).lag is None
    assert status(partitions=[]).lag is None
    assert status(partitions=[]).oldest_waiting_seconds is None
