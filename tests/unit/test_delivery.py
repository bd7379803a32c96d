"""Delivery: bounded, in order, and never beyond a rebalance."""

import asyncio
import gc
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.worker.delivery import Delivery, InterruptibleWaits


@dataclass(eq=False)
class Event:
    offset: int
    partition: int = 0
    generation: int = 1
    size: int = 1
    release: asyncio.Event = field(default_factory=asyncio.Event)


class Group:
    """A delivery whose events end when the test says so."""

    def __init__(self, concurrency: int, *, partitions: int = 1, max_unacknowledged: int = 1000) -> None:
        self.generation = 1
        self.log: list[tuple[Hashable, int]] = []
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.paused: set[Hashable] = set()
        self.waits = InterruptibleWaits()
        self.defects: list[BaseException] = []
        self.error: BaseException | None = None
        self.acknowledging_fails = False
        self.delivery: Delivery[Event] = Delivery(
            self.handle,
            acknowledge=self.acknowledge,
            generation=lambda: self.generation,
            concurrency=concurrency,
            max_waiting_bytes=100,
            pause=self.paused.add,
            resume=self.paused.remove,
            on_defect=self.defects.append,
            waits=self.waits,
            max_unacknowledged=max_unacknowledged,
        )
        self.delivery.reopen(partitions)

    def event(self, offset: int, *, partition: int = 0, generation: int | None = None) -> Event:
        return Event(offset, partition, generation or self.generation)

    async def handle(self, event: Event) -> None:
        self.begun.append(event.offset)
        try:
            await event.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(event.offset)
            raise
        if self.error is not None:
            raise self.error

    def acknowledge(self, partition: Hashable, offset: int) -> None:
        if self.acknowledging_fails:
            raise RuntimeError("acknowledging failed")
        self.log.append((partition, offset))

    async def admit(self, *events: Event) -> None:
        for event in events:
            self.delivery.admit(event)
        await settle()


async def settle() -> None:
    """Let everything that can run, run."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("concurrency", [1, 2, 8])
async def test_all_slots_are_used_and_each_one_that_is_freed_is_used_again(concurrency: int) -> None:
    group = Group(concurrency)
    events = [group.event(offset) for offset in range(concurrency + 2)]
    await group.admit(*events)
    for freed in range(2):
        assert group.delivery.running == concurrency
        assert group.begun == list(range(concurrency + freed))
        events[freed].release.set()
        await settle()
    assert group.begun == list(range(concurrency + 2))
    assert group.log == [(0, 0), (0, 1)]


async def test_a_finished_event_frees_its_slot_while_one_before_it_runs() -> None:
    group = Group(concurrency=4)
    events = [group.event(offset) for offset in range(12)]
    for event in events[1:]:
        event.release.set()
    await group.admit(*events)
    assert group.begun == list(range(12))
    assert (group.delivery.running, group.delivery.in_flight, group.log) == (1, 12, [])
    events[0].release.set()
    await settle()
    assert (group.delivery.in_flight, group.log) == (0, [(0, 11)])


async def test_a_finished_event_keeps_only_its_offset() -> None:
    group = Group(concurrency=4)
    head, behind = group.event(0), group.event(1)
    behind.release.set()
    left = weakref.ref(behind)
    await group.admit(head, behind)
    del behind
    gc.collect()
    assert group.delivery.in_flight == 2
    assert left() is None


async def test_what_waits_behind_a_stuck_event_is_bounded() -> None:
    group = Group(concurrency=4, partitions=2, max_unacknowledged=10)
    stuck, other = group.event(0), group.event(0, partition=1)
    behind = [group.event(offset) for offset in range(1, 30)]
    for event in [*behind, other]:
        event.release.set()
    await group.admit(stuck, *behind)
    assert (group.begun, group.delivery.in_flight) == (list(range(10)), 10)
    assert group.paused == {0}
    await group.admit(other)
    assert group.log == [(1, 0)]
    stuck.release.set()
    await settle()
    await settle()
    assert (group.log[-1], group.delivery.in_flight, group.paused) == ((0, 29), 0, set())


async def test_one_partition_has_at_most_half_the_slots_while_the_worker_has_others() -> None:
    group = Group(concurrency=8, partitions=3)
    await group.admit(*[group.event(offset) for offset in range(20)])
    assert group.delivery.running == 4
    others = [group.event(100 + number, partition=1 + number % 2) for number in range(6)]
    await group.admit(*others)
    assert sorted(group.begun[4:]) == [100, 101, 102, 103]
    # And they take turns for the rest.
    for event in others[:4]:
        event.release.set()
    await settle()
    assert sorted(group.begun[8:]) == [104, 105]
    # Alone again, all of them.
    await group.delivery.drain(0)
    group.delivery.reopen(partitions=1)
    await group.admit(*[group.event(offset) for offset in range(20)])
    assert group.delivery.running == 8


async def test_partitions_take_turns() -> None:
    group = Group(concurrency=2, partitions=3)
    events = [
        group.event(10 * partition + number, partition=partition)
        for partition in range(3)
        for number in range(3)
    ]
    await group.admit(*events)
    while group.delivery.running:
        next(
            event for event in events if event.offset in group.begun and not event.release.is_set()
        ).release.set()
        await settle()
    turns = [offset // 10 for offset in group.begun[1:]]  # the very first is alone when it comes
    assert sorted(turns[:3]) == [0, 1, 2]
    assert sorted(group.begun) == sorted(event.offset for event in events)


async def test_a_partition_is_not_fetched_from_while_enough_of_its_events_wait() -> None:
    group = Group(concurrency=4, partitions=2)
    events = [group.event(offset) for offset in range(12)]
    await group.admit(*events[:5])
    assert (group.delivery.waiting, group.paused) == (3, set())
    await group.admit(*events[5:], group.event(100, partition=1))
    assert (group.delivery.waiting, group.paused) == (10, {0})
    for event in events[:7]:
        event.release.set()
        await settle()
    assert (group.delivery.waiting, group.paused) == (3, {0})
    events[7].release.set()
    await settle()
    assert (group.delivery.waiting, group.paused) == (2, set())


async def test_what_waits_is_bounded_in_bytes_over_all_partitions() -> None:
    group = Group(concurrency=8, partitions=3)
    running = [group.event(number, partition=number % 2) for number in range(8)]
    large = [group.event(10 + number, partition=number % 2) for number in range(3)]
    for event in large:
        event.size = 40
    await group.admit(*running, large[0], large[1])
    assert (group.delivery.waiting, group.paused) == (2, set())
    await group.admit(large[2])
    assert group.paused == {0, 1}  # and not the one that has none
    other = group.event(100, partition=2)
    other.size = 40
    await group.admit(other)
    assert group.paused == {0, 1, 2}
    # Half the bound is left before anything more is fetched, or a partition that has none waiting.
    running[0].release.set()
    await settle()
    assert (group.delivery.waiting, group.paused) == (3, {0, 1, 2})
    running[1].release.set()
    await settle()
    assert (group.delivery.waiting, group.paused) == (2, {0, 2})
    for event in running[2:4]:
        event.release.set()
        await settle()
    assert (group.delivery.waiting, group.paused) == (0, set())
    # What was given up does not count.
    again = [group.event(200 + number, partition=number % 2) for number in range(12)]
    for event in again:
        event.size = 40
    await group.admit(*again)
    assert group.paused
    await group.delivery.drain(0)
    group.paused.clear()  # as the consumer does
    group.generation = 2
    group.delivery.reopen(3)
    await group.admit(*[group.event(300 + number) for number in range(5)])
    assert (group.delivery.waiting, group.paused) == (1, set())


@given(
    partitions=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    concurrency=st.integers(1, 6),
    max_unacknowledged=st.integers(1, 8),
    seed=st.randoms(use_true_random=False),
)
def test_any_order_of_completion_is_acknowledged_in_order_and_once(
    partitions: list[int], concurrency: int, max_unacknowledged: int, seed: Random
) -> None:
    async def run() -> Group:
        group = Group(concurrency, partitions=3, max_unacknowledged=max_unacknowledged)
        events = [group.event(number, partition=partition) for number, partition in enumerate(partitions)]
        for event in events:
            group.delivery.admit(event)
        open_events = list(events)
        done: set[int] = set()
        async with asyncio.timeout(60):
            while open_events:
                await settle()
                assert group.delivery.running <= concurrency
                running = [event for event in open_events if event.offset in group.begun]
                for partition in range(3):
                    own = [event.offset for event in running if event.partition == partition]
                    assert len(own) <= max(1, concurrency // 2)
                event = seed.choice(running)  # there always is one: no slot is lost
                event.release.set()
                done.add(event.offset)
                open_events.remove(event)
                await settle()
                for committed, last in group.log:
                    before = [
                        number for number, own in enumerate(partitions) if own == committed and number <= last
                    ]
                    assert done.issuperset(before)
            await group.delivery.drain(1)
        assert not group.defects
        return group

    log = asyncio.run(run()).log
    for partition in set(partitions):
        offsets = [offset for one, offset in log if one == partition]
        assert offsets == sorted(set(offsets))
        assert offsets[-1] == max(number for number, own in enumerate(partitions) if own == partition)


async def test_a_drain_waits_for_what_is_in_flight() -> None:
    group = Group(concurrency=4)
    events = [group.event(offset) for offset in range(3)]
    await group.admit(*events)
    drain = asyncio.create_task(group.delivery.drain(5))
    await settle()
    assert not drain.done()
    for event in events:
        event.release.set()
    async with asyncio.timeout(1):
        await drain
    assert group.log[-1] == (0, 2)
    assert not group.cancelled


async def test_a_drain_gives_up_in_time_and_leaves_the_rest_unacknowledged() -> None:
    group = Group(concurrency=4)
    events = [group.event(offset) for offset in range(3)]
    await group.admit(*events)
    events[0].release.set()
    events[2].release.set()
    async with asyncio.timeout(1):
        await group.delivery.drain(0.01)
    # The last is done, but acknowledging it would commit past the second.
    assert (group.log, group.cancelled) == ([(0, 0)], [1])
    assert group.delivery.in_flight == 0
    assert not group.defects


async def test_a_drain_does_not_wait_for_events_that_only_wait() -> None:
    group = Group(concurrency=4)
    running, waiting, will_wait = (group.event(offset) for offset in range(3))

    async def handle(event: Event) -> None:
        if event is not waiting:
            await event.release.wait()
        if event is not running:
            await group.waits.sleep(60)

    group.delivery._handle = handle
    await group.admit(running, waiting, will_wait)
    async with asyncio.timeout(1):
        drain = asyncio.create_task(group.delivery.drain(60))
        await settle()
        assert group.delivery.running == 2
        will_wait.release.set()
        await settle()
        assert group.delivery.running == 1
        running.release.set()
        await drain
    assert group.log == [(0, 0)]
    # And with the next assignment events may wait again.
    group.delivery.reopen(1)
    await group.admit(waiting)
    assert group.delivery.running == 1


async def test_an_idle_delivery_drains_at_once() -> None:
    async with asyncio.timeout(1):
        await Group(concurrency=1).delivery.drain(60)


async def test_a_drain_frees_the_slots_for_the_next_generation() -> None:
    group = Group(concurrency=1)
    await group.admit(group.event(0), group.event(1))
    group.generation = 2
    async with asyncio.timeout(1):
        await group.delivery.drain(0.01)
    group.delivery.reopen(1)
    event = group.event(0)
    event.release.set()
    await group.admit(event)
    # What was read before the rebalance and still waited was not begun: its owner reads it again.
    assert (group.begun, group.log) == ([0, 0], [(0, 0)])


async def test_a_drained_delivery_begins_nothing_until_it_is_reopened() -> None:
    """The generation changes only when the next assignment is known, well after the partitions were taken away."""
    group = Group(concurrency=1)
    async with asyncio.timeout(1):
        await group.delivery.drain(0)
        await group.admit(group.event(0))
    assert (group.begun, group.delivery.in_flight) == ([], 0)


async def test_an_event_of_another_generation_is_not_begun() -> None:
    group = Group(concurrency=1)
    group.generation = 2
    await group.admit(group.event(0, generation=1), group.event(0, generation=3))
    await settle()
    assert (group.begun, group.delivery.in_flight) == ([], 0)


async def test_an_event_that_ends_after_a_rebalance_is_not_acknowledged() -> None:
    # A group that forgot this member tells it through the generation alone: no revocation, no drain.
    group = Group(concurrency=3)
    old = [group.event(0), group.event(1)]
    await group.admit(*old)
    group.generation = 2
    new = group.event(0)
    await group.admit(new)
    for event in [*old, new]:
        event.release.set()
    await settle()
    assert group.log == [(0, 0)]
    assert group.delivery.in_flight == 0


async def test_a_cancelled_event_stays_unacknowledged_and_so_does_what_is_behind_it() -> None:
    group = Group(concurrency=2)
    group.error = asyncio.CancelledError()
    head, behind = group.event(0), group.event(1)
    await group.admit(head, behind)
    head.release.set()
    await settle()
    group.error = None
    behind.release.set()
    await settle()
    assert (group.log, group.defects) == ([], [])
    assert group.delivery.in_flight == 2


@pytest.mark.parametrize("error", [RuntimeError("unforeseen"), SystemExit(3)])
async def test_a_defect_is_reported_and_its_event_stays_unacknowledged(error: BaseException) -> None:
    group = Group(concurrency=2)
    group.error = error
    event = group.event(0)
    await group.admit(event)
    event.release.set()
    await settle()
    assert (group.defects, group.log) == ([error], [])


async def test_an_acknowledgement_that_fails_is_a_defect() -> None:
    # In a task that nobody awaits it would be lost, and the partition would stand still unnoticed.
    group = Group(concurrency=2)
    group.acknowledging_fails = True
    event = group.event(0)
    await group.admit(event)
    event.release.set()
    await settle()
    assert [str(defect) for defect in group.defects] == ["acknowledging failed"]


async def test_what_waits_of_another_generation_is_not_begun() -> None:
    """The group forgot this member: neither a revocation nor a drain."""
    group = Group(concurrency=1)
    running, waiting = group.event(0), group.event(1)
    await group.admit(running, waiting)
    group.generation = 2
    running.release.set()
    await settle()
    group.delivery.reopen(1)
    again = group.event(0)
    again.release.set()
    await group.admit(again)
    assert (group.begun, group.log, group.delivery.waiting) == ([0, 0], [(0, 0)], 0)
