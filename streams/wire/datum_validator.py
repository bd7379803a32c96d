"""Validates an Avro datum before decoding: checks each declared length against the bytes that are available.

fastavro trusts its input. It reads a truncated string as a shorter one, a negative length as "everything that
follows" and a negative index as counted from the end, and it loops over any count that a block declares. This module
first walks the same bytes without building anything. It accepts exactly one well-formed datum with nothing after it,
in time and memory proportional to the datum's size.
"""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from streams.core.errors import Undecodable

__all__ = ["DatumCheck", "DatumWalker", "Unbounded", "datum_validator", "read_floats"]

DatumWalker = Callable[[bytes, int], int]
"""Maps a datum's offset to the offset after it. Raises ``Undecodable``, or ``IndexError`` at the end of the bytes."""

DatumCheck = Callable[[bytes, int], Sequence[int]]
"""Takes the bytes and the datum's offset. Returns where each field of the record ends, or where the datum ends."""

_INT32: Final = (-(2**31), 2**31 - 1)
_WIDTHS: Final[Mapping[str, int]] = {"float": 4, "double": 8}
_LONGEST_VARINT: Final = 10
_CONTINUES: Final = 0x80


class Unbounded(ValueError):
    """The cost of decoding is not bounded by the size of the data: the schema is recursive or has items of 0 bytes."""


def datum_validator(schema: Any) -> DatumCheck:
    """Compile a schema into a check of one datum.

    Args:
        schema: an Avro schema as parsed JSON, with full names as returned by fastavro's ``parse_schema``.

    Returns:
        The check. It raises :class:`Undecodable` unless the bytes from the offset to the end are exactly one datum.

    Raises:
        Unbounded: the message names the construct.
    """
    if isinstance(schema, dict) and schema["type"] == "record":
        walkers = [walk for walk, _ in _compile_fields(schema, {}, ())]
    else:
        walkers = [_compile(schema, {}, ())[0]]

    def check(data: bytes, start: int) -> Sequence[int]:
        at, ends = start, []
        try:
            for walk in walkers:
                at = walk(data, at)
                ends.append(at)
        except IndexError:
            raise Undecodable("the Avro datum is truncated") from None
        except UnicodeDecodeError:
            raise Undecodable("a string in the Avro datum is not valid UTF-8") from None
        if at != len(data):
            raise Undecodable(f"{len(data) - at} bytes follow the Avro datum")
        return ends

    return check


def read_floats(data: bytes, at: int) -> memoryview:
    """The items of an array of ``float`` that has been checked, without a Python object for each.

    Args:
        data: the bytes.
        at: the array's offset.
    """
    floats = array("f")
    while True:
        count, at, _ = _block(data, at)
        if count == 0:
            break
        end = at + 4 * count
        floats.frombytes(data[at:end])
        at = end
    if sys.byteorder == "big":
        floats.byteswap()
    return memoryview(floats).toreadonly()


def _long(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < _CONTINUES:
        return (byte >> 1) ^ -(byte & 1), at
    value, shift, last = byte & 0x7F, 7, at + _LONGEST_VARINT - 1
    while byte & _CONTINUES:
        if at == last:
            raise Undecodable("a number in the Avro datum is longer than 64 bits")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    if value >> 64:
        raise Undecodable("a number in the Avro datum is longer than 64 bits")
    return (value >> 1) ^ -(value & 1), at


def _int(data: bytes, at: int) -> int:
    value, at = _long(data, at)
    if not _INT32[0] <= value <= _INT32[1]:
        raise Undecodable("an int in the Avro datum is longer than 32 bits")
    return at


def _skip_long(data: bytes, at: int) -> int:
    return _long(data, at)[1]


def _null(_data: bytes, at: int) -> int:
    return at


def _boolean(data: bytes, at: int) -> int:
    if data[at] > 1:
        raise Undecodable("a boolean in the Avro datum is neither 0 nor 1")
    return at + 1


def _bytes(data: bytes, at: int) -> int:
    size, at = _long(data, at)
    if size < 0 or size > len(data) - at:
        raise Undecodable("a length in the Avro datum is negative or larger than the remaining data")
    return at + size


def _string(data: bytes, at: int) -> int:
    size, at = _long(data, at)
    if size < 0 or size > len(data) - at:
        raise Undecodable("a length in the Avro datum is negative or larger than the remaining data")
    end = at + size
    data[at:end].decode()
    return end


def _fixed(size: int) -> DatumWalker:
    def walk(data: bytes, at: int) -> int:
        if size > len(data) - at:
            raise Undecodable("the Avro datum is truncated")
        return at + size

    return walk


_SIMPLE: Final[Mapping[str, tuple[DatumWalker, int]]] = {
    "null": (_null, 0),
    "boolean": (_boolean, 1),
    "int": (_int, 1),
    "long": (_skip_long, 1),
    "float": (_fixed(4), 4),
    "double": (_fixed(8), 8),
    "bytes": (_bytes, 1),
    "string": (_string, 1),
}


_Walk = tuple[DatumWalker, int]
"""The walker of a schema, and the minimum size of its data in bytes."""


def _compile(schema: Any, names: dict[str, _Walk], above: tuple[str, ...]) -> _Walk:
    """Compile one schema; ``names`` has the types defined so far, ``above`` the enclosing records."""
    if isinstance(schema, list):
        return _union([_compile(branch, names, above)[0] for branch in schema]), 1
    if isinstance(schema, dict):
        kind = schema["type"]
        if kind in ("record", "error", "enum", "fixed"):
            names[schema["name"]] = walk = _named(schema, names, above)
            return walk
        if kind == "array":
            items, min_size = _compile(schema["items"], names, above)
            if min_size == 0:
                raise Unbounded("an array has items of 0 bytes")
            return _array(items, _WIDTHS.get(_primitive(schema["items"])), min_size), 1
        if kind == "map":
            return _map(_compile(schema["values"], names, above)[0]), 1
        return _compile(kind, names, above)
    if schema in above:
        raise Unbounded(f"{schema} is recursive")
    return _SIMPLE.get(schema) or names[schema]


def _named(schema: Mapping[str, Any], names: dict[str, _Walk], above: tuple[str, ...]) -> _Walk:
    if schema["type"] == "fixed":
        return _fixed(schema["size"]), schema["size"]
    if schema["type"] == "enum":
        return _enum(len(schema["symbols"])), 1
    fields = _compile_fields(schema, names, above)
    return _record([walk for walk, _ in fields]), sum(min_size for _, min_size in fields)


def _compile_fields(
    schema: Mapping[str, Any], names: dict[str, _Walk], above: tuple[str, ...]
) -> list[_Walk]:
    return [_compile(field["type"], names, (*above, schema["name"])) for field in schema["fields"]]


def _primitive(schema: Any) -> str:
    while isinstance(schema, dict):
        schema = schema["type"]
    return schema if isinstance(schema, str) else ""


def _record(fields: list[DatumWalker]) -> DatumWalker:
    def walk(data: bytes, at: int) -> int:
        for field in fields:
            at = field(data, at)
        return at

    return walk


def _union(branches: list[DatumWalker]) -> DatumWalker:
    count = len(branches)

    def walk(data: bytes, at: int) -> int:
        index, at = _long(data, at)
        if not 0 <= index < count:
            raise Undecodable("a union in the Avro datum has an invalid branch index")
        return branches[index](data, at)

    return walk


def _enum(count: int) -> DatumWalker:
    def walk(data: bytes, at: int) -> int:
        index, at = _long(data, at)
        if not 0 <= index < count:
            raise Undecodable("an enum in the Avro datum has an invalid symbol index")
        return at

    return walk


def _block(data: bytes, at: int) -> tuple[int, int, int | None]:
    """Number of items, where they begin, and where they must end if the block declares its size."""
    count, at = _long(data, at)
    if count >= 0:
        return count, at, None
    size, at = _long(data, at)
    if size < 0 or size > len(data) - at:
        raise Undecodable("a length in the Avro datum is negative or larger than the remaining data")
    return -count, at, at + size


def _check_block_end(at: int, end: int | None) -> None:
    if end is not None and at != end:
        raise Undecodable("a block in the Avro datum does not have its declared size")


def _array(items: DatumWalker, width: int | None, min_size: int) -> DatumWalker:
    def walk(data: bytes, at: int) -> int:
        while True:
            count, at, end = _block(data, at)
            if count == 0:
                return at
            if count * min_size > len(data) - at:
                raise Undecodable("a count in the Avro datum is too large for the remaining data")
            if width is not None:
                at += count * width
            else:
                for _ in range(count):
                    at = items(data, at)
            _check_block_end(at, end)

    return walk


def _map(values: DatumWalker) -> DatumWalker:
    def walk(data: bytes, at: int) -> int:
        keys: set[bytes] = set()
        while True:
            count, at, end = _block(data, at)
            if count == 0:
                return at
            if count > len(data) - at:
                raise Undecodable("a count in the Avro datum is too large for the remaining data")
            for _ in range(count):
                after = _string(data, at)
                key = data[at:after]
                if key in keys:
                    raise Undecodable("a map in the Avro datum has a duplicate key")
                keys.add(key)
                at = values(data, after)
            _check_block_end(at, end)

    return walk
