"""Reading what stands in a partition now, or between two offsets, and no further."""

import time
from collections.abc import AsyncIterator

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaTimeoutError

__all__ = ["read_range"]

_MAX_RECORDS = 500
_POLL_MS = 1_000
_PATIENCE_SECONDS = 60.0


async def read_range(
    consumer: AIOKafkaConsumer, partition: TopicPartition, start: int, end: int | None = None
) -> AsyncIterator[ConsumerRecord]:
    """Records from an offset on, up to another, which is not read; what retention or compaction took is missing.

    Args:
        consumer: without a group, with `auto_offset_reset="earliest"` and a short wait for fetches that have nothing to
            bring; it reads nothing else meanwhile.
        partition: where.
        start: the first offset that is wanted.
        end: at most the partition's end. None: its end when reading begins.

    Raises:
        KafkaError: the broker is gone, or delivers nothing more.
    """
    consumer.assign([partition])
    [first] = (await consumer.beginning_offsets([partition])).values()
    position = max(start, first)
    is_end_known = end is not None
    if end is None:
        [end] = (await consumer.end_offsets([partition])).values()
        # The embedded broker, asked for the end, tells one within its last batch; with a fetch it tells the end.
        is_end_known = first == end
    consumer.seek(partition, position)
    patience = time.monotonic() + _PATIENCE_SECONDS
    # By position, not by the last record seen: the last offsets of a log may hold none.
    while position < end or not is_end_known:
        records = await consumer.getmany(partition, timeout_ms=_POLL_MS, max_records=_MAX_RECORDS)
        if not is_end_known and (told := consumer.highwater(partition)) is not None:
            end, is_end_known = max(end, told), True
        for record in records.get(partition, ()):
            if record.offset >= end:
                return
            yield record
        before, position = position, await consumer.position(partition)
        if position != before:
            patience = time.monotonic() + _PATIENCE_SECONDS
        elif time.monotonic() > patience:
            raise KafkaTimeoutError(
                f"{partition.topic}[{partition.partition}] ends at {end}, stuck at {position}"
            )
