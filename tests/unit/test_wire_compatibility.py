"""FULL compatibility: each change in both directions."""

from typing import Any

import pytest

from streams.wire.compatibility import incompatibilities, unreadable


def record(*fields: dict[str, Any], name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "namespace": "n", "fields": list(fields)}


def field(type_: Any, name: str = "x", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type_} | more


BASE = record(field("string", "id"))
UUID = {"type": "string", "logicalType": "uuid"}


def enum(*symbols: str, **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": "E", "symbols": list(symbols)} | more


TREE = record(field("int", "value"), field(["null", "R"], "next", default=None))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (BASE, BASE),
        (BASE, record(field("string", "id"), field(["null", "int"], default=None))),
        (BASE, record(field(["null", "int"], default=None), field("string", "id"))),
        (BASE, record(field({"type": "string"}, "id"), field("int", default=0))),
        (BASE, record(field("string", "id", doc="other"))),
        (record(field(enum("a"))), record(field(enum("a") | {"doc": "d"}))),
        (record(field(enum("a", default="a"))), record(field(enum("a", "b", default="a")))),
        (TREE, TREE),
        (record(field(["null", "int", "string"])), record(field(["string", "null", "int"]))),
        (
            record(field({"type": "map", "values": "int"})),
            record(field({"type": "map", "values": {"type": "int"}})),
        ),
        (
            record(field(BASE | {"name": "S"}), field("S", "y")),
            record(field(BASE | {"name": "S"}), field("n.S", "y")),
        ),
    ],
)
def test_compatible(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert incompatibilities(old, new) == []
    assert incompatibilities(new, old) == []


@pytest.mark.parametrize(
    ("old", "new", "direction", "path"),
    [
        (BASE, record(field("string", "id"), field("int")), "new cannot read old", "x"),
        (record(field("string", "id"), field("int")), BASE, "old cannot read new", "x"),
        (record(field("int")), record(field("long")), "old cannot read new", "x"),
        (record(field("double")), record(field("float")), "new cannot read old", "x"),
        (record(field("int")), record(field(["null", "int"])), "old cannot read new", "x"),
        (record(field(["null", "int"])), record(field(["null", "long"])), "old cannot read new", "x"),
        (record(field(enum("a"))), record(field(enum("a", "b"))), "old cannot read new", "x"),
        (record(field(BASE | {"name": "S"})), record(field(record(name="S"))), "old cannot read new", "x.id"),
        (
            record(field({"type": "array", "items": "int"})),
            record(field({"type": "array", "items": "long"})),
            "old cannot read new",
            "x[]",
        ),
        (
            record(field({"type": "map", "values": "float"})),
            record(field({"type": "map", "values": "double"})),
            "old cannot read new",
            "x{}",
        ),
    ],
)
def test_incompatible_in_one_direction(old: Any, new: Any, direction: str, path: str) -> None:
    [problem] = incompatibilities(old, new)
    assert problem.startswith(f"{direction}: {path}: ")
    # Turned round, it is the other direction that fails.
    [turned] = incompatibilities(new, old)
    assert turned.split(" ")[0] != problem.split(" ")[0]
    assert turned.split(": ")[1:] == problem.split(": ")[1:]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (field("string"), field(UUID)),
        (field(["null", UUID]), field(["null", "string"])),
        (field("string"), field("bytes")),
        (field("string"), field("int")),
        (
            field({"type": "long", "logicalType": "timestamp-micros"}),
            field({"type": "long", "logicalType": "timestamp-millis"}),
        ),
        (field({"type": "fixed", "name": "F", "size": 4}), field({"type": "fixed", "name": "F", "size": 8})),
        (field(enum("a")), field(enum("b"))),
        (field(BASE | {"name": "S"}), field(BASE | {"name": "T"})),
        (field({"type": "array", "items": "int"}), field({"type": "map", "values": "int"})),
        (field("int", "x"), field("int", "y")),
    ],
)
def test_incompatible_in_both_directions(old: Any, new: Any) -> None:
    problems = incompatibilities(record(old), record(new))
    assert {problem.split(" ")[0] for problem in problems} == {"old", "new"}


def test_an_alias_reads_the_old_name() -> None:
    assert unreadable(record(field("int", "x")), record(field("int", "y", aliases=["x"]))) == []


def test_a_recursive_change_is_found() -> None:
    changed = record(field("long", "value"), field(["null", "R"], "next", default=None))
    assert unreadable(TREE, changed) == []
    assert unreadable(changed, TREE) == ["value: long cannot be read as int"]
