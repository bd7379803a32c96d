"""Converts between bytes and messages.

Reads Confluent's wire format (``00`` and a 4-byte id), Avro single-object encoding (``C3 01`` and a fingerprint), or
a JSON object. The first bytes identify the encoding unambiguously. Writes single-object encoding with the contract's
own schema.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

from fastavro import schemaless_reader, schemaless_writer

from streams import resources
from streams.core.errors import TerminalError, Undecodable, UnknownSchema
from streams.core.messages import QueryEmbedding, RetrievalResult, event_id_of
from streams.wire import strict_json
from streams.wire.datum_validator import read_floats
from streams.wire.writer_schemas import (
    BadWriterSchema,
    FileWriterSchemas,
    Resolver,
    WriterSchema,
    full_name,
    read_schemas,
    schemas_by_contract,
)

__all__ = ["BadWriterSchema", "Codec", "query_to_json", "result_to_json"]

_SINGLE_OBJECT: Final = b"\xc3\x01"
_SINGLE_OBJECT_HEAD: Final = 10
_CONFLUENT: Final = b"\x00"
_CONFLUENT_HEAD: Final = 5
_QUERY: Final = "query_embedding.v1.avsc"
_RESULT: Final = "retrieval_result.v1.avsc"
_EMPTY_ARRAY: Final = b"\0"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_INSTANTS: Final = ("occurred_at", "expires_at")


class Codec:
    """Decodes and encodes both contracts. Immutable, without I/O after construction; safe to share.

    Args:
        schema_path: a directory of additional ``.avsc`` files: the schemas of newer minor versions that producers may
            already write with (``ANABRANCH_SCHEMA_PATH``); not searched recursively.
        queries: additional source of writer schemas for query events, used after the files; the place for a schema
            registry.
        results: the same for results, which consumers decode.

    Raises:
        BadWriterSchema: a file in ``schema_path`` is not an Avro schema, belongs to neither contract, or writes data
            that the contract's schema cannot read.
    """

    def __init__(
        self,
        schema_path: Path | None = None,
        *,
        queries: Resolver | None = None,
        results: Resolver | None = None,
    ) -> None:
        avro = resources.schemas() / "avro"
        current = dict(read_schemas(avro))
        readers = {full_name(schema): schema for schema in (current[_QUERY], current[_RESULT])}
        schemas = [*current.items(), *read_schemas(avro / "released")]
        if schema_path is not None:
            schemas += read_schemas(schema_path)
        known = schemas_by_contract(schemas, readers)
        self._query = _Contract(known[full_name(current[_QUERY])], queries)
        self._result = _Contract(known[full_name(current[_RESULT])], results)

    def decode_query(self, value: bytes) -> QueryEmbedding:
        """Decode and validate a query event.

        Raises:
            TerminalError: of the class for the error. Nothing else is raised, whatever the bytes are. Profile, model
                and expiry are not checked here.
        """
        record = self._query.decode(value)
        try:
            return QueryEmbedding.parse(record)
        except TerminalError as error:
            error.event_id = event_id_of(record)
            raise

    def decode_result(self, value: bytes) -> RetrievalResult:
        """Decode and validate a result; raises as :meth:`decode_query` does."""
        return RetrievalResult.parse(self._result.decode(value))

    def encode_query(self, query: QueryEmbedding) -> bytes:
        """Encode a query event."""
        record = query.model_dump(mode="json", exclude={"embedding", *_INSTANTS})
        record["embedding"] = list(query.embedding)
        for name in _INSTANTS:
            instant = getattr(query, name)
            record[name] = None if instant is None else (instant - _EPOCH) // _MICROSECOND
        return self._query.encode(record)

    def encode_result(self, result: RetrievalResult) -> bytes:
        """Encode a result. The same result gives the same bytes."""
        return self._result.encode(result.model_dump(mode="json"))


class _Contract:
    """One contract's schemas. The first one is the reader's schema and is also used for writing."""

    def __init__(self, known: list[WriterSchema], registry: Resolver | None) -> None:
        self._own = known[0]
        self._resolvers: list[Resolver] = [FileWriterSchemas(known)]
        if registry is not None:
            self._resolvers.append(registry)

    def decode(self, value: bytes) -> dict[str, Any]:
        if value.startswith(_SINGLE_OBJECT):
            if len(value) < _SINGLE_OBJECT_HEAD:
                raise Undecodable("Avro single-object encoding is truncated within the fingerprint")
            fingerprint = value[2:_SINGLE_OBJECT_HEAD]
            for resolver in self._resolvers:
                if writer := resolver.by_fingerprint(fingerprint):
                    return self._datum(value, _SINGLE_OBJECT_HEAD, writer)
            raise UnknownSchema(f"no schema with the fingerprint {fingerprint.hex()}")
        if value.startswith(_CONFLUENT):
            if len(value) < _CONFLUENT_HEAD:
                raise Undecodable("Confluent wire format is truncated within the schema id")
            schema_id = int.from_bytes(value[1:_CONFLUENT_HEAD], "big")
            for resolver in self._resolvers:
                if writer := resolver.by_id(schema_id):
                    return self._datum(value, _CONFLUENT_HEAD, writer)
            raise UnknownSchema(f"no schema with the id {schema_id}")
        return strict_json.loads(value)

    def _datum(self, value: bytes, start: int, writer: WriterSchema) -> dict[str, Any]:
        ends = writer.check(value, start)
        if writer.fingerprint == self._own.fingerprint:
            record = _read(value, start, ends, writer)
        else:
            record = cast(
                "dict[str, Any]", schemaless_reader(BytesIO(value[start:]), writer.schema, self._own.schema)
            )
        for name in _INSTANTS:
            micros = record.get(name)
            if micros is not None:
                # An instant out of range stays a number, which the model rejects.
                with suppress(OverflowError):
                    record[name] = _EPOCH + timedelta(microseconds=micros)
        return record

    def encode(self, record: Mapping[str, Any]) -> bytes:
        stream = BytesIO()
        stream.write(_SINGLE_OBJECT + self._own.fingerprint)
        schemaless_writer(stream, self._own.schema, record)
        return stream.getvalue()


def _read(value: bytes, start: int, ends: Sequence[int], writer: WriterSchema) -> dict[str, Any]:
    """Decode a checked datum; arrays of floats become buffers, because fastavro would create an object per number."""
    arrays = {}
    parts = []
    begin = start
    for number, name in writer.float_arrays:
        at = ends[number - 1] if number else begin
        arrays[name] = read_floats(value, at)
        parts += [value[start:at], _EMPTY_ARRAY]
        start = ends[number]
    parts.append(value[start:])
    record = cast("dict[str, Any]", schemaless_reader(BytesIO(b"".join(parts)), writer.schema, None))
    record.update(arrays)
    return record


def query_to_json(query: QueryEmbedding) -> dict[str, Any]:
    """A query event in canonical form, as a JSON dictionary that its contract accepts.

    It has every field of the contract, with null for fields without a value. The embedding is float32, UUIDs are lower
    case, instants are UTC with six digits of microseconds and ``Z``.
    """
    record = query.model_dump(mode="json", exclude={"embedding", *_INSTANTS})
    return {
        name: list(query.embedding)
        if name == "embedding"
        else _instant(getattr(query, name))
        if name in _INSTANTS
        else record[name]
        for name in QueryEmbedding.model_fields
    }


def result_to_json(result: RetrievalResult) -> dict[str, Any]:
    """A result in canonical form, as a JSON dictionary that its contract accepts. It has every field, also nulls."""
    return result.model_dump(mode="json")


def _instant(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat(timespec="microseconds").replace("+00:00", "Z")
