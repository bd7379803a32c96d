"""Writer schemas, found by fingerprint or, in the future, by a registry's id."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any, Protocol

from fastavro import parse_schema
from fastavro.schema import SchemaParseException, UnknownType, fingerprint, to_parsing_canonical_form

from streams.wire.compatibility import unreadable
from streams.wire.datum_validator import DatumCheck, Unbounded, datum_validator

__all__ = ["BadWriterSchema", "FileWriterSchemas", "Resolver", "WriterSchema", "read_schemas"]


class BadWriterSchema(ValueError):
    """A schema file that cannot be used to read events; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class WriterSchema:
    """A schema with which producers may write one contract's messages.

    Attributes:
        fingerprint: CRC-64-AVRO of the parsing canonical form, 8 bytes, little-endian as on the wire.
        schema: parsed for fastavro, without logical types: UUIDs stay text and instants stay microseconds, so that
            the model validates them and the decoder does not raise.
        check: raises ``Undecodable`` unless the bytes from an offset to the end are exactly one datum.
        float_arrays: number and name of each of the record's fields that is an array of ``float``.
    """

    fingerprint: bytes
    schema: Any
    check: DatumCheck
    float_arrays: Sequence[tuple[int, str]]

    @classmethod
    def of(cls, schema: Any) -> "WriterSchema":
        """Prepare a schema (parsed JSON).

        Raises:
            BadWriterSchema: it is not an Avro schema, or the cost of decoding is not bounded by the size of the data.
        """
        try:
            parsed = parse_schema(_physical(schema))
            canonical = to_parsing_canonical_form(parsed)
            return cls(
                bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO")),
                parsed,
                datum_validator(parsed),
                _float_arrays(parsed),
            )
        except (SchemaParseException, UnknownType, KeyError, TypeError, AttributeError) as error:
            raise BadWriterSchema(f"not an Avro schema: {type(error).__name__}: {error}") from error
        except Unbounded as error:
            raise BadWriterSchema(str(error)) from error


class Resolver(Protocol):
    """Where writer schemas come from. A schema registry is another implementation of this."""

    def by_fingerprint(self, fingerprint: bytes) -> WriterSchema | None:
        """The schema for the 8-byte fingerprint of single-object encoding, or ``None`` if unknown."""
        ...

    def by_id(self, schema_id: int) -> WriterSchema | None:
        """The schema for a registry's id, or ``None`` if unknown."""
        ...


class FileWriterSchemas:
    """One contract's schemas from files: the released ones and the operator's. They have no registry ids."""

    def __init__(self, schemas: Iterable[WriterSchema]) -> None:
        self._schemas: dict[bytes, WriterSchema] = {}
        for schema in schemas:
            # Keep the first schema of a fingerprint: the same canonical form has the same wire format.
            self._schemas.setdefault(schema.fingerprint, schema)

    def by_fingerprint(self, fingerprint: bytes) -> WriterSchema | None:
        return self._schemas.get(fingerprint)

    def by_id(self, schema_id: int) -> WriterSchema | None:  # noqa: ARG002  # required by the protocol
        return None


def read_schemas(folder: Traversable) -> list[tuple[str, Any]]:
    """Name and parsed JSON of every ``.avsc`` directly in a folder, sorted by name.

    Raises:
        BadWriterSchema: the path is not a directory, or a file in it is not a JSON object.
    """
    if not folder.is_dir():
        raise BadWriterSchema(f"{folder} is not a directory")
    schemas = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".avsc"):
            try:
                schema = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise BadWriterSchema(f"{path.name}: {error}") from error
            if not isinstance(schema, dict):
                raise BadWriterSchema(f"{path.name}: not a record schema")
            schemas.append((path.name, schema))
    return schemas


def schemas_by_contract(
    schemas: Iterable[tuple[str, Any]], readers: Mapping[str, Any]
) -> dict[str, list[WriterSchema]]:
    """Group schemas by the contract that they write.

    Args:
        schemas: file names and schemas.
        readers: each contract's own schema by full record name.

    Raises:
        BadWriterSchema: a schema does not belong to any contract, or the contract's schema cannot read its data.
    """
    sorted_: dict[str, list[WriterSchema]] = {name: [] for name in readers}
    for file, schema in schemas:
        name = full_name(schema)
        if name not in readers:
            raise BadWriterSchema(
                f"{file}: {name or 'a schema without a name'} is not one of {', '.join(readers)}"
            )
        try:
            writer = WriterSchema.of(schema)
            problems = unreadable(schema, readers[name])
        except BadWriterSchema as error:
            raise BadWriterSchema(f"{file}: {error}") from error
        except KeyError as error:  # fastavro accepts a record without fields
            raise BadWriterSchema(f"{file}: not an Avro schema: {error} is missing") from error
        if problems:
            raise BadWriterSchema(f"{file}: the contract cannot read its data: {problems[0]}")
        sorted_[name].append(writer)
    return sorted_


def full_name(schema: Mapping[str, Any]) -> str:
    """The full name of a record schema."""
    name, namespace = schema.get("name", ""), schema.get("namespace", "")
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _float_arrays(schema: Any) -> list[tuple[int, str]]:
    if not isinstance(schema, dict):
        return []
    return [
        (number, field["name"])
        for number, field in enumerate(schema.get("fields", ()))
        if field["type"] == {"type": "array", "items": "float"}
    ]


def _physical(schema: Any) -> Any:
    """The same schema without logical types, which the canonical form, and so the fingerprint, excludes anyway."""
    if isinstance(schema, dict):
        return {
            key: _physical(value) if key in ("type", "fields", "items", "values") else value
            for key, value in schema.items()
            if key != "logicalType"
        }
    if isinstance(schema, list):
        return [_physical(item) for item in schema]
    return schema
