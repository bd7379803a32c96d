"""Reads a partition up to its current end, or between two offsets."""

import time
from collections.abc import AsyncIterator

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaTimeoutError

from streams.broker.records import Unreadable

__all__ = ["read_range"]

_MAX_RECORDS = 500
_POLL_MS = 1_000
_STALL_TIMEOUT_SECONDS = 60.0


async def read_range(
    consumer: AIOKafkaConsumer, partition: TopicPartition, start: int, end: int | None = None
) -> AsyncIterator[ConsumerRecord]:
    """Yield the records between two offsets (end exclusive), except those removed by retention or compaction.

    An unreadable batch that begins before the end is yielded even if it ends after it.

    Args:
        consumer: without a group, with `auto_offset_reset="earliest"` and a short wait for empty fetches; it must not
            read anything else meanwhile.
        partition: the partition to read.
        start: the first offset to read.
        end: at most the partition's end. None: the partition's end when reading begins.

    Raises:
        KafkaError: the broker is unreachable, or delivers no more records.
    """
    consumer.assign([partition])
    [first] = (await consumer.beginning_offsets([partition])).values()
    position = max(start, first)
    is_end_known = end is not None
    if end is None:
        [end] = (await consumer.end_offsets([partition])).values()
        # The embedded broker's list-offsets answer lies within its last batch; only its fetch responses have the end.
        is_end_known = first == end
    consumer.seek(partition, position)
    deadline = time.monotonic() + _STALL_TIMEOUT_SECONDS
    # Compare positions, not the last record read: the last offsets of a log may have no records.
    while position < end or not is_end_known:
        records = await consumer.getmany(partition, timeout_ms=_POLL_MS, max_records=_MAX_RECORDS)
        if not is_end_known and (highwater := consumer.highwater(partition)) is not None:
            end, is_end_known = max(end, highwater), True
        for record in records.get(partition, ()):
            # A placeholder for an unreadable batch has the offset of the batch's last record.
            if (record.value.first if isinstance(record.value, Unreadable) else record.offset) >= end:
                return
            yield record
        before, position = position, await consumer.position(partition)
        if position != before:
            deadline = time.monotonic() + _STALL_TIMEOUT_SECONDS
        elif time.monotonic() > deadline:
            raise KafkaTimeoutError(
                f"{partition.topic}[{partition.partition}] ends at {end}, but no more records arrive after {position}"
            )
