"""Converts between bytes and messages.

Reads Confluent's wire format (``00`` and a 4-byte id), Avro single-object encoding (``C3 01`` and a fingerprint), or
a JSON object. The first bytes identify the encoding unambiguously. Writes single-object encoding: events with the
schema of the oldest minor version that can express them, results with that of their ``schema_version``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

from fastavro import schemaless_reader, schemaless_writer

from streams import resources
from streams.core.errors import TerminalError, Undecodable, UnknownSchema
from streams.core.messages import (
    CONTRACT_VERSIONS,
    DIMENSIONS,
    QUERY_TEXT_VERSION,
    SCHEMA_VERSION,
    QueryEmbedding,
    QueryText,
    RetrievalResult,
    event_id_of,
    expires_at_of,
    oldest_query_version,
    oldest_result_version,
)
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
_QUERY: Final = "query_embedding"
_RESULT: Final = "retrieval_result"
_QUESTION: Final = "query_text"
_EMPTY_ARRAY: Final = b"\0"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_INSTANTS: Final = ("occurred_at", "expires_at")
_INSTANT_BOUNDS: Final = ("at_or_after", "after", "at_or_before", "before")
# Of JSON: what 1.0.0 does not have.
_ADDED_TO_QUERY: Final = ("explain", "upstream_warnings")
_ADDED_TO_FILTERS: Final = ("metadata_contains", "metadata_any", "metadata_range")
_ADDED_TO_RESULT: Final = ("explanation",)


class Codec:
    """Decodes and encodes all contracts. Immutable, without I/O after construction; safe to share.

    Args:
        schema_path: a directory of additional ``.avsc`` files: the schemas of newer minor versions that producers may
            already write with (``ANABRANCH_SCHEMA_PATH``); not searched recursively.
        queries: additional source of writer schemas for query events, used after the files; the place for a schema
            registry.
        results: the same for results, which consumers decode.
        dimensions: the number of components that an event's embedding must have; None: what the contract allows.

    Raises:
        BadWriterSchema: a file in ``schema_path`` is not an Avro schema, does not belong to a contract, or writes data
            that the contract's schema cannot read.
    """

    def __init__(
        self,
        schema_path: Path | None = None,
        *,
        queries: Resolver | None = None,
        results: Resolver | None = None,
        dimensions: int | None = DIMENSIONS,
    ) -> None:
        avro = resources.schemas() / "avro"
        files = dict(read_schemas(avro)), dict(read_schemas(avro / "released"))
        own = {contract: _by_version(contract, *files) for contract in (_QUERY, _RESULT)}
        own[_QUESTION] = {QUERY_TEXT_VERSION: files[0][f"{_QUESTION}.v1.avsc"]}
        newest = [[*versions.values()][-1] for versions in own.values()]
        readers = {full_name(schema): schema for schema in newest}
        others = [] if schema_path is None else read_schemas(schema_path)
        known = schemas_by_contract(others, readers)
        self._query = _Contract(own[_QUERY], known, queries)
        self._result = _Contract(own[_RESULT], known, results)
        self._question = _Contract(own[_QUESTION], known, None)
        self._dimensions = dimensions

    def decode_query(self, value: bytes) -> QueryEmbedding:
        """Decode and validate a query event.

        Raises:
            TerminalError: of the class for the error. Nothing else is raised, whatever the bytes are. Profile, model
                and expiry are not checked here.
        """
        record = self._query.decode(value)
        try:
            return QueryEmbedding.parse(record, dimensions=self._dimensions)
        except TerminalError as error:
            error.event_id, error.expires_at = event_id_of(record), expires_at_of(record)
            raise

    def decode_result(self, value: bytes) -> RetrievalResult:
        """Decode and validate a result; raises as :meth:`decode_query` does."""
        return RetrievalResult.parse(self._result.decode(value))

    def decode_text(self, value: bytes) -> QueryText:
        """Decode and validate a question in words; raises as :meth:`decode_query` does."""
        record = self._question.decode(value)
        try:
            return QueryText.parse(record)
        except TerminalError as error:
            error.event_id, error.expires_at = event_id_of(record), expires_at_of(record)
            raise

    def encode_text(self, text: QueryText) -> bytes:
        """Encode a question in words."""
        record = text.model_dump(mode="json")
        for holder, name in _instants(record):
            holder[name] = _micros(datetime.fromisoformat(holder[name]))
        return self._question.encode(record, QUERY_TEXT_VERSION)

    def encode_query(self, query: QueryEmbedding) -> bytes:
        """Encode a query event, with the schema of the oldest minor version that can express it."""
        return self._query.encode(_record(query, _micros), oldest_query_version(query))

    def encode_result(self, result: RetrievalResult) -> bytes:
        """Encode a result, with the schema of its version. The same result gives the same bytes."""
        return self._result.encode(result.model_dump(mode="json"), _result_version(result))


class _Contract:
    """One contract's schemas.

    Args:
        own: the package's schemas, by version; the newest is the reader's schema.
        others: the operator's, by full record name.
    """

    def __init__(
        self, own: Mapping[str, Any], others: Mapping[str, list[WriterSchema]], registry: Resolver | None
    ) -> None:
        self._writers = {version: WriterSchema.of(schema) for version, schema in own.items()}
        *_, self._reader = self._writers.values()
        # A later minor only adds nullable fields, and the model replaces an absent one by null.
        self._without_resolution = {writer.fingerprint for writer in self._writers.values()}
        *_, newest = own.values()
        known = [*self._writers.values(), *others[full_name(newest)]]
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
        if writer.fingerprint in self._without_resolution:
            record = _read(value, start, ends, writer)
        else:
            record = cast(
                "dict[str, Any]",
                schemaless_reader(BytesIO(value[start:]), writer.schema, self._reader.schema),
            )
        for holder, name in _instants(record):
            # An instant out of range stays a number, which the model rejects.
            with suppress(OverflowError):
                holder[name] = _EPOCH + timedelta(microseconds=holder[name])
        return record

    def encode(self, record: Mapping[str, Any], version: str) -> bytes:
        writer = self._writers[version]
        stream = BytesIO()
        stream.write(_SINGLE_OBJECT + writer.fingerprint)
        schemaless_writer(stream, writer.schema, record)
        return stream.getvalue()


def _by_version(contract: str, current: Mapping[str, Any], released: Mapping[str, Any]) -> dict[str, Any]:
    """The package's schemas of one contract, by version, oldest first."""
    versions = {version: released.get(f"{contract}.{version}.avsc") for version in CONTRACT_VERSIONS}
    return versions | {SCHEMA_VERSION: current[f"{contract}.v1.avsc"]}


def _instants(record: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each instant in a record that is not null: the dictionary that holds it, and its name there."""
    ranges = ((record.get("filters") or {}).get("metadata_range") or {}).values()
    for holder, names in [(record, _INSTANTS), *((bounds, _INSTANT_BOUNDS) for bounds in ranges)]:
        for name in names:
            if holder.get(name) is not None:
                yield cast("dict[str, Any]", holder), name


def _record(query: QueryEmbedding, instant: Callable[[datetime], Any]) -> dict[str, Any]:
    """An event as a dictionary of JSON types, with every field in order; `instant` converts its instants."""
    dumped = query.model_dump(mode="json", exclude={"embedding"})
    record = {
        name: list(query.embedding) if name == "embedding" else dumped[name]
        for name in QueryEmbedding.model_fields
    }
    for holder, name in _instants(record):
        holder[name] = instant(datetime.fromisoformat(holder[name]))
    return record


def _micros(instant: datetime) -> int:
    return (instant - _EPOCH) // _MICROSECOND


def _text(instant: datetime) -> str:
    return instant.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _result_version(result: RetrievalResult) -> str:
    """The version to write a result in: its own, as far as we know it, but one that can express it."""
    needed = oldest_result_version(result.query_embedding_dimensions)
    old = result.schema_version.startswith("1.0.") and result.explanation is None
    return needed if old else SCHEMA_VERSION


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

    It has every field of the oldest minor version that can express it, with null for fields without a value. The
    embedding is float32, UUIDs are lower case, instants are UTC with six digits of microseconds and ``Z``.
    """
    record = _record(query, _text)
    if oldest_query_version(query) == CONTRACT_VERSIONS[0]:
        _remove(record, _ADDED_TO_QUERY)
        _remove(record["filters"] or {}, _ADDED_TO_FILTERS)
    return record


def result_to_json(result: RetrievalResult) -> dict[str, Any]:
    """A result in canonical form, as a JSON dictionary that its contract accepts.

    It has every field of its version, also nulls.
    """
    record = result.model_dump(mode="json")
    if _result_version(result) == CONTRACT_VERSIONS[0]:
        _remove(record, _ADDED_TO_RESULT)
    return record


def _remove(record: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        record.pop(name, None)
