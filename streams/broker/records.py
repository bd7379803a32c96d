r"""Reads batches so that no batch blocks a partition: a consumer gets at least one record for each batch.

aiokafka raises from the fetch on a batch that it cannot read, every time it fetches it, so that one such batch blocks
every reader of the partition. It also decompresses batches without a size limit. This module changes that:

- A batch that cannot be read is fetched again three times, because it may have been damaged in transit. Then one
  record with the value `Unreadable` replaces it.
- A batch that decompresses to more than the limit is replaced at once; the memory is never allocated. So is a batch
  from a record on that has too many headers: an empty one takes two bytes in the batch, and about a hundred in memory.
- Header names that are not UTF-8 (brokers accept any bytes, clients expect text) are escaped (``\xff``).
"""

import logging
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch
from aiokafka.structs import ConsumerRecord, TopicPartition

from streams.broker.aiokafka_internals import (
    FetchedRecords,
    PartitionRecords,
    TolerantBatch,
    replace_fetched_records,
)
from streams.broker.compression import CODECS, inflate_into
from streams.core.errors import RecordTooLarge, TerminalError, UnreadableBatch
from streams.core.headers import Headers

__all__ = [
    "MAX_HEADERS",
    "MAX_INFLATED_BYTES",
    "ReadBudget",
    "Unreadable",
    "fetched_records",
    "memory_bytes",
    "patch_fetcher",
]

logger = logging.getLogger(__name__)

MAX_INFLATED_BYTES = 64 * 1024 * 1024
"""The limit for readers of what workers have written: larger than any topic's limit."""

MAX_HEADERS = 10_000
"""Maximum number of a record's headers. Readers of what workers have written accept more, because workers add some."""

_MAX_REFETCHES = 3

# The start of each batch: its first offset and the length of the rest.
_FRAME = struct.Struct(">qi")
# The whole header: first offset, length, epoch, format, checksum, attributes, last offset minus first offset, two
# timestamps, producer id and epoch, sequence, number of records.
_HEAD = struct.Struct(">qiibIhiqqqhii")
_FORMAT_AT = 16
_CODEC_AT = 22  # the low byte of the attributes
_CODEC_BITS = 0x07
_MIN_BATCH_BYTES = 26  # in the oldest format
_LEGACY_ATTRIBUTES_AT = 17
# Most batches decompress to less than this multiple of their size, so they are decompressed once.
_USUAL_RATIO = 16
_MIN_BUFFER_BYTES = 64 * 1024
# Memory overhead of a record, and of each header, in addition to their bytes.
_RECORD_BYTES = 512
_HEADER_BYTES = 100
_MIN_ENCODED_HEADER_BYTES = 2  # the lengths of its name and its value
_MAX_VARINT_BYTES = 10


def memory_bytes(key: bytes | None, value: object, headers: Headers) -> int:
    """About how much memory a record takes."""
    return (
        _RECORD_BYTES
        + len(key or b"")
        + (len(value) if isinstance(value, bytes) else 0)
        + _HEADER_BYTES * len(headers)
        + sum(len(name) + len(content or b"") for name, content in headers)
    )


def fetched_records(
    max_inflated_bytes: int = MAX_INFLATED_BYTES,
    budget: "ReadBudget | None" = None,
    *,
    max_headers: int = 2 * MAX_HEADERS,
) -> FetchedRecords:
    """The classes with which a consumer reads as described above.

    Args:
        max_inflated_bytes: maximum decompressed size of one batch.
        budget: limits what is read from all partitions until it is renewed; None: the same limit applies to each
            partition separately.
        max_headers: maximum number of a record's headers.
    """
    return FetchedRecords(
        _Records, partial(_PartitionRecords, _ReadAttempts(), max_inflated_bytes, budget, max_headers)
    )


def patch_fetcher(
    max_inflated_bytes: int, budget: "ReadBudget | None" = None, *, max_headers: int = 2 * MAX_HEADERS
) -> None:
    """Make every consumer of this process read so, Faust's among them. Call this before the first one starts.

    Args:
        max_inflated_bytes: see `fetched_records`.
        budget: see there.
        max_headers: see there.
    """
    replace_fetched_records(fetched_records(max_inflated_bytes, budget, max_headers=max_headers))


class ReadBudget:
    """Limits what may be read until the next `renew`. Together, a few hundred compressed batches may have gigabytes.

    Args:
        max_bytes: the limit; the last record may exceed it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._remaining = max_bytes

    def renew(self) -> None:
        """Allow reading again."""
        self._remaining = self._max_bytes

    def consume(self, record: ConsumerRecord) -> bool:
        """Count a record; False if it has to wait."""
        if self._remaining <= 0:
            return False
        self._remaining -= memory_bytes(record.key, record.value, record.headers)
        return True


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The value of a placeholder record, which replaces a whole batch and has the batch's last offset.

    Attributes:
        error: why the batch cannot be read.
        first: offset of its first record.
        last: offset of its last record.
        size: bytes of the batch as stored by the broker.
    """

    error: TerminalError
    first: int
    last: int
    size: int


class _ReadAttempts:
    """Counts the failed reads at each partition's current offset."""

    def __init__(self) -> None:
        self._failed: dict[TopicPartition, tuple[int, int]] = {}

    def exhausted(self, partition: TopicPartition, offset: int, error: UnreadableBatch) -> bool:
        """Count a failure; return whether to give up."""
        failed_at, count = self._failed.get(partition, (offset, 0))
        count = count + 1 if failed_at == offset else 1
        if count > _MAX_REFETCHES:
            self._failed.pop(partition, None)
            return True
        self._failed[partition] = offset, count
        logger.warning(
            "cannot read a batch; fetching it again",
            extra={
                "topic": partition.topic,
                "partition": partition.partition,
                "offset": offset,
                "code": error.code,
                "reason": str(error),
                "attempt": count,
                "max_attempts": _MAX_REFETCHES,
            },
        )
        return False

    def succeeded(self, partition: TopicPartition) -> None:
        """Reset the count: a batch was read."""
        self._failed.pop(partition, None)


class _Records:
    """The data of one partition in a fetch response, split into batches; replaces aiokafka's `MemoryRecords`."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._start = 0

    def size_in_bytes(self) -> int:
        return len(self._data)

    def has_next(self) -> bool:
        # A batch truncated at the end comes with the next fetch. If the first batch is truncated, its length is
        # damaged: brokers always send the first one whole.
        return self._end() is not None or (self._start == 0 and len(self._data) > 0)

    def next_batch(self) -> "_Batch":
        start, end = self._start, self._end()
        self._start = len(self._data) if end is None else end
        return _Batch(self._data[start : self._start], is_whole=end is not None)

    def _end(self) -> int | None:
        if len(self._data) - self._start < _FRAME.size:
            return None
        _, length = _FRAME.unpack_from(self._data, self._start)
        end = self._start + _FRAME.size + int(length)
        return end if self._start + _MIN_BATCH_BYTES <= end <= len(self._data) else None


class _Batch:
    """One batch that has not been read yet.

    Attributes:
        size: in bytes.
    """

    def __init__(self, data: memoryview, *, is_whole: bool) -> None:
        self._data = data
        self._is_whole = is_whole
        self.size = len(data)

    @property
    def _is_legacy(self) -> bool:
        return self._data[_FORMAT_AT] < 2  # noqa: PLR2004  # the format since 0.11

    def open(self, *, check_crc: bool) -> Any:
        """The batch as aiokafka's object, with a verified header.

        Raises:
            UnreadableBatch: the batch is damaged.
        """
        if not self._is_whole or (self.size < _HEAD.size and not self._is_legacy):
            raise UnreadableBatch("the batch is truncated")
        batch = (
            LegacyRecordBatch(self._data, self._data[_FORMAT_AT])
            if self._is_legacy
            else DefaultRecordBatch(self._data)
        )
        if check_crc and not batch.validate_crc():
            raise UnreadableBatch("the batch's checksum is wrong")
        return batch

    def last_offset(self, at: int) -> int:
        """The last offset according to an unverified header; `at` if the header is inconsistent.

        Args:
            at: an offset within the batch.
        """
        if self.size < _HEAD.size or self._is_legacy:
            return at
        first, *_, last_delta, _, _, _, _, _, records = _HEAD.unpack_from(self._data)
        # A damaged header may claim offsets of the following batches: advance by single offsets, to not skip events.
        return (
            int(first + last_delta) if records == last_delta + 1 and first <= at <= first + last_delta else at
        )

    def records(self, opened: Any, max_inflated_bytes: int, max_headers: int) -> Iterator[Any]:
        """The records of an opened batch.

        Raises:
            UnreadableBatch: it cannot be decompressed, or a record is malformed.
            RecordTooLarge: it decompresses to more than the limit, or the next record has too many headers.
        """
        if self._is_legacy:
            if self._data[_LEGACY_ATTRIBUTES_AT] & _CODEC_BITS:
                # Brokers have not written this format since 2017, and aiokafka decompresses it without a limit.
                raise UnreadableBatch("the batch is compressed in a format older than Kafka 0.11")
            yield from opened
            return
        plain, batch = self._data, opened
        if self._data[_CODEC_AT] & _CODEC_BITS:
            plain = self._inflate(max_inflated_bytes)
            batch = DefaultRecordBatch(plain)
        read = 0
        try:
            try:
                for record in _limit_headers(batch, plain, max_headers):
                    yield record
                    read += 1
            except (UnicodeDecodeError, CorruptRecordException) as error:
                if not isinstance(error, UnicodeDecodeError) and not isinstance(
                    error.__cause__, UnicodeDecodeError
                ):
                    raise
                yield from islice(_limit_headers(TolerantBatch(plain), plain, max_headers), read, None)
        except (CorruptRecordException, ValueError, IndexError, OverflowError) as error:
            raise UnreadableBatch("the batch's records are malformed") from error

    def _inflate(self, max_bytes: int) -> memoryview:
        """The same batch, decompressed."""
        codec = self._data[_CODEC_AT] & _CODEC_BITS
        payload = self._data[_HEAD.size :]
        room = min(max_bytes, max(_MIN_BUFFER_BYTES, _USUAL_RATIO * len(payload)))
        while True:
            buffer = bytearray(_HEAD.size + room)
            size = inflate_into(codec, payload, memoryview(buffer)[_HEAD.size :])
            if size is not None:
                break
            if room == max_bytes:
                raise RecordTooLarge(
                    f"a {CODECS[codec]} batch of {self.size} bytes decompresses to more than {max_bytes} bytes"
                    " (ANABRANCH_MAX_INFLATED_BYTES)"
                )
            room = max_bytes
        buffer[: _HEAD.size] = self._data[: _HEAD.size]
        buffer[_CODEC_AT] &= ~_CODEC_BITS & 0xFF
        return memoryview(buffer)[: _HEAD.size + size]


def _limit_headers(batch: Iterable[Any], plain: memoryview, max_headers: int) -> Iterator[Any]:
    """Yield a batch's records; aiokafka creates each only after its number of headers is checked.

    Args:
        batch: the records.
        plain: the same batch as bytes, not compressed.
        max_headers: maximum number of a record's headers.

    Raises:
        RecordTooLarge: the next record has more.
    """
    records = iter(batch)
    at = _HEAD.size
    while True:
        if at < len(plain):
            length, start = _read_varint(plain, at)
            at = start + length
            # Counting takes longer than reading the length, and most records are too short to have so many.
            if (
                length > _MIN_ENCODED_HEADER_BYTES * max_headers
                and (count := _count_headers(plain, start)) > max_headers
            ):
                raise RecordTooLarge(f"a record has {count} headers; the maximum is {max_headers}")
        try:
            record = next(records)
        except StopIteration:
            return
        yield record


def _count_headers(plain: memoryview, at: int) -> int:
    """The number of headers of the record at this place, behind its length.

    Raises:
        ValueError, IndexError: the record is malformed.
    """
    at += 1  # attributes
    for _ in range(2):  # timestamp and offset
        _, at = _read_varint(plain, at)
    for _ in range(2):  # key and value
        length, at = _read_varint(plain, at)
        at += max(0, length)  # -1: null
    count, _ = _read_varint(plain, at)
    return count


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number in Kafka's variable-length encoding, and the place behind it.

    Raises:
        ValueError, IndexError: there is none.
    """
    number = 0
    for position in range(_MAX_VARINT_BYTES):
        byte = data[at + position]
        number |= (byte & 0x7F) << 7 * position
        if byte < 0x80:  # noqa: PLR2004  # the last byte
            return number >> 1 ^ -(number & 1), at + position + 1
    raise ValueError("too long")


class _PartitionRecords(PartitionRecords):
    """Yields the records of one partition in a fetch response."""

    def __init__(
        self,
        attempts: _ReadAttempts,
        max_inflated_bytes: int,
        budget: ReadBudget | None,
        max_headers: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._attempts = attempts
        self._max_inflated_bytes = max_inflated_bytes
        self._max_headers = max_headers
        self._budget = budget or ReadBudget(max_inflated_bytes)
        self._owns_budget = budget is None
        super().__init__(*args, **kwargs)

    def __iter__(self) -> "_PartitionRecords":
        # Called whenever a consumer requests more records.
        if self._owns_budget:
            self._budget.renew()
        return self

    def unpack(self, batches: _Records, *, check_crc: bool) -> Iterator[ConsumerRecord]:
        while batches.has_next():
            batch = batches.next_batch()
            opened: Any = None
            try:
                opened = batch.open(check_crc=check_crc)
                for record in (
                    ()
                    if self.is_skipped(opened)
                    else batch.records(opened, self._max_inflated_bytes, self._max_headers)
                ):
                    if record.offset >= opened.next_offset:
                        raise UnreadableBatch("a record's offset is after the batch's last")  # noqa: TRY301  # ends this loop
                    if record.offset >= self.next_fetch_offset:
                        consumer_record = self.consumer_record(record)
                        if not self._budget.consume(consumer_record):
                            return  # the next fetch begins here
                        self.next_fetch_offset = record.offset + 1
                        yield consumer_record
                self._attempts.succeeded(self.partition)
                # Skip offsets that compaction has removed.
                self.next_fetch_offset = max(self.next_fetch_offset, opened.next_offset)
            except (UnreadableBatch, RecordTooLarge) as error:
                if isinstance(error, UnreadableBatch) and not self._attempts.exhausted(
                    self.partition, self.next_fetch_offset, error
                ):
                    return
                unreadable = self._unreadable_rest(batch, opened, error)
                if unreadable.first <= unreadable.last:
                    self.next_fetch_offset = unreadable.last + 1
                    yield self._placeholder(unreadable)
                if opened is None:
                    return  # the start of the next batch is uncertain; the broker knows it

    def _unreadable_rest(self, batch: _Batch, opened: Any, error: TerminalError) -> Unreadable:
        """The rest of the batch, from the current position."""
        first = self.next_fetch_offset
        last = batch.last_offset(first) if opened is None else opened.next_offset - 1
        # A new error: the one that was raised references its frames and so the decompressed data.
        return Unreadable(type(error)(str(error)), first, last, batch.size)

    def _placeholder(self, unreadable: Unreadable) -> ConsumerRecord:
        topic, partition = self.partition
        return ConsumerRecord(topic, partition, unreadable.last, 0, 0, None, unreadable, None, -1, -1, ())
