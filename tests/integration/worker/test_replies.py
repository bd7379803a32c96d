"""Request and reply through real workers: each caller's partition has its own answers, and nothing else stops."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiokafka.structs import ConsumerRecord

from streams.broker.topics import create_topics, topic_specs
from streams.core.replies import (
    CORRELATION_ID_HEADER,
    REPLY_PARTITION_HEADER,
    REPLY_TOPIC_HEADER,
    ReplyTarget,
    reply_request_headers,
)
from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import (
    PARTITIONS,
    Channel,
    OutputReader,
    Worker,
    account,
    as_json,
    configure_topic,
    event_id_of,
    query,
    read_result,
    until,
)

VECTOR = unit_vectors(1, 3)[0]
TRACE = ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
Headers = Sequence[tuple[str, bytes | None]]


def question(**fields: Any) -> dict[str, Any]:
    return query(VECTOR, **{"profile": "docs", "k": 1, "similarity_threshold": 0, **fields})


def asking(
    channel: Channel, partition: int | None, event: dict[str, Any], **changes: bytes | None
) -> Headers:
    """The headers of an event that asks for a reply; its id is the correlation id."""
    headers = dict(reply_request_headers(ReplyTarget(channel.replies, partition), event["event_id"].encode()))
    return [TRACE, *({**headers, **changes}).items()]


def correlation_id(record: ConsumerRecord) -> str:
    return str(dict(record.headers)[CORRELATION_ID_HEADER], "utf-8")


async def test_replies_and_events_whose_reply_cannot_be_sent(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    absent = f"{channel.name}.absent"
    worker = start_worker(database.worker, ANABRANCH_REPLY_TOPICS=f"{channel.replies},{absent}")
    await worker.until_ready()
    malformed: dict[str, dict[str, bytes | None]] = {
        "reply_headers_invalid": {REPLY_PARTITION_HEADER: b"\0"},
        "reply_topic_not_allowed": {REPLY_TOPIC_HEADER: channel.output.encode()},
        "reply_topic_missing": {REPLY_TOPIC_HEADER: absent.encode()},
        "reply_partition_missing": {REPLY_PARTITION_HEADER: (PARTITIONS).to_bytes(4, "big")},
    }
    wanted: dict[str, int | None] = {}  # event id to the reply's partition
    codes: dict[str, str | None] = {}  # event id to a dead letter's code
    warnings: dict[str, list[str]] = {}
    for number in range(60):
        event = question()
        partition = (*range(PARTITIONS), None)[number % (PARTITIONS + 1)]
        wanted[event["event_id"]], codes[event["event_id"]] = partition, None
        await channel.send(as_json(event), b"key", asking(channel, partition, event))
        code = [*malformed][number % len(malformed)]
        event = question()
        warnings[event["event_id"]] = [code]
        await channel.send(as_json(event), b"key", asking(channel, 0, event, **malformed[code]))
        event = question()
        warnings[event["event_id"]] = []
        await channel.send(as_json(event), b"key", [TRACE])
        if number % 10 == 0:
            event = question(profile="unknown")
            wanted[event["event_id"]], codes[event["event_id"]] = 1, "unknown_profile"
            await channel.send(as_json(event), b"key", asking(channel, 1, event))
    # Longer than the broker has time to say that a topic does not exist, and not longer than for others.
    await output_reader.until(results=180, dead_letters=6, replies=66)

    results = {event_id_of(record): record for record in output_reader.results}
    replies = {correlation_id(record): record for record in output_reader.replies}
    assert len(results) == len(output_reader.results) == 180
    assert replies.keys() == wanted.keys()
    for event_id, reply in replies.items():
        assert wanted[event_id] in (None, reply.partition)
        headers = dict(reply.headers)
        assert (reply.key, headers[TRACE[0]]) == (b"key", TRACE[1])
        assert {REPLY_TOPIC_HEADER, REPLY_PARTITION_HEADER}.isdisjoint(headers)
        if (expected := codes[event_id]) is None:
            result = results.pop(event_id)
            assert (reply.value, reply.headers) == (result.value, result.headers)
        else:
            assert (reply.value, headers["anabranch.error.code"]) == (b"", expected.encode())
    assert {id_: read_result(record.value)["warnings"] for id_, record in results.items()} == warnings
    samples = await worker.scrape()
    assert samples.nonzero("anabranch_replies_total") == {
        ("answered",): 60,
        ("dead_lettered",): 6,
        **dict.fromkeys([(code,) for code in malformed], 15),
    }

    # The topic is there at last.
    specs = topic_specs(
        input_topic=channel.input,
        output_topic=channel.output,
        dead_letter_topic=channel.dead_letters,
        partitions=1,
        replication_factor=1,
        max_event_bytes=1024 * 1024,
        reply_topics=[absent],
    )
    await create_topics({"bootstrap_servers": channel.bootstrap_servers}, specs[3:])

    async def answered() -> float:
        event = question()
        headers = asking(channel, 0, event, **{REPLY_TOPIC_HEADER: absent.encode()})
        await channel.send(as_json(event), b"key", headers)
        await asyncio.sleep(0.2)
        return (await worker.scrape()).value("anabranch_replies_total", outcome="answered")

    async with asyncio.timeout(15):
        while await answered() == 60:
            pass


@pytest.mark.parametrize("broker", ["either"], indirect=True)
async def test_reply_only_and_kill_9(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    """An event is acknowledged by its reply, and by nothing before."""
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker, ANABRANCH_REPLIED_RESULTS="reply_only")
    await worker.until_ready()
    asked: dict[str, int] = {}
    for number in range(150):
        event = question()
        asked[event["event_id"]] = number % PARTITIONS
        await channel.send(as_json(event), None, asking(channel, number % PARTITIONS, event))
    await output_reader.until(replies=20)
    worker.kill()
    start_worker(database.worker, ANABRANCH_REPLIED_RESULTS="reply_only")
    await until(
        lambda: {correlation_id(record) for record in output_reader.replies} >= asked.keys(),
        lambda: f"{len(output_reader.replies)} replies",
        seconds=60,
    )
    outcome = account(asked, output_reader.replies)
    figures(f"{outcome}")
    assert outcome.violations == []
    assert outcome.repeats < 150
    for record in output_reader.replies:
        assert asked[correlation_id(record)] == record.partition
        assert event_id_of(record) == correlation_id(record)
    assert output_reader.results == []


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)  # the embedded one takes records without a key
async def test_a_reply_that_the_topic_rejects_holds_no_event(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    """A compacted topic rejects records without a key, whenever they are sent."""
    await load(database.writer, tiny_corpus())
    await configure_topic(channel.bootstrap_servers, channel.replies, **{"cleanup.policy": "compact"})
    worker = start_worker(database.worker, ANABRANCH_REPLIED_RESULTS="reply_only")
    await worker.until_ready()
    keyed: set[str] = set()
    keyless: set[str] = set()
    for number in range(60):
        event = question()
        (keyless if number % 3 == 0 else keyed).add(event["event_id"])
        key = None if number % 3 == 0 else b"key"
        await channel.send(as_json(event), key, asking(channel, 0, event), partition=number % PARTITIONS)
    for _ in range(3):
        event = question(profile="unknown")
        await channel.send(as_json(event), None, asking(channel, 0, event))
    await output_reader.until(results=20, dead_letters=3, replies=40)

    assert {correlation_id(record) for record in output_reader.replies} == keyed
    warnings = {
        event_id_of(record): read_result(record.value)["warnings"] for record in output_reader.results
    }
    assert warnings == {event_id: ["reply_rejected"] for event_id in keyless}
    samples = await worker.scrape()
    assert samples.nonzero("anabranch_replies_total") == {("answered",): 40, ("reply_rejected",): 23}
    assert f"{channel.replies} rejects a reply: InvalidRecordError" in worker.log
    assert "Kafka unreachable" not in worker.log
    async with asyncio.timeout(30):
        while (await worker.scrape()).nonzero("anabranch_consumer_lag"):
            pass
