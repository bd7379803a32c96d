"""The gauges of the lag, on what the consumer and the broker say of a partition at each moment."""

import asyncio
from collections.abc import Collection, Mapping
from tracemalloc import get_traced_memory, start, stop
from unittest.mock import AsyncMock

import pytest
from faust.types import TP

from streams.worker.lag import Lag

HERE = TP("queries", 1)


class Consumer:
    """What is committed, what the last fetch reported, and what the broker says."""

    def __init__(self, committed: int | None, highwater: int | None, bounds: tuple[int, int] | None) -> None:
        self.offset, self._highwater, self.bounds = committed, highwater, bounds
        self.position: int | None = None
        self.asked = 0

    def committed(self, tp: TP) -> int | None:
        assert tp == HERE
        return self.offset

    def next_offset(self, tp: TP) -> int | None:
        assert tp == HERE
        return self.position

    def highwater(self, tp: TP) -> int | None:
        assert tp == HERE
        return self._highwater

    async def log_bounds(self, tps: Collection[TP]) -> Mapping[TP, tuple[int, int]]:
        self.asked += 1
        if self.bounds is None:
            raise TimeoutError
        return dict.fromkeys(tps, self.bounds)


@pytest.mark.parametrize(
    ("committed", "highwater", "bounds", "reported"),
    [
        (0, 40, (0, 40), [(1, 40)]),  # a group that has never committed
        (31, 40, (0, 40), [(1, 9)]),
        (40, 40, (0, 40), [(1, 0)]),
        (31, 40, (0, 90), [(1, 59)]),  # nothing is fetched for now
        (31, 95, (0, 90), [(1, 64)]),  # the last fetch is more recent than the last question
        (31, None, (0, 90), [(1, 59)]),
        (0, None, (40, 40), [(1, 0)]),  # an emptied log
        (31, 60, (40, 60), [(1, 20)]),  # retention was faster
        (70, 60, (0, 60), [(1, 0)]),
        (None, 40, (0, 40), []),  # just assigned: what is committed is being asked for
        (31, 40, None, []),  # the broker has not answered yet
    ],
)
async def test_only_what_is_known_is_reported(
    committed: int | None,
    highwater: int | None,
    bounds: tuple[int, int] | None,
    reported: list[tuple[int, int]],
) -> None:
    consumer = Consumer(committed, highwater, bounds)
    lag = Lag(lambda: consumer, lambda: [HERE])
    await lag.refresh()
    assert list(lag()) == reported


async def test_a_broker_that_does_not_answer_changes_nothing() -> None:
    consumer = Consumer(10, 40, (0, 40))
    lag = Lag(lambda: consumer, lambda: [HERE])
    await lag.refresh()
    consumer.bounds = None
    await lag.refresh()
    assert list(lag()) == [(1, 30)]


async def test_a_partition_that_the_broker_says_nothing_of_keeps_its_lag() -> None:
    consumer = Consumer(10, 40, (0, 40))
    lag = Lag(lambda: consumer, lambda: [HERE])
    await lag.refresh()
    consumer.log_bounds = AsyncMock(return_value={})  # type: ignore[method-assign]  # the stub answers otherwise from here on
    await lag.refresh()
    assert list(lag()) == [(1, 30)]


async def test_it_asks_again_and_again_and_at_once_after_an_assignment() -> None:
    consumer = Consumer(10, 40, (0, 40))
    for interval, asked in ((0.001, 3), (60, 2)):
        consumer.asked = 0
        lag = Lag(lambda: consumer, lambda: [HERE], interval_seconds=interval)
        watching = asyncio.create_task(lag.watch())
        async with asyncio.timeout(5):
            while consumer.asked < asked:
                await asyncio.sleep(0.01)
                if interval > 1:
                    lag.assigned([HERE])
        watching.cancel()


def test_nothing_is_asked_without_partitions() -> None:
    consumer = Consumer(10, 40, (0, 40))
    lag = Lag(lambda: consumer, list[TP])
    asyncio.run(lag.refresh())
    assert (consumer.asked, list(lag())) == (0, [])


class Clock:
    """Two clocks that go at the same rate."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return 1.7e9 + self.seconds

    def monotonic(self) -> float:
        return 40.0 + self.seconds


class Bench:
    """A worker that has had one partition for an hour, without lag."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.consumer = Consumer(10, None, (0, 10))
        self.assigned = [HERE]
        self.lag = Lag(
            lambda: self.consumer,
            lambda: self.assigned,
            now=self.clock.now,
            monotonic=self.clock.monotonic,
        )

    async def idle(self) -> "Bench":
        self.lag.assigned([HERE])
        await self.after(3600)
        return self

    async def after(self, seconds: float, *, committed: int | None = None, end: int | None = None) -> float:
        """Lets time pass while the broker answers every 3 s; returns what is reported then."""
        if committed is not None:
            self.consumer.offset = committed
        if end is not None:
            self.consumer.bounds = (0, end)
        until = self.clock.seconds + seconds
        while self.clock.seconds < until:
            self.clock.seconds = min(until, self.clock.seconds + 3)
            await self.lag.refresh()
        return self.waiting()

    def read(self, *events: tuple[int, float | None]) -> None:
        """Reads events: offset, and how many seconds ago it was written."""
        for offset, age in events:
            self.lag.track(HERE, offset, None if age is None else self.clock.now() - age)

    def waiting(self) -> float:
        [(partition, seconds)] = self.lag.oldest_waiting()
        assert partition == HERE.partition
        return seconds


async def test_nothing_waits_without_lag() -> None:
    bench = await Bench().idle()
    assert bench.waiting() == 0
    bench.read((10, 5.0))
    assert await bench.after(3, committed=11, end=11) == 0


async def test_the_oldest_event_that_is_not_committed_counts_from_when_it_was_written() -> None:
    bench = await Bench().idle()
    bench.read((10, 5.0), (11, 4.0), (12, 1.0))
    assert await bench.after(3, end=13) == 8  # 5 s before it was read, and 3 s since
    assert await bench.after(60, committed=11) == 67
    assert await bench.after(0, committed=12) == 64
    assert await bench.after(3, committed=13) == 0


async def test_the_committed_offset_is_reported_as_soon_as_it_is_known() -> None:
    bench = await Bench().idle()
    assert list(bench.lag.committed()) == [(1, 10)]
    await bench.after(3, committed=12, end=20)
    assert list(bench.lag.committed()) == [(1, 12)]
    bench.consumer.offset = None
    assert list(bench.lag.committed()) == []


async def test_offsets_without_an_event_do_not_count() -> None:
    bench = await Bench().idle()
    bench.read((17, 5.0))  # compaction has left a gap
    assert await bench.after(3, end=18) == 8


async def test_what_follows_the_last_event_without_being_one_is_no_lag() -> None:
    """A transaction ends with a marker, which has an offset, and which no consumer commits."""
    bench = await Bench().idle()
    bench.read((10, 1.0), (11, 1.0))
    assert await bench.after(3, end=13) == 4
    assert list(bench.lag()) == [(1, 3)]
    bench.consumer.position = 13  # once both are committed
    assert await bench.after(60, committed=12) == 0
    assert list(bench.lag()) == [(1, 0)]
    assert await bench.after(60, end=14) == 60  # the next event, which has not been read
    assert list(bench.lag()) == [(1, 1)]


async def test_an_event_that_is_not_read_counts_from_when_there_was_no_lag_last() -> None:
    bench = await Bench().idle()
    assert await bench.after(30, end=11) == 30
    bench.read((10, 300.0))  # at last; how long it has really been waiting
    assert bench.waiting() == 300


async def test_under_a_steady_load_an_event_that_is_not_read_is_no_older_than_the_last_answer_without_it() -> (
    None
):
    """The lag is never 0, but each event is committed within seconds."""
    bench = await Bench().idle()
    end = 10
    for _ in range(200):
        end += 30
        assert await bench.after(3, committed=max(10, end - 40), end=end) <= 6
    # Now nothing is committed any more.
    for _ in range(200):
        end += 30
        waiting = await bench.after(3, end=end)
    assert 600 <= waiting <= 606


async def test_a_topic_that_was_created_again_counts_from_its_first_event() -> None:
    bench = await Bench().idle()
    bench.consumer.offset = 0
    assert await bench.after(3, end=0) == 0
    assert await bench.after(9, end=1) == 9


async def test_log_ends_take_little_memory_however_long_commits_fail() -> None:
    bench = await Bench().idle()
    start()
    for end in range(11, 5_000):
        await bench.after(3, end=end)
    used, _ = get_traced_memory()
    stop()
    assert used < 200_000
    assert bench.waiting() == 3 * (5_000 - 11)
    assert await bench.after(0, committed=4_000) == pytest.approx(3 * 1_000, rel=0.2)


async def test_the_assignment_counts_where_there_was_lag_from_the_start() -> None:
    bench = Bench()
    bench.consumer.bounds = (0, 500)
    bench.lag.assigned([HERE])
    assert await bench.after(30) == 30
    # Another member joins; nobody has answered the event meanwhile.
    bench.lag.assigned([HERE])
    assert await bench.after(30) == 60
    bench.assigned = []
    bench.lag.assigned([])
    assert list(bench.lag.oldest_waiting()) == []
    bench.assigned = [HERE]
    bench.lag.assigned([HERE])
    assert await bench.after(30) == 30  # another member had it


async def test_events_of_an_earlier_assignment_do_not_count() -> None:
    bench = await Bench().idle()
    bench.read((10, 100.0))
    bench.lag.assigned([HERE])
    assert await bench.after(3, end=11) == 3
    bench.read((10, 103.0))
    assert bench.waiting() == 103


async def test_an_assignment_is_reported_at_once() -> None:
    """A series that begins with its first lag hides that one."""
    bench = Bench()
    bench.consumer.offset = None
    bench.lag.assigned([HERE])
    assert bench.waiting() == 0


@pytest.mark.parametrize("end", [10, 12], ids=["without lag", "with lag"])
async def test_a_worker_that_is_cut_off_cannot_say_that_nothing_waits(end: int) -> None:
    bench = await Bench().idle()
    if end > 10:
        bench.read((10, 2.0))
    before = await bench.after(3, end=end)
    assert before == (0 if end == 10 else 5)
    bench.consumer.bounds = None
    assert await bench.after(9) == (0 if end == 10 else before + 9)  # an answer may be slow
    assert await bench.after(51) == before + 60
    assert await bench.after(60) == before + 120
    assert await bench.after(3, end=end, committed=end) == 0


async def test_an_event_without_a_timestamp_counts_from_when_it_was_read() -> None:
    bench = await Bench().idle()
    bench.read((10, None))
    assert await bench.after(6, end=11) == 6


async def test_a_timestamp_in_the_future_is_no_negative_age() -> None:
    bench = await Bench().idle()
    bench.read((10, -3600.0))
    assert await bench.after(3, end=11) == 0


async def test_timestamps_take_little_memory_however_long_commits_fail() -> None:
    bench = await Bench().idle()
    bench.read((10, 0.0))
    start()
    for offset in range(11, 500_000):
        bench.lag.track(HERE, offset, 1.7e9 + bench.clock.seconds + offset / 1000)
    used, _ = get_traced_memory()
    stop()
    assert used < 2_000_000
    assert await bench.after(600, end=500_000) == 600
    # Once a commit succeeds, it covers all that was acknowledged meanwhile. What is still in flight is known exactly.
    assert await bench.after(0, committed=499_000) == pytest.approx(600 - 499, abs=0.001)
