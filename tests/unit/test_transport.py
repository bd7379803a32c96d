"""What the consumer commits, on a broker that confirms, rejects, or takes its time."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from aiokafka.errors import KafkaTimeoutError, NodeNotReadyError
from aiokafka.structs import OffsetAndMetadata
from faust.types import TP, EventT
from mode import Service

from streams.configured import broker_connection
from streams.settings import load
from streams.worker import faust_internals
from streams.worker.stage_app import _faust_app, _InputEvent

HERE, THERE = TP("queries", 0), TP("queries", 1)


class Thread(Service):
    """In place of the consumer's thread: the commits that came, and what becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[Mapping[TP, int]] = []
        self.accepts = True
        self.getmany: Any = None
        self.fetched_at = 0.0
        self.position: int | None = None
        self.committed: Mapping[TP, int] = {}
        self.topic_ids = {HERE.topic: "id"}
        self.answers = asyncio.Event()
        self.answers.set()

    async def commit(self, offsets: Mapping[TP, int], seconds: float) -> bool:
        assert seconds > 0
        self.commits.append(dict(offsets))
        await self.answers.wait()
        return self.accepts

    def assignment(self) -> set[TP]:
        return {HERE, THERE}

    def next_offset(self, tp: TP) -> int | None:
        assert tp == HERE
        return self.position


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
        self.thread = Thread()
        self.failures = 0
        self.shutdown_seconds = 1.0
        monkeypatch.setattr(faust_internals.Consumer, "_new_consumer_thread", lambda _: self.thread)
        settings = load(variables)
        app = _faust_app(settings, broker_connection(settings))
        app.root = SimpleNamespace(
            settings=settings,
            shutdown=SimpleNamespace(seconds_left=lambda: self.shutdown_seconds),
            revocation_seconds=0.75 * settings.anabranch_rebalance_timeout_seconds,
            commit_failed=self.fail,
            reopen=lambda _: None,
        )
        self.consumer: Any = app._new_consumer()

    def fail(self) -> None:
        self.failures += 1


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def test_it_commits_what_is_acknowledged_once(bench: Bench) -> None:
    bench.consumer.acknowledge(HERE, 4)
    bench.consumer.acknowledge(HERE, 7)
    await bench.consumer.commit()
    await bench.consumer.commit()
    bench.consumer.acknowledge(THERE, 0)
    await bench.consumer.commit()
    assert bench.thread.commits == [{HERE: 8}, {THERE: 1}]


async def test_a_rejected_commit_is_tried_again_with_nothing_new_to_say(bench: Bench) -> None:
    bench.thread.accepts = False
    bench.consumer.acknowledge(HERE, 7)
    await bench.consumer.commit()
    assert bench.consumer._committed_offset.get(HERE) is None  # the lag is counted from it
    await bench.consumer.commit()
    assert bench.failures == 2
    bench.thread.accepts = True
    await bench.consumer.commit()
    assert bench.consumer._committed_offset[HERE] == 8
    await bench.consumer.commit()
    assert bench.thread.commits == [{HERE: 8}] * 3
    assert bench.failures == 2


async def test_a_commit_says_what_was_acknowledged_while_another_one_ran(bench: Bench) -> None:
    bench.thread.answers.clear()
    bench.consumer.acknowledge(HERE, 7)
    running = asyncio.create_task(bench.consumer.commit())
    await asyncio.sleep(0)
    bench.consumer.acknowledge(HERE, 9)
    last = asyncio.create_task(bench.consumer.commit_in_time())
    await asyncio.sleep(0)
    bench.thread.answers.set()
    async with asyncio.timeout(1):
        await asyncio.gather(running, last)
    assert bench.thread.commits == [{HERE: 8}, {HERE: 10}]


async def test_offsets_without_their_topic_s_id_are_no_failed_commit_and_are_logged_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.thread.topic_ids = {}
    bench.thread.accepts = False
    bench.consumer.acknowledge(HERE, 7)
    for _ in range(3):
        assert not await bench.consumer.commit()
    assert bench.failures == 0
    [line] = caplog.messages
    assert HERE.topic in line
    bench.thread.topic_ids = {HERE.topic: "id"}
    bench.thread.accepts = True
    assert await bench.consumer.commit()
    assert bench.thread.commits == [{HERE: 8}]


async def test_what_was_acknowledged_before_an_assignment_is_not_committed_after_it(bench: Bench) -> None:
    bench.thread.accepts = False
    bench.consumer.acknowledge(HERE, 7)
    await bench.consumer.commit()
    bench.thread.accepts = True
    bench.consumer._on_partitions_assigned = AsyncMock()
    await bench.consumer.on_partitions_assigned({HERE}, 2)
    await bench.consumer.commit()
    assert bench.thread.commits == [{HERE: 8}]


async def test_what_a_drain_finishes_is_committed_before_the_partitions_are_given_back(bench: Bench) -> None:
    async def drain(_: set[TP]) -> None:
        bench.consumer.acknowledge(HERE, 9)
        await bench.consumer.commit_in_time()

    bench.consumer.acknowledge(HERE, 7)
    bench.consumer._on_partitions_revoked = drain
    await bench.consumer.on_partitions_revoked({HERE, THERE})
    assert bench.thread.commits == [{HERE: 8}, {HERE: 10}]


async def test_a_drain_does_not_commit_again_what_is_committed(bench: Bench) -> None:
    """The topic may have been created again; a broker that keeps no id with an offset takes it for the new one's."""

    async def drain(_: set[TP]) -> None:
        await bench.consumer.commit_in_time()

    bench.consumer.acknowledge(HERE, 7)
    await bench.consumer.commit()
    bench.consumer._on_partitions_revoked = drain
    await bench.consumer.on_partitions_revoked({HERE})
    assert bench.thread.commits == [{HERE: 8}]


async def test_offsets_of_a_topic_that_was_created_again_are_committed_from_the_first_on(
    bench: Bench,
) -> None:
    async def drain(_: set[TP]) -> None:
        await bench.consumer.commit_in_time()

    bench.consumer.acknowledge(HERE, 899)
    bench.consumer._on_partitions_revoked = drain
    bench.consumer._on_partitions_assigned = AsyncMock()
    bench.consumer.seek_to_committed = AsyncMock(
        return_value={HERE: None}
    )  # what is committed has another id
    await bench.consumer.on_partitions_revoked({HERE})
    await bench.consumer.on_partitions_assigned({HERE}, 2)
    await bench.consumer.perform_seek()
    assert bench.consumer.committed(HERE) == 0
    bench.consumer.acknowledge(HERE, 4)
    await bench.consumer.commit()
    assert bench.thread.commits[-1] == {HERE: 5}


async def test_the_last_commit_does_not_wait_for_a_broker_that_does_not_answer(bench: Bench) -> None:
    bench.thread.answers.clear()
    bench.consumer.acknowledge(HERE, 7)
    async with asyncio.timeout(10):
        await bench.consumer.commit_in_time()
    assert bench.consumer._committed_offset.get(HERE) is None


async def test_a_rebalance_does_not_wait_for_commits_longer_than_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, ANABRANCH_REBALANCE_TIMEOUT_SECONDS="5")
    bench.shutdown_seconds = 26.0  # no end has begun

    async def drain(_: set[TP]) -> None:
        await bench.consumer.commit_in_time()

    bench.thread.answers.clear()
    bench.consumer.acknowledge(HERE, 7)
    bench.consumer._on_partitions_revoked = drain
    async with asyncio.timeout(5):
        await bench.consumer.on_partitions_revoked({HERE})
    assert bench.thread.commits == [{HERE: 8}] * 2


async def test_a_full_queue_does_not_hold_a_partition_but_its_own_events_do(bench: Bench) -> None:
    consumer = bench.consumer
    consumer._set_active_tps({HERE, THERE})
    consumer.on_buffer_full(HERE)  # Faust, whose queue all partitions share
    assert consumer._get_active_partitions() == {HERE, THERE}
    consumer.pause_fetching(HERE)
    consumer.on_buffer_drop(HERE)
    assert consumer._get_active_partitions() == {THERE}
    consumer.resume_fetching(HERE)
    assert consumer._get_active_partitions() == {HERE, THERE}


async def test_fetching_does_not_sleep_for_long_while_partitions_are_held(bench: Bench) -> None:
    consumer = bench.consumer
    consumer._set_active_tps({HERE, THERE})
    bench.thread.getmany = AsyncMock(return_value={})
    await consumer._wait_next_records(1.0)
    consumer.pause_fetching(HERE)
    await consumer._wait_next_records(1.0)
    consumer.pause_fetching(THERE)
    async with asyncio.timeout(0.5):  # Faust sleeps for a second
        assert await consumer._wait_next_records(1.0) == ({}, set())
    assert [call.args[1] for call in bench.thread.getmany.call_args_list] == [1.0, 0.01]


async def test_holds_end_with_the_assignment(bench: Bench) -> None:
    consumer = bench.consumer
    consumer._on_partitions_assigned = AsyncMock()
    consumer._set_active_tps({HERE})
    consumer.pause_fetching(HERE)
    await consumer.on_partitions_assigned({HERE}, 2)
    consumer.resume_fetching(THERE)  # a straggler of the time before
    assert consumer._get_active_partitions() == {HERE}


def fetched(*, offset: int = 7, timestamp: int | None = None) -> SimpleNamespace:
    """A record as aiokafka returns it."""
    return SimpleNamespace(
        topic=HERE.topic,
        partition=HERE.partition,
        offset=offset,
        timestamp=timestamp,
        timestamp_type=0,
        headers=(),
        key=None,
        value=b"{}",
        checksum=None,
        serialized_key_size=0,
        serialized_value_size=2,
    )


def input_event(message: object) -> _InputEvent:
    return _InputEvent(cast("EventT[Any]", SimpleNamespace(message=message)))


async def test_an_event_s_clock_starts_when_it_is_fetched(bench: Bench) -> None:
    bench.thread.fetched_at = 12.5
    assert input_event(bench.consumer._to_message(HERE, fetched())).read_at == 12.5


@pytest.mark.parametrize(
    ("stored", "timestamp"), [(1_700_000_000_123, 1_700_000_000.123), (0, None), (-1, None), (None, None)]
)
async def test_an_event_s_timestamp_is_the_record_s_in_seconds(
    bench: Bench, stored: int | None, timestamp: float | None
) -> None:
    """0 for a batch that was not read, -1 in the oldest format."""
    message = bench.consumer._to_message(HERE, fetched(timestamp=stored))
    assert input_event(message).timestamp == timestamp


async def test_the_next_offset_is_known_once_every_event_before_it_is_committed(bench: Bench) -> None:
    """An event may also be on its way between the consumer and the agent."""
    consumer = bench.consumer
    assert consumer.next_offset(HERE) is None
    consumer._read_offset[HERE] = consumer._committed_offset[HERE] = 7  # as Faust does after an assignment
    bench.thread.position = 8  # a marker at 7
    assert consumer.next_offset(HERE) == 8
    consumer._to_message(HERE, fetched(offset=8))
    consumer._to_message(HERE, fetched(offset=9))
    bench.thread.position = 11
    assert consumer.next_offset(HERE) is None
    consumer.acknowledge(HERE, 8)
    await consumer.commit()
    assert consumer.next_offset(HERE) is None
    consumer.acknowledge(HERE, 9)
    assert consumer.next_offset(HERE) is None
    await consumer.commit()
    assert consumer.next_offset(HERE) == 11
    consumer._on_partitions_assigned = AsyncMock()
    consumer._to_message(HERE, fetched(offset=12))
    await consumer.on_partitions_assigned({HERE}, 2)  # what was fetched before is read again
    assert consumer._fetched == {}


def test_an_events_size_covers_what_its_headers_take_in_memory() -> None:
    message = SimpleNamespace(
        topic="queries",
        partition=0,
        offset=7,
        timestamp=1.7e9,
        generation_id=1,
        key=b"key",
        value=b"value",
        headers=[("", b"")] * 1000,
        fetched_at=12.5,
    )
    assert input_event(message).size > 100_000


async def test_offsets_of_a_deleted_topic_never_get_the_id_of_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faust seeks once more while a rebalance drains: to what is committed, as it fetched with the flow stopped."""
    ids = {HERE.topic: "old"}
    fetched: dict[TP, OffsetAndMetadata] = {}

    async def topic_ids(*_: Any) -> Mapping[str, str]:
        return dict(ids)

    monkeypatch.setattr(faust_internals, "topic_ids", topic_ids)
    thread: Any = object.__new__(faust_internals._ConsumerThread)
    thread.topic_ids = {}
    thread.tp_last_committed_at = {}
    thread._assignment_changed = True
    thread._commits_fail = False
    thread.thread_loop = asyncio.get_running_loop()
    thread.consumer = SimpleNamespace(threadsafe_partitions_assigned=AsyncMock())
    thread._consumer = SimpleNamespace(
        assignment=lambda: {HERE},
        commit=AsyncMock(side_effect=fetched.update),
        _client=None,
        _coordinator=SimpleNamespace(fetch_committed_offsets=AsyncMock(side_effect=lambda _: fetched)),
        seek=lambda *_: None,
    )
    await thread._seek_to_committed()
    ids[HERE.topic] = "new"
    await thread._seek_to_committed()  # the drain has begun
    assert await thread._commit({HERE: 900})
    await thread.on_partitions_assigned({HERE}, 1)
    assert await thread._seek_to_committed() == {HERE: None}


async def test_commits_that_fail_are_one_line_and_their_end_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="streams")
    thread: Any = object.__new__(faust_internals._ConsumerThread)
    thread.topic_ids = {HERE.topic: "id"}
    thread.tp_last_committed_at = {}
    thread._commits_fail = False
    thread._consumer = SimpleNamespace(
        assignment=lambda: {HERE},
        commit=AsyncMock(
            side_effect=[None, KafkaTimeoutError(), NodeNotReadyError(), TimeoutError(), None, None]
        ),
    )
    assert [await thread._commit({HERE: 7}) for _ in range(6)] == [True, False, False, False, True, True]
    assert caplog.messages == [
        "offsets were not committed (KafkaTimeoutError); retrying",
        "offsets are committed again",
    ]


@pytest.mark.parametrize(
    ("answer", "known"), [({HERE.topic: "id"}, {HERE.topic: "id"}), (KafkaTimeoutError(), {})]
)
async def test_the_topics_ids_are_awaited_after_an_assignment(
    monkeypatch: pytest.MonkeyPatch, answer: Mapping[str, str] | KafkaTimeoutError, known: Mapping[str, str]
) -> None:
    asked, answers = asyncio.Event(), asyncio.Event()

    async def topic_ids(*_: Any) -> Mapping[str, str]:
        asked.set()
        await answers.wait()
        if isinstance(answer, KafkaTimeoutError):
            raise answer
        return answer

    monkeypatch.setattr(faust_internals, "topic_ids", topic_ids)
    consumer = Bench(monkeypatch).consumer
    consumer._thread = thread = cast("Any", object.__new__(faust_internals._ConsumerThread))
    thread.topic_ids = {}
    thread.thread_loop = asyncio.get_running_loop()
    thread.consumer = SimpleNamespace(threadsafe_partitions_assigned=AsyncMock())
    thread._consumer = SimpleNamespace(
        assignment=lambda: {HERE},
        _client=None,
        _coordinator=SimpleNamespace(fetch_committed_offsets=AsyncMock(return_value={})),
        seek=lambda *_: None,
    )

    def ids() -> Any:
        return consumer.topic_ids

    for generation in (1, 2):
        await thread.on_partitions_assigned({HERE}, generation)
        assert ids() is None
        seeking = asyncio.create_task(thread._seek_to_committed())
        await asked.wait()
        assert ids() is None
        answers.set()
        await seeking
        assert ids() == known
        asked.clear()
        answers.clear()


@pytest.mark.parametrize("leader", [None, -1])
async def test_the_bounds_of_other_partitions_are_known_while_one_has_no_leader(leader: int | None) -> None:
    leaders = {HERE: 1, THERE: leader}

    async def offsets(tps: Collection[TP]) -> Mapping[TP, int]:
        if any(leaders[tp] in (None, -1) for tp in tps):
            raise KafkaTimeoutError
        return dict.fromkeys(tps, 9)

    thread: Any = object.__new__(faust_internals._ConsumerThread)
    thread.thread_loop = asyncio.get_running_loop()
    thread._consumer = SimpleNamespace(
        beginning_offsets=offsets,
        end_offsets=offsets,
        _client=SimpleNamespace(cluster=SimpleNamespace(leader_for_partition=leaders.get)),
        _coordinator=None,
    )
    assert await thread.log_bounds({HERE, THERE}) == {HERE: (9, 9)}
