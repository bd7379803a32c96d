"""What both Kafka peers share: options, decoding events and encoding results."""

import argparse
import json
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import orjson
from fastavro import parse_schema, schemaless_reader

__all__ = ["decode", "encode", "options", "parse"]

# Avro single-object encoding: a marker and the schema's fingerprint come first.
_HEAD_BYTES = 10


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--input-topic", required=True)
    parser.add_argument("--output-topic", required=True)
    parser.add_argument("--schema", type=Path, required=True, help="the events' Avro schema")
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--ef-search", type=int, required=True)
    parser.add_argument("--fetch-max-wait-ms", type=int, required=True)
    return parser


def parse(file: Path) -> Any:
    return parse_schema(json.loads(file.read_text(encoding="utf-8")))


def decode(schema: Any, value: bytes) -> dict[str, Any]:
    stream = BytesIO(value)
    stream.seek(_HEAD_BYTES)
    return cast("dict[str, Any]", schemaless_reader(stream, schema, None))


def encode(event_id: str, passages: list[dict[str, Any]]) -> bytes:
    return orjson.dumps({"event_id": event_id, "results": passages}, default=str)
