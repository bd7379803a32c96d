"""Checks whether two versions of an Avro schema can read each other's data: FULL compatibility.

The checks follow Avro's resolution rules, but are stricter in three places where resolution would change the meaning:
full names must be equal, logical types must be equal, and strings and bytes are not interchangeable.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["incompatibilities", "unreadable"]

_PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAMED: Final = frozenset({"record", "error", "enum", "fixed"})
_ITEMS: Final[Mapping[str, str]] = {"array": "items", "map": "values"}
_REFERENCE: Final = "reference"
_PROMOTIONS: Final[Mapping[str, frozenset[str]]] = {
    "int": frozenset({"long", "float", "double"}),
    "long": frozenset({"float", "double"}),
    "float": frozenset({"double"}),
}


def incompatibilities(old: Any, new: Any) -> list[str]:
    """List why two schemas are not FULLY compatible; empty if they are.

    Args:
        old: a released schema, as parsed JSON.
        new: the schema that will replace it.

    Returns:
        One sentence per problem, with direction and path.
    """
    return [f"new cannot read old: {problem}" for problem in unreadable(old, new)] + [
        f"old cannot read new: {problem}" for problem in unreadable(new, old)
    ]


def unreadable(writer: Any, reader: Any) -> list[str]:
    """List why data of ``writer`` cannot be read as ``reader`` (both parsed JSON); empty if all of it can."""
    return list(_Resolution(writer, reader).problems())


class _Schema:
    """A schema with full names, and with every primitive or reference as ``{"type": ...}``."""

    def __init__(self, schema: Any) -> None:
        self._types: dict[str, dict[str, Any]] = {}
        self.root = self._expand(schema, "")

    def resolve_reference(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The definition that a reference points to; any other schema unchanged."""
        return self._types[schema["name"]] if schema["type"] == _REFERENCE else schema

    def _expand(self, schema: Any, namespace: str) -> Any:
        if isinstance(schema, list):
            return [self._expand(branch, namespace) for branch in schema]
        if isinstance(schema, str):
            schema = {"type": schema}
        kind = schema["type"]
        expanded = dict(schema)
        if not isinstance(kind, str):
            return self._expand(kind, namespace)
        if kind in _NAMED:
            expanded["name"] = name = _full(schema["name"], schema.get("namespace", namespace))
            self._types[name] = expanded
            inner = name.rpartition(".")[0]
            if "fields" in schema:
                expanded["fields"] = [
                    field | {"type": self._expand(field["type"], inner)} for field in schema["fields"]
                ]
        elif kind in _ITEMS:
            expanded[_ITEMS[kind]] = self._expand(schema[_ITEMS[kind]], namespace)
        elif kind not in _PRIMITIVES:
            expanded = {"type": _REFERENCE, "name": _full(kind, namespace)}
        return expanded


_Pairs = frozenset[tuple[str, str]]


class _Resolution:
    def __init__(self, writer: Any, reader: Any) -> None:
        self._writer = _Schema(writer)
        self._reader = _Schema(reader)

    def problems(self) -> Iterator[str]:
        return self._resolve(self._writer.root, self._reader.root, "", frozenset())

    def _resolve(self, writer: Any, reader: Any, at: str, above: _Pairs) -> Iterator[str]:
        """Yield the problems between two schemas; ``above`` has the pairs of enclosing records."""
        if isinstance(writer, list):
            for branch in writer:
                yield from self._resolve(branch, reader, at, above)
            return
        writer = self._writer.resolve_reference(writer)
        if isinstance(reader, list):
            if all(any(self._resolve(writer, branch, at, above)) for branch in reader):
                yield f"{_at(at)}: no branch of the reader's union accepts {_label(writer)}"
            return
        reader = self._reader.resolve_reference(reader)
        wrote, reads = writer["type"], reader["type"]
        logical = writer.get("logicalType"), reader.get("logicalType")
        promoted = reads in _PROMOTIONS.get(wrote, ()) and logical == (None, None)
        if (wrote != reads and not promoted) or logical[0] != logical[1]:
            yield f"{_at(at)}: {_label(writer)} cannot be read as {_label(reader)}"
        elif wrote == "array":
            yield from self._resolve(writer["items"], reader["items"], f"{at}[]", above)
        elif wrote == "map":
            yield from self._resolve(writer["values"], reader["values"], f"{at}{{}}", above)
        elif wrote in _NAMED:
            yield from self._named(writer, reader, at, above)

    def _named(self, writer: dict[str, Any], reader: dict[str, Any], at: str, above: _Pairs) -> Iterator[str]:
        pair = (writer["name"], reader["name"])
        if pair[0] != pair[1]:
            yield f"{_at(at)}: the writer's name is {pair[0]}, the reader's is {pair[1]}"
        elif writer["type"] == "fixed":
            if writer["size"] != reader["size"]:
                yield f"{_at(at)}: the writer's size is {writer['size']}, the reader's is {reader['size']}"
        elif writer["type"] == "enum":
            unknown = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
            if unknown and "default" not in reader:
                yield f"{_at(at)}: the reader's enum lacks {', '.join(unknown)} and has no default"
        elif pair not in above:
            yield from self._fields(writer, reader, at, above | {pair})

    def _fields(
        self, writer: dict[str, Any], reader: dict[str, Any], at: str, above: _Pairs
    ) -> Iterator[str]:
        written = {field["name"]: field for field in writer["fields"]}
        for field in reader["fields"]:
            path = f"{at}.{field['name']}" if at else str(field["name"])
            names = (field["name"], *field.get("aliases", ()))
            source = next((written[name] for name in names if name in written), None)
            if source is not None:
                yield from self._resolve(source["type"], field["type"], path, above)
            elif "default" not in field:
                yield f"{path}: missing in the writer's schema, and the reader's has no default"


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _label(schema: Mapping[str, Any]) -> str:
    name = str(schema.get("name", schema["type"]))
    return f"{name} ({schema['logicalType']})" if "logicalType" in schema else name


def _at(path: str) -> str:
    return path or "root"
