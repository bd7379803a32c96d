"""When a member has to join again: not for what the broker only fails to say."""

import asyncio
from collections.abc import Mapping

import pytest
from aiokafka.errors import KafkaConnectionError

from streams.worker.topic_watch import TopicWatch

INPUT = "queries"


class Bench:
    def __init__(self, *found: Mapping[str, str], assigned_ids: Mapping[str, str] | None) -> None:
        self._found = list(found)
        self.rejoined = self.failed = 0
        self.watch = TopicWatch(
            self._fetch_topic_ids,
            topics=[INPUT],
            input_topic=INPUT,
            assigned_ids=lambda: assigned_ids,
            rejoin=self._rejoin,
            on_failed=self._on_failed,
            interval_seconds=1.0,
            overdue_seconds=0.01,
        )

    async def _fetch_topic_ids(self) -> Mapping[str, str]:
        return self._found.pop(0)

    async def _rejoin(self) -> None:
        self.rejoined += 1

    def _on_failed(self) -> None:
        self.failed += 1

    async def fetch_topic_ids(self) -> None:
        while self._found:
            await self.watch._check_once()


@pytest.mark.parametrize(
    ("found", "assigned_ids", "rejoined"),
    [
        ("a", {INPUT: "a"}, 0),
        ("b", {INPUT: "a"}, 1),
        ("a", {}, 1),  # nothing can be committed without the id
        ("", {}, 1),
        ("", {INPUT: ""}, 0),
        ("a", {INPUT: ""}, 1),
        ("a", None, 0),
    ],
)
async def test_it_joins_again_where_the_topic_is_another_one(
    found: str, assigned_ids: Mapping[str, str] | None, rejoined: int
) -> None:
    bench = Bench({INPUT: found}, assigned_ids=assigned_ids)
    await bench.fetch_topic_ids()
    assert bench.rejoined == rejoined


async def test_an_id_that_a_broker_does_not_say_is_not_another_one(caplog: pytest.LogCaptureFixture) -> None:
    """One of an older release, in a cluster that is being upgraded, or one that refuses to describe the topic."""
    bench = Bench({INPUT: "a"}, {INPUT: ""}, {INPUT: "a"}, assigned_ids={INPUT: "a"})
    await bench.fetch_topic_ids()
    assert bench.rejoined == 0
    assert "created again" not in caplog.text


async def test_a_broker_that_does_not_answer_is_reported_each_time() -> None:
    """An idle worker's own clients may take a minute."""
    bench = Bench(assigned_ids=None)
    failures = [TimeoutError(), KafkaConnectionError(), OSError()]

    async def fail() -> Mapping[str, str]:
        if failures:
            raise failures.pop()
        return {INPUT: "a"}

    bench.watch._fetch_topic_ids = fail
    bench.watch._interval_seconds = 0.001
    watching = asyncio.create_task(bench.watch.watch())
    async with asyncio.timeout(5):
        while failures or not bench.watch._ids:  # noqa: ASYNC110  # nobody says when
            await asyncio.sleep(0.001)
    watching.cancel()
    assert bench.failed == 3


async def test_an_answer_that_takes_long_is_reported_before_it_comes() -> None:
    """Each of a large cluster's brokers may take its time."""
    bench = Bench(assigned_ids=None)
    answered = asyncio.Event()

    async def wait() -> Mapping[str, str]:
        await answered.wait()
        return {INPUT: "a"}

    bench.watch._fetch_topic_ids = wait
    checking = asyncio.create_task(bench.watch._check_once())
    async with asyncio.timeout(5):
        while not bench.failed:  # noqa: ASYNC110  # nobody says when
            await asyncio.sleep(0.001)
        answered.set()
        await checking
    assert bench.failed == 1
    assert bench.watch._ids == {INPUT: "a"}


async def test_an_answer_in_time_is_not_reported() -> None:
    bench = Bench({INPUT: "a"}, assigned_ids=None)
    await bench.fetch_topic_ids()
    await asyncio.sleep(0.03)
    assert bench.failed == 0
