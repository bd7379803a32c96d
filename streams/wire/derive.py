"""Avro schemas derived from the JSON contracts.

Pure: JSON Schema in, Avro schema out. Supports the subset of draft-07 that the contracts use. Anything else raises
:class:`NotDerivable`, because ignoring a keyword could silently drop a field.

==================================================  =============================================
JSON Schema                                         Avro
==================================================  =============================================
object with ``properties`` and a ``title``          record with that name
object with ``additionalProperties``: a schema      map
array                                               array
string; ``format`` uuid                             string; logical type ``uuid``
``format`` date-time                                long, logical type ``timestamp-micros``
string with ``enum`` and a ``title``                enum with that name
integer within int32; within int64                  int; long
number                                              double
``anyOf`` [schema, null], field not required        union [null, T] with default null
``x-avro-type``                                     ``int``, ``long``, ``float`` or ``double``, if the
                                                    bounds do not determine it
``x-avro-namespace`` at the root                    namespace of the records
==================================================  =============================================
"""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

__all__ = ["NotDerivable", "contract_files", "derive", "derive_all", "stale", "write"]

Json = dict[str, Any]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INT32: Final = (-(2**31), 2**31 - 1)
_INT64: Final = (-(2**63), 2**63 - 1)
_NUMERIC: Final = {"integer": {"int", "long"}, "number": {"float", "double"}}

# The keywords allowed for each type. Avro cannot express the assertions among them; the typed model enforces those.
_ANNOTATIONS: Final = {"title", "description", "examples", "$comment"}
_KNOWN: Final[Mapping[str, set[str]]] = {
    "object": {"properties", "required", "additionalProperties", "propertyNames", "if", "then", "anyOf"},
    "array": {"items", "minItems", "maxItems", "contains"},
    "string": {"format", "pattern", "not", "minLength", "maxLength", "enum", "const"},
    "integer": {"minimum", "maximum", "const", "x-avro-type"},
    "number": {"minimum", "maximum", "x-avro-type"},
    "boolean": set(),
}
_ROOT_ONLY: Final = {"$schema", "$id", "definitions", "x-avro-namespace"}
_REFINEMENTS: Final = {"minLength", "maxLength", "pattern", "not"}


class NotDerivable(ValueError):
    """The contract uses a construct that this module does not support; the message has its JSON pointer."""


def derive(contract: Json) -> dict[str, Any]:
    """Derive a self-contained Avro record schema from one contract.

    Args:
        contract: a draft-07 schema of an object, with ``title`` and ``x-avro-namespace``.

    Raises:
        NotDerivable: the message names the place and the construct.
    """
    return _Derivation(contract).root()


def derive_all(contracts_dir: Traversable) -> dict[str, str]:
    """Derive every contract ``<name>/v<major>/<stem>.schema.json`` in a folder.

    Returns:
        File name (``<stem>.v<major>.avsc``) → file content, sorted by name.

    Raises:
        NotDerivable: the message names the contract, the place and the construct.
    """
    derived = {}
    for path, version in contract_files(contracts_dir):
        stem = path.name.removesuffix(".schema.json")
        try:
            schema = derive(json.loads(path.read_text(encoding="utf-8")))
        except NotDerivable as error:
            raise NotDerivable(f"{path.name}: {error}") from None
        derived[f"{stem}.{version}.avsc"] = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    return dict(sorted(derived.items()))


def stale(contracts_dir: Traversable, avro_dir: Traversable) -> list[str]:
    """Names of ``.avsc`` files in a folder that are missing, differ, or do not belong to any contract."""
    derived = derive_all(contracts_dir)
    present = {path.name: path for path in avro_dir.iterdir() if path.name.endswith(".avsc")}
    return sorted(
        name
        for name in derived.keys() | present.keys()
        if name not in derived
        or name not in present
        or present[name].read_text(encoding="utf-8") != derived[name]
    )


def write(contracts_dir: Traversable, avro_dir: Path) -> list[str]:
    """Write the missing and differing files into a folder and return their names. Never deletes a file."""
    derived = derive_all(contracts_dir)
    avro_dir.mkdir(parents=True, exist_ok=True)
    changed = [name for name in stale(contracts_dir, avro_dir) if name in derived]
    for name in changed:
        (avro_dir / name).write_text(derived[name], encoding="utf-8")
    return changed


def contract_files(contracts_dir: Traversable) -> Iterator[tuple[Traversable, str]]:
    """Each contract ``<name>/v<major>/<stem>.schema.json`` in a folder, and its ``v<major>``."""
    for contract in contracts_dir.iterdir():
        if not contract.is_dir():
            continue
        for version in contract.iterdir():
            if not version.is_dir() or not re.fullmatch(r"v[1-9][0-9]*", version.name):
                continue
            for path in version.iterdir():
                if path.name.endswith(".schema.json"):
                    yield path, version.name


class _Derivation:
    def __init__(self, contract: Json) -> None:
        self._contract = contract
        self._names: set[str] = set()

    def root(self) -> dict[str, Any]:
        contract = self._contract
        namespace = contract.get("x-avro-namespace")
        if not isinstance(namespace, str):
            raise NotDerivable("#: x-avro-namespace is missing")
        body = {key: value for key, value in contract.items() if key not in _ROOT_ONLY}
        schema = self._type(body, "#")
        if not isinstance(schema, dict) or schema["type"] != "record":
            raise NotDerivable("#: a contract must be an object with properties")
        head = {"type": schema.pop("type"), "name": schema.pop("name"), "namespace": namespace}
        return head | schema

    def _type(self, schema: Json, at: str) -> Any:
        schema = self._resolve_reference(schema, at)
        kind = schema.get("type")
        if not isinstance(kind, str) or kind not in _KNOWN:
            raise NotDerivable(f"{at}: type {kind!r} is not supported")
        unknown = schema.keys() - _KNOWN[kind] - _ANNOTATIONS - {"type"}
        if unknown:
            raise NotDerivable(f"{at}: {kind} with {', '.join(sorted(unknown))} is not supported")
        derived: Any
        match kind:
            case "object" if "properties" in schema:
                derived = self._record(schema, at)
            case "object":
                derived = self._map(schema, at)
            case "array":
                if not isinstance(schema.get("items"), dict):
                    raise NotDerivable(f"{at}: an array must have exactly one schema for its items")
                derived = {"type": "array", "items": self._type(schema["items"], f"{at}/items")}
            case "string":
                derived = self._string(schema, at)
            case "integer" | "number":
                derived = _numeric(schema, at)
            case _:
                derived = "boolean"
        return derived

    def _resolve_reference(self, schema: Json, at: str) -> Json:
        """Follow ``$ref``, alone or as the only member of ``allOf`` next to annotations and refinements."""
        if "allOf" in schema:
            members = schema["allOf"]
            extra = schema.keys() - {"allOf"} - _ANNOTATIONS - _REFINEMENTS
            if len(members) != 1 or members[0].keys() != {"$ref"} or extra:
                raise NotDerivable(
                    f"{at}: allOf is only supported with one $ref, next to annotations and string bounds"
                )
            return self._resolve_reference(members[0], at) | {
                key: value for key, value in schema.items() if key != "allOf"
            }
        if "$ref" in schema:
            reference = schema["$ref"]
            prefix, _, name = reference.rpartition("/")
            if schema.keys() != {"$ref"} or prefix != "#/definitions":
                raise NotDerivable(
                    f"{at}: only a $ref into #/definitions, with nothing next to it, is supported"
                )
            target = self._contract.get("definitions", {}).get(name)
            if not isinstance(target, dict) or "$ref" in target or "allOf" in target:
                raise NotDerivable(f"{at}: {reference} is missing, or contains another reference")
            return dict(target)
        return schema

    def _record(self, schema: Json, at: str) -> dict[str, Any]:
        if not isinstance(schema.get("additionalProperties", True), bool):
            raise NotDerivable(
                f"{at}: an object cannot have both properties and a schema for additionalProperties"
            )
        name = self._name(schema, at)
        required = set(schema.get("required", ()))
        missing = required - schema["properties"].keys()
        if missing:
            raise NotDerivable(f"{at}: required, but not in properties: {', '.join(sorted(missing))}")
        fields = [
            self._field(key, value, f"{at}/properties/{key}", required=key in required)
            for key, value in schema["properties"].items()
        ]
        return {"type": "record", "name": name, **_doc(schema), "fields": fields}

    def _field(self, name: str, schema: Json, at: str, *, required: bool) -> dict[str, Any]:
        if not _NAME.fullmatch(name):
            raise NotDerivable(f"{at}: not an Avro name")
        if "anyOf" not in schema:
            if not required:
                raise NotDerivable(f"{at}: an optional field must be nullable: use anyOf [schema, null]")
            return {"name": name, **_doc(schema), "type": self._type(schema, at)}
        members = schema["anyOf"]
        if schema.keys() - {"anyOf"} - _ANNOTATIONS or members[1:] != [{"type": "null"}]:
            raise NotDerivable(f"{at}: anyOf is only supported as [schema, null], next to annotations")
        if required:
            raise NotDerivable(f"{at}: a nullable field must be optional: remove it from required")
        inner = self._type(members[0], f"{at}/anyOf/0")
        return {"name": name, **_doc(schema), "type": ["null", inner], "default": None}

    def _map(self, schema: Json, at: str) -> dict[str, Any]:
        values = schema.get("additionalProperties")
        if not isinstance(values, dict) or schema.keys() & {"required", "if", "then", "anyOf"}:
            raise NotDerivable(f"{at}: an object must have properties, or additionalProperties with a schema")
        return {"type": "map", "values": self._type(values, f"{at}/additionalProperties")}

    def _string(self, schema: Json, at: str) -> Any:
        if "enum" in schema:
            symbols = schema["enum"]
            if not all(isinstance(symbol, str) and _NAME.fullmatch(symbol) for symbol in symbols):
                raise NotDerivable(f"{at}: an enum's values must be Avro names")
            return {"type": "enum", "name": self._name(schema, at), "symbols": list(symbols)}
        match schema.get("format"):
            case None:
                return "string"
            case "uuid":
                return {"type": "string", "logicalType": "uuid"}
            case "date-time":
                return {"type": "long", "logicalType": "timestamp-micros"}
            case other:
                raise NotDerivable(f"{at}: format {other!r} is not supported")

    def _name(self, schema: Json, at: str) -> str:
        name = schema.get("title")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise NotDerivable(f"{at}: a record or enum needs a title that is an Avro name")
        if name in self._names:
            raise NotDerivable(f"{at}: the title {name} is already in use")
        self._names.add(name)
        return name


def _numeric(schema: Json, at: str) -> str:
    kind = schema["type"]
    if "x-avro-type" in schema:
        avro = schema["x-avro-type"]
        if avro not in _NUMERIC[kind]:
            raise NotDerivable(f"{at}: x-avro-type {avro!r} is invalid for type {kind}")
        return str(avro)
    if kind == "number":
        return "double"
    if "const" in schema:
        low = high = schema["const"]
    else:
        low, high = schema.get("minimum"), schema.get("maximum")
    if low is None or high is None or low < _INT64[0] or high > _INT64[1]:
        raise NotDerivable(f"{at}: an integer needs bounds within int64, or x-avro-type")
    return "int" if _INT32[0] <= low and high <= _INT32[1] else "long"


def _doc(schema: Json) -> dict[str, str]:
    return {"doc": schema["description"]} if "description" in schema else {}
