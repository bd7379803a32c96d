"""`anabranch contract`: shows and exports contracts, and compares them with every released one."""

import json
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from streams.terminal import json_text
from streams.wire.compatibility import incompatibilities
from streams.wire.contracts import ContractVersion, contract_versions, find_contract
from streams.wire.derive import contract_files
from streams.wire.widening import narrowings

__all__ = ["broken", "export", "show"]

_FINGERPRINTS: Final = "fingerprints.json"


def show(reference: str) -> str:
    """One version of a contract as a JSON object: both schemas and the fingerprints.

    Args:
        reference: ``NAME`` or ``NAME@VERSION``; without a version, the newest.

    Raises:
        UnknownContract: it does not exist.
    """
    name, _, version = reference.partition("@")
    found = find_contract(name, version or None)
    return json_text(
        {
            "name": found.name,
            "version": found.version,
            **_fingerprints(found),
            "json_schema": json.loads(found.json_schema),
            "avro_schema": json.loads(found.avro_schema),
        },
        indent=2,
    )


def export(folder: Path) -> list[Path]:
    """Write all versions of all contracts, and ``fingerprints.json``, which lists them. Returns the files.

    Args:
        folder: created if it is missing; files of the same names are overwritten.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def write(name: str, text: str) -> str:
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
        return name

    index = [
        {
            "name": each.name,
            "version": each.version,
            **_fingerprints(each),
            "json_schema": write(f"{each.name}.{each.version}.schema.json", each.json_schema),
            "avro_schema": write(f"{each.name}.{each.version}.avsc", each.avro_schema),
        }
        for each in contract_versions()
    ]
    write(_FINGERPRINTS, json_text(index, indent=2) + "\n")
    return written


def _fingerprints(contract: ContractVersion) -> dict[str, str]:
    return {
        "crc_64_avro": contract.fingerprint("CRC-64-AVRO"),
        "sha_256": contract.fingerprint("SHA-256"),
    }


def broken(contracts: Traversable, avro: Traversable) -> list[str]:
    """One line for each reason why a contract or an Avro schema is incompatible with a released one of its name."""
    return [*_contracts(contracts), *_avro(avro)]


def _contracts(contracts: Traversable) -> Iterator[str]:
    released = list(_parsed(contracts / "released", ".schema.json"))
    for path, _ in contract_files(contracts):
        contract = json.loads(path.read_text(encoding="utf-8"))
        for name, before in released:
            if before["$id"] == contract["$id"]:
                for line in narrowings(before, contract):
                    yield f"{path.name} with {name}: {line}"


def _avro(avro: Traversable) -> Iterator[str]:
    released = list(_parsed(avro / "released", ".avsc"))
    for current, schema in _parsed(avro, ".avsc"):
        for name, before in released:
            if before["name"] == schema["name"]:
                for line in incompatibilities(before, schema):
                    yield f"{current} with {name}: {line}"


def _parsed(folder: Traversable, suffix: str) -> Iterator[tuple[str, Any]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(suffix):
            yield entry.name, json.loads(entry.read_text(encoding="utf-8"))
