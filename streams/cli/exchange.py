"""`anabranch publish` and `anabranch tail`: publish events from JSONL, print results as JSON."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

import click
from aiokafka import ConsumerRecord

from streams.broker.clients import running_consumer, running_producer
from streams.broker.records import Unreadable
from streams.broker.topics import partitions_of
from streams.core.errors import TerminalError
from streams.core.messages import QueryEmbedding
from streams.replay.dead_letters import instant_of
from streams.replay.journal import is_entry
from streams.settings import Settings
from streams.terminal import json_text, printable
from streams.wire import Codec, result_to_json

__all__ = ["publish_events", "read_events", "tail_topic"]


def read_events(lines: Iterable[str]) -> Sequence[QueryEmbedding]:
    """Validate every line.

    Raises:
        click.ClickException: a line violates the contract; the message names the line and the rule.
    """
    codec = Codec()
    queries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            queries.append(codec.decode_query(line.encode()))
        except TerminalError as error:
            raise click.ClickException(printable(f"line {number}: {error.code}: {error}")) from None
    return queries


async def publish_events(
    settings: Settings, options: dict[str, Any], queries: Sequence[QueryEmbedding]
) -> None:
    """Publish as Avro, keyed by event id; returns when the broker has acknowledged all of them.

    Raises:
        MissingTopics: the input topic does not exist.
        KafkaError: the broker is unreachable or rejects the request.
    """
    await partitions_of(options, [settings.anabranch_input_topic])
    codec = Codec()
    async with running_producer(options) as producer:
        deliveries = [
            await producer.send(
                settings.anabranch_input_topic,
                value=codec.encode_query(query),
                key=str(query.event_id).encode(),
            )
            for query in queries
        ]
        for delivery in deliveries:
            await delivery


async def tail_topic(
    settings: Settings,
    options: dict[str, Any],
    *,
    dead_letters: bool,
    from_beginning: bool,
    limit: int | None,
    show: Callable[[str], object],
    notify: Callable[[str], object] = lambda _: None,
) -> None:
    """Show records until the limit, or indefinitely.

    Args:
        settings: for the topics.
        options: for the client.
        dead_letters: show dead letters instead of results.
        from_beginning: start with the oldest record instead of the next one.
        limit: the number of records; None: indefinitely.
        show: called with each record, as one line of JSON.
        notify: called once with a line for people, as soon as the command waits for records.

    Raises:
        MissingTopics: the topic does not exist.
        KafkaError: the broker is unreachable or rejects the request.
    """
    topic = settings.anabranch_dead_letter_topic if dead_letters else settings.anabranch_output_topic
    await partitions_of(options, [topic])
    codec = Codec()
    start = "earliest" if from_beginning else "latest"
    async with running_consumer(options, topic, auto_offset_reset=start) as consumer:
        kind = "dead letters" if dead_letters else "results"
        notify(
            f"showing {kind} from the beginning; Ctrl-C ends"
            if from_beginning
            else f"waiting for new {kind}; --from-beginning shows older ones; Ctrl-C ends"
        )
        shown = 0
        async for record in consumer:
            if dead_letters and is_entry(record.headers):
                continue  # an entry of `anabranch replay`, not a dead letter
            if isinstance(record.value, Unreadable):
                show(_unreadable(record))
            else:
                show((_dead_letter if dead_letters else _result)(codec, record))
            shown += 1
            if shown == limit:
                return


def _unreadable(record: ConsumerRecord) -> str:
    return json_text(
        {
            "unreadable": record.value.error.code,
            "partition": record.partition,
            "offset": record.value.first,
            "last_offset": record.value.last,
        }
    )


def _result(codec: Codec, record: ConsumerRecord) -> str:
    try:
        return json_text(result_to_json(codec.decode_result(record.value)))
    except TerminalError as error:
        return json_text({"undecodable": error.code, "partition": record.partition, "offset": record.offset})


def _dead_letter(codec: Codec, record: ConsumerRecord) -> str:
    """Which event it is, and why it was dead-lettered. The rest of the event's content is confidential."""
    headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
    event_id = _event_id(codec, record.value)
    return json_text(
        {
            "partition": record.partition,
            "offset": record.offset,
            "timestamp": f"{instant_of(record.timestamp):%Y-%m-%dT%H:%M:%S.%fZ}",
            "key": None if record.key is None else _key(record.key),
            "event_id": None if event_id is None else str(event_id),
            "headers": headers,
        }
    )


def _event_id(codec: Codec, value: bytes | None) -> UUID | None:
    try:
        return codec.decode_query(value or b"").event_id
    except TerminalError as error:
        return error.event_id


def _key(key: bytes) -> str:
    """As text if a terminal can show it, else in hexadecimal."""
    with suppress(UnicodeDecodeError):
        text = key.decode()
        if printable(text) == text:
            return text
    return f"0x{key.hex()}"
