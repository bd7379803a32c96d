"""Whatever the bytes, nothing but a TerminalError comes out of the decoder, and soon."""

import random
from time import perf_counter, process_time

import pytest
from bad_inputs import QUERY_WRITER, avro_event, embedding, head, json_event
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.errors import TerminalError
from streams.core.messages import QueryEmbedding
from streams.wire import Codec

CODEC = Codec()
SMALL = [round(x, 1) for x in embedding()]
# Mutations of a short event rarely hit the embedding, which takes most of a long one.
SEEDS = {
    "json": json_event(embedding=SMALL),
    "avro": avro_event(expires_at=32_472_144_000_000_000),
    "json without embedding": json_event(embedding=[]),
    "avro without embedding": avro_event(embedding=[]),
    "confluent": b"\0\0\0\0\x01" + avro_event(embedding=[])[10:],
}
INTERESTING = [
    b"\0",
    b"\xff",
    b"\x80",
    b"\x7f",
    b"\x01",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\\u",
    b"e9",
    b"-",
    b"NaN",
]


def _decoded(value: bytes) -> QueryEmbedding | None:
    try:
        return CODEC.decode_query(value)
    except TerminalError:
        return None


def _mutated(rng: random.Random, value: bytes) -> bytes:
    mutated = bytearray(value)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(mutated) + 1)
        match rng.randrange(6):
            case 0 if at < len(mutated):
                mutated[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(mutated):
                mutated[at] = rng.randrange(256)
            case 2:
                mutated[at:at] = rng.choice(INTERESTING)
            case 3:
                del mutated[at : at + rng.choice([1, 2, 8, 100])]
            case 4:
                other = rng.randrange(len(mutated) + 1)
                mutated[at:at] = mutated[other : other + rng.randrange(40)]
            case _:
                del mutated[at:]
        if not mutated:
            break
    return bytes(mutated)


@pytest.mark.parametrize(("name", "count"), [(name, 12000 if "without" in name else 4000) for name in SEEDS])
def test_mutated_events(name: str, count: int) -> None:
    rng = random.Random(name)
    seed = SEEDS[name]
    began = perf_counter()
    decoded = sum(_decoded(_mutated(rng, seed)) is not None for _ in range(count))
    print(f"{name}: {decoded} of {count} still valid, {(perf_counter() - began) / count * 1e6:.0f} us each")
    if name in ("json", "avro"):
        assert 0 < decoded < count


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


@settings(max_examples=500, deadline=None)
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
