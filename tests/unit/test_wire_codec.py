"""Framing, fingerprints, and schemas of other minors."""

import json
import struct
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import UUID

import fastavro
import pytest

from streams import resources
from streams.core.errors import (
    ContractViolation,
    DimensionMismatch,
    NonFiniteEmbedding,
    Undecodable,
    UnknownSchema,
)
from streams.core.messages import Passage, QueryEmbedding, RetrievalResult, result_id
from streams.wire import BadWriterSchema, Codec, query_to_json
from streams.wire.writer_schemas import WriterSchema
from tests.bad_inputs import avro_event, embedding, valid_event, zigzag

AVRO = resources.schemas() / "avro"
EVENT_ID = UUID("6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d")
EVENT: dict[str, Any] = {
    "schema_version": "1.0.0",
    "event_id": str(EVENT_ID),
    "occurred_at": "2025-06-01T12:34:56.789012Z",
    "principals": ["user:42"],
    "embedding": [0.5] * 768,
}


def schema(name: str) -> dict[str, Any]:
    return dict(json.loads((AVRO / name).read_text(encoding="utf-8")))


def crc64(data: bytes) -> int:
    """CRC-64-AVRO as the Avro specification gives it."""
    empty = 0xC15D213AA4D7A795
    crc = empty
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (empty if crc & 1 else 0)
    return crc


def test_the_fingerprint_is_the_specifications() -> None:
    assert crc64(b'"int"') == 0x7275D51A3F395C8F
    for name in (
        "query_embedding.v1.avsc",
        "retrieval_result.v1.avsc",
        "released/query_embedding.1.0.0.avsc",
    ):
        canonical = fastavro.schema.to_parsing_canonical_form(schema(name)).encode()
        assert WriterSchema.of(schema(name)).fingerprint == struct.pack("<Q", crc64(canonical))


@pytest.mark.parametrize(
    ("name", "filters"),
    [
        ("released/query_embedding.1.0.0.avsc", None),
        (
            "query_embedding.v1.avsc",
            {"metadata_range": {"a": {"after": "2025-06-01T12:34:56+02:00", "gt": 1}}},
        ),
    ],
)
def test_what_is_written_is_read_by_plain_fastavro_with_the_published_schema(name: str, filters: Any) -> None:
    codec = Codec()
    event = EVENT | {"session_id": str(EVENT_ID).upper(), "k": 10.0, "filters": filters}
    query = QueryEmbedding.parse(event)
    data = codec.encode_query(query)
    published = fastavro.parse_schema(schema(name))
    read = fastavro.schemaless_reader(BytesIO(data[10:]), published, None)
    assert data[:10] == b"\xc3\x01" + WriterSchema.of(schema(name)).fingerprint
    # Logical types are there for those who decode with them.
    assert isinstance(read, dict)
    assert read["event_id"] == read["session_id"] == EVENT_ID
    assert read["occurred_at"] == query.occurred_at
    assert read["k"] == 10
    if filters is None:
        assert read["filters"] is None
    else:
        bounds = read["filters"]["metadata_range"]["a"]
        assert (bounds["after"], bounds["gt"]) == (datetime(2025, 6, 1, 10, 34, 56, tzinfo=UTC), 1)
    assert codec.decode_query(data) == query


@pytest.mark.parametrize("name", ["query_embedding.v1.avsc", "released/query_embedding.1.0.0.avsc"])
def test_a_plain_producer_with_the_published_schema_is_read(name: str) -> None:
    published = fastavro.parse_schema(schema(name))
    filters = {"section": "1", "metadata": {"a": "b"}}
    if name == "query_embedding.v1.avsc":
        filters |= {
            "metadata_any": {"a": ["b"]},
            "metadata_range": {"a": {"after": "2025-06-01T12:34:56+02:00", "gt": 1}},
        }
    query = QueryEmbedding.parse(EVENT | {"filters": filters})
    out = BytesIO()
    fastavro.schemaless_writer(out, published, query.model_dump())
    data = b"\xc3\x01" + WriterSchema.of(schema(name)).fingerprint + out.getvalue()
    assert Codec().decode_query(data) == query


def test_an_instant_out_of_range_in_a_range_is_refused() -> None:
    query = QueryEmbedding.parse(
        EVENT | {"filters": {"metadata_range": {"a": {"after": "9999-01-01T00:00:00Z"}}}}
    )
    record = query.model_dump(mode="json") | {"occurred_at": 0}
    record["filters"]["metadata_range"]["a"]["after"] = 2**62
    with pytest.raises(ContractViolation, match=r"filters\.metadata_range\.\*"):
        Codec().decode_query(single_object(schema("query_embedding.v1.avsc"), record))


def test_an_embedding_has_the_dimensions_of_the_deployment() -> None:
    def decoded(count: int, dimensions: int | None) -> int:
        event = json.dumps(EVENT | {"embedding": [0.5] * count}).encode()
        return len(Codec(dimensions=dimensions).decode_query(event).embedding)

    assert decoded(1024, 1024) == 1024
    assert [decoded(count, None) for count in (1, 768, 4000)] == [1, 768, 4000]
    for count, dimensions, expected in (
        (768, 1024, "1024"),
        (1024, 768, "768"),
        (0, 768, "768"),
        (0, None, "1 to 4000"),
        (4001, None, "1 to 4000"),
    ):
        with pytest.raises(DimensionMismatch) as caught:
            decoded(count, dimensions)
        assert str(caught.value) == f"embedding has {count} components, expected {expected}"


def result(**changes: Any) -> RetrievalResult:
    passage = Passage(
        rank=1,
        chunk_id=EVENT_ID,
        document_id=EVENT_ID,
        matched_chunk_id=EVENT_ID,
        scope="local",
        score=0.75,
        text_content="text",
        token_count=1,
        coordinates={"x0": 1.5},
        metadata={"year": "2020"},
    )
    values: dict[str, Any] = {
        "schema_version": "1.0.0",
        "result_id": result_id(EVENT_ID),
        "event_id": EVENT_ID,
        "profile": "chat",
        "query_embedding_dimensions": 768,
        "k_effective": 9,
        "k_returned": 1,
        "score_type": "cosine_similarity",
        "tokens_used": 1,
        "query_time_ms": 3.5,
        "warnings": ("k_clamped",),
        "results": (passage,),
    }
    return RetrievalResult(**(values | changes))


def test_a_result_there_and_back() -> None:
    codec = Codec()
    for one in (result(), result(results=(), k_returned=0, warnings=())):
        data = codec.encode_result(one)
        assert codec.decode_result(data) == one
        assert codec.encode_result(one) == data


def test_a_query_is_no_result() -> None:
    codec = Codec()
    with pytest.raises(UnknownSchema):
        codec.decode_query(codec.encode_result(result()))
    with pytest.raises(UnknownSchema):
        codec.decode_result(codec.encode_query(QueryEmbedding.parse(EVENT)))


def newer() -> dict[str, Any]:
    """A later minor: fields more, one of them in the middle, with a nested record."""
    changed = schema("query_embedding.v1.avsc")
    inner = {"type": "record", "name": "Origin", "fields": [{"name": "host", "type": "string"}]}
    changed["fields"][2:2] = [
        {"name": "origin", "type": ["null", inner], "default": None},
        {"name": "weights", "type": {"type": "array", "items": "double"}, "default": []},
        {"name": "labels", "type": {"type": "map", "values": "string"}, "default": {}},
    ]
    filters = next(field for field in changed["fields"] if field["name"] == "filters")
    filters["type"][1]["fields"].insert(0, {"name": "x_added", "type": ["null", "string"], "default": None})
    return changed


def older() -> dict[str, Any]:
    """A minor that lacked some optional fields."""
    changed = schema("query_embedding.v1.avsc")
    changed["fields"] = [f for f in changed["fields"] if f["name"] not in ("token_budget", "expires_at")]
    return changed


def single_object(writer: dict[str, Any], record: dict[str, Any]) -> bytes:
    out = BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(writer), record)
    return b"\xc3\x01" + WriterSchema.of(writer).fingerprint + out.getvalue()


@pytest.mark.parametrize("minor", [newer, older])
def test_another_minors_writer_schema_is_resolved(tmp_path: Path, minor: Any) -> None:
    event = EVENT | {"k": 12, "filters": {"section": "1"}}
    plain = QueryEmbedding.parse(event)
    record = plain.model_dump() | {
        "origin": {"host": "example.org"},
        "weights": [0.5, 0.25],
        "labels": {"a": "b"},
    }
    record["filters"] |= {"x_added": "de"}
    data = single_object(minor(), record)
    with pytest.raises(UnknownSchema):
        Codec().decode_query(data)

    (tmp_path / "other.avsc").write_text(json.dumps(minor()), encoding="utf-8")
    (tmp_path / "README.md").write_text("not a schema", encoding="utf-8")
    codec = Codec(tmp_path)
    assert query_to_json(codec.decode_query(data)) == query_to_json(plain)
    # What is written stays with the released schema.
    assert codec.encode_query(plain) == Codec().encode_query(plain)
    for broken in (data[:-1], data + b"\0", data[:70]):
        with pytest.raises(Undecodable, match=r"Avro datum"):
            codec.decode_query(broken)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "bad.avsc"),
        ("[]", "not a record schema"),
        ('{"type": "record"}', "is not one of"),
        (json.dumps({"type": "record", "name": "Other", "fields": []}), "is not one of"),
        (
            json.dumps(
                {"type": "record", "name": "QueryEmbedding", "namespace": "anabranch.v1", "fields": []}
            ),
            "the contract cannot read its data",
        ),
        (
            json.dumps({"type": "record", "name": "QueryEmbedding", "namespace": "anabranch.v1"}),
            "not an Avro schema",
        ),
        (
            json.dumps(
                {
                    "type": "record",
                    "name": "QueryEmbedding",
                    "namespace": "anabranch.v1",
                    "fields": [{"name": "x", "type": "nope"}],
                }
            ),
            "not an Avro schema",
        ),
        (
            json.dumps(
                newer()
                | {"fields": [*newer()["fields"], {"name": "n", "type": {"type": "array", "items": "null"}}]}
            ),
            "items of 0 bytes",
        ),
        (
            json.dumps(
                newer() | {"fields": [*newer()["fields"], {"name": "n", "type": ["null", "QueryEmbedding"]}]}
            ),
            "recursive",
        ),
    ],
)
def test_a_schema_that_cannot_be_used_stops_the_start(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "bad.avsc").write_text(content, encoding="utf-8")
    with pytest.raises(BadWriterSchema, match=r"bad\.avsc") as caught:
        Codec(tmp_path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_schema_path_that_is_none_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(BadWriterSchema, match="not a directory"):
        Codec(tmp_path / "absent")


class Registry:
    """Knows one id, as a schema registry will."""

    def by_fingerprint(self, fingerprint: bytes) -> WriterSchema | None:  # noqa: ARG002  # the protocol's
        return None

    def by_id(self, schema_id: int) -> WriterSchema | None:
        return WriterSchema.of(newer()) if schema_id == 258 else None


def test_a_registry_resolves_confluents_ids() -> None:
    plain = QueryEmbedding.parse(EVENT)
    datum = single_object(newer(), plain.model_dump() | {"origin": None, "weights": [], "labels": {}})[10:]
    codec = Codec(queries=Registry())
    assert query_to_json(codec.decode_query(b"\0\0\0\x01\x02" + datum)) == query_to_json(plain)
    with pytest.raises(UnknownSchema, match="id 259"):
        codec.decode_query(b"\0\0\0\x01\x03" + datum)


def test_messages_hold_and_are_immutable() -> None:
    query = Codec().decode_query(json.dumps(EVENT).encode())
    assert len(query.embedding) == 768
    with pytest.raises(TypeError, match="read-only"):
        query.embedding[0] = 1.0  # type: ignore[index]  # what the test is about
    assert query.occurred_at.isoformat() == "2025-06-01T12:34:56.789012+00:00"
    with pytest.raises(ValueError, match="frozen"):
        query.k = 3
    with pytest.raises(ContractViolation, match=r"^message is not an object$"):
        QueryEmbedding.parse([])


def test_an_embedding_in_any_blocks_is_the_same() -> None:
    numbers = embedding()
    plain = Codec().decode_query(avro_event(embedding=numbers))
    assert list(plain.embedding) == list(struct.unpack("<768f", struct.pack("<768f", *numbers)))
    whole = struct.pack("<768f", *numbers)
    for cuts in ((768,), (1, 767), (256, 256, 256)):
        blocks, sized, at = b"", b"", 0
        for count in cuts:
            items, at = whole[at : at + 4 * count], at + 4 * count
            blocks += zigzag(count) + items
            sized += zigzag(-count) + zigzag(len(items)) + items
        for array in (blocks, sized):
            assert Codec().decode_query(avro_event({"embedding": array + b"\0"})) == plain


@pytest.mark.parametrize("component", ["0000c07f", "0100807f", "ffffffff", "0000807f", "000080ff"])
def test_no_component_is_a_nan_of_any_kind_or_infinite(component: str) -> None:
    array = zigzag(768) + struct.pack("<767f", *embedding()[1:]) + bytes.fromhex(component) + b"\0"
    with pytest.raises(NonFiniteEmbedding):
        Codec().decode_query(avro_event({"embedding": array}))


@pytest.mark.parametrize("length", [1e-45, 1e-40, 1e-38, 1.17549e-38, 1.1755e-38, 3.4e38])
def test_both_encodings_of_short_and_long_embeddings_are_one_event(length: float) -> None:
    unit = [component / 4 for component in embedding()]
    numbers = struct.unpack("<768f", struct.pack("<768f", *(length * component for component in unit)))
    event = valid_event(embedding=list(numbers), expires_at=...)
    by_json = Codec().decode_query(json.dumps(event).encode())
    by_avro = Codec().decode_query(avro_event(embedding=numbers))
    assert by_json == by_avro
    largest = max(map(abs, numbers))
    if largest < 2**-126:
        assert 0.5 <= max(map(abs, by_avro.embedding)) < 1
    else:
        assert tuple(by_avro.embedding) == numbers


def test_clamping_to_int32() -> None:
    query = Codec().decode_query(json.dumps(EVENT | {"k": -(10**30), "token_budget": 2**80}).encode())
    assert (query.k, query.token_budget) == (-(2**31), 2**31 - 1)
    huge = json.dumps(EVENT | {"k": 77}).encode().replace(b"77", b"9" * 5000)
    assert Codec().decode_query(huge).k == 2**31 - 1
