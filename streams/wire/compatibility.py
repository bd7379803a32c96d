"""Whether two versions of an Avro schema can read each other's data (FULL compatibility), by Avro's resolution rules.

Stricter than Avro in three places, because what resolves there still changes the meaning: full names must be equal,
logical types must be equal, and strings and bytes do not stand for each other.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["incompatibilities", "unreadable"]

_PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_PROMOTIONS: Final[Mapping[str, frozenset[str]]] = {
    "int": frozenset({"long", "float", "double"}),
    "long": frozenset({"float", "double"}),
    "float": frozenset({"double"}),
}


def incompatibilities(old: Any, new: Any) -> list[str]:
    """Why two schemas are not FULLY compatible; empty when they are.

    Args:
        old: a released schema, as parsed JSON.
        new: the schema that is to follow it.

    Returns:
        One sentence for each obstacle, with direction and path.
    """
    return [f"new cannot read old: {problem}" for problem in unreadable(old, new)] + [
        f"old cannot read new: {problem}" for problem in unreadable(new, old)
    ]


def unreadable(writer: Any, reader: Any) -> list[str]:
    """Why data of ``writer`` cannot be read as ``reader`` (both parsed JSON); empty when all of it can."""
    return list(_Resolution(writer, reader).problems())


class _Names:
    """Named types of one schema by full name, with each definition's namespace resolved."""

    def __init__(self, schema: Any) -> None:
        self._types: dict[str, Mapping[str, Any]] = {}
        self._root = self._expand(schema, "")

    @property
    def root(self) -> Any:
        return self._root

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._types[name]

    def _expand(self, schema: Any, namespace: str) -> Any:
        """The same schema with full names, and every primitive or reference as ``{"type": name}``."""
        if isinstance(schema, str):
            if schema in _PRIMITIVES:
                return {"type": schema}
            return {"type": "reference", "name": _full(schema, namespace)}
        if isinstance(schema, list):
            return [self._expand(branch, namespace) for branch in schema]
        kind = schema["type"]
        if isinstance(kind, (dict, list)):
            return self._expand(kind, namespace)
        if kind in ("record", "error", "enum", "fixed"):
            name = _full(schema["name"], schema.get("namespace", namespace))
            inner = name.rpartition(".")[0]
            expanded: dict[str, Any] = dict(schema) | {"name": name}
            self._types[name] = expanded
            if "fields" in schema:
                expanded["fields"] = [
                    dict(field) | {"type": self._expand(field["type"], inner)} for field in schema["fields"]
                ]
            return expanded
        if kind == "array":
            return dict(schema) | {"items": self._expand(schema["items"], namespace)}
        if kind == "map":
            return dict(schema) | {"values": self._expand(schema["values"], namespace)}
        if kind in _PRIMITIVES:
            return dict(schema)
        return {"type": "reference", "name": _full(kind, namespace)}


class _Resolution:
    def __init__(self, writer: Any, reader: Any) -> None:
        self._writer = _Names(writer)
        self._reader = _Names(reader)
        self._seen: set[tuple[str, str]] = set()

    def problems(self) -> Iterator[str]:
        return self._resolve(self._writer.root, self._reader.root, "")

    def _resolve(self, writer: Any, reader: Any, at: str) -> Iterator[str]:
        if isinstance(writer, list):
            for branch in writer:
                yield from self._resolve(branch, reader, at)
            return
        writer = self._writer[writer["name"]] if writer["type"] == "reference" else writer
        if isinstance(reader, list):
            if all(list(_Resolution._copy(self)._resolve(writer, branch, at)) for branch in reader):
                yield f"{_at(at)}: no branch of the reader's union takes {_label(writer)}"
            return
        reader = self._reader[reader["name"]] if reader["type"] == "reference" else reader
        yield from self._matched(writer, reader, at)

    def _copy(self) -> "_Resolution":
        # A branch that is only tried must leave no trace in what counts as checked.
        copy = object.__new__(_Resolution)
        copy._writer, copy._reader, copy._seen = self._writer, self._reader, set(self._seen)  # noqa: SLF001
        return copy

    def _matched(self, writer: Mapping[str, Any], reader: Mapping[str, Any], at: str) -> Iterator[str]:
        wrote, reads = writer["type"], reader["type"]
        if wrote != reads:
            if (
                reads not in _PROMOTIONS.get(wrote, ())
                or writer.get("logicalType")
                or reader.get("logicalType")
            ):
                yield f"{_at(at)}: {_label(writer)} is not read as {_label(reader)}"
            return
        if writer.get("logicalType") != reader.get("logicalType"):
            yield f"{_at(at)}: {_label(writer)} is not read as {_label(reader)}"
            return
        if wrote == "array":
            yield from self._resolve(writer["items"], reader["items"], f"{at}[]")
        elif wrote == "map":
            yield from self._resolve(writer["values"], reader["values"], f"{at}{{}}")
        elif "name" in writer:
            yield from self._named(writer, reader, at)

    def _named(self, writer: Mapping[str, Any], reader: Mapping[str, Any], at: str) -> Iterator[str]:
        if writer["name"] != reader["name"]:
            yield f"{_at(at)}: the name {writer['name']} is not {reader['name']}"
            return
        if writer["type"] == "fixed":
            if writer["size"] != reader["size"]:
                yield f"{_at(at)}: size {writer['size']} is not {reader['size']}"
        elif writer["type"] == "enum":
            unknown = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
            if unknown and "default" not in reader:
                yield f"{_at(at)}: the reader's enum lacks {', '.join(unknown)} and has no default"
        elif (writer["name"], reader["name"]) not in self._seen:
            self._seen.add((writer["name"], reader["name"]))
            yield from self._fields(writer, reader, at)

    def _fields(self, writer: Mapping[str, Any], reader: Mapping[str, Any], at: str) -> Iterator[str]:
        written = {field["name"]: field for field in writer["fields"]}
        for field in reader["fields"]:
            path = f"{at}.{field['name']}" if at else str(field["name"])
            source = next(
                (written[name] for name in (field["name"], *field.get("aliases", ())) if name in written),
                None,
            )
            if source is not None:
                yield from self._resolve(source["type"], field["type"], path)
            elif "default" not in field:
                yield f"{path}: the writer lacks it and the reader has no default"


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _label(schema: Mapping[str, Any]) -> str:
    name = str(schema.get("name", schema["type"]))
    return f"{name} ({schema['logicalType']})" if "logicalType" in schema else name


def _at(path: str) -> str:
    return path or "root"
