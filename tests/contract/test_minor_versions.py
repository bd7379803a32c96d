"""1.1.0 accepts what 1.0.0 accepts, and what is written in 1.0.0 loses nothing."""

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from streams import resources
from streams.cli.publish import read_events
from streams.core.errors import TerminalError
from streams.core.messages import RetrievalResult, in_oldest_version, oldest_query_version
from streams.wire import Codec, query_to_json, result_to_json
from streams.wire.codec import _micros, _record
from tests.contract import instances
from tests.contract.test_agreement import SHARED

CODEC = Codec(dimensions=None)
FORMATS = Draft7Validator.FORMAT_CHECKER
SEEDS = st.integers(0, 2**32 - 1)
SHORT = [0.5, -0.25]


def validator(path: str, **properties: Any) -> Draft7Validator:
    schema = json.loads((resources.contracts() / path).read_text(encoding="utf-8"))
    schema["properties"] |= properties
    return Draft7Validator(schema, format_checker=FORMATS)


# 768 components take the validator 10 ms: all events have the same ones, which are judged once.
QUERIES = {
    "1.0.0": validator("released/query_embedding.1.0.0.schema.json", embedding={"minItems": 768}),
    "1.1.0": validator("query_embedding/v1/query_embedding.schema.json", embedding={"minItems": 1}),
}
RESULTS = {
    "1.0.0": validator("released/retrieval_result.1.0.0.schema.json"),
    "1.1.0": validator("retrieval/v1/retrieval_result.schema.json"),
}


def accepted(decode: Callable[[bytes], object], instance: Any) -> bool:
    try:
        decode(instances.to_json(instance))
    except TerminalError:
        return False
    return True


def mutated(rng: random.Random, instance: Any) -> Any:
    for _ in range(rng.randrange(3)):
        at = rng.choice(list(instances.places(instance)))
        if at != ("embedding",):
            instance = instances.put(instance, at, rng.choice([*instances.VALUES, ...]))
    # As it was sent: 1e-400 is 0.0, surrogates are joined.
    return json.loads(instances.to_json(instance))


@pytest.mark.parametrize(
    ("make", "versions", "decode"),
    [
        pytest.param(
            lambda rng: instances.query_event(rng, SHARED, newer=False),
            QUERIES,
            CODEC.decode_query,
            id="query",
        ),
        pytest.param(
            lambda rng: instances.retrieval_result(rng, newer=False),
            RESULTS,
            CODEC.decode_result,
            id="result",
        ),
    ],
)
def test_every_instance_of_1_0_0_is_one_of_1_1_0(
    make: Callable[[random.Random], Any],
    versions: dict[str, Draft7Validator],
    decode: Callable[[bytes], object],
) -> None:
    outcomes: Counter[bool] = Counter()

    @settings(max_examples=1000)
    @given(seed=SEEDS)
    def holds(seed: int) -> None:
        rng = random.Random(seed)
        instance = mutated(rng, make(rng))
        valid = versions["1.0.0"].is_valid(instance)
        outcomes[valid] += 1
        if valid:
            assert versions["1.1.0"].is_valid(instance)
            assert accepted(decode, instance)

    holds()
    assert min(outcomes[True], outcomes[False]) > 100


def test_the_shared_embeddings_are_valid() -> None:
    event = instances.query_event(random.Random(1), SHARED, newer=False)
    assert validator("released/query_embedding.1.0.0.schema.json").is_valid(event)
    assert not validator("released/query_embedding.1.0.0.schema.json").is_valid(event | {"embedding": SHORT})
    assert validator("query_embedding/v1/query_embedding.schema.json").is_valid(event | {"embedding": SHORT})


@settings(max_examples=300)
@given(seed=SEEDS)
def test_an_event_is_written_in_the_oldest_version_that_can_express_it(seed: int) -> None:
    rng = random.Random(seed)
    newer = rng.random() < 0.5
    event = instances.query_event(rng, SHORT if rng.random() < 0.2 else SHARED, newer=newer)
    query = CODEC.decode_query(instances.to_json(event))
    in_1_0_0 = CODEC.decode_query(CODEC._query.encode(_record(query, _micros), "1.0.0"))
    expressible = in_1_0_0 == query and QUERIES["1.0.0"].is_valid(event)
    assert (oldest_query_version(query) == "1.0.0") == expressible

    relabelled = in_oldest_version(query)
    assert relabelled.schema_version == ("1.0.0" if expressible else "1.1.0")
    assert query_to_json(relabelled) == query_to_json(query) | {"schema_version": relabelled.schema_version}
    fingerprint = CODEC.encode_query(query)[:10]
    assert fingerprint == CODEC.encode_query(relabelled)[:10]
    assert fingerprint == CODEC._query.encode(_record(query, _micros), relabelled.schema_version)[:10]


def result(**changes: Any) -> RetrievalResult:
    made = instances.retrieval_result(random.Random(3), newer=False)
    return RetrievalResult.parse(made | {"schema_version": "1.0.0"} | changes)


def test_a_result_is_written_in_its_own_version() -> None:
    explanation = instances.explanation(random.Random(1))
    heads = {
        version: CODEC._result.encode(result().model_dump(mode="json"), version)[:10]
        for version in ("1.0.0", "1.1.0")
    }
    assert heads["1.0.0"] != heads["1.1.0"]
    for one, version in (
        (result(), "1.0.0"),
        (result(schema_version="1.1.0"), "1.1.0"),
        (result(schema_version="1.7.0"), "1.1.0"),
        # It says 1.0.0, but nothing is lost.
        (result(explanation=explanation), "1.1.0"),
        (result(query_embedding_dimensions=1024), "1.1.0"),
    ):
        encoded = CODEC.encode_result(one)
        assert encoded[:10] == heads[version]
        assert CODEC.decode_result(encoded) == one
        assert ("explanation" in result_to_json(one)) == (version == "1.1.0")


def test_events_to_publish_get_the_oldest_version() -> None:
    base = instances.query_event(random.Random(1), SHARED, newer=False) | {"schema_version": "1.7.0"}
    explained = base | {"schema_version": "1.0.0", "explain": True}
    lines, _ = read_events(json.dumps(event).encode() for event in (base, explained))
    assert [line.event.schema_version for line in lines] == ["1.0.0", "1.1.0"]
