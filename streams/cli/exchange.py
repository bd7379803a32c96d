"""`anabranch publish` and `anabranch tail`: events in from JSONL, results out as JSON."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord

from streams.broker.records import patch_fetcher
from streams.core.errors import TerminalError
from streams.core.messages import QueryEmbedding
from streams.replay.journal import is_entry
from streams.settings import Settings
from streams.wire import Codec, result_to_json

__all__ = ["publish_events", "read_events", "tail_topic"]


def read_events(lines: Iterable[str]) -> Sequence[QueryEmbedding]:
    """Validate every line.

    Raises:
        click.ClickException: a line breaks the contract; it names the line and the rule.
    """
    codec = Codec()
    queries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            queries.append(codec.decode_query(line.encode()))
        except TerminalError as error:
            raise click.ClickException(f"line {number}: {error.code}: {error}") from None
    return queries


async def publish_events(
    settings: Settings, options: dict[str, Any], queries: Sequence[QueryEmbedding]
) -> None:
    """Publish as Avro, keyed by event id; returns when the broker has acknowledged all of them.

    Raises:
        KafkaError: the broker cannot be reached or refuses.
    """
    codec = Codec()
    producer = AIOKafkaProducer(**options, acks="all", linger_ms=5)
    try:
        await producer.start()
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
    finally:
        await producer.stop()


async def tail_topic(
    settings: Settings,
    options: dict[str, Any],
    *,
    dead_letters: bool,
    from_beginning: bool,
    limit: int | None,
    show: Callable[[str], object],
) -> None:
    """Show records until the limit, or for ever.

    Raises:
        KafkaError: the broker cannot be reached or refuses.
    """
    topic = settings.anabranch_dead_letter_topic if dead_letters else settings.anabranch_output_topic
    patch_fetcher()
    consumer = AIOKafkaConsumer(
        topic,
        **options,
        auto_offset_reset="earliest" if from_beginning else "latest",
        enable_auto_commit=False,
    )
    codec = Codec()
    try:
        await consumer.start()
        shown = 0
        async for record in consumer:
            if dead_letters and is_entry(record.headers):
                continue  # what `anabranch replay` remembers; no letter
            show(_dead_letter(record) if dead_letters else _result(codec, record))
            shown += 1
            if shown == limit:
                return
    finally:
        await consumer.stop()


def _result(codec: Codec, record: ConsumerRecord) -> str:
    try:
        return json.dumps(result_to_json(codec.decode_result(record.value)), ensure_ascii=False)
    except TerminalError as error:
        return json.dumps({"undecodable": error.code, "partition": record.partition, "offset": record.offset})


def _dead_letter(record: ConsumerRecord) -> str:
    """The headers alone: the event's content belongs to its asker."""
    headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
    return json.dumps({"partition": record.partition, "offset": record.offset, "headers": headers})
