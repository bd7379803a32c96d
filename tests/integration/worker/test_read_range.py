"""A partition is read up to its end and no further, wherever batches begin."""

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from streams.broker.range_reader import read_range
from tests.integration.harness import Channel


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, None, range(20)),
        (7, None, range(7, 20)),
        (19, None, range(19, 20)),
        (0, 13, range(13)),
        (3, 4, range(3, 4)),
        (20, None, range(0)),
        (5, 5, range(0)),
    ],
)
async def test_from_an_offset_to_another_or_to_the_end(
    channel: Channel, start: int, end: int | None, expected: range
) -> None:
    await channel.producer.send_and_wait(channel.input, b"alone", partition=0)
    # In one batch: asked for the partition's end, the embedded broker tells one within it.
    sent = [await channel.producer.send(channel.input, b"%d" % n, partition=0) for n in range(19)]
    await asyncio.gather(*sent)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=channel.bootstrap_servers, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        partition = TopicPartition(channel.input, 0)
        read = [record.offset async for record in read_range(consumer, partition, start, end)]
        assert read == list(expected)
        empty = TopicPartition(channel.input, 1)
        assert [record async for record in read_range(consumer, empty, 0)] == []
    finally:
        await consumer.stop()
