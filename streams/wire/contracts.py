"""The contracts that this release has: each version's JSON Schema and Avro schema, with its fingerprints."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from fastavro.schema import fingerprint, to_parsing_canonical_form

from streams import resources
from streams.core.messages import QUERY_TEXT_VERSION, SCHEMA_VERSION
from streams.wire.derive import contract_files

__all__ = ["ContractVersion", "UnknownContract", "contract_versions", "find_contract"]

_SUFFIX: Final = ".schema.json"
# All other contracts have the version of query events and results.
_VERSIONS: Final = {"query_text": QUERY_TEXT_VERSION}


class UnknownContract(LookupError):
    """There is no contract of this name or version; the message is one line that lists them."""


@dataclass(frozen=True, slots=True)
class ContractVersion:
    """One version of a contract.

    Attributes:
        name: ``query_embedding``.
        version: ``1.0.0``.
        json_schema: the text of its file.
        avro_schema: the text of its file.
    """

    name: str
    version: str
    json_schema: str
    avro_schema: str

    def fingerprint(self, algorithm: Literal["CRC-64-AVRO", "SHA-256"]) -> str:
        """The fingerprint of the Avro schema's parsing canonical form, in hexadecimal.

        CRC-64-AVRO has the byte order of Avro single-object encoding, least significant first.
        """
        return fingerprint(to_parsing_canonical_form(json.loads(self.avro_schema)), algorithm)


def contract_versions() -> list[ContractVersion]:
    """All versions of all contracts, by name, oldest first."""
    found = {(each.name, each.version): each for each in (*_released(), *_current())}
    return sorted(found.values(), key=lambda each: (each.name, tuple(map(int, each.version.split(".")))))


def find_contract(name: str, version: str | None = None) -> ContractVersion:
    """One version of a contract, by default the newest.

    Raises:
        UnknownContract: it does not exist.
    """
    everything = contract_versions()
    of_name = {each.version: each for each in everything if each.name == name}
    if not of_name:
        names = dict.fromkeys(each.name for each in everything)
        raise UnknownContract(f"there is no contract {name!r}; there are {', '.join(names)}")
    if version is None:
        return [*of_name.values()][-1]
    if version not in of_name:
        raise UnknownContract(f"{name} does not have the version {version!r}; it has {', '.join(of_name)}")
    return of_name[version]


def _released() -> Iterator[ContractVersion]:
    avro = resources.schemas() / "avro" / "released"
    for path in (resources.contracts() / "released").iterdir():
        if path.name.endswith(_SUFFIX):
            name, _, version = path.name.removesuffix(_SUFFIX).partition(".")
            yield ContractVersion(
                name,
                version,
                path.read_text(encoding="utf-8"),
                (avro / f"{name}.{version}.avsc").read_text(encoding="utf-8"),
            )


def _current() -> Iterator[ContractVersion]:
    avro = resources.schemas() / "avro"
    for path, major in contract_files(resources.contracts()):
        name = path.name.removesuffix(_SUFFIX)
        yield ContractVersion(
            name,
            _VERSIONS.get(name, SCHEMA_VERSION),
            path.read_text(encoding="utf-8"),
            (avro / f"{name}.{major}.avsc").read_text(encoding="utf-8"),
        )
