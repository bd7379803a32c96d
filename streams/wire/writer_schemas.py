"""Writer schemas: what a fingerprint, or one day a registry's id, stands for."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any, Protocol

from fastavro import parse_schema
from fastavro.schema import SchemaParseException, UnknownType, fingerprint, to_parsing_canonical_form

from streams.wire.compatibility import unreadable
from streams.wire.datum_validator import Unbounded, datum_validator

__all__ = ["BadWriterSchema", "FileWriterSchemas", "Resolver", "WriterSchema", "read_schemas"]


class BadWriterSchema(ValueError):
    """A schema file that cannot be used to read events; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class WriterSchema:
    """A schema that messages of one contract may be written with.

    Attributes:
        fingerprint: CRC-64-AVRO of the parsing canonical form, 8 bytes, little-endian as on the wire.
        schema: parsed for fastavro, without logical types: UUIDs stay text and instants stay microseconds,
            so that the model judges them and not an exception from within the decoder.
        check: raises ``Undecodable`` unless one datum fills the bytes from an offset to the end.
    """

    fingerprint: bytes
    schema: Any
    check: Callable[[bytes, int], None]

    @classmethod
    def of(cls, schema: Any) -> "WriterSchema":
        """Prepare a schema (parsed JSON).

        Raises:
            BadWriterSchema: it is no Avro schema, or its data could cost more than its size.
        """
        try:
            parsed = parse_schema(_physical(schema))
            canonical = to_parsing_canonical_form(parsed)
            return cls(bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO")), parsed, datum_validator(parsed))
        except (SchemaParseException, UnknownType, KeyError, TypeError, AttributeError) as error:
            raise BadWriterSchema(f"no Avro schema: {type(error).__name__}: {error}") from error
        except Unbounded as error:
            raise BadWriterSchema(str(error)) from error


class Resolver(Protocol):
    """Where writer schemas come from. A schema registry is another implementation of this."""

    def by_fingerprint(self, fingerprint: bytes) -> WriterSchema | None:
        """The writer of single-object encoding's 8 bytes, or ``None`` if it is not known."""
        ...

    def by_id(self, schema_id: int) -> WriterSchema | None:
        """The writer of a registry's id, or ``None`` if it is not known."""
        ...


class FileWriterSchemas:
    """One contract's schemas from files, the released ones and an operator's. They have no registry ids."""

    def __init__(self, writers: Iterable[WriterSchema]) -> None:
        self._writers: dict[bytes, WriterSchema] = {}
        for writer in writers:
            # The first of a fingerprint stays: the same canonical form is the same bytes.
            self._writers.setdefault(writer.fingerprint, writer)

    def by_fingerprint(self, fingerprint: bytes) -> WriterSchema | None:
        return self._writers.get(fingerprint)

    def by_id(self, schema_id: int) -> WriterSchema | None:  # noqa: ARG002  # the protocol's
        return None


def read_schemas(folder: Traversable) -> list[tuple[str, Any]]:
    """Name and parsed JSON of every ``.avsc`` directly in a folder, in order of the names.

    Raises:
        BadWriterSchema: the folder is none, or a file in it is no JSON object.
    """
    if not folder.is_dir():
        raise BadWriterSchema(f"{folder} is no directory")
    schemas = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".avsc"):
            try:
                schema = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise BadWriterSchema(f"{path.name}: {error}") from error
            if not isinstance(schema, dict):
                raise BadWriterSchema(f"{path.name}: no record schema")
            schemas.append((path.name, schema))
    return schemas


def writers(schemas: Iterable[tuple[str, Any]], readers: Mapping[str, Any]) -> dict[str, list[WriterSchema]]:
    """Sort schemas by the contract they write.

    Args:
        schemas: file name and schema.
        readers: each contract's own schema by full record name.

    Raises:
        BadWriterSchema: a schema belongs to no contract, or the contract's schema cannot read what it writes.
    """
    sorted_: dict[str, list[WriterSchema]] = {name: [] for name in readers}
    for file, schema in schemas:
        name = full_name(schema)
        if name not in readers:
            raise BadWriterSchema(
                f"{file}: {name or 'a schema without a name'} is none of {', '.join(readers)}"
            )
        try:
            writer = WriterSchema.of(schema)
            problems = unreadable(schema, readers[name])
        except BadWriterSchema as error:
            raise BadWriterSchema(f"{file}: {error}") from error
        except KeyError as error:  # fastavro lets a record without fields pass
            raise BadWriterSchema(f"{file}: no Avro schema: {error} is missing") from error
        if problems:
            raise BadWriterSchema(f"{file}: cannot be read: {problems[0]}")
        sorted_[name].append(writer)
    return sorted_


def full_name(schema: Mapping[str, Any]) -> str:
    """Full name of a record schema."""
    name, namespace = schema.get("name", ""), schema.get("namespace", "")
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _physical(schema: Any) -> Any:
    """The same schema without logical types; the canonical form, and so the fingerprint, has none anyway."""
    if isinstance(schema, dict):
        return {
            key: _physical(value) if key in ("type", "fields", "items", "values") else value
            for key, value in schema.items()
            if key != "logicalType"
        }
    if isinstance(schema, list):
        return [_physical(item) for item in schema]
    return schema
