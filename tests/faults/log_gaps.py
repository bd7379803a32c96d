"""Offsets that are missing from the input topic: compacted away, or written in transactions that were aborted."""

import asyncio
from collections.abc import Iterator

from aiokafka import AIOKafkaProducer

from tests.accounting import Asked
from tests.faults.fault import REPEATS_OF_A_MEMBER, Fault
from tests.faults.load import Event, good_events
from tests.faults.stack import Stack
from tests.integration.harness import PARTITIONS

__all__ = ["FAULTS"]

_SUPERSEDED = 300
_MAX_SECONDS = 60


async def compact(stack: Stack) -> None:
    """Before anybody reads: an event at offset 0 of each partition, then a gap, then another event."""
    await stack.configure_topic(
        stack.channel.input,
        {
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": "0.001",
            "segment.ms": "500",
            "min.compaction.lag.ms": "0",
            "delete.retention.ms": "0",
        },
    )
    for partition in range(PARTITIONS):
        await stack.load.send_now(next(_UNIQUE), partition)
        for number in range(_SUPERSEDED):
            event = next(_UNIQUE)
            superseded = Event(Asked(event.asked.name, b"superseded"), event.value)
            if number < _SUPERSEDED - 1:
                stack.replaceable.add(event.asked.name)
            await stack.load.send_now(superseded, partition)
        await asyncio.sleep(0.6)  # the segment's time is over
        await stack.load.send_now(next(_UNIQUE), partition)
    async with asyncio.timeout(_MAX_SECONDS):
        while await stack.gaps() < PARTITIONS:  # noqa: ASYNC110  # the broker tells nobody
            await asyncio.sleep(0.5)


def unique_events() -> Iterator[Event]:
    """Each with a key of its own, so that compaction keeps it."""
    for event in good_events():
        yield Event(Asked(event.asked.name, event.asked.name.encode()), event.value)


_UNIQUE = unique_events()


async def kill_all(stack: Stack) -> None:
    """Whoever comes next starts from what was committed around the gaps."""
    await asyncio.sleep(stack.rng.uniform(1, 2))
    for worker in list(stack.members):
        stack.replace(worker)


async def abort(stack: Stack) -> None:
    """Transactions, some aborted, some committed, between events of no transaction; then every worker is killed."""
    producer = AIOKafkaProducer(
        bootstrap_servers=stack.channel.bootstrap_servers,
        transactional_id=f"{stack.channel.name}-{stack.rng.random()}",
    )
    await producer.start()
    try:
        events = good_events()
        for number in range(20):
            await producer.begin_transaction()
            aborted = number % 2 == 0
            for _ in range(stack.rng.randrange(1, 8)):
                event = next(events)
                stack.load.asked[event.asked.name] = event.asked
                await producer.send(
                    stack.channel.input,
                    event.value,
                    key=event.asked.key,
                    partition=stack.rng.randrange(PARTITIONS),
                    headers=stack.load.headers(event),
                )
            await producer.flush()
            await asyncio.sleep(0.1)
            if aborted:
                await producer.abort_transaction()
            else:
                await producer.commit_transaction()
    finally:
        await producer.stop()
    await kill_all(stack)


async def abort_first(stack: Stack) -> None:
    """Before anybody reads: an event at offset 0, then aborted ones, then another event."""
    producer = AIOKafkaProducer(
        bootstrap_servers=stack.channel.bootstrap_servers, transactional_id=stack.channel.name
    )
    await producer.start()
    events = good_events()
    try:
        for partition in range(PARTITIONS):
            await stack.load.send_now(next(events), partition)
        await producer.begin_transaction()
        for number in range(30):
            event = next(events)
            stack.load.asked[event.asked.name] = event.asked
            await producer.send(
                stack.channel.input,
                event.value,
                key=event.asked.key,
                partition=number % PARTITIONS,
                headers=stack.load.headers(event),
            )
        await producer.flush()
        await producer.abort_transaction()
        for partition in range(PARTITIONS):
            await stack.load.send_now(next(events), partition)
    finally:
        await producer.stop()


FAULTS = [
    Fault(
        "gaps-by-compaction",
        kill_all,
        prepare=compact,
        rounds=2,
        workers=1,  # another one's joining would make it look at the gap from its other side
        events=unique_events,
        per_second=20.0,
        limit_seconds=60,
        repeats=2 * REPEATS_OF_A_MEMBER,
    ),
    Fault(
        "gaps-by-aborted-transactions",
        abort,
        prepare=abort_first,
        rounds=2,
        workers=1,  # another one's joining would make it look at the gap from its other side
        limit_seconds=60,
        repeats=2 * REPEATS_OF_A_MEMBER,
    ),
]
