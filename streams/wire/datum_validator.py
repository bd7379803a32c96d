"""How far an Avro datum reaches: each declared length is held against the bytes there, before decoding.

fastavro trusts its input. It takes a string that breaks off for a shorter one, a negative length for "all the
rest", a negative index for one from the end, and it loops over whatever count a block declares. Here the same
bytes are walked first, building nothing: what passes is exactly one well-formed datum and nothing after it,
in time and memory proportional to its size.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from streams.core.errors import Undecodable

__all__ = ["DatumWalker", "Unbounded", "datum_validator"]

DatumWalker = Callable[[bytes, int], int]
"""Offset of a datum to the offset after it. Raises ``Undecodable``, or ``IndexError`` where the bytes end."""

_INT32: Final = (-(2**31), 2**31 - 1)
_WIDTHS: Final[Mapping[str, int]] = {"float": 4, "double": 8}
_LONGEST_VARINT: Final = 10
_CONTINUES: Final = 0x80


class Unbounded(ValueError):
    """Data of this schema could cost more than its size: it is recursive, or has items without bytes."""


def datum_validator(schema: Any) -> Callable[[bytes, int], None]:
    """Compile a schema into a check of one datum.

    Args:
        schema: an Avro schema as parsed JSON, with names as fastavro's ``parse_schema`` leaves them (full).

    Returns:
        A function of the bytes and the datum's offset, which raises :class:`Undecodable` unless exactly one
        datum fills the bytes from there to the end.

    Raises:
        Unbounded: naming the construct.
    """
    walk, _ = _compile(schema, {}, ())

    def check(data: bytes, start: int) -> None:
        try:
            end = walk(data, start)
        except IndexError:
            raise Undecodable("the Avro datum breaks off") from None
        except UnicodeDecodeError:
            raise Undecodable("a string in the Avro datum is no UTF-8") from None
        if end != len(data):
            raise Undecodable(f"{len(data) - end} bytes follow the Avro datum")

    return check


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
        raise Undecodable("a length in the Avro datum is negative or exceeds what is there")
    return at + size


def _string(data: bytes, at: int) -> int:
    size, at = _long(data, at)
    if size < 0 or size > len(data) - at:
        raise Undecodable("a length in the Avro datum is negative or exceeds what is there")
    end = at + size
    data[at:end].decode()
    return end


def _fixed(size: int) -> DatumWalker:
    def walk(data: bytes, at: int) -> int:
        if size > len(data) - at:
            raise Undecodable("the Avro datum breaks off")
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
"""The walker of a schema, and the fewest bytes that a datum of it takes."""


def _compile(schema: Any, names: dict[str, _Walk], above: tuple[str, ...]) -> _Walk:
    """Compile one schema; ``names`` are the types defined so far, ``above`` the records that enclose it."""
    if isinstance(schema, list):
        return _union([_compile(branch, names, above)[0] for branch in schema]), 1
    if isinstance(schema, dict):
        kind = schema["type"]
        if kind in ("record", "error", "enum", "fixed"):
            names[schema["name"]] = walk = _named(schema, names, above)
            return walk
        if kind == "array":
            items, fewest = _compile(schema["items"], names, above)
            if fewest == 0:
                raise Unbounded("an array's items take no bytes")
            return _array(items, _WIDTHS.get(_primitive(schema["items"])), fewest), 1
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
    fields = [_compile(field["type"], names, (*above, schema["name"])) for field in schema["fields"]]
    return _record([walk for walk, _ in fields]), sum(fewest for _, fewest in fields)


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
            raise Undecodable("a union in the Avro datum has no such branch")
        return branches[index](data, at)

    return walk


def _enum(count: int) -> DatumWalker:
    def walk(data: bytes, at: int) -> int:
        index, at = _long(data, at)
        if not 0 <= index < count:
            raise Undecodable("an enum in the Avro datum has no such symbol")
        return at

    return walk


def _block(data: bytes, at: int) -> tuple[int, int, int | None]:
    """Number of items, where they begin, and where they must end if the block says so."""
    count, at = _long(data, at)
    if count >= 0:
        return count, at, None
    size, at = _long(data, at)
    if size < 0 or size > len(data) - at:
        raise Undecodable("a length in the Avro datum is negative or exceeds what is there")
    return -count, at, at + size


def _closed(at: int, end: int | None) -> None:
    if end is not None and at != end:
        raise Undecodable("a block in the Avro datum has not the size that it declares")


def _array(items: DatumWalker, width: int | None, fewest: int) -> DatumWalker:
    def walk(data: bytes, at: int) -> int:
        while True:
            count, at, end = _block(data, at)
            if count == 0:
                return at
            if count * fewest > len(data) - at:
                raise Undecodable("a count in the Avro datum exceeds what is there")
            if width is not None:
                at += count * width
            else:
                for _ in range(count):
                    at = items(data, at)
            _closed(at, end)

    return walk


def _map(values: DatumWalker) -> DatumWalker:
    def walk(data: bytes, at: int) -> int:
        keys: set[bytes] = set()
        while True:
            count, at, end = _block(data, at)
            if count == 0:
                return at
            if count > len(data) - at:
                raise Undecodable("a count in the Avro datum exceeds what is there")
            for _ in range(count):
                after = _string(data, at)
                key = data[at:after]
                if key in keys:
                    raise Undecodable("a map in the Avro datum has a key twice")
                keys.add(key)
                at = values(data, after)
            _closed(at, end)

    return walk
