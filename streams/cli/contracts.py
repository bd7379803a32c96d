"""`anabranch contract compatible`: compares the derived schemas with every released one."""

import json
from importlib.resources.abc import Traversable

from streams.wire.compatibility import incompatibilities

__all__ = ["broken"]


def broken(avro: Traversable) -> list[str]:
    """One line for each incompatibility between a schema and a released schema of the same name."""
    faults = []
    for current in sorted(avro.iterdir(), key=lambda entry: entry.name):
        if not current.name.endswith(".avsc"):
            continue
        schema = json.loads(current.read_text(encoding="utf-8"))
        for released in sorted((avro / "released").iterdir(), key=lambda entry: entry.name):
            if not released.name.endswith(".avsc"):
                continue
            before = json.loads(released.read_text(encoding="utf-8"))
            if before["name"] == schema["name"]:
                faults += [
                    f"{current.name} with {released.name}: {line}"
                    for line in incompatibilities(before, schema)
                ]
    return faults
