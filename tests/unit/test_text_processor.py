"""One question's way through the embedding stage: what is published, what is retried, what is dead-lettered.

The provider does what a script says; publishing is recorded. The codec, the composition, the batches, the metrics and
the provider's health are the real ones. Retries and dead letters themselves: see test_processor.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import numpy as np
import pytest

from streams.core.composition import Message
from streams.core.embedding_errors import (
    EmbeddingError,
    KeyRejected,
    ProviderUnavailable,
    TextRejected,
    WrongDimension,
)
from streams.core.errors import TerminalError, TransientError
from streams.core.replies import ReplyTarget, reply_request_headers
from streams.embedder.processor import TextProcessor
from streams.embedding.embedder import Embedder
from streams.embedding.provider import Embedded
from streams.embedding.summarizers import Composer
from streams.telemetry.metrics import EmbedderMetrics
from streams.tokens import count_tokens, first_tokens
from streams.wire import Codec
from streams.worker.delivery import InterruptibleWaits
from streams.worker.dependency_health import DependencyHealth, DependencyState
from streams.worker.event_processor import OutagePolicy
from tests.unit.test_processor import CANARY, Broker, Record, shows_nothing

CODEC = Codec(dimensions=None)
EVENT_ID = "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d"


def question(**changes: Any) -> Record:
    fields = {
        "schema_version": "1.0.0",
        "event_id": EVENT_ID,
        "occurred_at": datetime.now(UTC).isoformat(),
        "principals": [f"user:{CANARY}"],
        "text": CANARY,
    } | changes
    return Record(json.dumps(fields).encode())


class Scripted:
    """A provider whose next calls fail as a script says, and that truncates long texts."""

    def __init__(self, *script: EmbeddingError, dimensions: int = 768) -> None:
        self.script = list(script)
        self.dimensions = dimensions
        self.texts: list[str] = []

    async def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embedded:
        del dimensions
        self.texts += texts
        if self.script:
            raise self.script.pop(0)
        vectors = np.ones((len(texts), self.dimensions), dtype=np.float32)
        return Embedded(vectors, [len(text) > 1000 for text in texts])

    async def close(self) -> None:
        pass


class Summarizer:
    def __init__(self, error: EmbeddingError | None = None) -> None:
        self.error = error
        self.calls = 0

    async def summarize(self, conversation: Sequence[Message]) -> str:
        del conversation
        self.calls += 1
        if self.error is not None:
            raise self.error
        return "a summary"

    async def close(self) -> None:
        pass


class Bench:
    """A processor and everything around it."""

    def __init__(
        self,
        provider: Scripted | None = None,
        broker: Broker | None = None,
        *,
        then: Literal["block", "dead_letter"] = "block",
        summarizer: Summarizer | None = None,
    ) -> None:
        self.provider = provider or Scripted()
        self.broker = broker or Broker()
        self.metrics = EmbedderMetrics()
        self.reported: list[TransientError | None] = []
        self.health = DependencyHealth(name="provider", probe=self._probe, inspect=self._inspect)
        self.processor = TextProcessor(
            codec=CODEC,
            composer=Composer(
                summarizer, timeout_seconds=1, count_tokens=count_tokens, first_tokens=first_tokens
            ),
            embedder=Embedder(self.provider, dimensions=self.provider.dimensions, batch_wait_seconds=0),
            health=self.health,
            publish=self.broker.publish,
            publish_dead_letter=self.broker.publish,
            replies=self.broker.replies(self.metrics),
            metrics=self.metrics,
            embedding_model="some-model",
            output_topic="queries",
            dead_letter_topic="dead",
            outage=OutagePolicy(then=then, attempts=3, base_seconds=0.001, max_seconds=0.002),
            waits=InterruptibleWaits(),
            on_provider=self.reported.append,
        )

    async def _probe(self) -> None:
        pass

    async def _inspect(self) -> Sequence[Any]:
        return ()

    async def handle(self, record: Record) -> None:
        await self.health.check()
        async with asyncio.timeout(5):
            await self.processor.handle(record)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


async def embedded(bench: Bench, record: Record) -> Any:
    await bench.handle(record)
    (sent,) = bench.broker.sent
    assert sent.topic == "queries"
    assert bench.count("anabranch_events_total", outcome="answered") == 1
    return CODEC.decode_query(sent.value)


async def dead(bench: Bench, record: Record, code: str) -> Any:
    await bench.handle(record)
    (sent,) = bench.broker.sent
    assert (sent.topic, sent.key, sent.value) == ("dead", record.key, record.value)
    assert sent.header("anabranch.error.code") == code
    assert bench.count("anabranch_dead_letters_total", code=code) == 1
    return sent


async def test_a_query_event_carries_everything_over() -> None:
    filters = {"section": "1", "metadata": {"a": "b"}}
    fields = {
        "session_id": str(UUID(int=1)),
        "topic_id": str(UUID(int=2)),
        "profile": "docs",
        "k": 3,
        "similarity_threshold": 0.5,
        "token_budget": 100,
        "filters": filters,
        "expires_at": "2999-01-01T00:00:00Z",
    }
    bench, record = Bench(), question(**fields)
    query = await embedded(bench, record)
    shown = query.model_dump(mode="json", exclude={"embedding", "occurred_at"}, exclude_none=True)
    assert shown == fields | {
        "schema_version": "1.0.0",
        "event_id": EVENT_ID,
        "principals": [f"user:{CANARY}"],
        "embedding_model": "some-model",
        "query_hash": hashlib.sha256(CANARY.encode()).hexdigest(),
    }
    assert query.occurred_at == CODEC.decode_text(record.value).occurred_at  # type: ignore[arg-type]  # as made here
    assert list(query.embedding) == [1.0] * 768
    (sent,) = bench.broker.sent
    assert (sent.key, list(sent.headers)) == (record.key, list(record.headers))
    for name in ("event_age", "embedding_duration"):
        assert bench.count(f"anabranch_{name}_seconds_count") == 1


async def test_headers_of_the_text_are_not_copied_and_those_for_the_reply_are() -> None:
    bench = Bench()
    kept = [
        ("traceparent", b"00-aa-bb-01"),
        *reply_request_headers(ReplyTarget("replies", 1), b"some id"),
    ]
    record = replace(question(), headers=[("content-type", b"application/json"), *kept])
    await embedded(bench, record)
    (sent,) = bench.broker.sent
    assert sorted(sent.headers) == sorted(kept)


async def test_the_hash_is_of_the_text_whatever_is_embedded() -> None:
    bench = Bench()
    fields = {"session_id": str(UUID(int=1)), "topic_id": str(UUID(int=2)), "topic_title": "Tides"}
    query = await embedded(bench, question(**fields))
    assert bench.provider.texts == [f"Tides: {CANARY}"]
    assert query.query_hash == hashlib.sha256(CANARY.encode()).hexdigest()


@pytest.mark.parametrize(
    ("changes", "dimensions", "version"),
    [
        ({}, 768, "1.0.0"),
        ({}, 384, "1.1.0"),
        ({"text": "x" * 2000}, 768, "1.1.0"),
        ({"explain": True}, 768, "1.1.0"),
        ({"filters": {"metadata_any": {"a": ["b"]}}}, 768, "1.1.0"),
    ],
)
async def test_the_event_has_the_oldest_version_that_can_express_it(
    changes: dict[str, Any], dimensions: int, version: str
) -> None:
    bench = Bench(Scripted(dimensions=dimensions))
    assert (await embedded(bench, question(**changes))).schema_version == version


async def test_a_question_is_finished_when_its_query_event_is_acknowledged() -> None:
    bench = Bench()
    publishing, acknowledged = asyncio.Event(), asyncio.Event()

    async def publish(*_: object) -> None:
        publishing.set()
        await acknowledged.wait()

    bench.processor._publish = publish
    handling = asyncio.create_task(bench.handle(question()))
    async with asyncio.timeout(5):
        await publishing.wait()
    await asyncio.sleep(0.02)
    assert not handling.done()
    assert bench.count("anabranch_events_total", outcome="answered") == 0
    acknowledged.set()
    await handling
    assert bench.count("anabranch_events_total", outcome="answered") == 1


async def test_a_truncated_text_is_a_warning() -> None:
    bench = Bench()
    query = await embedded(bench, question(text="x" * 2000))
    assert query.upstream_warnings == ("text_truncated",)
    assert bench.count("anabranch_warnings_total", code="text_truncated") == 1


async def test_a_summary_is_made_once_however_often_it_is_tried() -> None:
    summarizer = Summarizer()
    bench = Bench(Scripted(*[ProviderUnavailable("away")] * 3), summarizer=summarizer)
    await embedded(bench, question(conversation=[{"role": "user", "text": CANARY}]))
    assert set(bench.provider.texts) == {f"a summary: {CANARY}"}
    assert (len(bench.provider.texts), summarizer.calls) == (4, 1)


async def test_a_summary_that_fails_is_a_warning_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(summarizer=Summarizer(KeyRejected("the provider rejects the API key")))
    record = question(conversation=[{"role": "user", "text": CANARY}])
    query = await embedded(bench, record)
    assert query.upstream_warnings == ("summary_unavailable",)
    assert bench.provider.texts == [CANARY]
    await bench.handle(record)
    lines = [line for line in caplog.messages if "summaries" in line]
    assert lines == [
        "no summaries, embedding the texts alone: key_rejected: the provider rejects the API key"
    ]


@pytest.mark.parametrize(
    ("record", "code", "stage"),
    [
        (question(text=" \n\t"), "empty_text", "embed"),
        (Record(b"{"), "undecodable", "decode"),
        (question(text=7), "contract_violation", "decode"),
        (question(schema_version="2.0.0"), "unsupported_version", "decode"),
        (question(topic_id=str(UUID(int=2))), "topic_without_session", "decode"),
        (question(expires_at="2020-01-01T00:00:00Z"), "expired", "decode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_can_never_succeed_is_dead_lettered_at_once(
    record: Record, code: str, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    sent = await dead(bench, record, code)
    assert sent.header("__connect.errors.stage") == stage
    assert bench.provider.texts == []
    shows_nothing(dict(sent.headers[3:]), caplog)
    (line,) = [line for line in caplog.records if line.getMessage() == "dead letter"]
    assert vars(line)["event_id"] == (None if code == "undecodable" else EVENT_ID)


async def test_a_rejected_text_is_dead_lettered() -> None:
    bench = Bench(Scripted(TextRejected("the provider rejects the text (HTTP 400)")))
    sent = await dead(bench, question(), "text_rejected")
    assert sent.header("__connect.errors.class.name") == "TextRejected"
    assert bench.reported == []  # which says nothing about the provider


async def test_an_outage_is_waited_for() -> None:
    bench = Bench(Scripted(*[ProviderUnavailable("away")] * 9))
    await embedded(bench, question())
    assert bench.count("anabranch_retries_total", cause="provider_unavailable") == 9
    assert [error is None for error in bench.reported] == [False] * 9 + [True]


async def test_an_outage_is_dead_lettered_if_it_is_set() -> None:
    bench = Bench(Scripted(*[ProviderUnavailable("away")] * 9), then="dead_letter")
    sent = await dead(bench, question(), "provider_unavailable")
    assert len(bench.provider.texts) == 3
    assert sent.header("__connect.errors.stage") == "embed"


@pytest.mark.parametrize("then", ["block", "dead_letter"])
@pytest.mark.parametrize("error", [KeyRejected("no"), WrongDimension("no")], ids=lambda error: error.code)
async def test_what_an_operator_must_fix_is_not_blamed_on_a_text(then: Any, error: EmbeddingError) -> None:
    bench = Bench(Scripted(*[error] * 9), then=then)
    states = []
    report = bench.processor._on_provider

    def note(found: TransientError | None) -> None:
        states.append(bench.health.state)
        report(found)

    bench.processor._on_provider = note
    await embedded(bench, question())
    assert bench.count("anabranch_retries_total", cause=error.code) == 9
    assert states[1] is DependencyState.MISCONFIGURED
    assert bench.health.state is DependencyState.UP


async def test_a_text_at_which_the_provider_fails_is_given_up_only_if_others_succeed() -> None:
    failure = ProviderUnavailable("the provider fails (HTTP 500)", status=500)
    bench = Bench()
    calls = 0

    async def embed(text: str) -> Any:
        nonlocal calls
        if text == "good":
            return await embed_one(text)
        calls += 1
        if calls == 5:  # so far, nothing else has been embedded since this text's first attempt
            assert bench.broker.sent == []
            await bench.processor.handle(question(text="good"))
        raise failure

    embed_one = bench.processor._embedder.embed
    bench.processor._embedder.embed = embed  # type: ignore[method-assign]  # one text at which it fails
    await bench.handle(question())
    good, bad = bench.broker.sent
    assert (good.topic, bad.topic, calls) == ("queries", "dead", 7)
    assert bad.header("anabranch.error.code") == "provider_unavailable"
    assert bad.header("__connect.errors.exception.message") == (
        "the provider failed 3 times while other events succeeded"
    )


async def test_a_text_is_not_blamed_for_a_provider_that_is_busy() -> None:
    bench = Bench()
    calls = 0

    async def embed(text: str) -> Any:
        nonlocal calls
        if text == "good":
            return await embed_one(text)
        calls += 1
        if calls > 9:
            return await embed_one(text)
        await bench.processor.handle(question(text="good"))
        raise ProviderUnavailable("the provider is busy (HTTP 503)", status=503)

    embed_one = bench.processor._embedder.embed
    bench.processor._embedder.embed = embed  # type: ignore[method-assign]  # busy for one text
    await bench.handle(question())
    assert [sent.topic for sent in bench.broker.sent] == ["queries"] * 10


async def test_an_unexpected_error_is_dead_lettered_with_its_stage(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.processor._composer = None  # type: ignore[assignment]  # breaks it
    sent = await dead(bench, question(), "internal_error")
    assert sent.header("__connect.errors.stage") == "compose"
    shows_nothing(dict(sent.headers[3:]), caplog)


async def test_a_question_that_expires_before_the_provider_has_been_checked_is_not_embedded() -> None:
    expiry = datetime.now(UTC) + timedelta(seconds=0.5)
    bench, record = Bench(), question(expires_at=expiry.isoformat())
    handling = asyncio.create_task(bench.processor.handle(record))
    await after(expiry)
    await bench.health.check()
    async with asyncio.timeout(5):
        await handling
    (sent,) = bench.broker.sent
    assert (sent.topic, sent.header("anabranch.error.code")) == ("dead", "expired")
    assert bench.provider.texts == []


async def test_an_expired_question_does_not_wait_for_the_provider() -> None:
    bench = Bench()
    async with asyncio.timeout(5):
        await bench.processor.handle(question(expires_at="2020-01-01T00:00:00Z"))
    (sent,) = bench.broker.sent
    assert (sent.topic, sent.header("anabranch.error.code")) == ("dead", "expired")


async def test_a_question_that_expires_in_an_outage_is_not_embedded_again() -> None:
    expiry = datetime.now(UTC) + timedelta(seconds=1.5)

    class Failing(Scripted):
        async def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embedded:
            await after(expiry)
            return await super().embed(texts, dimensions=dimensions)

    bench = Bench(Failing(ProviderUnavailable("away")))
    await dead(bench, question(expires_at=expiry.isoformat()), "expired")
    assert bench.provider.texts == [CANARY]


async def after(instant: datetime) -> None:
    await asyncio.sleep(max(0.0, (instant - datetime.now(UTC)).total_seconds()) + 0.01)


async def test_nothing_is_embedded_before_the_provider_has_been_checked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    bench = Bench()
    handling = asyncio.create_task(bench.processor.handle(question()))
    await asyncio.sleep(0.02)
    assert bench.provider.texts == []
    await bench.health.check()
    async with asyncio.timeout(5):
        await handling
    assert len(bench.broker.sent) == 1
    shows_nothing({}, caplog)


async def test_a_drain_does_not_wait_for_the_retries_of_an_outage() -> None:
    """While the provider is down, an event may be cancelled in the middle of a call."""
    hanging = asyncio.Event()

    class Hanging(Scripted):
        async def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embedded:
            hanging.set()
            await asyncio.sleep(60)
            return await super().embed(texts, dimensions=dimensions)

    bench = Bench(Hanging())
    await bench.health.check()
    bench.health._set_state(DependencyState.DOWN, "away")
    handling = asyncio.create_task(bench.processor.handle(question()))
    async with asyncio.timeout(5):
        await hanging.wait()
        bench.processor._waits.end()
        with pytest.raises(asyncio.CancelledError):
            await handling
        await bench.processor._embedder.close()
    assert bench.broker.sent == []


def test_the_tree_of_embedding_errors_is_on_the_axis_of_events() -> None:
    for kind in EmbeddingError.__subclasses__():
        assert issubclass(kind, TerminalError) is not issubclass(kind, TransientError)
