"""The typed models and a JSON Schema validator, formats asserted, accept the same instances."""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft7Validator

from streams import resources
from streams.core import fields, messages
from streams.core.errors import TerminalError
from streams.wire import Codec
from tests.contract import instances

CODEC = Codec(dimensions=None)
QUERY = json.loads(
    (resources.contracts() / "query_embedding/v1/query_embedding.schema.json").read_text(encoding="utf-8")
)
RESULT = json.loads(
    (resources.contracts() / "retrieval/v1/retrieval_result.schema.json").read_text(encoding="utf-8")
)
TEXT = json.loads(
    (resources.contracts() / "query_text/v1/query_text.schema.json").read_text(encoding="utf-8")
)
FORMATS = Draft7Validator.FORMAT_CHECKER

# Of few digits: most of the time would go into writing and reading them.
SHARED = [(i % 7 - 3) / 4 for i in range(768)]


def _without_embedding(schema: dict[str, Any]) -> dict[str, Any]:
    light = copy.deepcopy(schema)
    light["properties"]["embedding"] = {}
    return light


FULL = Draft7Validator(QUERY, format_checker=FORMATS)
LIGHT = Draft7Validator(_without_embedding(QUERY), format_checker=FORMATS)
RESULTS = Draft7Validator(RESULT, format_checker=FORMATS)
TEXTS = Draft7Validator(TEXT, format_checker=FORMATS)


def _accepted(decode: Callable[[bytes], object], text: bytes) -> str:
    try:
        decode(text)
    except TerminalError as error:
        return error.code
    return "accepted"


def _query_accepted_by_schema(instance: Any) -> bool:
    # 768 components take the validator 10 ms. They are judged once, for all instances that share them.
    if isinstance(instance, dict) and instance.get("embedding") == SHARED:
        return LIGHT.is_valid(instance)
    return FULL.is_valid(instance)


def _queries() -> Iterator[Any]:
    rng = random.Random(2)
    for _ in range(400):
        yield instances.query_event(rng, SHARED)
    # Every value in every place of a full event.
    full = instances.query_event(random.Random(5), SHARED) | {
        "session_id": instances.UUIDS[0],
        "topic_id": instances.UUIDS[1],
        "principals": ["user:1", "public"],
        "filters": {
            "section": "1",
            "source_url_prefix": "h",
            "document_type": "d",
            "metadata": {"a": "b"},
            "metadata_contains": {"a": ["b", "c"]},
            "metadata_any": {"a": ["b"]},
            "metadata_range": {"a": {"gte": 1, "before": "2025-06-01T12:34:56Z"}},
        },
        "explain": True,
        "upstream_warnings": ["text_truncated"],
    }
    for name in messages.QueryEmbedding.model_fields:
        full.setdefault(name, None)
    for at in instances.places(full):
        for value in [*instances.VALUES, ...]:
            if at != ("embedding",) or not isinstance(value, list):
                yield instances.put(full, at, value)
    # Two changes in a random event.
    for _ in range(1000):
        event = instances.query_event(rng, SHARED)
        for _ in range(2):
            at = rng.choice(list(instances.places(event)))
            event = instances.put(event, at, rng.choice([*instances.VALUES, ...]))
        yield event
    yield from ({"a": 1}, {})


def _results() -> Iterator[Any]:
    rng = random.Random(3)
    for _ in range(400):
        yield instances.retrieval_result(rng)
    full = next(r for r in iter(lambda: instances.retrieval_result(rng), None) if len(r["results"]) == 1)
    for name in messages.RetrievalResult.model_fields:
        full.setdefault(name, None)
    full["warnings"] = ["k_clamped"]
    passage = full["results"][0]
    for name in messages.Passage.model_fields:
        passage.setdefault(name, None)
    passage["coordinates"], passage["metadata"] = {"x0": 1}, {"a": "b"}
    full["explanation"] = instances.explanation(rng)
    for at in instances.places(full):
        for value in [*instances.VALUES, ...]:
            yield instances.put(full, at, value)
    for _ in range(500):
        result = instances.retrieval_result(rng)
        for _ in range(2):
            at = rng.choice(list(instances.places(result)))
            result = instances.put(result, at, rng.choice([*instances.VALUES, ...]))
        yield result


def _texts() -> Iterator[Any]:
    rng = random.Random(6)
    for _ in range(300):
        yield instances.query_text(rng)
    full = instances.query_text(rng) | {
        "session_id": instances.UUIDS[0],
        "topic_id": instances.UUIDS[1],
        "filters": {"metadata_any": {"a": ["b"]}},
        "conversation": [{"role": "user", "text": "a"}],
    }
    for name in messages.QueryText.model_fields:
        full.setdefault(name, None)
    for at in instances.places(full):
        for value in [*instances.VALUES, ...]:
            yield instances.put(full, at, value)
    for _ in range(500):
        event = instances.query_text(rng)
        for _ in range(2):
            at = rng.choice(list(instances.places(event)))
            event = instances.put(event, at, rng.choice([*instances.VALUES, ...]))
        yield event
    for name, most in (("text", 32768), ("topic_title", 1024), ("conversation_summary", 32768)):
        for length in (most, most + 1):
            yield full | {name: "é" * length}
    for messages_, role, text in ((64, 64, 1), (65, 1, 1), (1, 65, 1), (1, 1, 32768), (1, 1, 32769)):
        yield full | {"conversation": [{"role": "r" * role, "text": "t" * text}] * messages_}


def _compare(
    generated: Iterator[Any], decode: Callable[[bytes], object], valid: Callable[[Any], bool]
) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for made in generated:
        text = instances.to_json(made)
        # Parsed back, so that both judge what was sent: 1e-400 is 0.0, surrogates are joined.
        instance = json.loads(text)
        outcome = _accepted(decode, text)
        outcomes[outcome] += 1
        assert (outcome == "accepted") == valid(instance), (outcome, _shown(instance))
    return outcomes


def _shown(instance: Any) -> str:
    if isinstance(instance, dict):
        return ascii({key: value for key, value in instance.items() if key != "embedding"})
    return ascii(instance)


def test_what_is_shared_is_valid() -> None:
    assert FULL.is_valid(instances.query_event(random.Random(1), SHARED))


@pytest.mark.slow
def test_query_events() -> None:
    outcomes = _compare(_queries(), CODEC.decode_query, _query_accepted_by_schema)
    print(outcomes)
    assert outcomes.total() > 5000
    assert outcomes["accepted"] > 1000
    assert outcomes["contract_violation"] > 1000
    assert outcomes["unsupported_version"] >= 5
    assert outcomes["topic_without_session"] > 0


@pytest.mark.slow
def test_results() -> None:
    outcomes = _compare(_results(), CODEC.decode_result, RESULTS.is_valid)
    print(outcomes)
    assert outcomes.total() > 5000
    assert outcomes["accepted"] > 1000
    assert outcomes["contract_violation"] > 1000


@pytest.mark.slow
def test_questions_in_words() -> None:
    outcomes = _compare(_texts(), CODEC.decode_text, TEXTS.is_valid)
    print(outcomes)
    assert outcomes.total() > 3000
    assert outcomes["accepted"] > 500
    assert outcomes["contract_violation"] > 500
    assert outcomes["topic_without_session"] > 0


def test_a_question_in_words_is_the_same_in_avro() -> None:
    rng = random.Random(7)
    for _ in range(300):
        event = CODEC.decode_text(instances.to_json(instances.query_text(rng)))
        again = CODEC.decode_text(CODEC.encode_text(event))
        assert again == event


def test_embeddings() -> None:
    rng = random.Random(4)
    base = instances.query_event(rng, SHARED)
    made = (base | {"embedding": instances.broken_components(rng)} for _ in range(300))
    outcomes = _compare(made, CODEC.decode_query, FULL.is_valid)
    print(outcomes)
    for code in (
        "accepted",
        "contract_violation",
        "dimension_mismatch",
        "non_finite_embedding",
        "zero_embedding",
    ):
        assert outcomes[code] > 5


@pytest.mark.parametrize("schema", [QUERY, RESULT, TEXT], ids=["query", "result", "text"])
def test_a_contract_is_a_valid_schema_and_describes_every_field(schema: dict[str, Any]) -> None:
    Draft7Validator.check_schema(schema)

    def descriptions(node: dict[str, Any], at: str) -> Iterator[str]:
        for name, field in node.get("properties", {}).items():
            if not field.get("description"):
                yield f"{at}.{name}"
            for inner in (field, field.get("items", {}), *field.get("anyOf", ())):
                yield from descriptions(inner, f"{at}.{name}")

    assert list(descriptions(schema, "")) == []
    assert all(definition["description"] for definition in schema["definitions"].values())


def test_model_and_contract_have_the_same_fields_in_the_same_order() -> None:
    passage = RESULT["properties"]["results"]["items"]
    filters = QUERY["properties"]["filters"]["anyOf"][0]
    metadata_range = filters["properties"]["metadata_range"]["anyOf"][0]["additionalProperties"]
    explanation = RESULT["properties"]["explanation"]["anyOf"][0]
    for model, schema in (
        (messages.QueryEmbedding, QUERY),
        (messages.Filters, filters),
        (messages.MetadataRange, metadata_range),
        (messages.RetrievalResult, RESULT),
        (messages.Explanation, explanation),
        (messages.ArmExplanation, explanation["properties"]["arms"]["items"]),
        (messages.Passage, passage),
        (messages.QueryText, TEXT),
        (
            messages.ConversationMessage,
            TEXT["properties"]["conversation"]["anyOf"][0]["items"],
        ),
    ):
        assert list(model.model_fields) == list(schema["properties"])
        required = [name for name, field in model.model_fields.items() if field.is_required()]
        assert required == [name for name in schema["properties"] if name in schema.get("required", ())]


def test_patterns_are_the_contracts_own() -> None:
    definitions = QUERY["definitions"] | RESULT["definitions"]
    assert fields.UUID_PATTERN.pattern == definitions["uuid"]["pattern"]
    assert messages._VERSION.pattern == definitions["version"]["pattern"]
    assert messages._INSTANT.pattern == definitions["instant"]["pattern"]
    assert messages._INVALID_INSTANT.pattern == definitions["instant"]["not"]["pattern"]
    assert messages._HASH.pattern == QUERY["properties"]["query_hash"]["anyOf"][0]["pattern"]
    assert messages._WARNING.pattern == RESULT["properties"]["warnings"]["items"]["pattern"]
    for name in definitions:
        if name in QUERY["definitions"] and name in RESULT["definitions"]:
            assert QUERY["definitions"][name] == RESULT["definitions"][name]
