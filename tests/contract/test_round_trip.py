"""JSON, model, Avro, model: what comes back is the canonical form, and the contract accepts that too."""

import json
import math
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID, uuid5

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from streams import resources
from streams.core.messages import result_id
from streams.wire import Codec, query_to_json, result_to_json
from tests.contract import instances

CODEC = Codec(dimensions=None)
CONTRACTS = resources.contracts()
FORMATS = Draft7Validator.FORMAT_CHECKER
SEEDS = st.integers(0, 2**32 - 1)


def _schema(path: str) -> dict[str, Any]:
    return dict(json.loads((CONTRACTS / path).read_text(encoding="utf-8")))


QUERY = _schema("query_embedding/v1/query_embedding.schema.json")
RESULT = _schema("retrieval/v1/retrieval_result.schema.json")
QUERY_1_0_0 = _schema("released/query_embedding.1.0.0.schema.json")
RESULT_1_0_0 = _schema("released/retrieval_result.1.0.0.schema.json")
VALIDATORS = {
    "QueryEmbedding": Draft7Validator(QUERY, format_checker=FORMATS),
    "RetrievalResult": Draft7Validator(RESULT, format_checker=FORMATS),
}


def _canonical(schema: dict[str, Any], instance: Any) -> Any:
    """The documented canonical form, said once more, from the contract and not from the code."""
    schema = _resolved(schema)
    form: Any = instance
    match instance, schema:
        case None, _:
            pass
        case _, {"format": "uuid"}:
            form = instance.lower()
        case _, {"format": "date-time"}:
            form = _utc(instance)
        case _, {"type": "integer"}:
            form = max(-(2**31), min(2**31 - 1, int(instance)))
        case _, {"type": "number"}:
            form = float(instance)
        case _, {"items": items}:
            form = [_canonical(items, item) for item in instance]
        case _, {"properties": fields}:
            form = {name: _canonical(field, instance.get(name)) for name, field in fields.items()}
        case _, {"additionalProperties": values}:
            form = {key: _canonical(values, value) for key, value in instance.items()}
    return form


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" not in schema:
        schema = schema.get("anyOf", schema.get("allOf", [schema]))[0]
    if "$ref" in schema:
        return dict((QUERY["definitions"] | RESULT["definitions"])[schema["$ref"].rpartition("/")[2]])
    return schema


def _filters(schema: dict[str, Any]) -> dict[str, Any]:
    return dict(schema["properties"]["filters"]["anyOf"][0]["properties"])


def _oldest_query_schema(event: dict[str, Any]) -> dict[str, Any]:
    """1.0.0's, if the event has nothing that it lacks."""
    filters = event.get("filters") or {}
    added = [event.get(name) for name in QUERY["properties"].keys() - QUERY_1_0_0["properties"].keys()]
    added += [filters.get(name) for name in _filters(QUERY).keys() - _filters(QUERY_1_0_0).keys()]
    old = all(value is None for value in added) and len(event["embedding"]) == 768
    return QUERY_1_0_0 if old else QUERY


def _result_schema(result: dict[str, Any]) -> dict[str, Any]:
    """1.0.0's, if the result says so and has nothing that it lacks."""
    old = result["schema_version"] == "1.0.0" and result["query_embedding_dimensions"] == 768
    return RESULT_1_0_0 if old and result.get("explanation") is None else RESULT


def _utc(text: str) -> str:
    """By counting seconds as a fraction: independent of how the model parses."""
    text = text.upper()
    offset = timedelta(0)
    if not text.endswith("Z"):
        offset = timedelta(hours=int(text[-5:-3]), minutes=int(text[-2:])) * (-1 if text[-6] == "-" else 1)
    body = text[:-1] if text.endswith("Z") else text[:-6]
    micros = math.floor(Fraction(Decimal("0." + (body[20:] or "0"))) * 10**6)
    moment = datetime.strptime(body[:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    moment = moment + timedelta(microseconds=micros) - offset
    return f"{moment.year:04d}{moment:-%m-%dT%H:%M:%S.%f}Z"


def _direction(embedding: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    _, exponent = math.frexp(max(map(abs, embedding)))  # the squares of tiny components would be zero
    vector = np.ldexp(np.array(embedding, dtype=np.float64), -exponent)
    return np.asarray(vector / np.linalg.norm(vector))


@pytest.mark.slow
@settings(max_examples=300)
@given(seed=SEEDS)
@example(seed=0)
def test_query_events(seed: int) -> None:
    event = instances.query_event(random.Random(seed))
    decoded = CODEC.decode_query(instances.to_json(event))
    canonical = query_to_json(decoded)

    through_avro = CODEC.decode_query(CODEC.encode_query(decoded))
    assert through_avro == decoded
    assert query_to_json(through_avro) == canonical
    assert list(through_avro.embedding) == canonical["embedding"]
    # Once canonical, it stays the same through either encoding.
    again = CODEC.decode_query(instances.to_json(canonical))
    assert query_to_json(again) == canonical
    assert CODEC.encode_query(again) == CODEC.encode_query(through_avro)

    expected = _canonical(_oldest_query_schema(event), event)
    embedding, expected_embedding = canonical.pop("embedding"), expected.pop("embedding")
    assert canonical == expected
    if max(map(abs, expected_embedding)) >= 2.0**-126:
        assert embedding == np.array(expected_embedding, dtype=np.float32).tolist()
    assert np.array(embedding, dtype=np.float32).tolist() == embedding
    assert _direction(embedding) @ _direction(expected_embedding) > 1 - 1e-9


@settings(max_examples=40)
@given(seed=SEEDS)
def test_the_canonical_form_of_an_event_is_valid(seed: int) -> None:
    event = instances.query_event(random.Random(seed))
    assert VALIDATORS["QueryEmbedding"].is_valid(event)
    canonical = query_to_json(CODEC.decode_query(instances.to_json(event)))
    assert VALIDATORS["QueryEmbedding"].is_valid(canonical)
    assert list(canonical) == list(_oldest_query_schema(event)["properties"])


@pytest.mark.slow
@settings(max_examples=300)
@given(seed=SEEDS)
def test_results(seed: int) -> None:
    instance = instances.retrieval_result(random.Random(seed))
    assert VALIDATORS["RetrievalResult"].is_valid(instance)
    decoded = CODEC.decode_result(instances.to_json(instance))
    canonical = result_to_json(decoded)
    encoded = CODEC.encode_result(decoded)
    through_avro = CODEC.decode_result(encoded)
    assert through_avro == decoded
    assert result_to_json(through_avro) == canonical
    assert CODEC.encode_result(through_avro) == encoded
    assert canonical == _canonical(_result_schema(instance), instance)
    assert VALIDATORS["RetrievalResult"].is_valid(canonical)


@pytest.mark.parametrize("scale", [1e-300, 1e-46, 1e-44, 1e-40, 1e-38, 1e-25, 1e20, 1e38])
def test_an_embedding_of_any_length_keeps_its_direction(scale: float) -> None:
    event = instances.query_event(random.Random(1))
    rng = random.Random(2)
    event["embedding"] = [rng.uniform(-1, 1) * scale for _ in range(768)]
    decoded = CODEC.decode_query(instances.to_json(event))
    through_avro = CODEC.decode_query(CODEC.encode_query(decoded))
    assert _direction(list(through_avro.embedding)) @ _direction(event["embedding"]) > 1 - 1e-12


def test_the_result_id_is_what_the_contract_says() -> None:
    event_id = UUID("6F1C2F5E-8F0B-4D6A-9D43-0A7C1F2E3B4D")
    namespace = UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")  # RFC 4122, appendix C: URLs
    expected = uuid5(namespace, "urn:anabranch:result:6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d")
    assert result_id(event_id) == expected
