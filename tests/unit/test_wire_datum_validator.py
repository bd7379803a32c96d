"""Every declared length is checked before anything is decoded."""

from io import BytesIO
from typing import Any

import pytest
from fastavro import parse_schema, schemaless_reader, schemaless_writer

from streams.core.errors import Undecodable
from streams.wire.datum_validator import Unbounded, datum_validator

EVERYTHING: dict[str, Any] = {
    "type": "record",
    "name": "n.R",
    "fields": [
        {"name": "nothing", "type": "null"},
        {"name": "flag", "type": "boolean"},
        {"name": "int", "type": "int"},
        {"name": "long", "type": {"type": "long"}},
        {"name": "float", "type": "float"},
        {"name": "double", "type": "double"},
        {"name": "bytes", "type": "bytes"},
        {"name": "string", "type": "string"},
        {"name": "fixed", "type": {"type": "fixed", "name": "F", "size": 3}},
        {"name": "enum", "type": {"type": "enum", "name": "E", "symbols": ["a", "b"]}},
        {"name": "again", "type": ["null", "F", "E"]},
        {"name": "doubles", "type": {"type": "array", "items": "double"}},
        {"name": "maps", "type": {"type": "array", "items": {"type": "map", "values": ["null", "string"]}}},
    ],
}
DATUM = {
    "nothing": None,
    "flag": True,
    "int": -(2**31),
    "long": 2**63 - 1,
    "float": 1.5,
    "double": -2.5,
    "bytes": b"\xff",
    "string": "é",
    "fixed": b"abc",
    "enum": "b",
    "again": "a",
    "doubles": [1.0, 2.0],
    "maps": [{}, {"a": None, "b": "c"}],
}


def written(schema: Any, datum: Any) -> bytes:
    out = BytesIO()
    schemaless_writer(out, parse_schema(schema), datum)
    return out.getvalue()


def check(schema: Any, data: bytes) -> None:
    datum_validator(parse_schema(schema))(data, 0)


def test_a_datum_of_every_type_fills_its_bytes() -> None:
    data = written(EVERYTHING, DATUM)
    check(EVERYTHING, data)
    assert schemaless_reader(BytesIO(data), parse_schema(EVERYTHING), None) == DATUM
    datum_validator(parse_schema(EVERYTHING))(b"head" + data, 4)


def test_any_other_length_is_refused() -> None:
    data = written(EVERYTHING, DATUM)
    for end in range(len(data)):
        with pytest.raises(Undecodable):
            check(EVERYTHING, data[:end])
    with pytest.raises(Undecodable, match="1 bytes follow"):
        check(EVERYTHING, data + b"\0")


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        ("boolean", b"\x02"),
        ("int", b"\x80\x80\x80\x80\x10"),
        ("long", b"\xff" * 9 + b"\x02"),
        ("long", b"\x80" * 11 + b"\0"),
        ("string", b"\x01"),
        ("string", b"\x04a"),
        ("string", b"\x02\xff"),
        ("bytes", b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        (["null", "int"], b"\x04"),
        (["null", "int"], b"\x01"),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, b"\x02"),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, b"\x01"),
        ({"type": "fixed", "name": "F", "size": 3}, b"ab"),
        ({"type": "array", "items": "float"}, b"\x02abc"),
        ({"type": "array", "items": "int"}, b"\x06\0\0"),
        ({"type": "array", "items": "int"}, b"\x01\x04\0\0"),
        ({"type": "array", "items": "int"}, b"\x01\x03\0\0"),
        ({"type": "map", "values": "null"}, b"\x04\x02a\x02a\0"),
        ({"type": "map", "values": "null"}, b"\x08\x02a\0"),
    ],
)
def test_malformed(schema: Any, data: bytes) -> None:
    with pytest.raises(Undecodable):
        check(schema, data)


def test_blocks_that_declare_their_size() -> None:
    schema = {"type": "array", "items": "string"}
    data = b"\x03\x08\x02a\x02b" + b"\x02\x02c" + b"\0"
    check(schema, data)
    assert schemaless_reader(BytesIO(data), parse_schema(schema), None) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": "null"},
        {"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}},
        {
            "type": "array",
            "items": {"type": "record", "name": "R", "fields": [{"name": "x", "type": "null"}]},
        },
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": ["null", "R"]}]},
    ],
)
def test_schemas_whose_data_could_cost_more_than_its_size(schema: Any) -> None:
    with pytest.raises(Unbounded):
        datum_validator(parse_schema(schema))
