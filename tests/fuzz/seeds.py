"""Codecs and valid messages to start from: every encoding, and every way through the decoder."""

import copy
import json
from io import BytesIO

from fastavro import parse_schema, schemaless_writer

from streams import resources
from streams.wire import Codec
from streams.wire.writer_schemas import WriterSchema
from tests.bad_inputs import QUERY_WRITER, avro_datum, avro_event, embedding, json_event

__all__ = ["CONFLUENT", "NEWER", "SEEDS", "codec"]

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
    return Codec(queries=_Registry())


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

# Mutations of a short event rarely hit the embedding, which takes most of a long one.
SEEDS = {
    "json": json_event(embedding=_SMALL),
    "json without embedding": json_event(embedding=[]),
    "avro": avro_event(expires_at=32_472_144_000_000_000),
    "avro without embedding": avro_event(embedding=[]),
    "avro of a newer minor": _newer_event(),
    "confluent": CONFLUENT + avro_datum(),
    "confluent without embedding": CONFLUENT + avro_datum(embedding=[]),
}
