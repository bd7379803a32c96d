"""From a question in words to its result, through both stages, on each broker."""

import asyncio
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import numpy as np
import pytest

from streams.core.messages import QueryEmbedding
from streams.core.replies import ReplyTarget, reply_request_headers
from tests.conftest import Database
from tests.embedding.imitation import Imitation, vector
from tests.integration.corpora import load, tiny_corpus
from tests.integration.embedder.conftest import MODEL, Stages
from tests.integration.embedder.stages import account_for, code_of, question, read_queries
from tests.integration.harness import PARTITIONS, read_result, until

SESSION, TOPIC = str(uuid4()), str(uuid4())
LONG = "word " * 600  # the imitation takes 2,000 characters


async def test_a_question_becomes_a_result(stages: Stages, database: Database) -> None:
    texts, server, output_reader = stages.texts, stages.server, stages.reader
    await load(database.writer, tiny_corpus())
    worker, embedder = await stages.start(database.worker, **summarizer(server))
    server.received.clear()
    headers = [("traceparent", b"00-aa-bb-01"), ("content-type", b"application/json")]
    plain = question(
        "How long is the notice period of a contract?", profile="docs", k=1, similarity_threshold=0
    )
    titled = question(
        "What next?",
        session_id=SESSION,
        topic_id=TOPIC,
        topic_title="Tides",
        filters={"section": "1", "metadata_any": {"a": ["b"]}},
        explain=True,
    )
    conversation = [{"role": "user", "text": "Tell me about estuaries."}]
    short = question("and why?", conversation=conversation)
    long = question(LONG)
    await texts.send(plain, headers=headers)
    for event in (titled, short, long):
        await texts.send(event)
    await texts.send(question(" \n"), expects="empty_text")
    await texts.send(b"{", expects="undecodable")
    past = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    await texts.send(question("too late", expires_at=past), expects="expired")
    await texts.send(question("no profile of this name", profile="unknown"), expects="unknown_profile")
    await texts.until_answered(output_reader, seconds=30)

    verdict = account_for(texts, output_reader)
    assert verdict.violations == []
    assert sorted(map(code_of, texts.dead_letters)) == ["empty_text", "expired", "undecodable"]
    assert list(map(code_of, output_reader.dead_letters)) == ["unknown_profile"]
    sent = {text for request in server.received for text in request.body.get("input", ())}
    assert {plain["text"], "Tides: What next?", f"{server.summary}: and why?"} <= sent

    queries = {query.event_id.hex: (record, query) for record, query in await read_queries(stages.channel, 5)}
    record, query = queries[plain["event_id"].replace("-", "")]
    assert record.key == plain["event_id"].encode()
    target = ReplyTarget(stages.channel.replies, 0)
    request = reply_request_headers(target, plain["event_id"].encode())
    assert set(record.headers) == {headers[0], *request}
    assert query == QueryEmbedding.parse(
        {name: value for name, value in plain.items() if name != "text"}
        | {
            "embedding": np.array(vector(plain["text"], 768), dtype=np.float32).tolist(),
            "embedding_model": MODEL,
            "query_hash": hashlib.sha256(plain["text"].encode()).hexdigest(),
        }
    )
    _, other = queries[titled["event_id"].replace("-", "")]
    assert (other.schema_version, other.explain, other.upstream_warnings) == ("1.1.0", True, None)
    assert other.filters is not None
    assert other.filters.metadata_any == {"a": ("b",)}
    assert (str(other.session_id), str(other.topic_id)) == (SESSION, TOPIC)

    warnings = {
        str(result["event_id"]): result["warnings"]
        for result in (read_result(record.value) for record in output_reader.results)
    }
    assert warnings[long["event_id"]] == ["text_truncated"]
    assert warnings[plain["event_id"]] == []
    check_replies(stages)
    samples = await embedder.scrape()
    assert samples.nonzero("anabranch_replies_total") == {("dead_lettered",): 3}
    assert samples.nonzero("anabranch_events_total") == {("answered",): 5, ("dead_lettered",): 3}
    assert samples.nonzero("anabranch_warnings_total") == {("text_truncated",): 1}
    assert samples.value("anabranch_events_received_total") == 8
    assert samples.value("anabranch_embedding_duration_seconds_count") == 5
    assert samples.value("anabranch_stage_duration_seconds_count", stage="embed") == 5
    for gauge in ("ready", "provider_up", "kafka_up"):
        assert samples.value(f"anabranch_{gauge}") == 1
    for event in (plain, titled, short, long):
        for log in (embedder.log, worker.log):
            assert event["text"] not in log


def check_replies(stages: Stages) -> None:
    """Each question has its result or its dead letter's code, on the partition that it names."""
    reader = stages.reader
    results = {record.key: record.value for record in reader.results}
    assert len(reader.replies) == len(stages.texts.asked)
    for number, event in enumerate(stages.texts.asked):
        [reply] = [record for record in reader.replies if record.key == event.key]
        assert reply.partition == number % PARTITIONS
        code = dict(reply.headers).get("anabranch.error.code", b"").decode() or None
        assert (code, reply.value) == (event.expects, results.get(event.key, b""))


def summarizer(server: Imitation) -> dict[str, str]:
    return {
        "ANABRANCH_EMBEDDING_SUMMARIZER": "openai",
        "ANABRANCH_EMBEDDING_SUMMARIZER_MODEL": "some-model",
        "ANABRANCH_EMBEDDING_SUMMARIZER_BASE_URL": f"{server.url}/openai/v1",
        "ANABRANCH_EMBEDDING_SUMMARIZER_API_KEY": server.key,
    }


@pytest.mark.parametrize("broker", ["either"], indirect=True)
async def test_kills_of_either_stage_lose_nothing(
    stages: Stages, database: Database, figures: Callable[[str], None]
) -> None:
    """Each stage is killed with events in flight, and replaced; every question has exactly one kind of answer."""
    texts, output_reader = stages.texts, stages.reader
    await load(database.writer, tiny_corpus())
    stages.server.delay_seconds = 0.05
    worker, embedder = await stages.start(database.worker)
    kills = 0
    asked_enough = asyncio.Event()

    async def ask() -> None:
        number = 0
        while not asked_enough.is_set():
            number += 1
            if number % 20 == 0:
                await texts.send(question("\t"), expects="empty_text")
            else:
                await texts.send(question(f"What is said about number {number}?", profile="docs"))
            await asyncio.sleep(0.02)

    asking = asyncio.create_task(ask())
    try:
        for victim in ("embedder", "worker", "both"):
            seen = len(output_reader.results)
            await until(
                lambda seen=seen: len(output_reader.results) > seen + 10,  # type: ignore[misc]  # mypy: a default
                lambda: f"{len(output_reader.results)} results",
                seconds=40,
            )
            if victim != "worker":
                embedder.kill()
                embedder = stages.start_embedder()
                kills += 1
            if victim != "embedder":
                worker.kill()
                worker = stages.start_worker(database.worker)
                kills += 1
    finally:
        # A cancelled send may have published an event of which the test does not know.
        asked_enough.set()
        await asking
    await texts.until_answered(output_reader, seconds=90)
    verdict = account_for(texts, output_reader)
    figures(f"{verdict}, {kills} kills")
    assert verdict.violations == []
    assert verdict.events > 100
    assert verdict.repeats > 0  # the kills met events in flight


@pytest.mark.parametrize("broker", ["either"], indirect=True)
async def test_a_stage_that_is_asked_to_end_loses_and_repeats_nothing(
    stages: Stages, database: Database
) -> None:
    texts, output_reader = stages.texts, stages.reader
    await load(database.writer, tiny_corpus())
    stages.server.delay_seconds = 0.2
    _, first = await stages.start(database.worker)
    for number in range(60):
        await texts.send(question(f"What is said about number {number}?"))
    await output_reader.until(results=5, seconds=20)
    code, _ = await first.terminate(seconds=15)
    assert code == 0
    embedded = len(output_reader.results)
    assert embedded < 60
    await stages.start_embedder().until_ready()
    await texts.until_answered(output_reader, seconds=60)
    verdict = account_for(texts, output_reader)
    assert verdict.violations == []
    assert verdict.repeats == 0
    assert "drained" in first.log
