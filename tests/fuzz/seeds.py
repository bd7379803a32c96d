"""Codecs and valid messages to start from: of both contracts, every encoding, and every way through the decoder."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

from fastavro import parse_schema, schemaless_writer

from streams import resources
from streams.wire import Codec
from streams.wire.writer_schemas import WriterSchema
from tests.bad_inputs import (
    QUERY_WRITER,
    TEXT_WRITER,
    avro_datum,
    avro_event,
    datum,
    embedding,
    head,
    json_event,
    valid_event,
    valid_text,
)

__all__ = ["CONFLUENT", "NEWER", "QUERIES", "SEEDS", "SUBJECTS", "TEXTS", "Subject", "codec"]

CONFLUENT = b"\0\0\0\0\x01"


def _newer() -> WriterSchema:
    """A later minor's schema, whose events are read by Avro's resolution: a field more, in another order."""
    schema = json.loads((resources.schemas() / "avro/query_embedding.v1.avsc").read_text(encoding="utf-8"))
    schema = copy.deepcopy(schema)
    added = {"name": "added", "type": {"type": "array", "items": ["null", "string", "double"]}, "default": []}
    schema["fields"] = [*reversed(schema["fields"]), added]
    return WriterSchema.of(schema)


NEWER = _newer()


class _Registry:
    """Knows the id 1, and the newer schema by its fingerprint."""

    def by_fingerprint(self, fingerprint: bytes) -> WriterSchema | None:
        return NEWER if fingerprint == NEWER.fingerprint else None

    def by_id(self, schema_id: int) -> WriterSchema | None:
        return QUERY_WRITER if schema_id == 1 else None


def codec() -> Codec:
    """One that knows a registry, so that Confluent's messages are decoded and not only refused."""
    return Codec(queries=_Registry(), dimensions=None)


def _newer_event() -> bytes:
    out = BytesIO()
    event = {
        **{field["name"]: None for field in NEWER.schema["fields"]},
        "schema_version": "1.1.0",
        "event_id": "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d",
        "occurred_at": 1_748_781_296_789_012,
        "principals": ["user:42", "group:law"],
        "embedding": _SMALL,
        "filters": {
            "section": "1.2",
            "source_url_prefix": None,
            "document_type": None,
            "metadata": {"year": "2020", "é": ""},
        },
        "added": [None, "a", 1.5],
    }
    schemaless_writer(out, parse_schema(NEWER.schema), event)
    return b"\xc3\x01" + NEWER.fingerprint + out.getvalue()


_SMALL = [round(x, 1) for x in embedding()]

_FILTERS_OF_1_1_0 = {
    "metadata_contains": {"tags": ["a", "b"]},
    "metadata_any": {"year": ["2020", "2021"]},
    "metadata_range": {"year": {"gte": 2020, "lt": 2021.5}, "published": {"after": "2020-01-01T00:00:00Z"}},
}
_OF_1_1_0 = json_event(
    schema_version="1.1.0",
    embedding=_SMALL,
    filters=_FILTERS_OF_1_1_0,
    explain=True,
    upstream_warnings=["text_truncated"],
)

# Mutations of a short event rarely hit the embedding, which takes most of a long one.
SEEDS = {
    "json": json_event(embedding=_SMALL),
    "json without embedding": json_event(embedding=[]),
    "json of 1.1.0": _OF_1_1_0,
    "avro of 1.1.0": Codec().encode_query(Codec().decode_query(_OF_1_1_0)),
    "avro of 1.0.0": Codec().encode_query(Codec().decode_query(json_event(embedding=_SMALL))),
    "avro": avro_event(expires_at=32_472_144_000_000_000),
    "avro without embedding": avro_event(embedding=[]),
    "avro of a newer minor": _newer_event(),
    "confluent": CONFLUENT + avro_datum(),
    "confluent without embedding": CONFLUENT + avro_datum(embedding=[]),
}


@dataclass(frozen=True)
class Subject:
    """A contract, and what hostile messages are made of.

    Attributes:
        name: the contract's.
        valid: a valid event as a JSON dictionary, with changed fields.
        seeds: valid messages.
        short: changes that leave little but the others.
        long: changes that make a message as large as usual.
    """

    name: str
    writer: WriterSchema
    valid: Callable[..., dict[str, Any]]
    seeds: Mapping[str, bytes]
    short: Mapping[str, Any]
    long: Mapping[str, Any]

    @property
    def fields(self) -> list[str]:
        return [field["name"] for field in self.writer.schema["fields"]]

    def json(self, **changes: Any) -> bytes:
        return json.dumps(self.valid(**changes)).encode()

    def avro(self, raw: dict[str, bytes], **changes: Any) -> bytes:
        """With some fields' own bytes."""
        instants: dict[str, Any] = {"occurred_at": 1_748_781_296_789_012, "expires_at": None}
        return head(self.writer) + datum(self.writer, self.valid(**instants) | changes, raw)


QUERIES: Final = Subject(
    "query_embedding", QUERY_WRITER, valid_event, SEEDS, {"embedding": []}, {"embedding": [0.5] * 768}
)


def _texts() -> dict[str, bytes]:
    own = Codec()
    shortest = json.dumps(
        {
            name: value
            for name, value in valid_text(text="?").items()
            if name in {"schema_version", "event_id", "occurred_at", "principals", "text"}
        }
    ).encode()
    full = json.dumps(valid_text(filters=_FILTERS_OF_1_1_0)).encode()
    return {
        "json": full,
        "json without optional fields": shortest,
        "avro": own.encode_text(own.decode_text(full)),
        "avro without optional fields": own.encode_text(own.decode_text(shortest)),
    }


TEXTS: Final = Subject(
    "query_text",
    TEXT_WRITER,
    valid_text,
    _texts(),
    {"conversation": None},
    {"text": "a question " * 300},
)
SUBJECTS: Final = {subject.name: subject for subject in (QUERIES, TEXTS)}
