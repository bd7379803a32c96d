"""`topics`, `publish`, `tail` and `check` as processes, on the embedded broker; what only Kafka shows is elsewhere."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer

from streams.wire import Codec
from tests.conftest import Database
from tests.evaluation import made_up
from tests.integration.harness import Channel, anabranch, as_json, query, start_anabranch

pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)

EVENT = query([0.5] * 768)
BARE = {name: EVENT[name] for name in ("principals", "embedding")}


async def run(
    channel: Channel, *arguments: str, given: str = "", code: int = 0, **settings: str
) -> tuple[str, str]:
    done = await asyncio.to_thread(partial(anabranch, *arguments, channel=channel, given=given, **settings))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def jsonl(*events: dict[str, Any]) -> str:
    return "\n".join(map(json.dumps, events))


# Publish


async def test_what_is_missing_is_filled_in_and_the_ids_are_printed(channel: Channel) -> None:
    before = datetime.now(UTC)
    out, err = await run(channel, "publish", given=jsonl(BARE, EVENT, BARE))
    ids = out.splitlines()
    assert len(set(ids)) == 3
    assert ids[1] == EVENT["event_id"]
    assert err == f"published 3 events to {channel.input}\n"
    records = await read(channel, channel.input, 3)
    events = {str(event.event_id): event for event in map(Codec().decode_query, records.values())}
    assert events.keys() == set(ids) == {key.decode() for key in records}
    assert before <= events[ids[0]].occurred_at <= datetime.now(UTC)


async def test_nothing_is_published_if_a_line_is_invalid_unless_it_is_skipped(channel: Channel) -> None:
    given = jsonl(BARE, BARE | {"k": "ten"}, EVENT, {}) + "\n[]\n"
    named = [
        "line 2: contract_violation: k is not an integer",
        "line 4: contract_violation: principals is required; embedding is required",
        "line 5: undecodable: JSON, but not an object",
    ]
    out, err = await run(channel, "publish", given=given, code=1)
    assert out == ""
    *lines, last = err.splitlines()
    assert lines == named
    assert last == (
        "anabranch publish: 3 of 5 lines are invalid; nothing was published, --skip-invalid publishes the others"
    )
    out, err = await run(channel, "publish", "--skip-invalid", given=given, code=1)
    assert out.splitlines()[1] == EVENT["event_id"]
    assert err.splitlines() == [*named, f"published 2 events to {channel.input}"]
    assert len(await read(channel, channel.input, 2)) == 2


async def test_a_rate_limits_and_an_interruption_says_what_was_published(
    channel: Channel, tmp_path: Path
) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(jsonl(*[BARE] * 1000))
    process = start_anabranch("publish", str(file), "--rate", "10", channel=channel)
    assert process.stdout is not None
    ids = [await asyncio.to_thread(process.stdout.readline) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    rest, err = await asyncio.to_thread(process.communicate)
    count = len(ids) + len(rest.splitlines())
    assert count < 1000  # without the limit, all are published at once
    assert process.returncode == 130
    assert err.splitlines() == [
        f"published only {count} of 1000 events to {channel.input}",
        "anabranch publish: interrupted",
    ]
    times = [
        Codec().decode_query(value).occurred_at for value in (await read(channel, channel.input, 3)).values()
    ]
    assert (max(times) - min(times)).total_seconds() >= 0.15


async def test_publishing_ends_when_nobody_reads_the_ids(channel: Channel, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(jsonl(*[BARE] * 1000))
    process = start_anabranch("publish", str(file), "--rate", "20", channel=channel)
    assert process.stdout is not None
    assert process.stderr is not None
    await asyncio.to_thread(process.stdout.readline)
    process.stdout.close()
    [line] = await asyncio.to_thread(process.stderr.readlines)
    assert re.fullmatch(rf"published only \d of 1000 events to {channel.input}\n", line)
    process.stderr.close()
    assert process.wait(timeout=10) == 1


async def read(channel: Channel, topic: str, count: int) -> dict[bytes, bytes]:
    """Key to value of so many records."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=channel.bootstrap_servers, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        async with asyncio.timeout(20):
            records = [await anext(consumer) for _ in range(count)]
    finally:
        await consumer.stop()
    return {record.key: record.value for record in records}


# Tail


async def test_a_tail_is_json_for_programs_and_readable_on_a_terminal(channel: Channel) -> None:
    results = [
        made_up.result([made_up.passage(title="Tides")]).model_copy(update={"profile": profile})
        for profile in ("docs", "chat", "docs")
    ]
    for result in results:
        await channel.producer.send_and_wait(channel.output, Codec().encode_result(result), partition=0)
    arguments = ("tail", "--from-beginning", "--limit", "2", "--profile", "docs")
    out, _ = await run(channel, *arguments)
    shown = [json.loads(line) for line in out.splitlines()]
    assert [each["event_id"] for each in shown] == [str(results[0].event_id), str(results[2].event_id)]
    code, text = await asyncio.to_thread(on_terminal, *arguments, channel=channel)
    assert code == 0
    assert text.splitlines()[0] == "showing results from the beginning; Ctrl-C ends"
    assert f"event {results[2].event_id}  docs" in text
    assert "Tides" in text
    assert "{" not in text
    code, text = await asyncio.to_thread(on_terminal, *arguments, "--json", channel=channel)
    assert json.loads(text.splitlines()[1]) == shown[0]


async def test_dead_letters_are_found_by_event(channel: Channel) -> None:
    wanted, other = str(uuid4()), str(uuid4())
    for event_id in (other, wanted):
        value = as_json(EVENT | {"event_id": event_id})
        await channel.producer.send_and_wait(channel.dead_letters, value, key=b"the key", partition=0)
    out, _ = await run(
        channel, "tail", "--dead-letters", "--from-beginning", "--limit", "1", "--event", wanted
    )
    [shown] = map(json.loads, out.splitlines())
    assert (shown["event_id"], shown["key"]) == (wanted, "the key")
    _, err = await run(channel, "tail", "--event", "no-uuid", code=2)
    assert "'no-uuid' is not a valid UUID" in err


def on_terminal(*arguments: str, channel: Channel, **settings: str) -> tuple[int, str]:
    """Exit code and what a terminal shows, without colours."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "streams", *arguments],
        cwd=Path(__file__).resolve().parents[2],
        env={
            "PATH": os.environ["PATH"],
            "TERM": "xterm",
            "COLUMNS": "120",
            "KAFKA_BOOTSTRAP_SERVERS": channel.bootstrap_servers,
            "ANABRANCH_INPUT_TOPIC": channel.input,
            "ANABRANCH_OUTPUT_TOPIC": channel.output,
            "ANABRANCH_DEAD_LETTER_TOPIC": channel.dead_letters,
            **settings,
        },
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # the process ended
        pass
    finally:
        os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    return process.wait(timeout=10), text.replace("\r\n", "\n")


async def test_publish_on_a_terminal(channel: Channel, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(jsonl(EVENT))
    code, text = await asyncio.to_thread(on_terminal, "publish", str(file), channel=channel)
    assert code == 0
    assert "0 of 1 events" in text  # the bar
    assert text.splitlines()[-2:] == [
        f"line 1  {EVENT['event_id']}",
        f"published 1 event to {channel.input}",
    ]


# Topics


async def test_topics_that_differ_are_named_with_the_remedy(channel: Channel) -> None:
    """The channel's topics have 3 partitions and records of up to 4 MiB."""
    sizes = ("--max-event-bytes", str(4 * 1024 * 1024))
    out, _ = await run(channel, "topics", "--check", "--partitions", "3", *sizes)
    first, *_ = out.splitlines()
    assert first == (
        f"ok       {channel.input}  exists, 3 partitions, 1 replica, kept 7 days, records of up to 4,194,304 bytes"
    )
    assert "differs" not in out
    assert "kept 28 days" in out

    more = ("--partitions", "6", "--replication-factor", "3", *sizes)
    out, _ = await run(channel, "topics", "--check", *more, code=3)
    assert not re.search(r"^(ok|FAULT)", out, re.MULTILINE)
    assert (
        f"3 partitions, not 6; remedy: kafka-topics.sh --alter --topic {channel.input} --partitions 6, or use"
        in out
    )
    assert "1 replica, not 3; remedy: use --replication-factor 1, or assign 3 brokers" in out
    # Without --check, a difference is not a failure: a deployment may have its reasons.
    assert (await run(channel, "topics", *more))[0] == out
    out, _ = await run(channel, "topics", "--check", "--partitions", "2", *sizes, code=3)
    assert "3 partitions, not 2; remedy: use --partitions 3: Kafka cannot remove partitions" in out


async def test_a_new_topic_does_not_differ(channel: Channel) -> None:
    other = replace(channel, name=f"{channel.name}-new")
    out, _ = await run(other, "topics", "--partitions", "2")
    assert len(re.findall(r"^ok .* created, 2 partitions, 1 replica, kept ", out, re.MULTILINE)) >= 3
    assert "differs" not in out


# Check


async def test_check_prints_versions_addresses_and_topics(channel: Channel, database: Database) -> None:
    out, _ = await run(channel, "check", DATABASE_CONNECTION_STRING=database.worker)
    facts = dict(re.findall(r"^(\w+) +(.*)$", out, re.MULTILINE))
    assert re.fullmatch(r"\d+\.\d+.*, pgvector \d+\.\d+\.\d+, schema version \d+", facts["PostgreSQL"])
    assert re.fullmatch(r".+ at (a Unix socket|[\d.:]+), role \S+", facts["database"])
    assert re.fullmatch(r"protocol of Kafka \d\.\d, at \S+:\d+", facts["Kafka"])
    topics = [line for line in out.splitlines() if line.startswith("topic ")]
    assert f"{channel.input} exists, 3 partitions" in topics[0]
    assert out.splitlines()[-1] == "a worker can run here: 1 warning"
    assert out.splitlines()[0].startswith("warning  derived: ")
