"""Kafka's compression codecs, with a limit on the decompressed size.

A few hundred bytes can decompress to gigabytes, so no codec may allocate the size that its input declares. Each codec
writes into a buffer of fixed size and stops when the buffer is full.
"""

from collections.abc import Iterator
from types import ModuleType

from streams.core.errors import UnreadableBatch

cramjam: ModuleType | None
try:
    import cramjam
except ImportError:  # an incomplete installation: `missing_codecs` reports it before anything is read
    cramjam = None

__all__ = ["CODECS", "MISSING_CODECS", "MISSING_CODECS_REMEDY", "inflate_into", "missing_codecs"]

CODECS = {1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
"""The codec number in a batch's attributes → the codec's name."""

MISSING_CODECS = "this installation cannot read batches compressed with"
MISSING_CODECS_REMEDY = "install the package cramjam: pip install cramjam"

# The error of `cramjam` if the output buffer is full before the end of the input.
_IS_FULL = "failed to write whole buffer"
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_XERIAL_LENGTH_BYTES = 4

_WORD = b"anabranch"
_WORD_COMPRESSED = {
    1: "1f8b08000000000002034bcc4b4c2a4acc4bce00002dcef54f09000000",
    2: "0920616e616272616e6368",
    3: "04224d185440ae09000080616e616272616e6368e4d3422d00000000e4d3422d",
    4: "28b52ffd2009490000616e616272616e6368",
}


def missing_codecs() -> list[str]:
    """The codecs that this installation cannot read."""
    return [name for number, name in CODECS.items() if not _works(number)]


def inflate_into(codec: int, data: memoryview, buffer: memoryview) -> int | None:
    """Decompress into a buffer.

    Args:
        codec: the codec's number.
        data: the compressed data.
        buffer: the output. Its size is the limit; no more memory than that is used.

    Returns:
        The decompressed size in bytes; None if the buffer is too small.

    Raises:
        UnreadableBatch: the codec is unknown or missing, or the data is corrupt.
    """
    name = CODECS.get(codec)
    if name is None:
        raise UnreadableBatch(f"unknown compression codec {codec}")
    if cramjam is None:
        raise UnreadableBatch(f"compression codec {name} needs the package cramjam, which is not installed")
    try:
        if name == "snappy":
            return _snappy_into(cramjam.snappy, data, buffer)
        return int(getattr(cramjam, name).decompress_into(data, buffer))
    except cramjam.DecompressionError as error:
        if str(error) == _IS_FULL:
            return None
        raise UnreadableBatch(f"the {name} data is corrupt") from None


def _snappy_into(snappy: ModuleType, data: memoryview, buffer: memoryview) -> int | None:
    """Snappy has no end marker: each block declares its length. Java clients send several blocks in a frame."""
    blocks = _xerial_blocks(data) if data[: len(_XERIAL_MAGIC)] == _XERIAL_MAGIC else [data]
    size = 0
    for block in blocks:
        length = snappy.decompress_raw_len(block)
        if size + length > len(buffer):
            return None
        size += snappy.decompress_raw_into(block, buffer[size:])
    return size


def _xerial_blocks(data: memoryview) -> Iterator[memoryview]:
    at = _XERIAL_HEADER_BYTES
    while at < len(data):
        start = at + _XERIAL_LENGTH_BYTES
        at = start + int.from_bytes(data[start - _XERIAL_LENGTH_BYTES : start], "big")
        if at > len(data):
            raise UnreadableBatch("the snappy data is corrupt")
        yield data[start:at]


def _works(codec: int) -> bool:
    buffer = bytearray(len(_WORD))
    try:
        size = inflate_into(codec, memoryview(bytes.fromhex(_WORD_COMPRESSED[codec])), memoryview(buffer))
    except (UnreadableBatch, AttributeError):
        return False
    return size == len(_WORD) and buffer == _WORD
