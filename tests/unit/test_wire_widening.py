"""A later minor accepts what a released contract accepts: each change that keeps or breaks this."""

import json
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft7Validator

from streams import resources
from streams.cli.main import commands
from streams.wire.derive import contract_files
from streams.wire.widening import narrowings

NULL = {"type": "null"}
TEXT = {"type": "string", "pattern": "^a*$"}


def contract(schema: Any, *, required: bool = True, text: Any = TEXT) -> dict[str, Any]:
    return {
        "$id": "urn:test",
        "type": "object",
        "required": ["x"] if required else [],
        "properties": {"x": schema},
        "definitions": {"text": text},
    }


INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
ARRAY = {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3}
REFERENCE = {"$ref": "#/definitions/text"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (INTEGER, INTEGER | {"description": "another"}),
        (INTEGER, INTEGER | {"minimum": -1, "maximum": 10}),
        (INTEGER, {"type": "integer"}),
        ({"type": "integer", "const": 5}, INTEGER),
        ({"type": "integer", "const": 5}, {"type": "integer"}),
        (ARRAY, ARRAY | {"minItems": 1, "maxItems": 4, "items": {"type": "integer"}}),
        (TEXT, {"type": "string"}),
        (TEXT, REFERENCE),
        ({"allOf": [REFERENCE], "maxLength": 2}, {"allOf": [REFERENCE], "maxLength": 3}),
        ({"type": "string", "enum": ["a"]}, {"type": "string", "enum": ["a", "b"]}),
        ({"type": "string", "enum": ["a"]}, {"type": "string"}),
        ({"anyOf": [INTEGER, NULL]}, {"anyOf": [INTEGER | {"maximum": 10}, NULL]}),
        (contract(INTEGER), contract(INTEGER, required=False)),
        (
            contract(INTEGER),
            contract(INTEGER) | {"properties": {"x": INTEGER, "y": {"anyOf": [INTEGER, NULL]}}},
        ),
    ],
)
def test_wider(old: Any, new: Any) -> None:
    assert narrowings(contract(old), contract(new)) == []


@pytest.mark.parametrize(
    ("old", "new", "at"),
    [
        (INTEGER, INTEGER | {"minimum": 1}, "/minimum"),
        (INTEGER, INTEGER | {"maximum": 8}, "/maximum"),
        ({"type": "integer"}, INTEGER, "/maximum"),
        (INTEGER, {"type": "string"}, "/type"),
        (INTEGER, INTEGER | {"const": 5}, "/const"),
        ({"type": "integer", "const": 10}, INTEGER, "/maximum"),
        ({"type": "integer", "const": 5}, {"type": "integer", "const": 6}, "/const"),
        (ARRAY, ARRAY | {"maxItems": 2}, "/maxItems"),
        (ARRAY, ARRAY | {"items": INTEGER | {"maximum": 8}}, "/items/maximum"),
        (ARRAY, ARRAY | {"contains": {"const": 1}}, "/contains"),
        ({"type": "string"}, TEXT, "/pattern"),
        (TEXT, TEXT | {"pattern": "^b*$"}, "/pattern"),
        (TEXT, TEXT | {"not": {"pattern": "b"}}, "/not"),
        ({"type": "string", "enum": ["a", "b"]}, {"type": "string", "enum": ["a"]}, "/enum"),
        ({"type": "string"}, {"type": "string", "enum": ["a"]}, "/enum"),
        ({"anyOf": [INTEGER, NULL]}, {"anyOf": [INTEGER | {"maximum": 8}, NULL]}, "/anyOf/0/maximum"),
        ({"anyOf": [INTEGER, NULL]}, INTEGER, "/maximum"),
        (contract(INTEGER, required=False), contract(INTEGER), "/required"),
        (contract(INTEGER), contract(INTEGER) | {"properties": {}}, "/properties/x"),
        (
            contract(INTEGER),
            contract(INTEGER) | {"properties": {"x": INTEGER, "y": INTEGER}},
            "/properties/y",
        ),
        (contract(INTEGER), contract(INTEGER) | {"additionalProperties": False}, "/additionalProperties"),
        (contract(INTEGER), contract(INTEGER) | {"anyOf": [{"required": ["y"]}]}, "/anyOf"),
        (contract(INTEGER), contract(INTEGER) | {"maxProperties": 1}, "/maxProperties"),
    ],
)
def test_narrower(old: Any, new: Any, at: str) -> None:
    found = narrowings(contract(old), contract(new))
    assert any(line.startswith(f"#/properties/x{at}: ") for line in found), found


def test_a_reference_to_something_narrower_is_found() -> None:
    for schema in (REFERENCE, {"anyOf": [REFERENCE, NULL]}, {"type": "array", "items": REFERENCE}):
        narrower = contract(schema, text={"type": "string", "pattern": "^b*$"})
        (line,) = narrowings(contract(schema), narrower)
        assert line.endswith("/pattern: differs, and is not known to be wider")


def test_every_contract_is_wider_than_each_released_one() -> None:
    contracts = resources.contracts()
    current = [json.loads(path.read_text(encoding="utf-8")) for path, _ in contract_files(contracts)]
    released = [json.loads(path.read_text(encoding="utf-8")) for path in (contracts / "released").iterdir()]
    pairs = [(old, new) for old in released for new in current if old["$id"] == new["$id"]]
    assert len(pairs) == len(released) >= 2
    for old, new in pairs:
        Draft7Validator.check_schema(old)
        assert narrowings(old, new) == []
        assert narrowings(new, old)  # there is a reason for the new version
    checked = CliRunner().invoke(commands, ["contract", "compatible"])
    assert (checked.exit_code, len(checked.output.splitlines())) == (0, 2), checked.output
