"""Compressed batches: of every codec, unreadable ones, and ones that inflate without end."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from aiokafka.codec import lz4_encode, snappy_encode

from tests.batches import Record, batch, gzipped, produce, zstd_repeated
from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, anabranch, as_avro, query

VECTOR = unit_vectors(1, 1)[0]


@pytest.mark.xfail(strict=True, reason="a batch that cannot be read stops every worker")
@pytest.mark.parametrize("broker", ["embedded"], indirect=True)  # Apache Kafka refuses such batches
@pytest.mark.parametrize(
    ("made", "readable"),
    [
        pytest.param(lambda records: batch(records, "gzip", lambda _: b"no gzip"), 0, id="payload"),
    ],
)
async def test_a_batch_that_cannot_be_read_becomes_a_placeholder(  # noqa: PLR0917  # fixtures
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    made: Callable[[list[Record]], bytes],
    readable: int,
) -> None:
    """Those before and behind it are answered, and so is what can be read of it."""
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    asked = set()
    for number in range(9):
        event = query(VECTOR)
        asked.add(event["event_id"])
        await channel.send(as_avro(event), b"key", partition=1)
        if number == 4:
            inside = [query(VECTOR) for _ in range(3)]
            asked |= {event["event_id"] for event in inside[:readable]}
            bad = made([(b"key", as_avro(event), [("a", b"b")]) for event in inside])
            offset = await produce(channel.producer, channel.input, 1, bad)
    await output_reader.until_answered(asked, seconds=20)
    await output_reader.until(dead_letters=1)
    [dead_letter] = output_reader.dead_letters
    assert (dead_letter.key, dead_letter.value) == (None, b"")
    headers = dict(dead_letter.headers)
    assert headers["anabranch.error.code"] == b"unreadable_batch"
    assert headers["__connect.errors.topic"] == channel.input.encode()
    assert headers["__connect.errors.partition"] == b"1"
    assert headers["__connect.errors.offset"] == b"%d" % (offset + readable)
    assert headers["anabranch.placeholder.first.offset"] == b"%d" % (offset + readable)
    assert headers["anabranch.placeholder.last.offset"] == b"%d" % (offset + 2)
    assert headers["anabranch.placeholder.original.bytes"] == b"%d" % len(bad)
    assert worker.log.count("fetching it again") == 3
    samples = await worker.scrape()
    assert samples.nonzero("anabranch_dead_letters_total") == {("unreadable_batch",): 1}

    missing = {"topic": channel.input, "partition": 1, "first": offset + readable, "last": offset + 2}
    for options, code in (((), 0), (("--apply",), 1)):
        done = await asyncio.to_thread(anabranch, "replay", "--json", *options, channel=channel)
        assert done.returncode == code, done.stderr
        shown = json.loads(done.stdout)
        assert (shown["chosen"], shown["replay"], shown["placeholder"]) == (1, 0, 1)
        assert shown["missing"] == [missing]
    done = await asyncio.to_thread(anabranch, "replay", channel=channel)
    span = f"{offset + readable}–{offset + 2}" if readable < 2 else str(offset + 2)
    assert "cannot be replayed" in done.stdout
    assert f"{channel.input}[1]@{span}" in done.stdout
    assert worker.process.poll() is None


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
async def test_a_tail_passes_over_what_cannot_be_read(channel: Channel) -> None:
    bad = batch([(None, b"result", [])] * 2, damaged=True)
    for topic in (channel.output, channel.dead_letters):
        await produce(channel.producer, topic, 0, bad)
        await channel.producer.send_and_wait(topic, b"no result", partition=0)
    for options in ((), ("--dead-letters",)):
        done = await asyncio.to_thread(
            anabranch, "tail", "--from-beginning", "--limit", "2", *options, channel=channel
        )
        assert done.returncode == 0, done.stderr
        unreadable, other = map(json.loads, done.stdout.splitlines())
        assert unreadable == {"unreadable": "unreadable_batch", "partition": 0, "offset": 0, "last_offset": 1}
        assert other["offset"] == 2
    done = await asyncio.to_thread(anabranch, "replay", channel=channel)
    assert done.returncode == 1
    *_, line = done.stderr.splitlines()  # behind the warnings
    assert f"the batch from {channel.dead_letters}[0]@0 to offset 1 cannot be read" in line
    assert "--partition" in line


MIB = 1024 * 1024
LIMIT = 8 * MIB  # ANABRANCH_MAX_INFLATED_BYTES where nobody sets it
MEMORY_LIMIT = 512 * MIB  # of the manifests


@asynccontextmanager
async def memory_of(worker: Worker) -> AsyncIterator[list[int]]:
    """Resident bytes, over and over."""
    process = psutil.Process(worker.process.pid)
    seen = [process.memory_info().rss]

    async def watch() -> None:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            seen.append(process.memory_info().rss)
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()


def bomb(codec: str, size: int) -> bytes:
    """A batch with one event that inflates to so many bytes and a few."""
    compress = {
        "gzip": gzipped,
        "snappy": snappy_encode,
        "lz4": lz4_encode,
        "zstd": lambda _: zstd_repeated(size, head=b"", tail=b""),
    }[codec]
    return batch([(b"key", b"\0" * size, [])] if codec != "zstd" else [(b"key", b"", [])], codec, compress)


@pytest.mark.xfail(strict=True, reason="batches are decompressed without a limit")
@pytest.mark.parametrize(
    "broker", ["embedded"], indirect=True
)  # Apache Kafka inflates each before it takes it
async def test_bombs_do_not_fill_the_memory(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    sizes = {"gzip": 300 * MIB, "zstd": 1024 * MIB, "lz4": 32 * MIB, "snappy": 16 * MIB}
    bombs = [await asyncio.to_thread(bomb, codec, size) for codec, size in sizes.items()]
    asked = set()
    async with memory_of(worker) as memory:
        for number in range(100):
            for made in bombs:
                await produce(channel.producer, channel.input, number % 3, made)
            event = query(VECTOR)
            asked.add(event["event_id"])
            await channel.send(as_avro(event), partition=number % 3)
        await output_reader.until_answered(asked, seconds=60)
        await output_reader.until(dead_letters=400)
    assert {dead_letter.value for dead_letter in output_reader.dead_letters} == {b""}
    codes = {dict(dead_letter.headers)["anabranch.error.code"] for dead_letter in output_reader.dead_letters}
    assert codes == {b"record_too_large"}
    figures(
        f"400 bombs of {', '.join(f'{len(made):,}' for made in bombs)} bytes:"
        f" {memory[0] // MIB} to {max(memory) // MIB} MiB resident"
    )
    assert max(memory) < MEMORY_LIMIT
