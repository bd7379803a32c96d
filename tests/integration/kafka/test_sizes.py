"""Records of the largest size, and topics that are too small: what only a broker that looks at sizes can show."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import MessageSizeTooLargeError

from streams.broker.publisher import Publisher
from streams.broker.topics import DEAD_LETTER_MARGIN_BYTES
from streams.core.errors import ResultTooLarge
from tests.conftest import Database
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, anabranch, as_json, query, read_result
from tests.integration.kafka.apache_kafka import ApacheKafka

_MIB = 1024 * 1024
# A batch with one record in it: its own header, and the record's lengths and timestamps.
_MAX_OVERHEAD = 100
DAY_MS = 24 * 60 * 60 * 1000
VECTOR = unit_vectors(1, 3)[0]


async def test_the_largest_event_that_comes_in_fits_the_dead_letter_topic(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    worker = start_worker(database.worker, ANABRANCH_RETRY_MAX_SECONDS="1")
    await worker.until_ready()
    headers = [("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
    largest = 4 * _MIB - _MAX_OVERHEAD - sum(len(name) + len(value) for name, value in headers)
    with pytest.raises(MessageSizeTooLargeError):
        await channel.send(b"\xff" * (4 * _MIB), headers=headers)
    # It is dead-lettered with headers of its own, which the dead-letter topic has room for.
    # Nothing that compresses, one that can be read up to its last byte, and one with most of it in the key.
    noise = random.Random(7).randbytes(largest)
    event = as_json(query(VECTOR, k="x"))
    sent = {}
    for key, value in (
        (None, noise),
        (None, event + b" " * (largest - len(event))),
        (noise[: largest // 2], noise[: largest // 2 - 20]),
    ):
        sent[await channel.send(value, key, headers)] = key, value
    await output_reader.until(dead_letters=len(sent), seconds=30)

    for record in output_reader.dead_letters:
        reported = dict(record.headers)
        origin = int(reported["__connect.errors.partition"]), int(reported["__connect.errors.offset"])
        assert (record.key, record.value) == sent.pop(origin)
        assert list(record.headers[:1]) == headers
    assert sent == {}
    assert output_reader.results == []
    figures(f"{largest:,} bytes of {4 * _MIB:,}")


async def test_a_dead_letter_that_its_topic_does_not_take_becomes_a_placeholder(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """Compressed, large ones fit; of one that does not, what fits is kept, and its partition goes on."""
    await load(database.writer, tiny_corpus())
    await set_most_bytes(channel, channel.dead_letters, 128 * 1024)
    worker = start_worker(database.worker, ANABRANCH_RETRY_MAX_SECONDS="1")
    await worker.until_ready()
    noise = random.Random(7).randbytes(150 * 1024)
    small, large = (
        ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("large", noise),
    )
    fits = b"\xff" * (6 * _MIB)
    origins = {}
    async with AIOKafkaProducer(
        bootstrap_servers=channel.bootstrap_servers, compression_type="gzip", max_request_size=16 * _MIB
    ) as producer:
        for name, key, value, headers in (
            ("fits", b"key", fits, [small]),
            ("value", b"key", b"\xff" + noise, [small]),
            ("all", noise, b"\xff" + noise, [large, small]),
        ):
            for _ in range(10):  # more than may be in flight at once
                sent = await producer.send_and_wait(
                    channel.input, value, key=key, headers=headers, partition=1
                )
                origins[sent.partition, sent.offset] = name
    asked = set()
    for number in range(9):
        event = query(VECTOR)
        asked.add(event["event_id"])
        await channel.send(as_json(event), partition=number % 3)
    await output_reader.until_answered(asked, seconds=60)
    await output_reader.until(dead_letters=30)

    for record in output_reader.dead_letters:
        found = dict(record.headers)
        assert found["anabranch.error.code"] == b"undecodable"
        offset = int(found["__connect.errors.offset"])
        name = origins.pop((int(found["__connect.errors.partition"]), offset))
        assert record.headers[0] == small
        assert "large" not in found
        assert record.key == (None if name == "all" else b"key")
        assert record.value == (fits if name == "fits" else b"")
        placeholder = {
            "anabranch.placeholder.first.offset": b"%d" % offset,
            "anabranch.placeholder.last.offset": b"%d" % offset,
            "anabranch.placeholder.original.bytes": b"%d" % (len(noise) + 1),
        }
        assert (placeholder.items() <= found.items()) == (name != "fits")
    assert origins == {}
    assert "rejects even a dead letter" not in worker.log
    figures("10 dead letters of 6 MiB and 20 placeholders in a topic that takes 128 KiB")


async def test_a_result_that_the_output_topic_does_not_take_is_dead_lettered(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """Those before it, behind it and in the same batch are answered."""
    most = 16 * 1024
    await set_most_bytes(channel, channel.output, most)
    rng = random.Random(5)
    document = Document(random_uuid(rng), frozenset({"public"}))
    big, small = unit_vectors(2, 9)
    texts = {"big": (rng.randbytes(most // 2).hex(), big), "small": ("small", small)}
    await load(
        database.writer,
        Corpus.of(
            [document],
            [
                Chunk(random_uuid(rng), document.id, text, vector, token_count=1)
                for text, vector in texts.values()
            ],
        ),
    )
    worker = start_worker(database.worker)
    await worker.until_ready()
    values, answered = [], set()
    for number in range(200):
        is_big = number % 10 == 5
        event = query(big if is_big else small, profile="docs", k=1)
        values.append((as_json(event), b"big" if is_big else b"small"))
        if not is_big:
            answered.add(event["event_id"])
    await channel.send_all(values)
    await output_reader.until(results=180, dead_letters=20, seconds=30)

    assert {str(read_result(record.value)["event_id"]) for record in output_reader.results} == answered
    assert sorted(record.value or b"" for record in output_reader.dead_letters) == sorted(
        value for value, key in values if key == b"big"
    )
    assert {dict(record.headers)["anabranch.error.code"] for record in output_reader.dead_letters} == {
        b"result_too_large"
    }
    assert {dict(record.headers)["__connect.errors.stage"] for record in output_reader.dead_letters} == {
        b"publish"
    }
    samples = await worker.scrape()
    assert samples.nonzero("anabranch_dead_letters_total") == {("result_too_large",): 20}
    figures("20 results too large among 180 that are not")


async def test_records_that_fit_alone_fit_together(channel: Channel) -> None:
    """A topic's bound is on batches. In the smallest topic that `anabranch check` lets pass no batch breaks it."""
    most = 16 * 1024
    await set_most_bytes(channel, channel.output, most)
    publisher = Publisher(
        {"bootstrap_servers": channel.bootstrap_servers},
        on_fault=lambda _: None,
        on_success=lambda: None,
        wait_seconds=(0.1, 1.0),
    )
    await publisher.on_start()
    try:
        for size in (100, 3_000, most - _MAX_OVERHEAD):
            await asyncio.gather(
                *(publisher.publish(channel.output, b"key", b"x" * size, []) for _ in range(200))
            )
        with pytest.raises(ResultTooLarge):
            await publisher.publish(channel.output, b"key", b"x" * most, [])
    finally:
        await publisher.on_stop()


async def test_more_replicas_than_brokers_are_refused_in_words(channel: Channel) -> None:
    other = replace(channel, name=f"{channel.name}-by-hand")
    done = anabranch("topics", "--replication-factor", "3", channel=other)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert f"cannot create {other.input}: " in line
    assert "only 1 broker(s) are registered" in line  # in the broker's own words
    assert line.endswith("; --replication-factor can be at most the number of brokers")
    assert "Error" not in line


async def test_topics_are_created_once_and_found_too_small(kafka: ApacheKafka, channel: Channel) -> None:
    other = replace(channel, name=f"{channel.name}-by-hand")
    options = ("topics", "--partitions", "5", "--max-event-bytes", "2000000")

    missing = anabranch(*options, "--check", channel=other)
    assert missing.returncode == 1
    assert missing.stdout.count("is missing") == 4
    first = anabranch(*options, channel=other)
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.count("created, 5 partitions") == 4
    dead_letters_take = 2_000_000 + DEAD_LETTER_MARGIN_BYTES
    wanted = {
        other.input: {"max.message.bytes": "2000000", "retention.ms": str(7 * DAY_MS)},
        other.output: {"max.message.bytes": "2000000", "retention.ms": str(7 * DAY_MS)},
        other.dead_letters: {"max.message.bytes": str(dead_letters_take), "retention.ms": str(28 * DAY_MS)},
        other.replies: {"max.message.bytes": "2000000", "retention.ms": str(DAY_MS // 24)},
    }
    for topic, config in wanted.items():
        assert config.items() <= (await config_of(kafka, topic)).items()

    again = anabranch(*options, channel=other)
    assert again.returncode == 0
    assert again.stdout.count("exists, 5 partitions") == 4
    larger = anabranch("topics", "--max-event-bytes", "3000000", channel=other)
    assert larger.returncode == 1
    assert larger.stdout.count("too small: max.message.bytes=2000000") == 3
    assert f"--entity-name {other.input} --add-config max.message.bytes=3000000" in larger.stdout
    assert (await config_of(kafka, other.input))["max.message.bytes"] == "2000000"  # never changed

    assert anabranch(*options, "--check", channel=other).returncode == 0
    await set_config(other, other.input, {"max.message.bytes": "2000000", "retention.ms": str(DAY_MS)})
    differs = anabranch(*options, "--check", channel=other)
    assert differs.returncode == 3
    [line, remedy] = differs.stdout.splitlines()[:2]
    assert line.startswith(f"differs  {other.input}  exists, 5 partitions, 1 replica, kept 1 day, ")
    assert remedy.strip() == (
        "kept 1 day, not 7 days; remedy: kafka-configs.sh --alter --entity-type topics"
        f" --entity-name {other.input} --add-config retention.ms={7 * DAY_MS}"
    )
    assert differs.stdout.count("differs") == 1


async def test_events_that_are_published_before_one_fails_are_reported(channel: Channel) -> None:
    small, large = query(VECTOR), query(VECTOR, filters={"section": "x" * 5 * _MIB})
    done = anabranch(
        "publish", channel=channel, given="\n".join(map(json.dumps, (small, large, query(VECTOR))))
    )
    assert done.returncode == 1
    ids = done.stdout.split()
    assert small["event_id"] in ids
    assert large["event_id"] not in ids
    first, second = done.stderr.splitlines()
    assert first == f"published only {len(ids)} of 3 events to {channel.input}"
    assert "MessageSizeTooLargeError" in second


async def test_check_compares_the_dead_letter_topic_with_the_input_topic(
    database: Database, channel: Channel
) -> None:
    def findings(**settings: str) -> tuple[int, list[dict[str, Any]]]:
        done = anabranch("check", "--json", channel=channel, dsn=database.worker, **settings)
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        return done.returncode, [finding for finding in found if finding["check"] == "topic"]

    code, found = findings()
    assert code == 0
    assert [finding["level"] for finding in found] == ["ok"] * 4
    shown = anabranch("check", channel=channel, dsn=database.worker).stdout
    assert f"\nKafka       protocol of Kafka 4.1 or later, at {channel.bootstrap_servers}\n" in shown

    # A worker can do without a topic for replies.
    absent = {"ANABRANCH_REPLY_TOPICS": f"{channel.replies},absent"}
    code, found = findings(**absent)
    assert code == 0
    assert [finding["level"] for finding in found] == [*["ok"] * 4, "warning"]
    assert found[-1]["detail"].startswith("absent is missing; results")
    checked = anabranch("topics", "--check", "--partitions", "3", channel=channel, **absent)
    assert (checked.returncode, checked.stdout.count("FAULT")) == (0, 0)
    assert "warning  absent  is missing" in checked.stdout

    room = 4 * _MIB + DEAD_LETTER_MARGIN_BYTES
    await set_most_bytes(channel, channel.dead_letters, room - 1)
    code, found = findings()
    assert code == 1
    [finding] = [each for each in found if each["level"] == "unready"]
    assert finding["detail"].startswith(f"{channel.dead_letters} accepts {room - 1} bytes")
    assert str(room) in finding["remedy"]


async def set_most_bytes(channel: Channel, topic: str, most: int) -> None:
    await set_config(channel, topic, {"max.message.bytes": str(most)})


async def set_config(channel: Channel, topic: str, config: dict[str, str]) -> None:
    client = AIOKafkaAdminClient(bootstrap_servers=channel.bootstrap_servers)
    await client.start()
    try:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, configs=config)
        [response] = await client.alter_configs([resource])
        assert [error for error, *_ in response.resources] == [0]
    finally:
        await client.close()


async def config_of(kafka: ApacheKafka, topic: str) -> dict[str, str]:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await client.start()
    try:
        [response] = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        [(error, _, _, _, entries)] = response.resources
        assert error == 0
        return {entry[0]: entry[1] for entry in entries}
    finally:
        await client.close()
