r"""Records whose headers' names are no UTF-8: any bytes to a broker, text to every client.

aiokafka raises out of the fetch over such a name, now and whenever it comes to that record again, so one of them would
stop whoever reads the partition. Here its bytes are shown escaped (``\xff``), and everything else is as it was.
"""

import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any

from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords

__all__ = ["escape_header_names"]

# Of each batch: its first offset and the length of what follows.
_BATCH_HEAD = struct.Struct(">qi")


def escape_header_names() -> None:
    """Make every consumer of this process read such records; to be called before one starts."""
    fetcher.MemoryRecords = _Records


class _Records:
    """aiokafka's `MemoryRecords`, whose batches can be read a second time."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._records = MemoryRecords(data)
        self._start = 0

    def size_in_bytes(self) -> int:
        return int(self._records.size_in_bytes())

    def has_next(self) -> bool:
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        batch = self._records.next_batch()
        _, length = _BATCH_HEAD.unpack_from(self._data, self._start)
        start, self._start = self._start, self._start + _BATCH_HEAD.size + length
        # Older formats have no headers.
        return (
            _Batch(batch, self._data[start : self._start]) if isinstance(batch, DefaultRecordBatch) else batch
        )


class _Batch:
    """A batch as aiokafka reads it, fast, and from the first bad name on in Python."""

    __slots__ = ("_batch", "_data")

    def __init__(self, batch: Any, data: memoryview) -> None:
        self._batch = batch
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        read = 0
        try:
            for record in self._batch:
                yield record
                read += 1
        except (UnicodeDecodeError, CorruptRecordException) as error:
            if not isinstance(error, UnicodeDecodeError) and not isinstance(
                error.__cause__, UnicodeDecodeError
            ):
                raise
        else:
            return
        yield from islice(TolerantBatch(self._data), read, None)


class TolerantBatch(_DefaultRecordBatchPy):  # type: ignore[misc]  # final in name
    _buffer: bytearray

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _Bytes(self._buffer)


class _Bytes(bytearray):
    """Whose slices decode, whatever they are."""

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return item if isinstance(item, int) else _Bytes(item)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        del errors
        return super().decode(encoding, "backslashreplace")
