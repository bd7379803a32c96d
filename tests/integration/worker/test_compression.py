"""Compressed batches: of every codec, unreadable ones, and ones that inflate without end."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.codec import lz4_encode, snappy_encode

from streams.broker.topics import TopicSpec, create_topics
from streams.core.errors import UnknownProfile
from streams.embedded.postgres import EmbeddedPostgres
from streams.replay.journal import Entry
from streams.replay.offsets import Offsets
from streams.wire.deadletter import error_headers
from tests.batches import CODEC_IDS, Record, batch, gzipped, produce, zstd_repeated, zstd_stored
from tests.conftest import Database, PostgresServer
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import (
    Channel,
    OutputReader,
    Worker,
    anabranch,
    as_avro,
    as_json,
    query,
    until,
)

VECTOR = unit_vectors(1, 1)[0]


@pytest.mark.parametrize("codec", sorted(set(CODEC_IDS) - {"none"}))
async def test_compressed_events_are_answered(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    codec: str,
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    asked = set()
    async with AIOKafkaProducer(
        bootstrap_servers=channel.bootstrap_servers,
        compression_type=codec,
        linger_ms=20,
        max_batch_size=100_000,
    ) as producer:
        for number in range(40):
            event = query(VECTOR)
            asked.add(event["event_id"])
            await producer.send(channel.input, as_json(event), partition=number % 3)
    await output_reader.until_answered(asked, seconds=20)
    assert output_reader.dead_letters == []
    assert worker.process.poll() is None


async def test_a_batch_of_zstd_that_no_library_made_is_answered(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    events = [query(VECTOR) for _ in range(5)]
    records = [(b"key", as_avro(event), [("name", b"value")]) for event in events]
    await produce(channel.producer, channel.input, 1, batch(records, "zstd", zstd_stored))
    await output_reader.until_answered({event["event_id"] for event in events}, seconds=20)
    assert worker.process.poll() is None


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)  # Apache Kafka refuses such batches
@pytest.mark.parametrize(
    ("made", "readable"),
    [
        pytest.param(lambda records: batch(records, "gzip", lambda _: b"no gzip"), 0, id="payload"),
        pytest.param(
            lambda records: batch(records, "zstd", lambda data: zstd_stored(data)[:-9]), 0, id="cut"
        ),
        pytest.param(lambda records: batch(records, "none", lambda data: data[:-5]), 2, id="last record"),
        pytest.param(lambda records: batch(records, damaged=True), 0, id="checksum"),
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
async def test_an_interrupted_replay_whose_marks_cannot_be_read_is_not_repeated(channel: Channel) -> None:
    """What it had published before it was killed may be in that batch."""
    error = error_headers(UnknownProfile("no such profile"), topic=channel.input, partition=1, offset=7)
    await channel.producer.send_and_wait(channel.dead_letters, b"event", partition=0, headers=error)
    entry = Entry("run", Offsets.of(set()), scan_from={0: 0, 1: 0, 2: 0})
    await channel.producer.send_and_wait(
        channel.dead_letters, entry.encode(), partition=0, headers=entry.headers
    )
    bad = batch([(None, b"event", [])] * 2, damaged=True)
    await produce(channel.producer, channel.input, 1, bad)
    done = await asyncio.to_thread(anabranch, "replay", "--apply", channel=channel)
    assert done.returncode == 1, done.stdout
    *_, line = done.stderr.splitlines()  # behind the warnings
    assert f"{channel.input}[1]@0" in line
    assert "cannot be read" in line
    assert "--partition" in line


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
MAX_HEADERS = 10_000
LIMIT = 8 * MIB  # ANABRANCH_MAX_INFLATED_BYTES where nobody sets it
MEMORY_LIMIT = 512 * MIB  # below the manifests' 640 MiB


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
    if codec == "headers":
        return batch([(None, b"", [("", b"")] * (size // 2))], "gzip", gzipped)
    compress = {
        "gzip": gzipped,
        "snappy": snappy_encode,
        "lz4": lz4_encode,
        "zstd": lambda _: zstd_repeated(size, head=b"", tail=b""),
    }[codec]
    return batch([(b"key", b"\0" * size, [])] if codec != "zstd" else [(b"key", b"", [])], codec, compress)


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
    sizes = {"gzip": 300 * MIB, "zstd": 1024 * MIB, "lz4": 32 * MIB, "snappy": 16 * MIB, "headers": 7 * MIB}
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
        await output_reader.until(dead_letters=100 * len(bombs))
    assert {dead_letter.value for dead_letter in output_reader.dead_letters} == {b""}
    codes = {dict(dead_letter.headers)["anabranch.error.code"] for dead_letter in output_reader.dead_letters}
    assert codes == {b"record_too_large"}
    figures(
        f"{100 * len(bombs)} bombs of {', '.join(f'{len(made):,}' for made in bombs)} bytes:"
        f" {memory[0] // MIB} to {max(memory) // MIB} MiB resident"
    )
    assert max(memory) < MEMORY_LIMIT


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
async def test_events_that_inflate_to_just_the_limit_do_not_either(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """Dead letters whole, batches of many thousand records that ask nothing, and events with many headers."""
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    overhead = len(batch([(b"key", b"\0" * LIMIT, [])])) - LIMIT - len(batch([]))
    largest = batch([(b"key", b"\0" * (LIMIT - overhead), [])], "gzip", gzipped)
    many = batch([(None, None, [])] * 30_000, "gzip", gzipped)
    headers = batch([(None, b"", [("", b"")] * (MAX_HEADERS - 100))] * 50, "gzip", gzipped)
    asked = set()
    async with memory_of(worker) as memory:
        await produce(channel.producer, channel.input, 0, many)
        for partition in range(3):
            await produce(channel.producer, channel.input, partition, headers)
        for number in range(100):
            await produce(channel.producer, channel.input, number % 3, largest)
            event = query(VECTOR)
            asked.add(event["event_id"])
            await channel.send(as_avro(event), partition=number % 3)
        await output_reader.until_answered(asked, seconds=240)
        await output_reader.until(dead_letters=250)
    sizes = Counter(len(dead_letter.value or b"") for dead_letter in output_reader.dead_letters)
    assert sizes == {LIMIT - overhead: 100, 0: 150}
    figures(
        f"100 events of {LIMIT - overhead:,} bytes in {len(largest):,} and 30,000 tombstones in {len(many):,},"
        f" 150 events of {MAX_HEADERS - 100:,} headers:"
        f" {memory[0] // MIB} to {max(memory) // MIB} MiB resident"
    )
    assert max(memory) < MEMORY_LIMIT


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
async def test_large_events_of_many_partitions_do_not_while_the_store_is_away(
    channel: Channel, start_worker: Callable[..., Worker], figures: Callable[[str], None]
) -> None:
    """Each partition's events wait."""
    partitions = 12
    name = f"{channel.name}.wide"
    spec = TopicSpec(name, partitions, replication_factor=1, config={}, floors={})
    await create_topics({"bootstrap_servers": channel.bootstrap_servers}, [spec])
    event = {**query(VECTOR), "padding": "a" * (LIMIT - 32 * 1024)}
    large = batch([(b"key", as_json(event), [])], "gzip", gzipped)
    with EmbeddedPostgres() as embedded:
        database = PostgresServer(embedded).database()
        await load(database.writer, tiny_corpus())
        worker = start_worker(database.worker, ANABRANCH_INPUT_TOPIC=name)
        await worker.until_ready()
        await asyncio.to_thread(embedded.stop, "immediate")
        async with memory_of(worker) as memory:
            for number in range(20 * partitions):
                await produce(channel.producer, name, number % partitions, large)
            await until(
                lambda: worker.process.poll() is not None or max(memory) > memory[0] + 100 * MIB,
                lambda: f"{max(memory) // MIB} MiB resident",
                seconds=120,
            )
            await asyncio.sleep(20)
    figures(
        f"240 events of {LIMIT // MIB} MiB on {partitions} partitions, store away:"
        f" {memory[0] // MIB} to {max(memory) // MIB} MiB resident"
    )
    assert worker.process.poll() is None
    assert max(memory) < MEMORY_LIMIT
