"""Dead letters come back, each once, whatever interrupts it, and are answered when what was wrong has been mended."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord

from streams.core.errors import GaveUp, UnknownProfile
from streams.replay.journal import JOURNAL_HEADER
from streams.wire.deadletter import error_headers
from tests.bad_inputs import json_event
from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import (
    PARTITIONS,
    Channel,
    OutputReader,
    Worker,
    anabranch,
    as_avro,
    query,
    start_anabranch,
    until,
)

VECTOR = unit_vectors(1, 1)[0]
HEADERS: Sequence[tuple[str, bytes | None]] = [
    ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("x", b""),
    ("x", b"\xff"),
    # Of an event that somebody else had put aside before it came here.
    ("__connect.errors.topic", b"elsewhere"),
]
# What a letter is and what becomes of it does not depend on the broker; what a replay remembers does.
on_one_broker = pytest.mark.parametrize("broker", ["either"], indirect=True)
STORE_OUTAGE = GaveUp("store_unavailable", "the store was unavailable 3 times")


async def replay(channel: Channel, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and outcome."""
    done = await asyncio.to_thread(anabranch, "replay", "--json", *arguments, channel=channel)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


async def write_dead_letter(
    channel: Channel,
    error: Any,
    value: bytes,
    *,
    partition: int,
    offset: int = 0,
    headers: Sequence[tuple[str, bytes | None]] = (),
    topic: str | None = None,
) -> int:
    """A dead letter as a worker writes it; returns its offset."""
    sent = await channel.producer.send_and_wait(
        channel.dead_letters,
        value,
        key=b"key",
        headers=[
            *headers,
            *error_headers(error, topic=topic or channel.input, partition=partition, offset=offset),
        ],
        partition=partition,
    )
    return int(sent.offset)


class InputReader:
    """Reads the input topic into memory, in the background, from the beginning."""

    def __init__(self) -> None:
        self.records: list[ConsumerRecord] = []

    async def read(self, consumer: AIOKafkaConsumer) -> None:
        async for record in consumer:
            self.records.append(record)

    async def until(self, count: int, *, seconds: float = 30) -> None:
        await until(
            lambda: len(self.records) >= count,
            lambda: f"{len(self.records)} of {count} events came",
            seconds=seconds,
        )

    @property
    def sources(self) -> Counter[str]:
        """The dead letters that came, by the mark, and how often."""
        replay_headers = (dict(record.headers).get("anabranch.replay.from") for record in self.records)
        return Counter(mark.decode() for mark in replay_headers if mark)


@pytest.fixture
async def input_reader(channel: Channel) -> AsyncIterator[InputReader]:
    opened = InputReader()
    consumer = AIOKafkaConsumer(
        channel.input,
        bootstrap_servers=channel.bootstrap_servers,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=8 * 1024 * 1024,
    )
    await consumer.start()
    reading = asyncio.create_task(opened.read(consumer))
    try:
        yield opened
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await consumer.stop()


def read_dead_letters(output_reader: OutputReader) -> list[ConsumerRecord]:
    """Without what a replay remembers."""
    return [record for record in output_reader.dead_letters if "anabranch.error.code" in dict(record.headers)]


async def until_dead_letters(output_reader: OutputReader, count: int) -> None:
    await until(
        lambda: len(read_dead_letters(output_reader)) >= count,
        lambda: f"{len(read_dead_letters(output_reader))} of {count} dead letters",
        seconds=30,
    )


@on_one_broker
async def test_what_had_no_profile_is_answered_when_there_is_one(
    *,
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    input_reader: InputReader,
    start_worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    asked: dict[str, tuple[bytes, bytes]] = {}
    for number in range(12):
        event = query(VECTOR, profile="briefing")
        asked[event["event_id"]] = f"key {number}".encode(), as_avro(event)
        await channel.send(asked[event["event_id"]][1], asked[event["event_id"]][0], HEADERS)
    broken = json_event(principals=[])
    await channel.send(broken, b"broken", HEADERS, partition=1)
    await until_dead_letters(output_reader, 13)
    await worker.terminate()

    # Dry: all of it is shown, and nothing comes.
    code, shown = await replay(channel)
    assert (code, shown["applied"], shown["replay"]) == (0, False, 13), shown
    assert {row["code"] for row in shown["rows"]} == {"unknown_profile", "contract_violation"}
    assert sum(row["replay"] for row in shown["rows"] if row["code"] == "unknown_profile") == 12
    assert len(input_reader.records) == 13
    assert len(output_reader.dead_letters) == 13

    profiles = tmp_path / "profiles.toml"
    profiles.write_text('[briefing]\nk_default = 3\nk_min = 1\nk_max = 9\norder = "similarity"\n')
    fixed = start_worker(database.worker, ANABRANCH_PROFILES_FILE=str(profiles))
    await fixed.until_ready()
    code, done = await replay(channel, "--apply", "--code", "unknown_profile")
    assert (code, done["applied"], done["replay"], done["chosen"]) == (0, True, 12, 12)
    await output_reader.until_answered(set(asked), seconds=30)
    assert len(output_reader.results) == 12

    # Byte for byte what was sent, and the marks; where it was sent.
    sent = {(record.key, record.value): record for record in input_reader.records[:13]}
    places = {
        (record.key, record.value): f"{record.topic}[{record.partition}]@{record.offset}"
        for record in read_dead_letters(output_reader)
    }
    for record in input_reader.records[13:]:
        first = sent[record.key, record.value]
        assert record.partition == first.partition
        assert list(record.headers) == [
            *HEADERS,
            ("anabranch.replay.from", places[record.key, record.value].encode()),
            ("anabranch.replay.attempts", b"1"),
        ]
    # The reader of a result can tell that it comes late.
    assert all(("anabranch.replay.attempts", b"1") in record.headers for record in output_reader.results)

    # Once is enough; what was passed over is still there to be chosen.
    code, again = await replay(channel, "--apply", "--code", "unknown_profile")
    assert (code, again["replay"], again["already"]) == (0, 0, 12)
    code, others = await replay(channel)
    assert (code, others["replay"], others["already"]) == (0, 1, 12)


@on_one_broker
async def test_what_comes_back_again_and_again_is_left(
    channel: Channel,
    output_reader: OutputReader,
    input_reader: InputReader,
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker("postgresql://worker@127.0.0.1:1/nowhere")
    await worker.until_ready(ready=False)
    broken = json_event(principals=[])
    await channel.send(broken, b"broken", HEADERS, partition=1)
    limited = ("--apply", "--max-attempts", "2")
    for attempts in (1, 2):
        await until_dead_letters(output_reader, attempts)
        code, done = await replay(channel, *limited)
        assert (code, done["replay"], done["already"]) == (0, 1, attempts - 1)
        await until_dead_letters(output_reader, attempts + 1)
        # The worker carries the marks along, and a replay puts its own in their place.
        last = read_dead_letters(output_reader)[-1]
        assert (last.key, last.value) == (b"broken", broken)
        assert list(last.headers[: len(HEADERS)]) == HEADERS
        names = Counter(name for name, _ in last.headers[len(HEADERS) :])
        assert len(names) == names.total() == 2 + 7
        assert dict(last.headers)["anabranch.replay.attempts"] == b"%d" % attempts
    code, done = await replay(channel, *limited)
    assert (code, done["replay"], done["already"], done["exhausted"]) == (1, 0, 2, 1)
    table = await asyncio.to_thread(anabranch, "replay", "--max-attempts", "2", channel=channel)
    assert table.returncode == 0
    left = "skipped 1 × replayed 2 times or more and dead-lettered again (--max-attempts): "
    assert f"{left}[{last.partition}]@{last.offset}" in table.stdout
    await input_reader.until(3)
    assert [record.partition for record in input_reader.records] == [1, 1, 1]


@on_one_broker  # on the embedded one it takes three times as long
async def test_kill_dash_nine_in_the_middle_repeats_nothing(
    channel: Channel, input_reader: InputReader, figures: Callable[[str], None]
) -> None:
    """Kill replays until one has published what it had not written down; the next comes to the end."""
    places, due = [], set()
    for number in range(120):
        is_due, partition = number % 4 != 3, number % 3
        error = STORE_OUTAGE if is_due else UnknownProfile("no such profile")
        offset = await write_dead_letter(channel, error, b"%d" % number, partition=partition)
        places.append(f"{channel.dead_letters}[{partition}]@{offset}")
        if is_due:
            due.add(places[-1])
    chosen = ("--code", "store_unavailable")
    killed_at: list[int] = []
    shown = {"recognised": 0}
    while not shown["recognised"]:
        # A batch is a second's worth; in most of them it is hit in the middle.
        process = await asyncio.to_thread(
            start_anabranch, "replay", "--apply", "--rate", "10", *chosen, channel=channel
        )
        with process:
            try:
                await input_reader.until(len(input_reader.records) + 8)
                assert process.poll() is None
            finally:
                process.kill()
        await asyncio.sleep(0.5)  # what it had sent arrives
        killed_at.append(len(input_reader.records))
        assert killed_at[-1] < len(due)
        code, shown = await replay(channel, *chosen)
        assert (code, shown["replay"], shown["already"]) == (0, len(due) - killed_at[-1], killed_at[-1])
    code, done = await replay(channel, "--apply", "--rate", "100", *chosen)
    assert (code, done["replay"], done["already"]) == (0, len(due) - killed_at[-1], killed_at[-1])
    assert done["recognised"] == shown["recognised"]
    await input_reader.until(len(due))
    figures(f"killed after {killed_at} of {len(due)}; {done['recognised']} were known by their marks alone")
    assert input_reader.sources == dict.fromkeys(due, 1)
    # The journal knows all of them now, without a look into the input topic.
    code, again = await replay(channel, "--apply", *chosen)
    assert (code, again["replay"], again["already"], again["recognised"]) == (0, 0, len(due), 0)
    # And those of the other code were passed over, not done with.
    code, rest = await replay(channel, "--apply", "--rate", "1000")
    assert (code, rest["replay"]) == (0, len(places) - len(due))
    await input_reader.until(len(places))
    assert input_reader.sources == dict.fromkeys(places, 1)


@on_one_broker
async def test_two_at_the_same_time(channel: Channel, input_reader: InputReader) -> None:
    """The first goes on, the second says so and ends."""
    for number in range(60):
        await write_dead_letter(channel, STORE_OUTAGE, b"%d" % number, partition=0)
    first = await asyncio.to_thread(
        start_anabranch, "replay", "--apply", "--rate", "4", "--json", channel=channel
    )
    with first:
        try:
            await input_reader.until(1)
            second = await asyncio.to_thread(anabranch, "replay", "--apply", channel=channel)
            assert second.returncode == 1
            assert second.stdout == ""
            assert second.stderr.splitlines() == [
                (
                    f"anabranch replay: another replay of {channel.dead_letters} is running"
                    f" (the other member of the consumer group {channel.dead_letters}.replay)"
                )
            ]
            assert first.poll() is None
            stdout, stderr = await asyncio.to_thread(first.communicate, None, 60)
        finally:
            first.kill()
    assert first.returncode == 0, stderr
    assert json.loads(stdout)["replay"] == 60
    await input_reader.until(60)
    assert max(input_reader.sources.values()) == 1


@on_one_broker
async def test_two_that_start_at_once(channel: Channel, input_reader: InputReader) -> None:
    """Exactly one does it; or the one after the other, if the first is done by then."""
    for number in range(30):
        await write_dead_letter(channel, STORE_OUTAGE, b"%d" % number, partition=number % PARTITIONS)
    done = await asyncio.gather(
        *(asyncio.to_thread(anabranch, "replay", "--apply", "--json", channel=channel) for _ in range(2))
    )
    codes = sorted(process.returncode for process in done)
    assert codes in ([0, 0], [0, 1]), [process.stderr for process in done]
    assert sum(json.loads(process.stdout)["replay"] for process in done if process.returncode == 0) == 30
    await input_reader.until(30)
    await asyncio.sleep(0.5)
    assert sorted(input_reader.sources.values()) == [1] * 30


@on_one_broker
async def test_what_is_none_of_ours_is_refused(channel: Channel, input_reader: InputReader) -> None:
    await channel.producer.send_and_wait(channel.dead_letters, b"a line of somebody's", partition=0)
    await channel.producer.send_and_wait(
        channel.dead_letters,
        b"Kafka Connect's",
        headers=[("__connect.errors.topic", channel.input.encode())],
        partition=0,
    )
    other = await write_dead_letter(channel, STORE_OUTAGE, b"another's", partition=0, topic="another.topic")
    # An event may bring an entry of the journal with it. It says nothing.
    forged = json.dumps({"run": "x", "replayed": [[0, 99]], "beyond": None, "settled": []}).encode()
    await write_dead_letter(
        channel, STORE_OUTAGE, forged, partition=0, headers=[("anabranch.replay.journal", b"1")]
    )
    code, done = await replay(channel, "--apply")
    assert code == 1
    assert (done["foreign"], done["elsewhere"], done["replay"], done["already"]) == (2, 1, 1, 0)
    await input_reader.until(1)
    assert [record.value for record in input_reader.records] == [forged]
    table = await asyncio.to_thread(anabranch, "replay", channel=channel)
    assert table.returncode == 0
    assert (
        "skipped 2 × not written by Anabranch (no header anabranch.error.code): [0]@0, [0]@1" in table.stdout
    )
    assert f"skipped 1 × not read from {channel.input} (ANABRANCH_INPUT_TOPIC): [0]@{other}" in table.stdout
    code, done = await replay(channel, "--code", "store_unavailable")
    assert done["foreign"] == 0


@on_one_broker
async def test_a_forged_entry_of_the_journal_is_named(channel: Channel) -> None:
    forged = b'{"run":"x","replayed":[[0,999999999999]],"beyond":null,"settled":[]}'
    await channel.producer.send_and_wait(
        channel.dead_letters, forged, headers=[(JOURNAL_HEADER, b"1")], partition=1
    )
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        " runpy.run_module('streams', run_name='__main__')"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", limited, "replay"],
        env={
            "PATH": os.environ["PATH"],
            "KAFKA_BOOTSTRAP_SERVERS": channel.bootstrap_servers,
            "ANABRANCH_INPUT_TOPIC": channel.input,
            "ANABRANCH_OUTPUT_TOPIC": channel.output,
            "ANABRANCH_DEAD_LETTER_TOPIC": channel.dead_letters,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"{channel.dead_letters}[1]@0" in line
    assert "offset" in line


@on_one_broker
async def test_a_tail_of_dead_letters_shows_them(channel: Channel) -> None:
    for number in range(3):
        await write_dead_letter(channel, STORE_OUTAGE, b"%d" % number, partition=0)
    code, _ = await replay(channel, "--apply")
    assert code == 0
    await write_dead_letter(channel, STORE_OUTAGE, b"the last", partition=0, headers=[("nothing", None)])
    arguments = ("tail", "--dead-letters", "--from-beginning", "--limit", "4")
    shown = await asyncio.to_thread(anabranch, *arguments, channel=channel)
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [line["headers"]["anabranch.error.code"] for line in lines] == ["store_unavailable"] * 4
    assert [line["event_id"] for line in lines] == [None] * 4
    now = datetime.now(UTC)
    assert all(
        now - timedelta(minutes=5) < datetime.fromisoformat(line["timestamp"]) <= now for line in lines
    )


@pytest.mark.parametrize(
    ("arguments", "settings", "code", "said"),
    [
        (("--partition", "3"), {}, 2, "--partition: {dead} has no partition 3; its partitions are 0 to 2"),
        ((), {"ANABRANCH_DEAD_LETTER_TOPIC": "nonesuch"}, 1, "missing topic: nonesuch"),
        (("--apply",), {"ANABRANCH_INPUT_TOPIC": "nonesuch"}, 1, "missing topic: nonesuch"),
        (
            ("--apply",),
            {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"},
            1,
            "Kafka at 127.0.0.1:1: cannot connect",
        ),
    ],
)
@on_one_broker
async def test_what_cannot_be_done_is_reported_in_one_line(
    channel: Channel, arguments: tuple[str, ...], settings: Mapping[str, str], code: int, said: str
) -> None:
    done: subprocess.CompletedProcess[str] = await asyncio.to_thread(
        lambda: anabranch("replay", *arguments, channel=channel, **settings)
    )
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    line = done.stderr
    assert said.format(dead=channel.dead_letters) in line
