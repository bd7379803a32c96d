"""Delivery: bounded, in order, and never beyond a rebalance."""

import asyncio
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.worker.delivery import Delivery


@dataclass(eq=False)
class Event:
    offset: int
    log: list[tuple[int, int]]
    partition: int = 0
    generation: int = 1
    broken: bool = False
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def acknowledge(self) -> None:
        if self.broken:
            raise RuntimeError("acknowledging failed")
        self.log.append((self.partition, self.offset))


class Group:
    """A delivery whose events end when the test says so."""

    def __init__(self, concurrency: int) -> None:
        self.generation = 1
        self.log: list[tuple[int, int]] = []
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.defects: list[BaseException] = []
        self.fault: BaseException | None = None
        self.delivery: Delivery[Event] = Delivery(
            self.handle,
            generation=lambda: self.generation,
            concurrency=concurrency,
            on_defect=self.defects.append,
        )

    def event(
        self, offset: int, *, partition: int = 0, generation: int | None = None, broken: bool = False
    ) -> Event:
        return Event(offset, self.log, partition, generation or self.generation, broken)

    async def handle(self, event: Event) -> None:
        self.begun.append(event.offset)
        try:
            await event.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(event.offset)
            raise
        if self.fault is not None:
            raise self.fault

    async def admit(self, *events: Event) -> None:
        for event in events:
            async with asyncio.timeout(1):
                await self.delivery.admit(event)


async def settle() -> None:
    """Let everything that can run, run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def is_held_back(admission: "asyncio.Task[None]") -> bool:
    await settle()
    return not admission.done()


@pytest.mark.parametrize("concurrency", [1, 2, 8])
async def test_all_places_are_used_and_each_one_that_is_freed_is_used_again(concurrency: int) -> None:
    group = Group(concurrency)
    events = [group.event(offset) for offset in range(concurrency + 2)]
    await group.admit(*events[:concurrency])
    for freed in range(2):
        admission = asyncio.create_task(group.delivery.admit(events[concurrency + freed]))
        assert await is_held_back(admission)
        assert group.delivery.in_flight == concurrency
        events[freed].release.set()
        async with asyncio.timeout(1):
            await admission
    await settle()
    assert group.begun == list(range(concurrency + 2))
    assert group.log == [(0, 0), (0, 1)]


async def test_a_stuck_event_holds_back_what_is_behind_it() -> None:
    group = Group(concurrency=4)
    events = [group.event(offset) for offset in range(5)]
    await group.admit(*events[:4])
    # All but the first are done. Unacknowledged, they still count, or the queue behind it would grow for ever.
    for event in events[1:4]:
        event.release.set()
    admission = asyncio.create_task(group.delivery.admit(events[4]))
    assert await is_held_back(admission)
    assert (group.delivery.in_flight, group.log) == (4, [])
    events[0].release.set()
    async with asyncio.timeout(1):
        await admission
    assert group.log == [(0, 0), (0, 1), (0, 2), (0, 3)]


@given(
    partitions=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    concurrency=st.integers(1, 6),
    seed=st.randoms(use_true_random=False),
)
def test_any_order_of_completion_is_acknowledged_in_order_and_once(
    partitions: list[int], concurrency: int, seed: Random
) -> None:
    async def run() -> Group:
        group = Group(concurrency)
        events = [group.event(number, partition=partition) for number, partition in enumerate(partitions)]

        async def read() -> None:
            for event in events:
                await group.delivery.admit(event)

        reading = asyncio.create_task(read())
        open_events = list(events)
        async with asyncio.timeout(5):
            while open_events:
                await settle()
                assert group.delivery.in_flight <= concurrency
                working = [event for event in open_events if event.offset in group.begun]
                event = seed.choice(working)  # there always is one: no place is lost
                event.release.set()
                open_events.remove(event)
            await reading
            await group.delivery.drain(1)
        assert not group.defects
        return group

    log = asyncio.run(run()).log
    assert sorted(log) == sorted((partition, number) for number, partition in enumerate(partitions))
    for partition in set(partitions):
        offsets = [offset for one, offset in log if one == partition]
        assert offsets == sorted(offsets)


async def test_a_drain_waits_for_what_is_in_work() -> None:
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
    assert group.log == [(0, 0), (0, 1), (0, 2)]
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


async def test_an_idle_delivery_drains_at_once() -> None:
    async with asyncio.timeout(1):
        await Group(concurrency=1).delivery.drain(60)


async def test_a_drain_frees_the_places_for_the_next_generation() -> None:
    group = Group(concurrency=1)
    await group.admit(group.event(0))
    read_before = asyncio.create_task(group.delivery.admit(group.event(1)))
    assert await is_held_back(read_before)
    group.generation = 2
    async with asyncio.timeout(1):
        await group.delivery.drain(0.01)
        await read_before
    group.delivery.reopen()
    event = group.event(0)
    await group.admit(event)
    event.release.set()
    await settle()
    # What was read before the rebalance and still waited was not begun: its owner reads it again.
    assert (group.begun, group.log) == ([0, 0], [(0, 0)])


async def test_a_drained_delivery_begins_nothing_until_it_is_reopened() -> None:
    """The generation changes only when the next assignment is known, well after the partitions were taken away."""
    group = Group(concurrency=1)
    async with asyncio.timeout(1):
        await group.delivery.drain(0)
        await group.delivery.admit(group.event(0))
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
    group.fault = asyncio.CancelledError()
    head, behind = group.event(0), group.event(1)
    await group.admit(head, behind)
    head.release.set()
    await settle()
    group.fault = None
    behind.release.set()
    await settle()
    assert (group.log, group.defects) == ([], [])
    assert group.delivery.in_flight == 2


@pytest.mark.parametrize("fault", [RuntimeError("unforeseen"), SystemExit(3)])
async def test_a_defect_is_told_and_its_event_stays_unacknowledged(fault: BaseException) -> None:
    group = Group(concurrency=2)
    group.fault = fault
    event = group.event(0)
    await group.admit(event)
    event.release.set()
    await settle()
    assert (group.defects, group.log) == ([fault], [])


async def test_an_acknowledgement_that_fails_is_a_defect() -> None:
    # In a task that nobody awaits it would be lost, and the partition would stand still unnoticed.
    group = Group(concurrency=2)
    event = group.event(0, broken=True)
    await group.admit(event)
    event.release.set()
    await settle()
    assert [str(defect) for defect in group.defects] == ["acknowledging failed"]


async def test_several_readers_share_the_places() -> None:
    group = Group(concurrency=2)
    events = [group.event(offset, partition=offset) for offset in range(6)]
    readers = [asyncio.create_task(group.delivery.admit(event)) for event in events]
    for event in events:
        await settle()
        assert group.delivery.in_flight <= 2
        event.release.set()
    async with asyncio.timeout(1):
        await asyncio.gather(*readers)
    await settle()
    assert len(group.log) == 6
