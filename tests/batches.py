"""Record batches that no client would write: any payload under any codec, and a wrong checksum where asked.

The compressors here need no library, so that what they make can be sent before any is installed.
"""

import gzip
import struct
from collections.abc import Callable, Iterable, Sequence

from aiokafka import AIOKafkaProducer
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record._crc32c import crc as crc32c
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.structs import TopicPartition

__all__ = ["CODEC_IDS", "Headers", "Record", "batch", "gzipped", "produce", "zstd_repeated", "zstd_stored"]

CODEC_IDS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}

Headers = Sequence[tuple[str, bytes | None]]
Record = tuple[bytes | None, bytes | None, Headers]
"""Key, value, headers."""

_HEAD = struct.Struct(">qiibIhiqqqhii")
_ATTRIBUTES_AT = 21
_MAX_BLOCK_BYTES = 128 * 1024
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def batch(
    records: Sequence[Record],
    codec: str | int = "none",
    compress: Callable[[bytes], bytes] = bytes,
    *,
    first: int = 0,
    damaged: bool = False,
) -> bytes:
    """One batch of format 2.

    Args:
        records: in order.
        codec: what the batch says it is compressed with.
        compress: what becomes of the records' bytes.
        first: offset of the first.
        damaged: flip a bit of the payload, behind the checksum's back.
    """
    builder = _DefaultRecordBatchBuilderPy(
        magic=2,
        compression_type=0,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 31,
    )
    for number, (key, value, headers) in enumerate(records):
        assert builder.append(
            number, timestamp=1_700_000_000_000, key=key, value=value, headers=list(headers)
        )
    plain = bytes(builder.build())
    payload = compress(plain[_HEAD.size :])
    fields = list(_HEAD.unpack_from(plain))
    fields[0] = first
    fields[1] = _HEAD.size - 12 + len(payload)
    fields[5] = CODEC_IDS[codec] if isinstance(codec, str) else codec
    made = bytearray(_HEAD.pack(*fields) + payload)
    struct.pack_into(">I", made, 17, crc32c(bytes(made[_ATTRIBUTES_AT:])))
    if damaged:
        made[-1] ^= 0x40
    return bytes(made)


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def zstd_stored(data: bytes) -> bytes:
    """A frame of zstd that holds the data as it is."""
    blocks = [data[at : at + _MAX_BLOCK_BYTES] for at in range(0, len(data), _MAX_BLOCK_BYTES)]
    return _zstd_frame((0, len(block), block) for block in blocks)


def zstd_repeated(length: int, *, head: bytes, tail: bytes, byte: bytes = b"\0") -> bytes:
    """A frame of zstd that holds the head, one byte so often, and the tail: four bytes for each 128 KiB."""
    whole, rest = divmod(length, _MAX_BLOCK_BYTES)
    runs = [_MAX_BLOCK_BYTES] * whole + [rest] * bool(rest)
    return _zstd_frame([(0, len(head), head), *((1, run, byte) for run in runs), (0, len(tail), tail)])


def _zstd_frame(blocks: Iterable[tuple[int, int, bytes]]) -> bytes:
    listed = list(blocks)
    frame = bytearray(_ZSTD_MAGIC + b"\x00\x88")  # no content size; a window of 128 MiB
    for number, (kind, size, content) in enumerate(listed):
        header = size << 3 | kind << 1 | (number == len(listed) - 1)
        frame += header.to_bytes(3, "little") + content
    return bytes(frame)


async def produce(producer: AIOKafkaProducer, topic: str, partition: int, made: bytes) -> int:
    """Send a batch as it is; returns the offset of its first record.

    Args:
        producer: started; whose connection is used.
        topic: where to.
        partition: which.
        made: the batch.

    Raises:
        AssertionError: the broker does not take it.
    """
    client = producer.client
    await producer.partitions_for(topic)
    node = client.cluster.leader_for_partition(TopicPartition(topic, partition))
    response = await client.send(node, ProduceRequest(None, -1, 30_000, [(topic, [(partition, made)])]))
    [(_, [(_, error, offset, *_rest)])] = response.topics
    assert error == 0, f"the broker refuses the batch: {error}"
    return int(offset)
