"""Kinds of bad input, each with the code of the dead letter that it must become.

``BAD_INPUTS`` is built from one valid event, so that each kind has one error and nothing else is wrong.
"""

import json
import random
from functools import cache
from io import BytesIO
from typing import Any

from fastavro import schemaless_writer

from streams import resources
from streams.wire.writer_schemas import WriterSchema

__all__ = [
    "BAD_INPUTS",
    "avro_datum",
    "avro_event",
    "datum",
    "head",
    "json_event",
    "valid_event",
    "valid_text",
    "zigzag",
]

_AVRO = resources.schemas() / "avro"
QUERY_WRITER = WriterSchema.of(json.loads((_AVRO / "query_embedding.v1.avsc").read_text(encoding="utf-8")))
TEXT_WRITER = WriterSchema.of(json.loads((_AVRO / "query_text.v1.avsc").read_text(encoding="utf-8")))
#: With the default settings, workers write results of 1.0.0, with ANABRANCH_RESULT_CONTRACT=1.1.0 of 1.1.0.
RESULT_WRITER = WriterSchema.of(
    json.loads((_AVRO / "released/retrieval_result.1.0.0.avsc").read_text(encoding="utf-8"))
)
NEWER_RESULT_WRITER = WriterSchema.of(
    json.loads((_AVRO / "retrieval_result.v1.avsc").read_text(encoding="utf-8"))
)

EVENT_ID = "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d"
SESSION_ID = "0b8d7c1a-55e4-4c2f-8f7e-9a1b2c3d4e5f"
TOPIC_ID = "c0ffee00-1234-4abc-8def-0123456789ab"


def embedding(seed: int = 7, dimensions: int = 768) -> list[float]:
    return list(_components_of(seed, dimensions))


@cache
def _components_of(seed: int, dimensions: int) -> tuple[float, ...]:
    rng = random.Random(seed)
    return tuple(rng.gauss(0, 1) for _ in range(dimensions))


def valid_event(**changes: Any) -> dict[str, Any]:
    """A valid event with every field, as a JSON dictionary; a change to ``...`` takes the field away."""
    event = {
        "schema_version": "1.0.0",
        "event_id": EVENT_ID,
        "occurred_at": "2025-06-01T12:34:56.789012Z",
        "principals": ["user:42", "group:law"],
        "embedding": embedding(),
        "session_id": SESSION_ID,
        "topic_id": TOPIC_ID,
        "profile": "extraction",
        "k": 12,
        "similarity_threshold": 0.25,
        "token_budget": 3000,
        "filters": {
            "section": "1.2",
            "source_url_prefix": "https://example.org/",
            "document_type": "statute",
            "metadata": {"year": "2020"},
        },
        "embedding_model": "all-mpnet-base-v2",
        "query_hash": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "expires_at": "2999-01-01T00:00:00Z",
    } | changes
    return {name: value for name, value in event.items() if value is not ...}


def valid_text(**changes: Any) -> dict[str, Any]:
    """A valid question in words with every field, as `valid_event`."""
    made = ("embedding", "embedding_model", "query_hash")
    own = {
        "text": "What moves an estuary?",
        "topic_title": "Tides",
        "conversation": [{"role": "user", "text": "Tell me about é."}, {"role": "assistant", "text": ""}],
        "conversation_summary": "The user asks about estuaries.",
        "explain": True,
    }
    return valid_event(**dict.fromkeys(made, ...), **(own | changes))


def json_event(**changes: Any) -> bytes:
    return json.dumps(valid_event(**changes)).encode()


def zigzag(value: int) -> bytes:
    """A number as Avro writes it, of any size."""
    value = value * 2 if value >= 0 else -value * 2 - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def avro_datum(raw: dict[str, bytes] | None = None, **changes: Any) -> bytes:
    """A valid event as an Avro datum, with changed values (instants in microseconds) or fields' own bytes."""
    return datum(
        QUERY_WRITER, valid_event(occurred_at=1_748_781_296_789_012, expires_at=None) | changes, raw or {}
    )


def datum(writer: WriterSchema, event: dict[str, Any], raw: dict[str, bytes]) -> bytes:
    """An Avro datum, with some fields' own bytes."""
    out = BytesIO()
    for field in writer.schema["fields"]:
        if field["name"] in raw:
            out.write(raw[field["name"]])
        else:
            schemaless_writer(out, field["type"], event.get(field["name"]))
    return out.getvalue()


def head(writer: WriterSchema = QUERY_WRITER) -> bytes:
    return b"\xc3\x01" + writer.fingerprint


def avro_event(raw: dict[str, bytes] | None = None, **changes: Any) -> bytes:
    return head() + avro_datum(raw, **changes)


def _replaced(old: bytes, new: bytes, **changes: Any) -> bytes:
    """JSON text that ``json.dumps`` does not write."""
    text = json_event(**changes)
    assert text.count(old) == 1
    return text.replace(old, new)


def _components(first: Any, rest: Any = 0.5) -> list[Any]:
    return [first] + [rest] * 767


def _table() -> list[tuple[str, bytes, str]]:
    undecodable = {
        "empty": b"",
        "a space": b" ",
        "plain text": b"where is the lease?",
        "a megabyte of noise": b"\xff" + random.Random(1).randbytes(1 << 20),
        "a megabyte of zeros and a brace": b"{" + b"0" * (1 << 20),
        "JSON array": b"[" + json_event() + b"]",
        "JSON string": b'"event"',
        "JSON number": b"42",
        "JSON null": b"null",
        "JSON breaks off": json_event()[:-200],
        "JSON twice": json_event() * 2,
        "JSON with a trailing comma": json_event()[:-1] + b",}",
        "JSON with single quotes": json_event().replace(b'"', b"'"),
        "JSON with a byte order mark": b"\xef\xbb\xbf" + json_event(),
        "JSON in UTF-16": json_event().decode().encode("utf-16"),
        "JSON with a byte that is no UTF-8": _replaced(b"user:42", b"user:\xff"),
        "JSON with a surrogate encoded in UTF-8": _replaced(b"user:42", b"user:\xed\xa0\x80"),
        "JSON with a raw control character": _replaced(b"user:42", b"user:\x01"),
        "NaN token": _replaced(b"[12345678.5", b"[NaN", embedding=_components(12345678.5)),
        "Infinity token": _replaced(b"[12345678.5", b"[-Infinity", embedding=_components(12345678.5)),
        "deep JSON array": b"[" * 200_000,
        "deep JSON in an unknown field": _replaced(b'"?"', b"[" * 200_000 + b"]" * 200_000, extra="?"),
        "deep JSON objects": b'{"a":' * 200_000,
        "principals twice": json_event()[:-1] + b', "principals": ["public"]}',
        "a key twice in filters.metadata": _replaced(
            b'{"year": "2020"}', b'{"year": "2020", "year": "2021"}'
        ),
        "Avro: one byte of magic": b"\xc3",
        "Avro: wrong magic": b"\xc3\x02" + avro_event()[2:],
        "Avro: breaks off in the fingerprint": avro_event()[:9],
        "Avro: nothing after the fingerprint": head(),
        "Avro: noise after the fingerprint": head() + b"\xff" * 4096,
        "Avro: breaks off in a string": avro_event()[:20],
        "Avro: breaks off in the embedding": avro_event()[:2000],
        "Avro: last byte missing": avro_event()[:-1],
        "Avro: a byte too many": avro_event() + b"\0",
        "Avro: twice": avro_event() + avro_datum(),
        "Avro: string of an exabyte": avro_event({"schema_version": zigzag(2**60)}),
        "Avro: string of negative length": avro_event({"schema_version": zigzag(-5)}),
        "Avro: a number of eleven bytes": avro_event({"occurred_at": b"\x80" * 10 + b"\x01"}),
        "Avro: a number beyond 64 bits": avro_event({"occurred_at": b"\xff" * 9 + b"\x7f"}),
        "Avro: array of a quintillion floats": avro_event({"embedding": zigzag(10**18)}),
        "Avro: array of a quintillion strings": avro_event({"principals": zigzag(10**18)}),
        "Avro: array of the most negative count": avro_event({"principals": zigzag(-(2**63)) + zigzag(1)}),
        "Avro: block of a negative size": avro_event({"principals": zigzag(-1) + zigzag(-9) + b"\x02a\0"}),
        "Avro: block of another size": avro_event({"principals": zigzag(-1) + zigzag(3) + b"\x02a\0"}),
        "Avro: map of a quintillion entries": avro_event(
            {"filters": b"\x02" + b"\0" * 3 + b"\x02" + zigzag(10**18)}
        ),
        "Avro: a key twice in a map": avro_event(
            {"filters": b"\x02" + b"\0" * 3 + b"\x02" + zigzag(2) + b"\x02a\x02b" * 2 + b"\0"}
        ),
        "Avro: a union's branch too far": avro_event({"profile": zigzag(2)}),
        "Avro: a union's negative branch": avro_event({"profile": zigzag(-1) + b"\x02a"}),
        "Avro: an int of 33 bits": avro_event({"k": zigzag(1) + zigzag(2**32)}),
        "Avro: a string that is no UTF-8": avro_event({"profile": b"\x02" + b"\x04\xc3\x28"}),
        "Avro: a surrogate in UTF-8": avro_event({"profile": b"\x02" + b"\x06\xed\xa0\x80"}),
        "Confluent: nothing after the magic": b"\0",
        "Confluent: breaks off in the id": b"\0\0\0\0",
    }
    unknown_schema = {
        "Confluent: without a registry": b"\0\0\0\0\x01" + avro_datum(),
        "Confluent: id and nothing else": b"\0\xff\xff\xff\xff",
        "Avro: unknown fingerprint": b"\xc3\x01" + bytes(range(8)) + avro_datum(),
        "Avro: fingerprint in big-endian": b"\xc3\x01" + head()[:1:-1] + avro_datum(),
        "Avro: a result's fingerprint": head(RESULT_WRITER) + avro_datum(),
    }
    unsupported_version = {
        "version 2.0.0": json_event(schema_version="2.0.0"),
        "version 0.9.0": json_event(schema_version="0.9.0"),
        "version 10.0.0": json_event(schema_version="10.0.0"),
        "version 2.0.0-rc.1": json_event(schema_version="2.0.0-rc.1"),
        "version 2.0.0 of something else": b'{"schema_version": "2.0.0", "vector": "AAAA", "embedding": [0]}',
        "Avro: version 2.0.0": avro_event(schema_version="2.0.0"),
        "Avro: version 2.0.0 and all else wrong": avro_event(
            schema_version="2.0.0", embedding=[0.0], event_id="", occurred_at=2**62, session_id=None
        ),
    }
    nul, lone = "a\0b", "a\ud800b"
    contract_violation = {
        "empty object": b"{}",
        "version absent": json_event(schema_version=...),
        "version null": json_event(schema_version=None),
        "version 1.0": json_event(schema_version="1.0"),
        "version of type number": json_event(schema_version=1),
        "version with a v": json_event(schema_version="v1.0.0"),
        "version 1.0.0-rc.1": json_event(schema_version="1.0.0-rc.1"),
        "version with a newline": json_event(schema_version="1.0.0\n"),
        "event_id absent": json_event(event_id=...),
        "event_id null": json_event(event_id=None),
        "event_id no UUID": json_event(event_id="42"),
        "event_id without hyphens": json_event(event_id=EVENT_ID.replace("-", "")),
        "event_id in braces": json_event(event_id="{" + EVENT_ID + "}"),
        "event_id with a newline": json_event(event_id=EVENT_ID + "\n"),
        "occurred_at absent": json_event(occurred_at=...),
        "occurred_at without offset": json_event(occurred_at="2025-06-01T12:00:00"),
        "occurred_at of type number": json_event(occurred_at=1_748_781_296),
        "occurred_at on 30 February": json_event(occurred_at="2025-02-30T12:00:00Z"),
        "occurred_at in a leap second": json_event(occurred_at="2016-12-31T23:59:60Z"),
        "occurred_at before year 1 in UTC": json_event(occurred_at="0001-01-01T00:00:00+01:00"),
        "occurred_at with a newline": json_event(occurred_at="2025-06-01T12:00:00Z\n"),
        "principals absent": json_event(principals=...),
        "principals empty": json_event(principals=[]),
        "principals of type string": json_event(principals="user:42"),
        "65 principals": json_event(principals=[f"user:{i}" for i in range(65)]),
        "an empty principal": json_event(principals=[""]),
        "a principal of 257 characters": json_event(principals=["x" * 257]),
        "a principal of type number": json_event(principals=[42]),
        "U+0000 in a principal": json_event(principals=[nul]),
        "unpaired surrogate in a principal": json_event(principals=[lone]),
        "embedding absent": json_event(embedding=...),
        "embedding null": json_event(embedding=None),
        "embedding of type string": json_event(embedding="AAAA"),
        "embedding of type object": json_event(embedding={"0": 1}),
        "component of type string": json_event(embedding=_components("0.1")),
        "component true": json_event(embedding=[True] * 768),
        "component null": json_event(embedding=_components(None)),
        "nested embedding": json_event(embedding=[embedding()]),
        "wrong dimension and no principals": json_event(embedding=[1.0], principals=[]),
        "session_id no UUID": json_event(session_id="session"),
        "topic_id of type number": json_event(topic_id=7),
        "profile of type number": json_event(profile=1),
        "U+0000 in profile": json_event(profile=nul),
        "k of type string": json_event(k="10"),
        "k true": json_event(k=True),
        "k 1.5": json_event(k=1.5),
        "k beyond float64": _replaced(b'"k": 12', b'"k": 1e400'),
        "similarity_threshold 1.5": json_event(similarity_threshold=1.5),
        "similarity_threshold -0.1": json_event(similarity_threshold=-0.1),
        "similarity_threshold of type string": json_event(similarity_threshold="0.5"),
        "token_budget 0": json_event(token_budget=0),
        "token_budget of type boolean": json_event(token_budget=True),
        "filters of type array": json_event(filters=[]),
        "filters.section of type number": json_event(filters={"section": 1}),
        "filters.metadata of type array": json_event(filters={"metadata": []}),
        "filters.metadata value of type number": json_event(filters={"metadata": {"year": 2020}}),
        "filters.metadata value null": json_event(filters={"metadata": {"year": None}}),
        "U+0000 in a filters.metadata key": json_event(filters={"metadata": {nul: "x"}}),
        "filters.metadata_contains value of type string": json_event(
            filters={"metadata_contains": {"year": "a"}}
        ),
        "filters.metadata_contains without values": json_event(filters={"metadata_contains": {"year": []}}),
        "filters.metadata_any with 65 values": json_event(filters={"metadata_any": {"year": ["a"] * 65}}),
        "filters.metadata_any value of type number": json_event(filters={"metadata_any": {"year": [2020]}}),
        "U+0000 in a filters.metadata_any value": json_event(filters={"metadata_any": {"year": [nul]}}),
        "filters.metadata_range of type array": json_event(filters={"metadata_range": []}),
        "filters.metadata_range without bounds": json_event(filters={"metadata_range": {"year": {}}}),
        "filters.metadata_range with a misspelt bound": json_event(
            filters={"metadata_range": {"year": {"min": 1}}}
        ),
        "filters.metadata_range bound of type string": json_event(
            filters={"metadata_range": {"year": {"gt": "1"}}}
        ),
        "filters.metadata_range bound beyond float64": _replaced(
            b'"gt": 1', b'"gt": 1e400', filters={"metadata_range": {"year": {"gt": 1}}}
        ),
        "filters.metadata_range instant without offset": json_event(
            filters={"metadata_range": {"year": {"after": "2020-01-01T00:00:00"}}}
        ),
        "explain of type string": json_event(explain="true"),
        "upstream_warnings of type string": json_event(upstream_warnings="text_truncated"),
        "17 upstream_warnings": json_event(upstream_warnings=["a"] * 17),
        "upstream_warnings with a long code": json_event(upstream_warnings=["a" * 65]),
        "upstream_warnings that is no code": json_event(upstream_warnings=["the lease"]),
        "unpaired surrogate in filters.section": json_event(filters={"section": lone}),
        "query_hash too short": json_event(query_hash="9f86d081"),
        "query_hash that is text": json_event(
            query_hash="where is the lease, and what does it say on pets".ljust(64)
        ),
        "expires_at no date": json_event(expires_at="tomorrow"),
        "Avro: event_id no UUID": avro_event(event_id="42"),
        "Avro: event_id as a URN": avro_event(event_id=f"urn:uuid:{EVENT_ID}"),
        "Avro: occurred_at beyond the year 9999": avro_event(occurred_at=2**62),
        "Avro: no principals": avro_event(principals=[]),
        "Avro: U+0000 in a string": avro_event(profile=nul),
        "Avro: version 1": avro_event(schema_version="1"),
        "Avro: token_budget 0": avro_event(token_budget=0),
        "Avro: similarity_threshold NaN": avro_event(similarity_threshold=float("nan")),
    }
    dimension_mismatch = {
        "767 components": json_event(embedding=embedding(dimensions=767)),
        "769 components": json_event(embedding=embedding(dimensions=769)),
        "1536 components": json_event(embedding=embedding(dimensions=1536)),
        "no components": json_event(embedding=[]),
        "767 components and one beyond float32": json_event(embedding=_components(1e39)[:767]),
        "Avro: 767 components": avro_event(embedding=embedding(dimensions=767)),
        "Avro: no components": avro_event(embedding=[]),
    }
    non_finite_embedding = {
        "component beyond float32": json_event(embedding=_components(3.5e38)),
        "component beyond float64": _replaced(b"[12345678.5", b"[-1e400", embedding=_components(12345678.5)),
        "component of 5,000 digits": _replaced(
            b"[1234567,", b"[" + b"9" * 5000 + b",", embedding=_components(1234567)
        ),
        "component of 50 digits": json_event(embedding=_components(-(10**50))),
        "Avro: NaN": avro_event(embedding=_components(float("nan"))),
        "Avro: infinity": avro_event(embedding=_components(float("inf"))),
        "Avro: minus infinity": avro_event(embedding=_components(0.0, float("-inf"))),
    }
    zero_embedding = {
        "zero vector": json_event(embedding=_components(0.0, 0.0)),
        "zero vector of integers": json_event(embedding=_components(0, 0)),
        "zero vector of negative zeros": json_event(embedding=_components(-0.0, 0.0)),
        "zero vector without a session for its topic": json_event(
            embedding=_components(0, 0), session_id=None
        ),
        "Avro: zero vector": avro_event(embedding=_components(-0.0, 0.0)),
    }
    topic_without_session = {
        "topic, session absent": json_event(session_id=...),
        "topic, session null": json_event(session_id=None),
        "Avro: topic without session": avro_event(session_id=None),
    }
    by_code = {
        "undecodable": undecodable,
        "unknown_schema": unknown_schema,
        "unsupported_version": unsupported_version,
        "contract_violation": contract_violation,
        "dimension_mismatch": dimension_mismatch,
        "non_finite_embedding": non_finite_embedding,
        "zero_embedding": zero_embedding,
        "topic_without_session": topic_without_session,
    }
    return [(name, value, code) for code, kinds in by_code.items() for name, value in kinds.items()]


BAD_INPUTS: list[tuple[str, bytes, str]] = _table()
"""Name, bytes, and the expected code."""
