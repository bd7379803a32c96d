"""`anabranch publish` and `anabranch tail`: publish events from JSONL, print results as JSON."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from aiokafka import ConsumerRecord

from streams.broker.clients import running_consumer, running_producer
from streams.broker.records import Unreadable
from streams.broker.topics import partitions_of
from streams.core.errors import TerminalError
from streams.core.messages import QueryEmbedding
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
) -> None:
    """Show records until the limit, or indefinitely.

    Raises:
        MissingTopics: the topic does not exist.
        KafkaError: the broker is unreachable or rejects the request.
    """
    topic = settings.anabranch_dead_letter_topic if dead_letters else settings.anabranch_output_topic
    await partitions_of(options, [topic])
    codec = Codec()
    start = "earliest" if from_beginning else "latest"
    async with running_consumer(options, topic, auto_offset_reset=start) as consumer:
        shown = 0
        async for record in consumer:
            if dead_letters and is_entry(record.headers):
                continue  # an entry of `anabranch replay`, not a dead letter
            if isinstance(record.value, Unreadable):
                show(_unreadable(record))
            else:
                show(_dead_letter(record) if dead_letters else _result(codec, record))
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


def _dead_letter(record: ConsumerRecord) -> str:
    """Only the headers: the event's content is confidential."""
    headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
    return json_text({"partition": record.partition, "offset": record.offset, "headers": headers})
