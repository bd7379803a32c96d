"""Checks that a later minor version of a JSON contract accepts every instance of a released one.

Pure: two JSON Schemas of the kind that :mod:`streams.wire.derive` supports. The check is strict: what it does not know
to be wider must be equal.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["narrowings"]

Json = Mapping[str, Any]

_ANNOTATIONS: Final = frozenset({"title", "description", "examples", "$comment"})
_LOWER: Final = ("minimum", "minItems", "minLength")
_UPPER: Final = ("maximum", "maxItems", "maxLength")
_NESTED: Final = ("items", "additionalProperties", "propertyNames")
_NULL: Final = {"type": "null"}


def narrowings(old: Json, new: Json) -> list[str]:
    """List why an instance of a released contract may be invalid under its later minor; empty if none can be.

    An instance with a field that its own version does not define is outside the promise: a later version may define
    that field in another way.

    Args:
        old: the released contract.
        new: the later minor version.

    Returns:
        One sentence per problem, with its JSON pointer.
    """
    return list(_Comparison(old, new).problems())


class _Comparison:
    def __init__(self, old: Json, new: Json) -> None:
        self._old = old
        self._new = new

    def problems(self) -> Iterator[str]:
        roots = ("$schema", "$id", "definitions", "x-avro-namespace")
        old, new = ({key: part[key] for key in part if key not in roots} for part in (self._old, self._new))
        return self._compare(old, new, "#")

    def _compare(self, old: Json, new: Json, at: str) -> Iterator[str]:
        old, new = _expanded(old, self._old), _expanded(new, self._new)
        if "const" in old and "const" not in new:
            old = {key: value for key, value in old.items() if key != "const"} | {
                bound: old["const"] for bound in ("minimum", "maximum") if bound in new
            }
        for key in sorted(old.keys() | new.keys()):
            yield from self._keyword(key, old, new, f"{at}/{key}")

    def _keyword(self, key: str, old: Json, new: Json, at: str) -> Iterator[str]:
        before: Any = old.get(key)
        after: Any = new.get(key)
        if before == after and not _refers(before):
            return
        if after is None:  # without the keyword, more is allowed
            if key == "type":
                yield f"{at}: is missing"
        elif key == "required":
            for name in sorted(set(after) - set(before or ())):
                yield f"{at}: {name} has become required"
        elif key == "properties" and before is not None:
            yield from self._properties(before, after, at)
        elif key in _NESTED and isinstance(before, dict):
            yield from self._compare(before, after, at)
        elif key == "anyOf" and _nullable(before) and _nullable(after):
            yield from self._compare(before[0], after[0], f"{at}/0")
        elif before is None or not _is_wider_value(key, before, after):
            yield f"{at}: differs, and is not known to be wider"

    def _properties(self, before: Json, after: Json, at: str) -> Iterator[str]:
        for name in before:
            if name not in after:
                yield f"{at}/{name}: the field is missing"
            else:
                yield from self._compare(before[name], after[name], f"{at}/{name}")
        for name in sorted(after.keys() - before.keys()):
            if not _nullable(after[name].get("anyOf")):
                yield f"{at}/{name}: a new field must be nullable"


def _expanded(schema: Json, root: Json) -> Json:
    """A schema without annotations, and without the references in place of its type."""
    if "allOf" in schema:
        schema = {
            **_expanded(schema["allOf"][0], root),
            **{key: schema[key] for key in schema if key != "allOf"},
        }
    if "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    return {
        key: value for key, value in schema.items() if key not in _ANNOTATIONS and not key.startswith("x-")
    }


def _is_wider_value(key: str, before: Any, after: Any) -> bool:
    if key in _LOWER:
        return bool(after <= before)
    if key in _UPPER:
        return bool(after >= before)
    return key == "enum" and set(before) <= set(after)


def _nullable(members: Any) -> bool:
    return isinstance(members, list) and members[1:] == [_NULL]


def _refers(part: Any) -> bool:
    """Whether a reference is in it: equal text may then have another meaning."""
    if isinstance(part, dict):
        return "$ref" in part or any(map(_refers, part.values()))
    return isinstance(part, list) and any(map(_refers, part))
