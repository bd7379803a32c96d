"""Live recall: what is measured, which searches are repeated, and what that may cost."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.errors import SearchTimeout, StoreUnavailable
from streams.core.live_recall import ALL_ROWS, LARGE_SECONDS, NORMAL_ROWS, Budget, draw, recall
from streams.core.selection import Candidate, Scope
from streams.retrieval import ArmResult, Retrieved, Search
from streams.telemetry.metrics import Metrics
from streams.worker.live_recall import LiveRecall

NAN = math.nan
VECTOR = np.zeros(768, dtype=np.float32)

# The measure


@pytest.mark.parametrize(
    ("found", "nearest", "share"),
    [
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4], 1),
        ([0.1, 0.3, 0.5, 0.6], [0.1, 0.2, 0.3, 0.4], 0.5),
        ([], [0.1, 0.2], 0),
        ([0.5], [0.1], 0),
        ([0.1, 0.2, 0.2], [0.1, 0.2, 0.2], 1),  # whichever of many equally near rows
        ([0.1, 0.2], [0.1, 0.2, 0.3, 0.4], 0.5),  # fewer than there are
        ([0.1, 0.2, 0.3, 0.3], [0.1, 0.3], 1),  # rows were deleted in the meantime
        ([0.1, 0.4], [0.1, 0.2, NAN], 0.5),  # a row without a direction is never found
        ([0.1], [], None),
        ([], [NAN], None),
    ],
)
def test_the_recall_of_a_search(
    found: Sequence[float], nearest: Sequence[float], share: float | None
) -> None:
    assert recall(found, nearest) == share


@given(st.lists(st.floats(0, 2), min_size=1, max_size=40), st.integers(1, 20), st.data())
def test_recall_is_that_of_sets_of_rows(distances: list[float], k: int, data: st.DataObject) -> None:
    """Where no two rows are equally near."""
    distances = sorted(set(distances))
    found = sorted(data.draw(st.sets(st.sampled_from(distances))))[:k]
    nearest = distances[:k]
    assert recall(found, nearest) == len(set(found) & set(nearest)) / len(nearest)


# The choice


@pytest.mark.parametrize("searches", [1, 2])
def test_each_search_of_an_event_is_drawn_equally_often(searches: int) -> None:
    drawn = Counter(draw(searches, number / 1000) for number in range(1000))
    assert [drawn[number] for number in range(searches)] == [250] * searches
    assert drawn.total() == 1000


# The budget


def spend_all(budget: Budget, cost: Callable[[], float], searches: int) -> tuple[float, float]:
    """Earn by searches of 10 ms, and start an exact search whenever possible; returns seconds earned by, and spent."""
    worked = spent = 0.0
    for _ in range(searches):
        worked += 0.01
        budget.earn(0.01)
        for size in ("normal", "large"):
            while (seconds := budget.seconds_for(size)) is not None:
                took = cost()
                spent += min(took, seconds)
                budget.spend(size, min(took, seconds), timed_out=took > seconds)
    return worked, spent


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_the_share_is_spent_but_never_exceeded(share: float) -> None:
    rng = random.Random(1)
    budget = Budget(share)
    worked = spent = 0.0
    for _ in range(300):
        more_work, more_spent = spend_all(budget, lambda: rng.lognormvariate(-3, 1.5), 1000)
        worked, spent = worked + more_work, spent + more_spent
        assert spent <= share * worked
    assert spent > share * worked - 16


def test_nothing_is_spent_without_a_share() -> None:
    budget = Budget(0)
    worked, spent = spend_all(budget, lambda: 0.0001, 1000)
    assert worked == pytest.approx(10)
    assert spent == 0


def test_a_search_that_takes_longer_than_its_limit_is_paid_back() -> None:
    budget = Budget(1)
    budget.earn(1)
    assert budget.seconds_for("normal") == 0.25
    budget.spend("normal", 1)  # 0.75 was saved
    budget.earn(0.5)
    assert budget.seconds_for("normal") is None
    budget.earn(0.2)
    assert budget.seconds_for("normal") == 0.25


def test_the_time_limit_grows_where_it_is_too_short() -> None:
    budget = Budget(1)
    limits = []
    for _ in range(5):
        budget.earn(100)
        limits.append(budget.seconds_for("normal"))
        budget.spend("normal", 0, timed_out=True)
    assert limits == [0.25, 0.5, 1, 2, 2]
    budget.spend("normal", 0.01)
    assert budget.seconds_for("normal") == 2
    budget.spend("large", 0, timed_out=True)
    assert budget.seconds_for("large") == LARGE_SECONDS


def test_no_more_is_saved_than_a_few_searches_cost() -> None:
    """After a pause of hours, too."""
    budget = Budget(1)
    budget.earn(1e6)
    spent = {"normal": 0.0, "large": 0.0}
    for size in ("normal", "large"):
        while (seconds := budget.seconds_for(size)) is not None:
            spent[size] += seconds
            budget.spend(size, seconds)
    assert spent == {"normal": 4, "large": LARGE_SECONDS}


def test_large_scopes_cost_at_most_a_quarter() -> None:
    budget = Budget(0.01)
    normal = large = 0.0
    for _ in range(1_000_000):
        budget.earn(0.01)
        if budget.seconds_for("normal"):
            budget.spend("normal", 0.2)
            normal += 0.2
        if budget.seconds_for("large"):
            budget.spend("large", LARGE_SECONDS)
            large += LARGE_SECONDS
    assert large == pytest.approx(25, abs=5)
    assert normal == pytest.approx(75, abs=5)


# What a worker does with it


class Scripted:
    """A store with so many rows, whose exact searches return distances of 0.1, 0.2, …"""

    def __init__(self, rows: int, *, error: BaseException | None = None) -> None:
        self.rows = rows
        self.error = error
        self.wait: Callable[[], Awaitable[object]] | None = None
        self.asked: list[tuple[Search, int, float]] = []

    async def search_exactly(self, search: Search, *, max_rows: int, timeout_seconds: float) -> ArmResult:
        self.asked.append((search, max_rows, timeout_seconds))
        if self.wait is not None:
            await self.wait()
        if self.error is not None:
            raise self.error
        return ArmResult(
            candidates([(number + 1) / 10 for number in range(min(self.rows, search.limit))]),
            complete=False,
            exact=self.rows <= max_rows,
        )


def candidates(distances: Sequence[float]) -> list[Candidate]:
    return [Candidate(UUID(int=number), distance) for number, distance in enumerate(distances)]


def answered(
    *arms: Scope,
    found: Sequence[float] = (0.9, 0.5, 0.1, 0.3, 0.2),
    exact: bool = False,
    seconds: float = 0.0,
) -> Retrieved:
    """An answer of four rows at most, by the vector index; with the content of the rows, they are in any order."""
    search = Search(VECTOR, ["user:1"], None, None, None, expand_parents=True, limit=60, with_passages=True)
    result = ArmResult(candidates(found), complete=False, exact=exact)
    return cast(
        "Retrieved",
        SimpleNamespace(
            result=SimpleNamespace(k_effective=4),
            arm_seconds=dict.fromkeys(arms, seconds),
            searches=dict.fromkeys(arms, (search, result)),
        ),
    )


class Bench:
    """Live recall with enough saved for both sizes, where the first search of each event is drawn."""

    def __init__(
        self,
        store: Any,
        *,
        share: float = 1.0,
        earned: float = 100.0,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.metrics = Metrics()
        self.busy = False
        self.budget = Budget(share)
        self.budget.earn(earned)
        self.chance = 0.0
        self.live_recall = LiveRecall(
            store,
            self.budget,
            paused=lambda: self.busy,
            metrics=self.metrics,
            chance=lambda: self.chance,
            now=now,
        )

    async def offer(self, retrieved: Retrieved) -> None:
        self.live_recall.offer(retrieved)
        await self.idle()

    async def idle(self) -> None:
        if (running := self.live_recall._running) is not None:
            async with asyncio.timeout(5):
                await asyncio.wait([running])
            await asyncio.sleep(0)  # callbacks

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"anabranch_live_recall{name}", labels)
        assert found is not None
        return found

    def skipped(self) -> dict[str, float]:
        return {
            sample.labels["reason"]: sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "anabranch_live_recall_skipped_total" and sample.value
        }


async def test_a_sample_is_counted() -> None:
    store = Scripted(rows=1000)
    bench = Bench(store)
    for found in ((0.1, 0.2, 0.3, 0.5), (0.1, 0.5, 0.6, 0.7), (0.1, 0.2, 0.3, 0.4, 0.5)):
        await bench.offer(answered("global", found=found))
    assert bench.value("_total", size="normal") == 3
    assert bench.value("_sum", size="normal") == 0.75 + 0.25 + 1
    assert bench.value("_squares_sum", size="normal") == 0.75**2 + 0.25**2 + 1
    assert bench.value("_total", size="large") == 0
    assert bench.value("_seconds_total") > 0
    assert bench.skipped() == {}
    # The same search for as many rows as the answer may have; no texts, no parents.
    search, max_rows, seconds = store.asked[0]
    assert (search.principals, search.limit, search.expand_parents, search.with_passages) == (
        ["user:1"], 4, False, False,
    )  # fmt: skip
    assert (max_rows, seconds) == (NORMAL_ROWS, 0.25)


async def test_each_search_is_counted_once() -> None:
    bench = Bench(Scripted(rows=1000))
    await bench.offer(answered("local", "global"))
    assert bench.value("_total", size="normal") == 1
    assert bench.skipped() == {"not_drawn": 1}
    await bench.offer(answered("local", "global", exact=True))
    assert bench.skipped() == {"not_drawn": 1, "exact": 2}
    bench.chance = 0.9
    await bench.offer(answered("local", "global"))
    assert bench.skipped() == {"not_drawn": 3, "exact": 2}
    assert bench.value("_total", size="normal") == 1


async def test_an_exact_search_is_never_repeated() -> None:
    store = Scripted(rows=1000)
    bench = Bench(store)
    for _ in range(10):
        await bench.offer(answered("global", exact=True))
    assert store.asked == []


async def test_a_large_scope_has_a_budget_of_its_own() -> None:
    store = Scripted(rows=NORMAL_ROWS + 1)
    bench = Bench(store)
    await bench.offer(answered("global"))
    assert (bench.value("_total", size="large"), bench.value("_sum", size="large")) == (1, 0.75)
    assert [asked[1:] for asked in store.asked] == [(NORMAL_ROWS, 0.25), (ALL_ROWS, LARGE_SECONDS)]
    # The second one costs more than what is left.
    bench.budget.spend("large", 1)
    await bench.offer(answered("global"))
    assert bench.value("_total", size="large") == 1
    assert bench.value("_total", size="normal") == 0
    assert bench.skipped() == {"too_large": 1}
    assert len(store.asked) == 3


async def test_a_search_does_not_earn_its_own_repetition() -> None:
    """Otherwise slow searches, which earn most, would be repeated most often."""
    store = Scripted(rows=1000)
    bench = Bench(store, share=0.01, earned=0)
    await bench.offer(answered("global", seconds=1000))
    assert store.asked == []
    await bench.offer(answered("global"))
    assert len(store.asked) == 1


async def test_the_mean_is_not_biased_by_how_long_searches_take() -> None:
    """Slow searches find less, and also take longer to be repeated; half of them have a second arm that finds all."""
    rng = random.Random(2)
    now = 0.0

    class Slow(Scripted):
        async def search_exactly(self, *arguments: Any, **named: Any) -> ArmResult:
            nonlocal now
            now += 0.2 if slow else 0.02
            return await super().search_exactly(*arguments, **named)

    bench = Bench(Slow(rows=1000), share=0.05, earned=0, now=lambda: now)
    shares: list[float] = []
    for _ in range(40_000):
        slow = rng.random() < 0.3
        event = answered(
            "global", found=(0.1, 0.2, 0.3, 0.4)[: 1 if slow else 4], seconds=0.2 if slow else 0.005
        )
        shares.append(0.25 if slow else 1)
        if slow and rng.random() < 0.5:
            event.searches["local"] = answered("local", found=(0.1, 0.2, 0.3, 0.4)).searches["local"]  # type: ignore[index]  # a fake
            shares.append(1)
        bench.chance = rng.random()
        await bench.offer(event)
    count = bench.value("_total", size="normal")
    mean = bench.value("_sum", size="normal") / count
    variance = bench.value("_squares_sum", size="normal") / count - mean**2
    assert count > 900
    assert abs(mean - sum(shares) / len(shares)) < 3 * math.sqrt(variance / count)
    assert 0.9 < bench.value("_seconds_total") / (0.05 * 40_000 * (0.3 * 0.2 + 0.7 * 0.005)) <= 1


async def test_without_a_share_nothing_is_repeated() -> None:
    store = Scripted(rows=1000)
    bench = Bench(store, share=0)
    for _ in range(10):
        await bench.offer(answered("global", seconds=1000))
    assert store.asked == []
    assert bench.skipped() == {"not_drawn": 10}


async def test_it_pauses_while_something_is_more_urgent() -> None:
    store = Scripted(rows=NORMAL_ROWS + 1)
    bench = Bench(store)
    bench.busy = True
    await bench.offer(answered("global"))
    assert (store.asked, bench.skipped()) == ([], {"paused": 1})
    bench.busy = False

    async def become_busy() -> None:
        bench.busy = True

    store.wait = become_busy
    await bench.offer(answered("global"))
    assert (len(store.asked), bench.skipped()) == (1, {"paused": 2})


@pytest.mark.parametrize(
    ("rows", "error", "reason"),
    [
        (10, SearchTimeout("slow"), "timeout"),
        (10, StoreUnavailable("gone"), "failed"),
        (10, RuntimeError("the event's text"), "failed"),
        (0, None, "empty"),
    ],
)
async def test_a_search_that_fails_is_counted(
    rows: int, error: BaseException | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Scripted(rows, error=error)
    bench = Bench(store)
    await bench.offer(answered("global"))
    assert bench.skipped() == {reason: 1}
    assert "the event's text" not in caplog.text
    # And the next one is measured.
    store.rows, store.error = 1000, None
    await bench.offer(answered("global"))
    assert bench.value("_total", size="normal") == 1


async def test_a_large_scope_that_takes_too_long_is_too_large() -> None:
    store = Scripted(rows=NORMAL_ROWS + 1)
    bench = Bench(store)

    async def fail_next() -> None:
        store.wait, store.error = None, None
        if len(store.asked) == 2:
            store.error = SearchTimeout("slow")
        else:
            store.wait = fail_next

    store.wait = fail_next
    await bench.offer(answered("global"))
    assert bench.skipped() == {"too_large": 1}


async def test_one_runs_at_a_time_and_nothing_is_queued() -> None:
    store = Scripted(rows=1000)
    bench = Bench(store)
    go_on = asyncio.Event()
    store.wait = go_on.wait
    for _ in range(100):
        bench.live_recall.offer(answered("global"))
        await asyncio.sleep(0)
    assert len(store.asked) == 1
    assert bench.skipped() == {"not_drawn": 99}
    go_on.set()
    await bench.idle()
    assert bench.value("_total", size="normal") == 1


async def test_it_ends_at_once_and_starts_nothing_any_more() -> None:
    store = Scripted(rows=1000)
    bench = Bench(store)
    store.wait = asyncio.Event().wait
    bench.live_recall.offer(answered("global"))
    await asyncio.sleep(0)
    bench.live_recall.end()
    await bench.idle()
    await bench.offer(answered("global"))
    assert len(store.asked) == 1
    bench.live_recall.end()
