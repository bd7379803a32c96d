"""Events in, results out, through a real worker; compared with exact search in numpy."""

import random
from collections.abc import Callable
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import numpy as np
import pytest

from streams.tokens import count_tokens
from tests.bad_inputs import valid_event
from tests.conftest import Database
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, as_json, query, read_result
from tests.integration.oracle import expected_result, numpy_distances

RNG = random.Random(20)
SESSIONS = [random_uuid(RNG) for _ in range(2)]
TOPICS = [random_uuid(RNG) for _ in range(3)]


def small_corpus() -> Corpus:
    """600 chunks of 30 documents; some for user:1, some for a group, some for everybody, some for nobody."""
    rng = random.Random(4)
    readers: list[set[str]] = [
        {"user:1"},
        {"group:law"},
        {"public"},
        {"user:2", "group:law"},
        {"user:2"},
        set(),
    ]
    documents = [
        Document(
            random_uuid(rng),
            frozenset(readers[i % len(readers)]),
            title=f"Document {i}",
            source_url=f"https://example.org/{i}",
            file_description=None if i % 3 else f"File No. {i}",
            document_type=("statute", "memo")[i % 2],
            metadata={"year": 2000 + i % 5},
        )
        for i in range(30)
    ]
    # Few directions with some spread, so that thresholds and filters cut somewhere.
    centres, noise = unit_vectors(8, 1), unit_vectors(600, 2)
    chunks = [
        Chunk(
            random_uuid(rng),
            documents[i % 30].id,
            f"Chunk {i} says something of its own.",
            centres[i % 8] + noise[i] * np.float32(rng.uniform(0.2, 2)),
            session_id=rng.choice([*SESSIONS, None]),
            related_topic_ids=rng.sample(TOPICS, rng.randrange(3)),
            chunk_position=i,
            page=i // 3,
            section=f"§ {i % 4}",
        )
        for i in range(600)
    ]
    return Corpus.of(documents, chunks)


def questions() -> list[dict[str, Any]]:
    rng, vectors = random.Random(9), unit_vectors(8, 1) + unit_vectors(8, 5) * np.float32(0.5)
    asked = []
    for number in range(90):
        fields: dict[str, Any] = {"principals": rng.choice([["user:1"], ["user:1", "group:law"], ["nobody"]])}
        if number % 3:
            fields["session_id"] = rng.choice(SESSIONS)
        if number % 3 == 2:
            fields["topic_id"] = rng.choice(TOPICS)
        if number % 4:
            fields["profile"] = ("chat", "docs", "drafting")[number % 4 - 1]
        if number % 5 == 0:
            fields["k"] = rng.choice([1, 7, 12, 2**40, -1])
        if number % 7 == 0:
            fields["similarity_threshold"] = rng.choice([0, 0.3, 0.6, 1])
        if number % 6 == 0:
            fields["filters"] = rng.choice(
                [
                    {"section": "§ 1"},
                    {"document_type": "memo", "metadata": {"year": "2001"}},
                    {"source_url_prefix": "https://example.org/1"},
                ]
            )
        # float32, as Avro carries it, so that both encodings ask the same; of any length.
        scale = rng.choice([1, 1e-6, 1e6])
        asked.append(query((vectors[number % 8] * scale).astype(np.float32), **fields))
    return asked


KEYS = [None, b"", b"\x00\xff\xfe", b"user:42", "ключ".encode(), b"x" * 1000]
HEADERS: list[list[tuple[str, bytes | None]]] = [
    [],
    [("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")],
    [("twice", b"1"), ("other", b""), ("twice", b"2"), ("binary", b"\xff\x00")],
    [("none", None)],
]


async def test_results_equal_exact_search(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
) -> None:
    corpus = small_corpus()
    await load(database.writer, corpus)
    worker = start_worker(database.worker)
    await worker.until_ready()
    sent = {}
    for number, event in enumerate(questions()):
        key, headers = KEYS[number % len(KEYS)], HEADERS[number % len(HEADERS)]
        value = as_avro(event) if number % 2 else as_json(event)
        await channel.send(value, key, headers)
        sent[event["event_id"]] = (event, key, headers)
    await output_reader.until(results=len(sent))

    assert output_reader.dead_letters == []
    assert len(output_reader.results) == len(sent)
    returned = 0
    for record in output_reader.results:
        result = read_result(record.value)
        event, key, headers = sent.pop(str(result["event_id"]))
        assert record.key == key
        assert list(record.headers) == headers
        expected = expected_result(
            corpus, _clamped(event), numpy_distances(corpus, event["embedding"]), count_tokens
        )
        assert_equal(result, expected)
        returned += result["k_returned"]
    assert sent == {}
    assert returned > 300  # the questions do find something


def _clamped(event: dict[str, Any]) -> dict[str, Any]:
    return event if event.get("k") is None else event | {"k": min(event["k"], 2**31 - 1)}


def assert_equal(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Everything but the time it took; scores to six places, since pgvector sums float32."""
    result = {**result, "results": [dict(passage) for passage in result["results"]]}
    assert 0 < result.pop("query_time_ms") < 60_000
    for name in ("result_id", "event_id", "session_id", "topic_id"):
        result[name] = None if result[name] is None else str(result[name])
    assert set(result.pop("warnings")) == expected.pop("warnings")
    assert len(result["results"]) == len(expected["results"])
    for passage, wanted in zip(result["results"], expected["results"], strict=True):
        for name in ("chunk_id", "document_id", "matched_chunk_id"):
            passage[name] = str(passage[name])
        assert passage.pop("score") == pytest.approx(wanted.pop("score"), abs=1e-6)
        assert passage == wanted
    assert result.pop("results") == expected.pop("results")
    assert result.pop("similarity_threshold") == pytest.approx(expected.pop("similarity_threshold"))
    assert result == expected


async def test_every_field_of_an_event_is_carried(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await start_worker(database.worker).until_ready()
    event = valid_event(event_id="6F1C2F5E-8F0B-4D6A-9D43-0A7C1F2E3B4D")
    await channel.send(as_json(event), b"key")
    await output_reader.until(results=1)
    result = read_result(output_reader.results[0].value)
    for name in ("query_hash", "embedding_model", "profile", "token_budget", "similarity_threshold"):
        assert result[name] == event[name]
    assert str(result["event_id"]) == event["event_id"].lower()
    assert str(result["result_id"]) == str(
        uuid5(NAMESPACE_URL, f"urn:anabranch:result:{event['event_id'].lower()}")
    )
    assert (str(result["session_id"]), str(result["topic_id"])) == (event["session_id"], event["topic_id"])
    assert result["results"] == []
    assert result["k_returned"] == 0
