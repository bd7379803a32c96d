"""Every kind of bad input has one code, says which, and does not quote the event."""

import tracemalloc
from time import perf_counter

import pytest

from streams.core.errors import TerminalError
from streams.wire import Codec, query_to_json
from tests.bad_inputs import BAD_INPUTS, avro_event, json_event

CODEC = Codec()


@pytest.mark.parametrize(
    ("value", "code"), [pytest.param(value, code, id=name) for name, value, code in BAD_INPUTS]
)
def test_each_kind_has_its_code(value: bytes, code: str) -> None:
    with pytest.raises(TerminalError) as caught:
        CODEC.decode_query(value)
    assert caught.value.code == code
    message = str(caught.value)
    assert len(message) < 160
    assert message.isprintable()
    for content in ("lease", "user:", "year", "law", "9f86d", "example.org", "all-mpnet"):
        assert content not in message
    # Nothing of the event hangs on the exception, where a logged traceback would show it.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


FIVE_MISSING = "; ".join(
    f"{name} is required" for name in ("schema_version", "event_id", "occurred_at", "principals", "embedding")
)
FIVE_OF_SEVEN = (
    "principals[0] is not a string; session_id is not a UUID; topic_id is not a UUID; profile is not a string;"
    " k is not an integer (and 2 more)"
)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{}", FIVE_MISSING),
        (json_event(k="10"), "k is not an integer"),
        (
            json_event(
                principals=[1],
                session_id="x",
                topic_id="y",
                profile=1,
                k="10",
                token_budget=0,
                query_hash="z",
            ),
            FIVE_OF_SEVEN,
        ),
        (b"", "neither Avro nor JSON"),
        (b"where is the lease?", "neither Avro nor JSON"),
        (b'{"key": tru', "starts like JSON, but is invalid or truncated at character 8"),
        (b" [1, 2", "starts like JSON, but is invalid or truncated at character 6"),
        (b"42", "JSON, but not an object"),
    ],
)
def test_a_reason_names_the_fields_or_the_place(value: bytes, reason: str) -> None:
    with pytest.raises(TerminalError) as caught:
        CODEC.decode_query(value)
    assert str(caught.value) == reason


def test_the_table_is_large_and_its_names_are_distinct() -> None:
    assert len(BAD_INPUTS) >= 100
    assert len({name for name, _, _ in BAD_INPUTS}) == len(BAD_INPUTS)
    assert len({value for _, value, _ in BAD_INPUTS}) == len(BAD_INPUTS)


def test_what_the_table_is_built_from_is_valid_in_both_encodings() -> None:
    in_json = query_to_json(CODEC.decode_query(json_event()))
    in_avro = query_to_json(CODEC.decode_query(avro_event(expires_at=32_472_144_000_000_000)))
    assert in_json == in_avro


@pytest.mark.parametrize(
    "value", [pytest.param(value, id=name) for name, value, _ in BAD_INPUTS if name.startswith("Avro")]
)
def test_a_bomb_costs_no_more_than_its_size(value: bytes) -> None:
    tracemalloc.start()
    began = perf_counter()
    try:
        with pytest.raises(TerminalError):
            CODEC.decode_query(value)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000 + 40 * len(value)
    finally:
        tracemalloc.stop()
    assert perf_counter() - began < 0.5
