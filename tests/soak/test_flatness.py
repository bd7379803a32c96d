"""The judgement itself: what it must call growth, and what it must let pass. No server, no worker, no clock."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.soak.flatness import Bound, bounds, judge, theil_sen
from tests.soak.injections import FAULTS, dealt
from tests.soak.record import Injection, Record, Sample

MIB = 1024 * 1024
MINUTES = 30
BOUNDS = {bound.series: bound for bound in bounds(pool=17)}
FLAT = {"rss": 120.0 * MIB, "blocks": 700_000.0, "files": 20.0, "tasks": 40.0, "kafka": 4.0, "postgres": 12.0}


def record(series: str, value: Callable[[float], float], *, minutes: int = MINUTES) -> Record:
    """A soak whose process is wild during each fault, as a real one is, and else as it is told."""
    made = Record(seconds=60.0 * minutes, settle_seconds=10.0)
    made.injections = [
        Injection("fault", 60.0 * n + 30, 60.0 * n + 45, 60.0 * n + 50) for n in range(minutes - 1)
    ]
    noise = random.Random(3)
    for at in range(0, 60 * minutes, 2):
        wild = any(injection.began <= at < injection.recovered + 5 for injection in made.injections)
        level = FLAT[series]
        seen = level * 3 if wild else value(float(at)) + level * noise.uniform(-0.01, 0.01)
        made.samples.append(Sample(float(at), {series: seen}))
    return made


def growing(series: str, *, by: float, since: float = 0.0) -> Record:
    """By so much in the whole half hour, evenly, since some minute."""
    last = 60.0 * MINUTES
    return record(series, lambda at: FLAT[series] + by * max(0.0, at - 60 * since) / (last - 60 * since))


def flat(series: str) -> Record:
    return record(series, lambda _: FLAT[series])


@pytest.mark.parametrize("series", BOUNDS)
def test_a_flat_series_passes_whatever_it_does_during_faults(series: str) -> None:
    finding = judge(flat(series), BOUNDS[series])
    assert finding.failures == []
    assert finding.level == pytest.approx(FLAT[series], rel=0.02)


@pytest.mark.parametrize(
    ("series", "by"),
    [
        ("rss", 30 * MIB),
        ("blocks", 54_000.0),  # one for each event, at 30 a second
        ("files", 30.0),  # one for each fault
        ("tasks", 30.0),
        ("kafka", 30.0),
        ("postgres", 30.0),
    ],
)
def test_a_steady_leak_is_named(series: str, by: float) -> None:
    [line] = judge(growing(series, by=by), BOUNDS[series]).failures
    assert line.startswith(BOUNDS[series].title)


def test_growth_is_reported_in_figures() -> None:
    finding = judge(growing("rss", by=30 * MIB), BOUNDS["rss"])
    assert finding.growth == pytest.approx(15 * MIB, rel=0.15)  # of the second half
    assert finding.limit == pytest.approx(0.05 * finding.level)
    [line] = finding.failures
    assert f"MiB grew by {finding.growth / MIB:.1f} over the second half" in line
    assert line.endswith(f"over {0.05 * finding.level / MIB:.1f}")


@pytest.mark.parametrize("series", ["rss", "files", "tasks"])
def test_what_fills_up_in_the_first_half_is_no_leak(series: str) -> None:
    half = 60 * MINUTES / 2
    warming = record(series, lambda at: FLAT[series] * (0.5 + 0.5 * min(1.0, at / (half - 60))))
    assert judge(warming, BOUNDS[series]).failures == []


def test_what_a_late_fault_leaves_behind_is_seen() -> None:
    left = record("files", lambda at: FLAT["files"] + (4 if at > 60 * 25 else 0))
    assert judge(left, BOUNDS["files"]).failures


@pytest.mark.parametrize("minute", [15, 21, 28])
def test_one_lull_astray_is_no_leak(minute: int) -> None:
    def value(at: float) -> float:
        return FLAT["tasks"] + (50 if 60 * minute + 30 < at <= 60 * minute + 120 else 0)

    assert judge(record("tasks", value), BOUNDS["tasks"]).failures == []


def test_shrinking_is_no_leak() -> None:
    assert judge(growing("rss", by=-60 * MIB), BOUNDS["rss"]).failures == []


def test_of_a_share_and_a_size_the_smaller_counts() -> None:
    seen = growing("rss", by=16 * MIB)  # 8 MiB in the second half
    assert judge(seen, Bound("rss", "", growth=10 * MIB)).failures == []
    assert judge(seen, Bound("rss", "", share=0.05)).failures
    assert judge(seen, Bound("rss", "", growth=10 * MIB, share=0.05)).limit == pytest.approx(
        0.05 * 128 * MIB, rel=0.05
    )


def test_a_ceiling_holds_in_every_lull_of_both_halves() -> None:
    seen = record("postgres", lambda at: 19.0 if 70 < at < 90 else 12.0)
    assert judge(seen, BOUNDS["postgres"]).failures == ["connections to PostgreSQL: 19 in a lull, over 18"]


def test_too_few_lulls_are_no_proof() -> None:
    [line] = judge(record("rss", lambda _: FLAT["rss"], minutes=8), BOUNDS["rss"]).failures
    assert "too few" in line


def test_a_series_that_was_never_seen_is_no_proof() -> None:
    assert judge(flat("rss"), BOUNDS["tasks"]).failures


def test_the_fit_is_not_bent_by_a_few() -> None:
    line = [(float(x), 2.0 * x + 1) for x in range(20)]
    assert theil_sen(line) == pytest.approx(2.0)
    line[3], line[17] = (3.0, 900.0), (17.0, -900.0)
    assert theil_sen(line) == pytest.approx(2.0)


def test_lulls_begin_when_things_have_settled_and_end_with_the_next_fault() -> None:
    made = Record(seconds=100, settle_seconds=10)
    made.injections = [Injection("a", 20, 25, 30), Injection("b", 38, 39, 40)]
    assert [(lull.began, lull.ended) for lull in made.lulls()] == [(10, 20), (50, 100)]


def test_a_record_can_be_kept(tmp_path: Path) -> None:
    made = flat("rss")
    made.injections.append(Injection("fault", 1, 2, 3, "it did not come back"))
    made.failures.append("it did not come back")
    made.save(tmp_path / "a folder" / "soak.json")
    assert Record.load(tmp_path / "a folder" / "soak.json") == made


def test_every_fault_is_dealt_once_before_any_comes_again() -> None:
    def some(deal: Iterator[object]) -> list[object]:
        return [next(deal) for _ in FAULTS]

    deal = dealt(random.Random(5))
    first, second = some(deal), some(deal)
    assert len(set(map(id, first))) == len(set(map(id, second))) == len(FAULTS)
    assert first != second
    assert len(FAULTS) <= MINUTES / 2, "the first half of the soak does not meet them all"
