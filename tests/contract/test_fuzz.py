"""Whatever the bytes, nothing but a TerminalError comes out of the decoder, and soon."""

import json
import random
import tracemalloc
from io import BytesIO
from time import process_time
from typing import Any

import pytest
from fastavro import schemaless_reader
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.errors import TerminalError
from streams.core.messages import QueryEmbedding
from streams.wire import Codec
from tests.bad_inputs import QUERY_WRITER, avro_event, head, json_event
from tests.fuzz.hunt import hunt, our_judge
from tests.fuzz.judge import Broken, Judge
from tests.fuzz.mutations import hostile
from tests.fuzz.seeds import SEEDS, TEXTS

CODEC = Codec()

# In the tests a fixed number from a fixed seed; `make fuzz` takes a new seed, and more.
INPUTS = 5_000
UNTRACED = 25_000


def _decoded(value: bytes) -> QueryEmbedding | None:
    try:
        return CODEC.decode_query(value)
    except TerminalError:
        return None


@pytest.mark.slow
def test_hostile_messages() -> None:
    found = hunt(our_judge(), seed=20, inputs=INPUTS)
    print(found.outcomes, found.most)
    assert found.found == []
    assert found.inputs == INPUTS
    # It is no use if hardly anything gets past the first bytes.
    assert found.outcomes["accepted"] > INPUTS / 50
    assert {
        "undecodable",
        "unknown_schema",
        "contract_violation",
        "dimension_mismatch",
        "non_finite_embedding",
    } <= set(found.outcomes)


@pytest.mark.slow
def test_hostile_questions() -> None:
    found = hunt(our_judge(TEXTS), subject=TEXTS, seed=20, inputs=INPUTS)
    print(found.outcomes, found.most)
    assert found.found == []
    assert found.inputs == INPUTS
    assert found.outcomes["accepted"] > INPUTS / 50
    assert {"undecodable", "unknown_schema", "contract_violation", "topic_without_session"} <= set(
        found.outcomes
    )


@pytest.mark.slow
def test_nothing_comes_out_but_our_own_errors() -> None:
    """More of them, without a look at memory and contract, which take most of the time."""
    assert sum(_decoded(hostile(21, number)) is not None for number in range(UNTRACED)) > UNTRACED / 50


def test_a_message_can_be_made_again() -> None:
    assert [hostile(3, number) for number in range(50)] == [hostile(3, number) for number in range(50)]
    assert hostile(3, 7) != hostile(4, 7)


# Nothing, an array of as many nulls as its five bytes say: the size is not in the message.
_LENGTH_BOMB = b"\x80\x80\x80\x01\0"


@pytest.mark.parametrize(
    ("decode", "value", "said"),
    [
        pytest.param(
            lambda value: schemaless_reader(BytesIO(value), {"type": "array", "items": "null"}, None),
            _LENGTH_BOMB,
            "bytes of memory for a message of 5",
            id="a length bomb",
        ),
        pytest.param(json.loads, b'{"a"', "JSONDecodeError came out", id="another's error"),
        pytest.param(lambda _: None, b"{}", "accepted, but invalid by the contract", id="what is invalid"),
        pytest.param(
            lambda _: CODEC.decode_query(b""), json_event(), "undecodable, but valid", id="what is valid"
        ),
    ],
)
def test_what_a_hunt_would_see(decode: Any, value: bytes, said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Broken, match=said):
            Judge(decode).judge(value)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value",
    [
        json_event(filters={"metadata": {f"{n:x}": 0 for n in range(20_000)}}),
        json_event(filters={"metadata": {f"{n:x}": "\0" for n in range(20_000)}}),
        json_event(filters={"metadata": {f"{n:x}\0": "" for n in range(20_000)}}),
        avro_event(
            filters={
                "section": None,
                "source_url_prefix": None,
                "document_type": None,
                "metadata": {f"{n:x}": "\0" for n in range(20_000)},
            }
        ),
    ],
    ids=["no strings", "U+0000", "U+0000 in keys", "U+0000 in Avro"],
)
def test_a_map_of_many_errors_takes_no_memory_for_each(value: bytes) -> None:
    tracemalloc.start()
    try:
        assert our_judge().judge(value).outcome == "contract_violation"
    finally:
        tracemalloc.stop()


def test_every_truncation() -> None:
    for seed in (SEEDS["avro without embedding"], SEEDS["json without embedding"]):
        for end in range(len(seed)):
            assert _decoded(seed[:end]) is None


def test_every_byte_of_a_small_avro_datum() -> None:
    seed = SEEDS["avro without embedding"]
    for at in range(len(seed)):
        for byte in (0, 1, 2, 3, 4, 0x41, 0x7F, 0x80, 0x81, 0xC3, 0xFE, 0xFF):
            _decoded(seed[:at] + bytes([byte]) + seed[at + 1 :])


def test_noise() -> None:
    rng = random.Random(9)
    for start in (b"", b"{", b"[", head(), b"\0", b"\xc3\x01", b'{"schema_version": "1.0.0"'):
        for _ in range(2000):
            assert _decoded(start + rng.randbytes(rng.randrange(60))) is None


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_a_checked_datum_is_decoded_whole(noise: bytes) -> None:
    # What passes the check is within fastavro's competence: it may break the contract, but it decodes.
    try:
        QUERY_WRITER.check(noise, 0)
    except TerminalError:
        return
    _decoded(head() + noise)


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(lambda n: b"[" * n, id="arrays"),
        pytest.param(lambda n: b'{"a":' * n, id="objects"),
        pytest.param(lambda n: b'{"k":' + b"9" * n + b"}", id="digits"),
        pytest.param(lambda n: b'{"k":1.' + b"9" * n + b"}", id="fraction"),
        pytest.param(lambda n: b'{"principals":[' + b'"",' * (n // 3) + b'""]}', id="principals"),
        pytest.param(lambda n: b'{"embedding":[' + b"0," * (n // 2) + b"0]}", id="components"),
        pytest.param(lambda n: b'{"occurred_at":"2025-06-01T00:00:00.' + b"1" * n + b'"}', id="instant"),
        pytest.param(lambda n: b'{"occurred_at":"0001-01-01' + b"+" * n + b'"}', id="instant's sign"),
        pytest.param(lambda n: b'{"schema_version":"1.' + b"1" * n + b'.x"}', id="version"),
        pytest.param(lambda n: b'{"schema_version":"2.0.0-' + b"a." * n + b'!"}', id="pre-release"),
        pytest.param(lambda n: avro_event({"principals": b"\x02\0" * (n // 2) + b"\0"}), id="Avro blocks"),
        pytest.param(lambda n: avro_event({"principals": b"\xff" * n}), id="Avro number"),
    ],
)
def test_a_megabyte_takes_no_more_than_its_size(unit: object) -> None:
    assert callable(unit)
    value = unit(1_000_000)
    began = process_time()
    assert _decoded(value) is None
    assert process_time() - began < 3  # quadratic would be minutes
