"""The lag gauge, on what the consumer and the broker say of a partition at each moment."""

import asyncio
from collections.abc import Collection, Mapping
from unittest.mock import AsyncMock

import pytest
from faust.types import TP

from streams.worker.lag import Lag

HERE = TP("queries", 1)


class Consumer:
    """What is committed, what the last fetch reported, and what the broker says."""

    def __init__(self, committed: int | None, highwater: int | None, bounds: tuple[int, int] | None) -> None:
        self._committed, self._highwater, self.bounds = committed, highwater, bounds
        self.asked = 0

    def committed(self, tp: TP) -> int | None:
        assert tp == HERE
        return self._committed

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
                    lag.changed()
        watching.cancel()


def test_nothing_is_asked_without_partitions() -> None:
    consumer = Consumer(10, 40, (0, 40))
    lag = Lag(lambda: consumer, list[TP])
    asyncio.run(lag.refresh())
    assert (consumer.asked, list(lag())) == (0, [])
