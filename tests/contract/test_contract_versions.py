"""The versions of the contracts that `anabranch contract` shows and exports, and their fingerprints."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from fastavro.schema import to_parsing_canonical_form

from streams.cli import contracts as view
from streams.core.messages import CONTRACT_VERSIONS, QUERY_TEXT_VERSION, QueryEmbedding, QueryText
from streams.wire import Codec
from streams.wire.contracts import UnknownContract, contract_versions, find_contract

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = [
    *(("query_embedding", version) for version in CONTRACT_VERSIONS),
    ("query_text", QUERY_TEXT_VERSION),
    *(("retrieval_result", version) for version in CONTRACT_VERSIONS),
]


def test_every_version_is_there() -> None:
    assert [(each.name, each.version) for each in contract_versions()] == EXPECTED


def rabin(text: str) -> int:
    """CRC-64-AVRO, as the Avro specification defines it."""
    empty = 0xC15D213AA4D7A795
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (empty & -(value & 1))
        table.append(value)
    value = empty
    for byte in text.encode():
        value = (value >> 8) ^ table[(value ^ byte) & 0xFF]
    return value


def test_the_fingerprints_are_the_specification_s() -> None:
    for each in contract_versions():
        canonical = to_parsing_canonical_form(json.loads(each.avro_schema))
        assert each.fingerprint("CRC-64-AVRO") == rabin(canonical).to_bytes(8, "little").hex()
        assert each.fingerprint("SHA-256") == hashlib.sha256(canonical.encode()).hexdigest()


def test_the_fingerprint_is_that_of_published_events() -> None:
    codec = Codec()
    event: dict[str, Any] = {
        "schema_version": "1.0.0",
        "event_id": "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d",
        "occurred_at": "2025-06-01T12:34:56.789012Z",
        "principals": ["user:1"],
    }
    old = QueryEmbedding.parse(event | {"embedding": [1.0] * 768})
    new = QueryEmbedding.parse(event | {"embedding": [1.0] * 768, "explain": True})
    text = QueryText.parse(event | {"text": "What moves an estuary?"})
    for value, name, version in (
        (codec.encode_query(old), "query_embedding", "1.0.0"),
        (codec.encode_query(new), "query_embedding", "1.1.0"),
        (codec.encode_text(text), "query_text", QUERY_TEXT_VERSION),
    ):
        assert value[:2] == b"\xc3\x01"
        assert find_contract(name, version).fingerprint("CRC-64-AVRO") == value[2:10].hex()


def test_a_contract_is_shown_as_json() -> None:
    shown = json.loads(view.show("query_embedding"))
    assert shown == json.loads(view.show(f"query_embedding@{CONTRACT_VERSIONS[-1]}"))
    assert list(shown) == ["name", "version", "crc_64_avro", "sha_256", "json_schema", "avro_schema"]
    folder = ROOT / "contracts/query_embedding/v1"
    assert shown["json_schema"] == json.loads((folder / "query_embedding.schema.json").read_text())
    old = json.loads(view.show("query_embedding@1.0.0"))
    assert "explain" in shown["json_schema"]["properties"]
    assert "explain" not in old["json_schema"]["properties"]
    assert "explain" not in {field["name"] for field in old["avro_schema"]["fields"]}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("query", "there is no contract 'query'; there are query_embedding, query_text, retrieval_result"),
        ("query_text@9.0.0", "query_text does not have the version '9.0.0'; it has 1.0.0"),
    ],
)
def test_an_unknown_contract_is_named(reference: str, message: str) -> None:
    with pytest.raises(UnknownContract) as caught:
        view.show(reference)
    assert str(caught.value) == message


def test_the_export_is_complete_and_usable(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    written = view.export(folder)
    assert sorted(written) == sorted(folder.iterdir())
    assert view.export(folder) == written  # again
    index = json.loads((folder / "fingerprints.json").read_text())
    assert [(each["name"], each["version"]) for each in index] == EXPECTED
    for each in index:
        found = find_contract(each["name"], each["version"])
        assert (folder / each["json_schema"]).read_text() == found.json_schema
        assert (folder / each["avro_schema"]).read_text() == found.avro_schema
        assert each["crc_64_avro"] == found.fingerprint("CRC-64-AVRO")
        assert each["sha_256"] == found.fingerprint("SHA-256")
    # As in the checkout, byte for byte.
    released = ROOT / "schemas/avro/released/query_embedding.1.0.0.avsc"
    assert (folder / released.name).read_bytes() == released.read_bytes()
    Codec(folder)  # ANABRANCH_SCHEMA_PATH
