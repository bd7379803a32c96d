"""Batches and dead letters that a broker takes and a worker may choke on."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from random import Random

import psutil
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode

from tests.accounting import Asked
from tests.faults.fault import Fault
from tests.faults.load import Event, good_events
from tests.faults.stack import CONCURRENCY, Stack
from tests.integration.harness import PARTITIONS, until

__all__ = ["FAULTS"]

_MIB = 1024 * 1024
#: What the manifests allow a worker.
_MEMORY_LIMIT = 512 * _MIB
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gzip": gzip_encode,
    "snappy": snappy_encode,
    "lz4": lz4_encode,
    "zstd": zstd_encode,
}
_MARK = "mark"
_SMALL_TOPIC = 128 * 1024


def _expecting(code: str, value: bytes | None = None) -> Event:
    """An event that is to become a dead letter: a good one, where no value is given."""
    good = next(good_events())
    return Event(Asked(good.asked.name, b"poison", code), good.value if value is None else value)


async def every_codec(stack: Stack) -> None:
    """Batches of one event and of ten, in each codec, to each partition."""
    for codec, compress in _COMPRESS.items():
        for size in (1, 10):
            for partition in range(PARTITIONS):
                await stack.load.send_batch([*islice(good_events(), size)], partition, codec, compress)
        await asyncio.sleep(0.5)


async def damage(stack: Stack) -> None:
    """Batches that come damaged from the broker: once, three times, or each time."""
    names: set[str] = set()
    words = {b"%032x" % stack.rng.getrandbits(128): times for times in (1, 3 * 3, math.inf, math.inf)}
    for proxy in stack.cluster.proxies:
        proxy.damaged.update(words)
    for word, times in words.items():
        events = [*islice(good_events(), 3)]
        if times == math.inf:
            events = [_expecting("unreadable_batch") for _ in events]
        names |= {event.asked.name for event in events}
        partition = stack.rng.randrange(PARTITIONS)
        await stack.load.send_batch(events, partition, headers=[(_MARK, word)])
    await until(
        lambda: not (names - stack.answered),
        lambda: f"{len(names - stack.answered)} events of damaged batches are unanswered",
        seconds=60,
    )
    for proxy in stack.cluster.proxies:
        proxy.damaged.clear()


@asynccontextmanager
async def _within_memory(stack: Stack) -> AsyncIterator[None]:
    """Sees that no worker ever takes more than it may."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            for worker in stack.members:
                most = max(most, psutil.Process(worker.process.pid).memory_info().rss)
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
    print(f"at most {most // _MIB} MiB resident")
    assert 0 < most < _MEMORY_LIMIT, f"a worker has taken {most // _MIB} MiB"


async def inflate(stack: Stack) -> None:
    """Batches of a few KB that inflate to 32 MiB, and some that stay just within the limit."""
    zeros = b"\0" * (32 * _MIB)
    within = 8 * _MIB - 200
    async with _within_memory(stack):
        for number in range(40):
            codec = stack.rng.choice(["gzip", "zstd"])
            size, code = (len(zeros), "record_too_large") if number % 4 else (within, "unknown_schema")
            compress = _COMPRESS[codec]
            event = _expecting(code, zeros[:size])
            await stack.load.send_batch([event], stack.rng.randrange(PARTITIONS), codec, compress)
        await stack.until_committed(60)


async def make_dead_letters_small(stack: Stack) -> None:
    await stack.configure_topic(stack.channel.dead_letters, {"max.message.bytes": str(_SMALL_TOPIC)})


async def send_large(stack: Stack) -> None:
    """More than may be in flight, of dead letters that fit compressed, and of such as do not fit at all."""
    noise = Random(stack.rng.random()).randbytes(2 * _SMALL_TOPIC)
    for number in range(2 * CONCURRENCY):
        value = b"\xff" * (6 * _MIB) if number % 2 else b"\xff" + noise
        await stack.load.send_batch([_expecting("undecodable", value)], 0, "zstd", zstd_encode)
    await asyncio.sleep(5)


FAULTS = [
    Fault("batches-of-every-codec", every_codec, rounds=2, repeats=0),
    Fault("batch-unreadable", damage, rounds=3, repeats=0),
    Fault("batch-inflates-without-end", inflate, repeats=0, per_second=10, workers=1),
    Fault("dead-letter-too-large", send_large, prepare=make_dead_letters_small, rounds=2, repeats=0),
]
