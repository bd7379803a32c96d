"""The report: its figures, its keys, and its page."""

import random
import re
from html.parser import HTMLParser
from typing import Any
from uuid import UUID

import pytest

from streams.evaluation.golden import Expectation, GoldenQuery
from streams.evaluation.page import render
from streams.evaluation.query_runner import Answered, DeadLettered, Outcome, Unanswered
from streams.evaluation.report import Bounds, Report, assess
from streams.evaluation.vectors import VectorCount
from tests.evaluation.made_up import golden, passage, result

WANTED = UUID(int=7)
EXPECTED = [Expectation("document_id", str(WANTED), 2)]
HOSTILE = "<script>alert('x')</script> & \"${title}\" $wanting {{ title }} {% raw %} [bold]"


def report(cases: list[tuple[str, Outcome]], *, bounds: Bounds | None = None, **changes: Any) -> Report:
    queries: list[GoldenQuery] = [
        golden(f"q{place}", EXPECTED, text) for place, (text, _) in enumerate(cases)
    ]
    options: dict[str, Any] = {
        "mode": "live",
        "golden": "golden.jsonl",
        "relevant_grade": 1,
        "bounds": bounds or Bounds(),
        "vectors": VectorCount(180, "store"),
    }
    return assess(queries, [outcome for _, outcome in cases], **(options | changes))


def answered(rank: int | None, *, latency_ms: float = 20, of: int = 6, **fields: Any) -> Answered:
    """Six passages, the wanted one at this rank."""
    found = [
        passage(
            place, score=0.9 - place / 20, **(fields | ({"document_id": WANTED} if place == rank else {}))
        )
        for place in range(1, of + 1)
    ]
    return Answered(result(found, warnings=["k_clamped"]), latency_ms)


MIXED: list[tuple[str, Outcome]] = [
    ("good", answered(1, title="T", source_url="https://a", page=1, section="")),
    ("late", answered(4, latency_ms=40)),
    ("lost", answered(None)),
    ("dead", DeadLettered("unknown_profile", "no such profile")),
    ("silent", Unanswered("no answer within 10 s")),
]


def test_figures() -> None:
    found = report(MIXED)
    assert (found.answered, found.dead_lettered, found.unanswered, found.passages) == (3, 1, 1, 18)
    assert found.mean.hit == pytest.approx(2 / 5)
    assert found.mean.reciprocal_rank == pytest.approx((1 + 1 / 4) / 5)
    assert found.mean.recall == pytest.approx(2 / 5)
    assert found.completeness == pytest.approx(
        {"title": 1 / 3, "source_url": 1 / 3, "page": 1 / 3, "section": 0}
    )
    assert found.warnings == {"k_clamped": 3}
    assert found.dead_letters == {"unknown_profile": 1}
    assert found.latency is not None
    assert (found.latency.p50, found.latency.maximum) == (20, 40)
    assert [each.first_relevant_rank for each in found.assessments] == [1, 4, None, None, None]
    assert found.assessments[1].first_relevant_score == pytest.approx(0.7)


def test_the_worst_come_first_and_the_perfect_not_at_all() -> None:
    worst = [each.label for each in report(MIXED).worst(10)]
    assert set(worst[:2]) == {"dead", "silent"}
    assert worst[2:] == ["lost", "late"]
    assert len(report(MIXED).worst(1)) == 1


@pytest.mark.parametrize(
    ("cases", "bounds", "failures"),
    [
        (MIXED[:1], Bounds(1, 1), []),
        (MIXED[:3], Bounds(), []),
        (MIXED[:3], Bounds(0.9, None), ["nDCG@10 is 0.4769, below 0.9"]),
        (MIXED[:3], Bounds(0.4, 0.7), ["hit rate@5 is 0.6667, below 0.7"]),
        (MIXED[3:], Bounds(), ["1 of 2 queries were not answered", "1 of 2 queries were dead-lettered"]),
    ],
)
def test_what_is_wanting(cases: Any, bounds: Bounds, failures: list[str]) -> None:
    assert report(cases, bounds=bounds).failures == failures


def test_the_keys_for_machines() -> None:
    found = report(MIXED).to_json()
    assert list(found) == [
        "at", "way", "golden", "passed", "failures", "bounds", "queries", "answered", "unanswered",
        "dead_lettered", "dead_letters", "relevant_grade", "hit_rate_at_5", "ndcg_at_10", "recall_at_k", "mrr",
        "latency_ms", "query_time_ms", "passages", "completeness", "vectors", "warnings", "per_query",
    ]  # fmt: skip
    assert list(found["latency_ms"]) == ["p50", "p95", "p99", "max"]
    assert found["vectors"] == {"count": 180, "scope": "store"}
    assert list(found["per_query"][0]) == [
        "id", "text", "outcome", "trouble", "hit_at_5", "ndcg_at_10", "recall_at_k", "reciprocal_rank",
        "first_relevant_rank", "first_relevant_score", "profile", "k_effective", "k_returned", "warnings",
        "latency_ms", "query_time_ms", "first_passage",
    ]  # fmt: skip
    outcomes = [each["outcome"] for each in found["per_query"]]
    assert outcomes == ["answered", "answered", "answered", "dead_lettered", "unanswered"]
    assert found["per_query"][3]["trouble"] == "dead letter unknown_profile: no such profile"


# The page


class Strict(HTMLParser):
    """Every element is closed in its turn, and nothing is fetched or run."""

    VOID = frozenset({"meta", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert name not in {"src", "srcset", "xlink:href"}, (tag, name)
            assert not name.startswith("on"), (tag, name)
            assert name != "href" or value == "data:,", (tag, value)
            if name in {"x", "y", "x1", "x2", "y1", "y2", "d", "style"}:
                assert "nan" not in (value or "").lower(), value
                assert "inf" not in (value or "").lower(), value
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> Strict:
    parser = Strict()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert "script" not in parser.seen
    assert not re.search(r"url\(|@import|https?://", page.replace("https://a", ""))
    assert not re.search(r"\$[a-z{]", page.replace("${title}", "").replace("$wanting", ""))
    assert not re.search(r"{{|{%", page.replace("{{ title }}", "").replace("{% raw %}", ""))
    return parser


def many(count: int) -> list[tuple[str, Outcome]]:
    rng = random.Random(6)
    ranks = [1, 1, 1, 2, 3, 7, 12, None]
    return [
        (f"question {n}", answered(rng.choice(ranks), latency_ms=rng.lognormvariate(3, 1), of=15))
        for n in range(count)
    ]


@pytest.mark.parametrize(
    "cases",
    [
        MIXED,
        MIXED[:1],
        MIXED[2:3],
        MIXED[3:4],
        MIXED[4:],
        [("empty", Answered(result([]), 0.0))],
        [("negative", Answered(result([passage(1, document_id=WANTED, score=-0.99)]), 90_000.0))],
        many(40),
        many(400),
    ],
    ids=["mixed", "one", "lost", "dead", "silent", "empty", "negative", "forty", "four hundred"],
)
def test_the_page_is_whole_and_needs_nothing_else(cases: Any) -> None:
    found = report(cases, bounds=Bounds(0.5, None), vectors=None)
    page = render(found)
    check(page)
    assert ("✗ failed" in page) is bool(found.failures)
    assert f"All {len(cases):,} queries" in page
    for text, _ in cases:
        assert text in page


def test_whatever_the_texts_say_they_stay_texts() -> None:
    cases: list[tuple[str, Outcome]] = [
        (HOSTILE, answered(2, title=HOSTILE)),
        (HOSTILE, DeadLettered(HOSTILE, HOSTILE)),
        (HOSTILE, Unanswered(HOSTILE)),
    ]
    page = render(report(cases, golden=HOSTILE))
    check(page)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\u202e" not in render(report([("\u202e", answered(1, title="\u202e"))], golden="\u202e"))
