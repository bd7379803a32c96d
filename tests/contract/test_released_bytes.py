"""1.0.0 producers and consumers keep working, byte for byte, with the default settings.

``release_1_0_0.json`` was recorded from the code of contract 1.0.0, before there was a later minor:

- ``events``: ``raw`` as a producer sent it, its canonical ``json``, and its ``avro`` as our producers wrote it.
- ``results``: ``json`` as `anabranch tail` printed it, and its ``avro``.
- ``answers``: for each event, the ``key``, ``headers`` and ``avro`` value that a worker published over the rows below.
- ``dead_letters``: for each ``raw`` value, the ``headers`` that a worker added.

Avro is in Base64. Nothing here may change in a later minor.
"""

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from streams import retrieval
from streams.configured import open_codec
from streams.settings import load
from streams.terminal import json_text
from streams.wire import query_to_json, result_to_json
from tests.unit.test_processor import Bench, Record
from tests.unit.test_retrieval import Row, Rows, passage

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("release_1_0_0.json").read_text(encoding="utf-8")
)
CODEC = open_codec(load({}))
KEY = b"\x00the key"
HEADERS = (("traceparent", b"00-aa-bb-01"), ("twice", b"1"), ("twice", b"\xff\x00"))
CLOCK = 5.0

ROWS = [
    Row(number, number / 10, in_topic=number % 2 == 0, parent=20 if number == 3 else None)
    for number in range(1, 13)
]
STORED = {
    1: passage(
        1,
        text_content="§ 1 Zweck — “a lease”",
        token_count=9,
        page=4,
        section="1",
        chunk_position=0,
        coordinates={"x0": 1.5, "y0": 2.0},
        title="Lease",
        source_url="https://example.org/1",
        file_description="lease.pdf",
        metadata={"year": "2020", "tags": '["a", "b"]'},
    ),
    2: passage(2, invalid=True),
    20: passage(20, text_content="the whole problem"),
}


class _OfEveryCaller(Rows):
    """Rows that any principals may read."""

    async def passages(self, principals: Any, chunk_ids: Any) -> Any:
        del principals
        return {one: self.passage(one) for one in chunk_ids}

    async def sizes(self, principals: Any, chunk_ids: Any) -> Any:
        del principals
        return {
            one: retrieval.StoredSize(
                self.passage(one).token_count,
                len(self.passage(one).text_content),
                self.passage(one).file_description,
            )
            for one in chunk_ids
        }


async def published(monkeypatch: pytest.MonkeyPatch, value: bytes) -> Any:
    """What a worker with the default settings publishes for an event; its clock stands still."""
    monkeypatch.setattr(retrieval, "perf_counter", lambda: CLOCK)
    bench = Bench(_OfEveryCaller(ROWS, STORED), codec=CODEC)
    await bench.handle(Record(value, KEY, HEADERS, read_at=CLOCK))
    (sent,) = bench.broker.sent
    return sent


def names(part: str) -> list[Any]:
    return [pytest.param(one, id=one["name"]) for one in RECORDED[part]]


@pytest.mark.parametrize("event", names("events"))
def test_events(event: dict[str, Any]) -> None:
    from_json, from_avro = (
        CODEC.decode_query(event["raw"].encode()),
        CODEC.decode_query(b64decode(event["avro"])),
    )
    assert from_json == from_avro
    assert json.dumps(query_to_json(from_json)) == event["json"]
    assert CODEC.encode_query(from_json) == b64decode(event["avro"])


@pytest.mark.parametrize("result", names("results"))
def test_results(result: dict[str, Any]) -> None:
    from_json, from_avro = (
        CODEC.decode_result(result["json"].encode()),
        CODEC.decode_result(b64decode(result["avro"])),
    )
    assert from_json == from_avro
    assert json_text(result_to_json(from_avro)) == result["json"]
    assert CODEC.encode_result(from_json) == b64decode(result["avro"])


@pytest.mark.parametrize("encoding", ["raw", "avro"])
@pytest.mark.parametrize("answer", names("answers"))
async def test_answers(answer: dict[str, Any], encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (event,) = (event for event in RECORDED["events"] if event["name"] == answer["name"])
    value = b64decode(event["avro"]) if encoding == "avro" else event["raw"].encode()
    sent = await published(monkeypatch, value)
    assert (sent.topic, sent.key) == ("results", KEY)
    assert [[name, value.decode("latin-1")] for name, value in sent.headers] == answer["headers"]
    assert sent.value == b64decode(answer["avro"])


@pytest.mark.parametrize("letter", names("dead_letters"))
async def test_dead_letters(letter: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sent = await published(monkeypatch, letter["raw"].encode())
    assert (sent.topic, sent.key, sent.value) == ("dead", KEY, letter["raw"].encode())
    assert [[name, value.decode("latin-1")] for name, value in sent.headers] == letter["headers"]


def test_the_recording_has_every_field() -> None:
    """Otherwise a change to a field that no recorded message uses would go unnoticed."""
    full = {event["name"]: json.loads(event["json"]) for event in RECORDED["events"]}["every field"]
    assert None not in full.values()
    assert None not in full["filters"].values()
    passages = [one for result in RECORDED["results"] for one in json.loads(result["json"])["results"]]
    assert all(any(one[name] is not None for one in passages) for name in passages[0])
    assert len(RECORDED["answers"]) == len(RECORDED["events"]) >= 5
