"""The contract of questions in words: what it shares with `query_embedding`, and what it has of its own."""

import io
import json
import re
from typing import Any, Final

import fastavro
import pytest
from jsonschema import Draft7Validator

from streams import resources

CONTRACTS: Final = resources.contracts()
TEXT: Final = json.loads((CONTRACTS / "query_text/v1/query_text.schema.json").read_text(encoding="utf-8"))
EMBEDDING: Final = json.loads(
    (CONTRACTS / "query_embedding/v1/query_embedding.schema.json")
    .read_text(encoding="utf-8")
    .replace("Since 1.1.0. ", "")  # this contract has had it from the start
)
VALIDATOR: Final = Draft7Validator(TEXT, format_checker=Draft7Validator.FORMAT_CHECKER)
PAGE: Final = (CONTRACTS / "query_text/v1/README.md").read_text(encoding="utf-8")
OWN: Final = {"text", "topic_title", "conversation", "conversation_summary"}
MADE: Final = {"embedding", "embedding_model", "query_hash", "upstream_warnings"}
SMALLEST: Final = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
MESSAGE: Final = {"role": "user", "text": "What moves an estuary?"}


def test_the_contract_is_valid_draft_07() -> None:
    Draft7Validator.check_schema(TEXT)


def test_the_other_fields_are_query_embedding_s() -> None:
    """A field that one gains and the other does not would be lost on the way."""
    ours, theirs = TEXT["properties"], EMBEDDING["properties"]
    assert {name: ours[name] for name in ours.keys() - OWN} == {
        name: theirs[name] for name in theirs.keys() - MADE
    }
    assert TEXT["definitions"] == EMBEDDING["definitions"]
    assert set(TEXT["required"]) == set(EMBEDDING["required"]) - MADE | {"text"}
    assert (TEXT["if"], TEXT["then"]) == (EMBEDDING["if"], EMBEDDING["then"])


def test_the_page_names_every_field() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) >= OWN
    assert set(re.findall(r"`(\w+)`", PAGE)) >= TEXT["properties"].keys() | MADE


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": "x" * 32768},
        {"text": "\U0001f600" * 32768},
        {"text": " "},  # valid here; the stage dead-letters it as empty_text
        {"topic_title": None, "conversation": None, "conversation_summary": None},
        {"topic_title": "", "conversation": [], "conversation_summary": ""},
        {"conversation": [MESSAGE] * 64},
        {"conversation": [{"role": "r" * 64, "text": ""}]},
        {"topic_title": "x" * 1024, "conversation_summary": "x" * 32768},
        {"unknown": 1},
        {"embedding": "unknown here, too"},
    ],
)
def test_these_are_instances(fields: dict[str, Any]) -> None:
    VALIDATOR.validate(SMALLEST | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ""},
        {"text": None},
        {"text": "x" * 32769},
        {"text": "\0"},
        {"text": "\ud800"},
        {"topic_title": "x" * 1025},
        {"topic_title": 1},
        {"conversation": MESSAGE},
        {"conversation": [MESSAGE] * 65},
        {"conversation": [{"role": "user"}]},
        {"conversation": [{"role": "", "text": "a"}]},
        {"conversation": [{"role": "r" * 65, "text": "a"}]},
        {"conversation": [{"role": "user", "text": "x" * 32769}]},
        {"conversation": [{"role": "user", "text": None}]},
        {"conversation_summary": "x" * 32769},
        {"topic_id": "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d"},
        {"schema_version": "2.0.0"},
    ],
)
def test_these_are_not(fields: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(SMALLEST | fields)


def test_text_is_required() -> None:
    assert not VALIDATOR.is_valid({name: value for name, value in SMALLEST.items() if name != "text"})


def test_the_derived_avro_carries_it() -> None:
    schema = json.loads((resources.schemas() / "avro/query_text.v1.avsc").read_text(encoding="utf-8"))
    parsed = fastavro.parse_schema(schema)
    record = SMALLEST | {
        "occurred_at": 1_748_781_296_789_000,
        "topic_title": "Tides",
        "conversation": [MESSAGE, {"role": "assistant", "text": ""}],
        "conversation_summary": "tides",
        "filters": {"section": "1"},
    }
    written = io.BytesIO()
    fastavro.schemaless_writer(written, parsed, record, strict_allow_default=True)
    written.seek(0)
    read = fastavro.schemaless_reader(written, parsed, None)
    assert isinstance(read, dict)
    assert {name: read[name] for name in OWN} == {name: record[name] for name in OWN}
    assert read.keys() == TEXT["properties"].keys()
