"""Avro from JSON Schema: what is derived, and that nothing unknown is passed over."""

import json
from pathlib import Path
from typing import Any

import fastavro
import pytest

from streams import resources
from streams.wire.compatibility import incompatibilities
from streams.wire.derive import NotDerivable, derive, derive_all, stale, write

AVRO = resources.schemas() / "avro"
NULLABLE = {"type": "null"}


def contract(**fields: Any) -> dict[str, Any]:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Thing",
        "x-avro-namespace": "test.v1",
        "type": "object",
        "required": list(fields),
        "properties": fields,
        "definitions": {"uuid": {"type": "string", "format": "uuid"}, "loop": {"$ref": "#/definitions/loop"}},
    }


def field_type(schema: dict[str, Any]) -> Any:
    return derive(contract(x=schema))["fields"][0]["type"]


def test_the_schemas_are_not_stale() -> None:
    # `anabranch contract derive` writes them.
    assert stale(resources.contracts(), AVRO) == []


def test_derived_schemas_are_fully_compatible_with_every_released_one() -> None:
    released = [json.loads(path.read_text(encoding="utf-8")) for path in (AVRO / "released").iterdir()]
    derived = [json.loads(text) for text in derive_all(resources.contracts()).values()]
    pairs = [(old, new) for old in released for new in derived if old["name"] == new["name"]]
    assert {new["name"] for _, new in pairs} == {"QueryEmbedding", "RetrievalResult"}
    for old, new in pairs:
        assert incompatibilities(old, new) == []


def test_derived_schemas_are_avro_and_stand_alone() -> None:
    for text in derive_all(resources.contracts()).values():
        schema = json.loads(text)
        assert schema["namespace"] == "anabranch.v1"
        fastavro.parse_schema(schema)  # raises where a name is not defined within


def test_what_the_specification_asks_for() -> None:
    query = json.loads(derive_all(resources.contracts())["query_embedding.v1.avsc"])
    fields = {field["name"]: field for field in query["fields"]}
    uuid = {"type": "string", "logicalType": "uuid"}
    instant = {"type": "long", "logicalType": "timestamp-micros"}
    assert fields["event_id"]["type"] == uuid
    assert fields["occurred_at"]["type"] == instant
    assert fields["embedding"]["type"] == {"type": "array", "items": "float"}
    assert fields["k"]["type"] == fields["token_budget"]["type"] == ["null", "int"]
    assert fields["session_id"]["type"] == ["null", uuid]
    assert fields["expires_at"]["type"] == ["null", instant]
    filters = fields["filters"]["type"][1]
    assert filters["fields"][3]["type"] == ["null", {"type": "map", "values": "string"}]
    result = json.loads(derive_all(resources.contracts())["retrieval_result.v1.avsc"])
    passages, explanation = (field["type"] for field in result["fields"][-2:])
    ranges = filters["fields"][-1]["type"][1]["values"]
    records = (query, filters, ranges, result, passages["items"], explanation[1])
    for record in records:
        assert record["doc"]
        for field in record["fields"]:
            assert field["doc"], field["name"]
            if isinstance(field["type"], list):
                assert field["type"][0] == "null"
                assert field["default"] is None
            else:
                assert "default" not in field


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "boolean"}, "boolean"),
        ({"type": "number"}, "double"),
        ({"type": "number", "x-avro-type": "float"}, "float"),
        ({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "int"),
        ({"type": "integer", "minimum": 0, "maximum": 2**31}, "long"),
        ({"type": "integer", "x-avro-type": "int"}, "int"),
        ({"type": "integer", "const": 768}, "int"),
        ({"type": "string", "const": "a b"}, "string"),
        (
            {"type": "string", "enum": ["a", "b"], "title": "E"},
            {"type": "enum", "name": "E", "symbols": ["a", "b"]},
        ),
        (
            {"allOf": [{"$ref": "#/definitions/uuid"}], "maxLength": 36},
            {"type": "string", "logicalType": "uuid"},
        ),
        (
            {"type": "object", "additionalProperties": {"type": "boolean"}},
            {"type": "map", "values": "boolean"},
        ),
    ],
)
def test_types(schema: dict[str, Any], expected: Any) -> None:
    assert field_type(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["string", "null"]},
        {"type": "string", "format": "email"},
        {"type": "string", "contentEncoding": "base64"},
        {"type": "string", "enum": ["a", "b"]},
        {"type": "string", "enum": ["a b"], "title": "E"},
        {"type": "string", "x-avro-type": "bytes"},
        {"type": "integer"},
        {"type": "integer", "minimum": 0, "maximum": 2**63},
        {"type": "integer", "minimum": 0, "maximum": 9, "multipleOf": 3},
        {"type": "integer", "x-avro-type": "float"},
        {"type": "number", "x-avro-type": "decimal"},
        {"type": "array"},
        {"type": "array", "items": [{"type": "boolean"}]},
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        {"type": "object"},
        {"type": "object", "additionalProperties": True},
        {"type": "object", "patternProperties": {}, "additionalProperties": {"type": "boolean"}},
        {"type": "object", "properties": {}},
        {"type": "object", "title": "Thing", "properties": {}},
        {"type": "object", "title": "T", "properties": {}, "additionalProperties": {"type": "boolean"}},
        {"type": "object", "title": "T", "properties": {"a-b": {"type": "boolean"}}, "required": ["a-b"]},
        {"type": "object", "title": "T", "properties": {"a": {"type": "boolean"}}},
        {"type": "object", "title": "T", "properties": {}, "required": ["a"]},
        {"$ref": "#/definitions/absent"},
        {"$ref": "#/definitions/loop"},
        {"$ref": "#/definitions/uuid", "description": "ignored in draft-07"},
        {"$ref": "https://example.org/other.json"},
        {"allOf": [{"$ref": "#/definitions/uuid"}, {"type": "string"}]},
        {"allOf": [{"$ref": "#/definitions/uuid"}], "enum": ["a"]},
        {"oneOf": [{"type": "boolean"}, NULLABLE]},
        {"anyOf": [{"type": "boolean"}, NULLABLE]},  # required, and nullable
    ],
)
def test_what_is_not_known_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(NotDerivable, match=r"^#/properties/x"):
        derive(contract(x=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [NULLABLE, {"type": "boolean"}]},
        {"anyOf": [{"type": "boolean"}, {"type": "string"}, NULLABLE]},
        {"anyOf": [{"type": "boolean"}, NULLABLE], "minLength": 1},
    ],
)
def test_only_one_way_to_say_nullable(schema: dict[str, Any]) -> None:
    with pytest.raises(NotDerivable):
        derive(contract(x=schema) | {"required": []})


def test_the_root_is_a_record_with_a_namespace() -> None:
    with pytest.raises(NotDerivable, match="x-avro-namespace"):
        derive({"type": "object", "title": "T", "properties": {}})
    with pytest.raises(NotDerivable, match="object with properties"):
        derive({"type": "string", "x-avro-namespace": "a"})


def test_write_then_stale(tmp_path: Path) -> None:
    names = list(derive_all(resources.contracts()))
    assert names == ["query_embedding.v1.avsc", "query_text.v1.avsc", "retrieval_result.v1.avsc"]
    target = tmp_path / "avro"
    assert write(resources.contracts(), target) == names
    assert stale(resources.contracts(), target) == []
    assert write(resources.contracts(), target) == []
    (target / names[0]).write_text("{}", encoding="utf-8")
    (target / "forgotten.v1.avsc").write_text("{}", encoding="utf-8")
    assert stale(resources.contracts(), target) == ["forgotten.v1.avsc", names[0]]
    assert write(resources.contracts(), target) == [names[0]]
