"""One event's way: every row of the specification's table of failures.

The store does what a script says; publishing is recorded. The codec, the retrieval, the metrics and the store's
health are the real ones. Back-off is in milliseconds.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Literal, cast
from uuid import UUID

import pytest

from streams.broker.publisher import CheckTarget
from streams.broker.records import Unreadable
from streams.core.errors import (
    RecordTooLarge,
    ResultTooLarge,
    SearchTimeout,
    StoreMisconfigured,
    StoreUnavailable,
    TerminalError,
    UnknownProfile,
    UnreadableBatch,
)
from streams.core.messages import QueryEmbedding, result_id
from streams.core.profiles import BUILTIN_PROFILES
from streams.core.replies import ReplyTarget
from streams.core.selection import Candidate
from streams.retrieval import ArmResult, Retrieved, Search, StoredPassage
from streams.telemetry.metrics import Metrics, StageMetrics
from streams.wire import Codec
from streams.wire.deadletter import Origin, read_dead_letter
from streams.wire.replay_headers import RecordPosition, with_replay_headers
from streams.worker.delivery import InterruptibleWaits
from streams.worker.dependency_health import DependencyHealth, DependencyState
from streams.worker.event_processor import OutagePolicy
from streams.worker.processor import Processor
from streams.worker.replies import Replies, ReplyTopics

CODEC = Codec()
CANARY = "canary-3b9e"
NUMBER = 0.31415926535  # of the embedding; no other number here looks like it
SLOW_SESSION = UUID(int=0x510)

Headers = Sequence[tuple[str, bytes | None]]
Step = BaseException | Callable[[], Awaitable[None]] | None


def event(**changes: Any) -> dict[str, Any]:
    fields = {
        "schema_version": "1.0.0",
        "event_id": "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d",
        "occurred_at": datetime.now(UTC).isoformat(),
        "principals": [f"user:{CANARY}"],
        "embedding": [NUMBER] * 768,
        "filters": {"section": CANARY, "metadata": {CANARY: CANARY}},
    } | changes
    return {name: value for name, value in fields.items() if value is not ...}


@dataclass(frozen=True)
class Record:
    value: bytes | Unreadable | None
    key: bytes | None = b"the key"
    headers: Headers = (("traceparent", b"00-aa-bb-01"), ("twice", b"1"), ("twice", b"\xff\x00"))
    topic: str = "retrieval.query-embeddings.v1"
    partition: int = 3
    offset: int = 42
    read_at: float = field(default_factory=perf_counter)
    timestamp: float | None = None

    @classmethod
    def of(cls, **changes: Any) -> "Record":
        return cls(json.dumps(event(**changes)).encode())


class Scripted:
    """A store that has one passage, and does before each search what its script says."""

    def __init__(self, *script: Step, forever: Step = None) -> None:
        self._script = list(script)
        self._forever = forever
        self.searches = 0

    async def search(self, search: Search) -> ArmResult:
        del search
        self.searches += 1
        step = self._script.pop(0) if self._script else self._forever
        if isinstance(step, BaseException):
            raise step
        if step is not None:
            await step()
        return ArmResult([Candidate(UUID(int=7), 0.25)], complete=True)

    async def passages(
        self, principals: Sequence[str], chunk_ids: Sequence[UUID]
    ) -> Mapping[UUID, StoredPassage]:
        del principals
        return {
            one: StoredPassage(one, UUID(int=1), CANARY, None, None, None, None, None, CANARY, None, CANARY)
            for one in chunk_ids
        }


@dataclass(frozen=True)
class Sent:
    topic: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]
    partition: int | None = None

    def header(self, name: str) -> str:
        (value,) = (value for other, value in self.headers if other == name)
        return value.decode()


class Broker:
    """Records what is published; refuses first what it is given to refuse. It has one topic for replies."""

    def __init__(self, *errors: BaseException, replies: Sequence[BaseException] = ()) -> None:
        self._errors = list(errors)
        self._reply_errors = list(replies)
        self.sent: list[Sent] = []
        self.reply_limits: list[datetime | None] = []

    async def publish(self, topic: str, key: bytes | None, value: bytes, headers: Headers) -> None:
        await asyncio.sleep(0)
        if self._errors:
            raise self._errors.pop(0)
        # No event here has a header without a value.
        self.sent.append(Sent(topic, key, value, cast("Sequence[tuple[str, bytes]]", headers)))

    async def publish_reply(
        self,
        target: ReplyTarget,
        key: bytes | None,
        value: bytes,
        headers: Headers,
        *,
        check: CheckTarget,
        expires_at: datetime | None,
    ) -> None:
        self.reply_limits.append(expires_at)
        await check(target, again=False)
        if self._reply_errors:
            raise self._reply_errors.pop(0)
        headers = cast("Sequence[tuple[str, bytes]]", headers)
        self.sent.append(Sent(target.topic, key, value, headers, target.partition))

    def replies(self, metrics: StageMetrics) -> Replies:
        async def existing() -> Mapping[str, int | None]:
            return {"replies": 4}

        allowed = ["replies", "not created"]
        return Replies(
            self.publish_reply, allowed=allowed, topics=ReplyTopics(existing), count=metrics.replies
        )


class Bench:
    """A processor and everything around it."""

    def __init__(
        self,
        store: Any,
        broker: Broker | None = None,
        *,
        then: Literal["block", "dead_letter"] = "block",
        attempts: int = 3,
        model: str | None = None,
        codec: Codec = CODEC,
        result_contract: str = "1.0.0",
        reply_only: bool = False,
    ) -> None:
        self.store = store
        self.broker = broker or Broker()
        self.metrics = Metrics()
        self.findings: list[Any] = []
        self.answers: list[Retrieved] = []
        self.frozen = False
        self.health = DependencyHealth(probe=self._probe, inspect=self._inspect, interval_seconds=0.001)
        self.processor = Processor(
            codec=codec,
            store=store,
            health=self.health,
            count_tokens=len,
            publish=self.broker.publish,
            publish_dead_letter=self.broker.publish,
            replies=self.broker.replies(self.metrics),
            reply_only=reply_only,
            metrics=self.metrics,
            profiles=BUILTIN_PROFILES,
            default_profile="extraction",
            embedding_model=model,
            output_topic="results",
            dead_letter_topic="dead",
            outage=OutagePolicy(then=then, attempts=attempts, base_seconds=0.001, max_seconds=0.002),
            waits=InterruptibleWaits(),
            result_contract=result_contract,
            on_answer=self.answers.append,
        )

    async def _probe(self) -> None:
        if self.frozen:
            raise SearchTimeout("no sign of life")

    async def _inspect(self) -> Sequence[Any]:
        return self.findings

    @asynccontextmanager
    async def preflight_passed(self) -> AsyncIterator[None]:
        """A preflight has passed, and the store is watched no longer."""
        watch = asyncio.create_task(self.health.watch())
        await self.health.wait_admitted()
        watch.cancel()
        yield

    async def handle(self, record: Record) -> None:
        async with self.preflight_passed(), asyncio.timeout(5):
            await self.processor.handle(record)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def outcomes(self) -> dict[str, float]:
        counts = {name: self.count("anabranch_events_total", outcome=name) for name in OUTCOMES}
        return {name: count for name, count in counts.items() if count}

    def dead_letter(self) -> Sent:
        (sent,) = self.broker.sent
        assert sent.topic == "dead"
        return sent

    def dead_letters(self) -> dict[str, float]:
        return self._by("anabranch_dead_letters_total", "code")

    def retries(self) -> dict[str, float]:
        return self._by("anabranch_retries_total", "cause")

    def replies(self) -> dict[str, float]:
        return self._by("anabranch_replies_total", "outcome")

    def _by(self, name: str, label: str) -> dict[str, float]:
        return {
            sample.labels[label]: sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and sample.value
        }


OUTCOMES = ("answered", "dead_lettered", "skipped")
POSITION = ("topic", "partition", "offset")


async def answered(bench: Bench, record: Record) -> None:
    await bench.handle(record)
    (sent,) = bench.broker.sent
    assert sent.topic == "results"
    assert bench.outcomes() == {"answered": 1}
    assert bench.dead_letters() == {}


async def dead(bench: Bench, record: Record, code: str) -> Sent:
    """Handle an event that is to end on the dead-letter topic, whole."""
    await bench.handle(record)
    sent = bench.dead_letter()
    assert (sent.key, sent.value) == (record.key, record.value)
    assert list(sent.headers[: len(record.headers)]) == list(record.headers)
    assert sent.header("anabranch.error.code") == code
    assert bench.outcomes() == {"dead_lettered": 1}
    assert bench.dead_letters() == {code: 1}
    return sent


async def test_an_answer_is_published_with_the_event_s_key_and_headers() -> None:
    bench, record = Bench(Scripted()), Record.of()
    await answered(bench, record)
    (sent,) = bench.broker.sent
    assert (sent.key, list(sent.headers)) == (record.key, list(record.headers))
    result = CODEC.decode_result(sent.value)
    assert result.result_id == result_id(QueryEmbedding.parse(event()).event_id)
    assert [(one.rank, one.text_content) for one in result.results] == [(1, CANARY)]
    assert 0 < result.query_time_ms < 5000


async def test_an_answer_is_counted() -> None:
    bench = Bench(Scripted())
    await answered(bench, Record.of(profile="docs", occurred_at="2020-01-01T00:00:00Z"))
    assert bench.count("anabranch_event_duration_seconds_count", profile="docs") == 1
    assert 0 < bench.count("anabranch_event_duration_seconds_sum", profile="docs") < 5
    assert bench.count("anabranch_event_age_seconds_sum") > 4e7
    assert bench.count("anabranch_passages_returned_sum", profile="docs") == 1
    header = f"[Source: {CANARY}]\n"
    assert bench.count("anabranch_tokens_used_sum", profile="docs") == len(header + CANARY)
    for stage in ("decode", "search", "assemble", "encode", "publish"):
        assert bench.count("anabranch_stage_duration_seconds_count", stage=stage) == 1
    assert bench.count("anabranch_search_duration_seconds_count", scope="global") == 1
    assert bench.count("anabranch_search_duration_seconds_count", scope="local") == 0
    assert bench.retries() == {}


async def test_the_warnings_of_a_result_are_counted() -> None:
    bench = Bench(Scripted())
    await answered(bench, Record.of(profile="docs", k=1000))
    (sent,) = bench.broker.sent
    assert list(CODEC.decode_result(sent.value).warnings) == ["k_clamped"]
    assert bench.count("anabranch_warnings_total", code="k_clamped") == 1
    assert bench.count("anabranch_warnings_total", code="scan_truncated") == 0


async def test_an_event_from_the_future_has_no_age() -> None:
    bench = Bench(Scripted())
    await answered(bench, Record.of(occurred_at="2999-01-01T00:00:00Z"))
    assert bench.count("anabranch_event_age_seconds_count") == 1
    assert bench.count("anabranch_event_age_seconds_sum") == 0


async def test_it_waits_for_the_broker_s_acknowledgement() -> None:
    bench = Bench(Scripted())
    acknowledged = asyncio.Event()

    async def publish(*_: object) -> None:
        await acknowledged.wait()

    bench.processor._publish = publish
    async with bench.preflight_passed():
        handling = asyncio.create_task(bench.processor.handle(Record.of()))
        await asyncio.sleep(0.02)
        assert not handling.done()
        assert bench.outcomes() == {}
        assert bench.answers == []
        acknowledged.set()
        await handling
    assert bench.outcomes() == {"answered": 1}
    (retrieved,) = bench.answers
    assert [search.principals for search, _ in retrieved.searches.values()] == [(f"user:{CANARY}",)]


async def test_a_tombstone_is_skipped_and_counted() -> None:
    bench = Bench(Scripted())
    async with asyncio.timeout(1):
        await bench.processor.handle(Record(None))  # also before any preflight: it asks nothing
    assert (bench.broker.sent, bench.store.searches) == ([], 0)
    assert bench.outcomes() == {"skipped": 1}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"", "undecodable"),
        (CANARY.encode(), "undecodable"),
        (json.dumps([CANARY]).encode(), "undecodable"),
        (b"\xc3\x01" + CANARY.encode(), "unknown_schema"),
        (b"\x00\x00\x00\x00\x07" + CANARY.encode(), "unknown_schema"),
        (json.dumps(event(schema_version="2.0.0")).encode(), "unsupported_version"),
        (json.dumps(event(k=CANARY)).encode(), "contract_violation"),
        (json.dumps(event(principals=[f"{CANARY}\0"])).encode(), "contract_violation"),
        (json.dumps(event(embedding=[NUMBER] * 767)).encode(), "dimension_mismatch"),
        (json.dumps(event(embedding=[NUMBER * 1e40] * 768)).encode(), "non_finite_embedding"),
        (json.dumps(event(embedding=[0] * 768)).encode(), "zero_embedding"),
        (json.dumps(event(topic_id=str(SLOW_SESSION))).encode(), "topic_without_session"),
        (json.dumps(event(profile=CANARY)).encode(), "unknown_profile"),
        (json.dumps(event(embedding_model=CANARY)).encode(), "model_mismatch"),
        (json.dumps(event(expires_at="2020-01-01T00:00:00Z")).encode(), "expired"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_can_never_succeed_is_dead_lettered_at_once(
    value: bytes, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bench = Bench(Scripted(), model="all-mpnet-base-v2")
    sent = await dead(bench, Record(value), code)
    assert bench.store.searches == 0
    assert bench.retries() == {}
    added = dict(sent.headers[len(Record(value).headers) :])
    assert sorted(added) == [
        "__connect.errors.class.name",
        "__connect.errors.exception.message",
        "__connect.errors.offset",
        "__connect.errors.partition",
        "__connect.errors.stage",
        "__connect.errors.topic",
        "anabranch.error.code",
    ]
    assert added["__connect.errors.topic"] == b"retrieval.query-embeddings.v1"
    assert (added["__connect.errors.partition"], added["__connect.errors.offset"]) == (b"3", b"42")
    assert added["__connect.errors.stage"] == b"decode"
    shows_nothing(added, caplog)


def shows_nothing(headers: Mapping[str, bytes], caplog: pytest.LogCaptureFixture) -> None:
    """Neither the log nor a header that was added shows anything of the event or of a text."""
    shown = [*map(repr, headers.values()), *map(logging.Formatter().format, caplog.records)]
    shown += [repr(record.__dict__) for record in caplog.records if record.name.startswith("streams")]
    for text in shown:
        assert CANARY not in text
        assert str(NUMBER)[:8] not in text


async def test_an_event_without_a_model_is_answered_and_so_is_one_of_the_store_s() -> None:
    await answered(Bench(Scripted(), model="mpnet"), Record.of(embedding_model=None))
    await answered(Bench(Scripted(), model="mpnet"), Record.of(embedding_model="mpnet"))
    await answered(Bench(Scripted(), model=None), Record.of(embedding_model="another"))


@pytest.mark.parametrize("contract", ["1.0.0", "1.1.0"])
async def test_a_result_has_the_version_of_its_own_contract(contract: str) -> None:
    bench = Bench(Scripted(), result_contract=contract)
    await answered(bench, Record.of(schema_version="1.7.0"))
    (sent,) = bench.broker.sent
    result = CODEC.decode_result(sent.value)
    assert result.schema_version == contract
    other = result.model_copy(update={"schema_version": {"1.0.0": "1.1.0", "1.1.0": "1.0.0"}[contract]})
    assert sent.value[:10] == CODEC.encode_result(result)[:10] != CODEC.encode_result(other)[:10]


async def test_warnings_of_earlier_stages_reach_the_answer() -> None:
    bench = Bench(Scripted())
    upstream = ["text_truncated", "k_clamped", "text_truncated"]
    await answered(bench, Record.of(upstream_warnings=upstream, k=1000))
    result = CODEC.decode_result(bench.broker.sent[0].value)
    assert result.warnings == ("k_clamped", "text_truncated")
    assert bench.count("anabranch_warnings_total", code="k_clamped") == 1
    # Other codes are not bounded, so they have one label.
    assert bench.count("anabranch_warnings_total", code="other") == 1
    assert bench.count("anabranch_warnings_total", code="text_truncated") == 0


@pytest.mark.parametrize(
    ("event", "warnings"),
    [({"explain": True}, ("explanation_unavailable",)), ({"explain": False}, ()), ({"explain": None}, ())],
)
async def test_a_missing_explanation_is_a_warning_in_1_0_0(
    event: dict[str, Any], warnings: tuple[str, ...]
) -> None:
    bench = Bench(Scripted())
    await answered(bench, Record.of(**event))
    result = CODEC.decode_result(bench.broker.sent[0].value)
    assert result.explanation is None
    assert result.warnings == warnings


async def test_a_result_of_1_1_0_has_an_explanation_if_the_event_asks_for_one() -> None:
    bench = Bench(Scripted(), result_contract="1.1.0")
    await answered(bench, Record.of(explain=True))
    result = CODEC.decode_result(bench.broker.sent[0].value)
    assert result.warnings == ()
    assert result.explanation is not None
    (arm,) = result.explanation.arms
    assert (arm.scope, arm.returned) == ("global", result.k_returned)
    other = Bench(Scripted(), result_contract="1.1.0")
    await answered(other, Record.of(explain=False))
    assert CODEC.decode_result(other.broker.sent[0].value).explanation is None


PAYLOAD_HEADERS = (
    *("__value_schema_id", "content-type", "Content-Type", "contentType", "content-encoding"),
    *("ce_specversion", "ce_type", "CE_id", "__TypeId__", "__ContentTypeId__", "apicurio.value.globalId"),
    *("kafka_replyTopic", "kafka_replyPartition"),
)
OTHER_HEADERS = (
    *("traceparent", "tracestate", "baggage", "kafka_correlationId", "__key_schema_id", "__KeyTypeId__"),
    *("x-content-type", "cent", "ce", "anabranch.replay.attempts", ""),
)


async def test_a_result_has_no_header_that_describes_the_events_value() -> None:
    headers = [(name, name.encode()) for name in (*PAYLOAD_HEADERS, *OTHER_HEADERS, *PAYLOAD_HEADERS)]
    bench = Bench(Scripted())
    await answered(bench, replace(Record.of(), headers=headers))
    assert list(bench.broker.sent[0].headers) == [(name, name.encode()) for name in OTHER_HEADERS]


async def test_a_dead_letter_has_all_headers() -> None:
    headers = [(name, name.encode()) for name in (*PAYLOAD_HEADERS, *OTHER_HEADERS)]
    await dead(Bench(Scripted()), replace(Record(b"garbage"), headers=headers), "undecodable")


async def test_an_event_without_key_and_headers_has_none_in_the_end() -> None:
    bench = Bench(Scripted())
    await answered(bench, Record(json.dumps(event()).encode(), key=None, headers=()))
    assert (bench.broker.sent[0].key, list(bench.broker.sent[0].headers)) == (None, [])


@pytest.mark.parametrize("then", ["block", "dead_letter"])
async def test_an_outage_that_ends_in_time_is_survived(then: Any) -> None:
    bench = Bench(Scripted(*[StoreUnavailable("down")] * 2), then=then)
    await answered(bench, Record.of())
    assert bench.retries() == {"store_unavailable": 2}
    assert bench.store.searches == 3


async def test_block_keeps_trying_for_as_long_as_it_takes() -> None:
    bench = Bench(Scripted(*[StoreUnavailable("down"), SearchTimeout("slow")] * 15))
    await answered(bench, Record.of())
    assert bench.retries() == {"store_unavailable": 15, "search_timeout": 15}


@pytest.mark.parametrize("attempts", [1, 3, 5])
@pytest.mark.parametrize("error", [StoreUnavailable(CANARY), SearchTimeout(CANARY)])
async def test_dead_letter_gives_up_after_so_many_attempts(
    attempts: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(Scripted(forever=error), then="dead_letter", attempts=attempts)
    sent = await dead(bench, Record.of(), "store_unavailable")
    assert bench.store.searches == attempts
    assert sent.header("__connect.errors.stage") == "search"
    assert sent.header("__connect.errors.class.name") == "GaveUp"
    shows_nothing(dict(sent.headers[3:]), caplog)


class SlowForOne(Scripted):
    """One session's searches time out six times; during the first of them another event is answered."""

    def __init__(self) -> None:
        super().__init__()
        self.bench: Bench | None = None
        self.slow_searches = 0

    async def search(self, search: Search) -> ArmResult:
        if search.session_id != SLOW_SESSION or self.slow_searches >= 6:
            return await super().search(search)
        self.slow_searches += 1
        if self.slow_searches == 1:
            assert self.bench is not None
            await self.bench.processor.handle(Record.of())
        raise SearchTimeout("too slow")


async def test_an_event_that_times_out_while_others_succeed_is_dead_lettered() -> None:
    """Others need not succeed each time: while it is not acknowledged, it may hold all of them back."""
    store = SlowForOne()
    bench = store.bench = Bench(store)
    async with bench.preflight_passed(), asyncio.timeout(5):
        await bench.processor.handle(Record.of(session_id=str(SLOW_SESSION)))
    assert [sent.topic for sent in bench.broker.sent] == ["results", "dead"]
    assert bench.broker.sent[-1].header("anabranch.error.code") == "search_timeout"
    assert store.slow_searches == 3
    assert bench.retries() == {"search_timeout": 3}


async def test_a_store_that_froze_after_another_s_success_is_not_blamed_on_this_event() -> None:
    store = SlowForOne()
    bench = store.bench = Bench(store)
    async with bench.preflight_passed(), asyncio.timeout(5):
        bench.frozen = True
        await bench.processor.handle(Record.of(session_id=str(SLOW_SESSION)))
    assert bench.outcomes() == {"answered": 2}
    assert bench.retries() == {"search_timeout": 6}


async def test_an_event_that_times_out_alone_is_not_to_blame() -> None:
    # A success from before it was read says nothing about now.
    bench = Bench(Scripted(None, *[SearchTimeout("slow")] * 6))
    async with bench.preflight_passed(), asyncio.timeout(5):
        await bench.processor.handle(Record.of())
        await bench.processor.handle(Record.of())
    assert bench.outcomes() == {"answered": 2}
    assert bench.retries() == {"search_timeout": 6}


@pytest.mark.parametrize("then", ["block", "dead_letter"])
async def test_what_nobody_foresaw_is_dead_lettered_after_three_attempts(
    then: Any, caplog: pytest.LogCaptureFixture
) -> None:
    defect = ValueError(f"bad {CANARY} {NUMBER}")
    bench = Bench(Scripted(forever=defect), then=then)
    sent = await dead(bench, Record.of(), "internal_error")
    assert bench.store.searches == 3
    assert bench.retries() == {"internal_error": 3}
    assert "ValueError" in sent.header("__connect.errors.exception.message")
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 3
    shows_nothing(dict(sent.headers[3:]), caplog)


async def test_a_defect_that_does_not_come_back_is_survived() -> None:
    bench = Bench(Scripted(ValueError(CANARY), KeyError(CANARY)))
    await answered(bench, Record.of())
    assert bench.retries() == {"internal_error": 2}


def raise_a_defect(*_: object, **__: object) -> Any:
    raise ValueError(CANARY)


def stub(**functions: Any) -> Any:
    return SimpleNamespace(**functions)


def break_decoding(bench: Bench) -> None:
    bench.processor._codec = stub(decode_query=raise_a_defect)


def break_searching(bench: Bench) -> None:
    bench.store.search = raise_a_defect


def break_fetching(bench: Bench) -> None:
    bench.store.passages = raise_a_defect


def break_assembling(bench: Bench) -> None:
    bench.processor._count_tokens = raise_a_defect


def break_encoding(bench: Bench) -> None:
    bench.processor._codec = stub(decode_query=CODEC.decode_query, encode_result=raise_a_defect)


def break_publishing(bench: Bench) -> None:
    bench.broker._errors = [ValueError(CANARY) for _ in range(3)]


@pytest.mark.parametrize(
    ("broken", "stage"),
    [
        (break_decoding, "decode"),
        (break_searching, "search"),
        (break_fetching, "search"),
        (break_assembling, "assemble"),
        (break_encoding, "encode"),
        (break_publishing, "publish"),
    ],
)
async def test_an_unexpected_error_is_reported_with_its_stage(
    broken: Callable[[Bench], None], stage: str
) -> None:
    bench = Bench(Scripted())
    broken(bench)
    sent = await dead(bench, Record.of(), "internal_error")
    assert sent.header("__connect.errors.stage") == stage


async def test_an_event_is_decoded_once_however_often_it_is_tried() -> None:
    decoded = []

    def decode(value: bytes) -> QueryEmbedding:
        decoded.append(value)
        return CODEC.decode_query(value)

    bench = Bench(Scripted(*[StoreUnavailable("away")] * 5, ValueError(CANARY)))
    bench.processor._codec = stub(decode_query=decode, encode_result=CODEC.encode_result)
    await answered(bench, Record.of())
    assert bench.store.searches == 7
    assert len(decoded) == 1
    assert bench.count("anabranch_stage_duration_seconds_count", stage="decode") == 1


async def test_a_store_that_breaks_its_contract_is_a_defect_too(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Scripted):
        async def search(self, search: Search) -> ArmResult:
            await super().search(search)
            return ArmResult(
                [Candidate(UUID(int=7), -3.0)], complete=True
            )  # a similarity of 4: the contract refuses it

    bench = Bench(Wrong())
    sent = await dead(bench, Record.of(), "internal_error")
    shows_nothing(dict(sent.headers[3:]), caplog)


@pytest.mark.parametrize("then", ["block", "dead_letter"])
async def test_a_misconfigured_store_is_not_blamed_on_an_event(then: Any) -> None:
    states: list[DependencyState] = []
    bench = Bench(Scripted(*[StoreMisconfigured("a table is missing")] * 12), then=then, attempts=2)

    async def check() -> None:
        states.append(bench.health.state)

    bench.store._script.append(check)
    await answered(bench, Record.of())
    assert bench.retries() == {"store_misconfigured": 12}
    assert states == [DependencyState.MISCONFIGURED]
    assert bench.health.state is DependencyState.UP  # a search that works is the end of it


async def test_a_result_that_the_broker_does_not_take_is_dead_lettered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(Scripted(), Broker(ResultTooLarge("the broker does not accept a record of this size")))
    sent = await dead(bench, Record.of(), "result_too_large")
    assert sent.header("__connect.errors.stage") == "publish"
    assert bench.store.searches == 1
    shows_nothing(dict(sent.headers[3:]), caplog)


async def test_a_dead_letter_topic_that_is_too_small_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Too small even for a placeholder: neither is the event lost, nor does the worker end."""
    refused = [ResultTooLarge("too large")] * 30
    bench = Bench(Scripted(), Broker(*refused))
    await bench.handle(Record(b"garbage"))
    (sent,) = bench.broker.sent
    assert (sent.topic, sent.header("anabranch.error.code")) == ("dead", "undecodable")
    (reported,) = [line for line in caplog.messages if "max.message.bytes" in line]
    assert "anabranch check" in reported


@pytest.mark.parametrize(
    ("refused", "key", "kept"),
    [
        (1, b"k" * 600, ["a", "b", "c"]),
        (2, b"k" * 600, []),
        (3, None, ["a", "c"]),
        (5, None, ["a"]),
        (7, None, []),
    ],
)
async def test_a_dead_letter_that_does_not_fit_keeps_what_does(
    refused: int, key: bytes | None, kept: list[str]
) -> None:
    bench = Bench(Scripted(), Broker(*[ResultTooLarge("too large")] * refused))
    headers = (("a", b"1" * 29), ("b", b"2" * 529), ("c", b"3" * 69))
    await bench.handle(Record(b"garbage", b"k" * 600, headers))
    (sent,) = bench.broker.sent
    assert (sent.topic, sent.key, sent.value) == ("dead", key, b"")
    assert [name for name, _ in sent.headers if len(name) == 1] == kept
    origin, own = read_dead_letter(sent.headers)
    assert (origin.code, origin.placeholder, [name for name, _ in own]) == ("undecodable", (42, 42), kept)
    assert sent.header("anabranch.placeholder.original.bytes") == "7"
    assert bench.count("anabranch_dead_letters_total", code="undecodable") == 1
    assert bench.count("anabranch_placeholder_dead_letters_total") == 1


async def test_a_placeholder_keeps_headers_that_have_no_value() -> None:
    headers: Any = (("empty", None), ("twice", b"1"))
    bench = Bench(Scripted(), Broker(ResultTooLarge("too large")))
    await bench.handle(Record(b"no query", headers=headers))
    _, own = read_dead_letter(bench.dead_letter().headers)
    assert list(own) == list(headers)


@pytest.mark.parametrize(
    "error", [UnreadableBatch("why"), RecordTooLarge("why")], ids=lambda error: error.code
)
async def test_a_batch_that_was_not_read_becomes_a_placeholder(error: TerminalError) -> None:
    bench = Bench(Scripted())
    await bench.handle(Record(Unreadable(error, 40, 42, 1234), key=None, headers=()))
    (sent,) = bench.broker.sent
    assert (sent.topic, sent.key, sent.value) == ("dead", None, b"")
    origin, own = read_dead_letter(sent.headers)
    assert origin == Origin(error.code, "retrieval.query-embeddings.v1", 3, 40, (40, 42))
    assert own == []
    assert sent.header("anabranch.placeholder.original.bytes") == "1234"
    assert sent.header("__connect.errors.stage") == "read"
    assert bench.store.searches == 0
    assert bench.count("anabranch_dead_letters_total", code=error.code) == 1
    assert bench.count("anabranch_placeholder_dead_letters_total") == 1


async def test_an_event_that_expires_between_two_attempts_is_not_searched_again() -> None:
    expiry = datetime.now(UTC) + timedelta(seconds=0.3)

    async def fail_after_expiry() -> None:
        await asyncio.sleep(max(0.0, (expiry - datetime.now(UTC)).total_seconds()) + 0.01)
        raise StoreUnavailable("down")

    bench = Bench(Scripted(fail_after_expiry))
    await dead(bench, Record.of(expires_at=expiry.isoformat()), "expired")
    assert bench.store.searches == 1


@pytest.mark.parametrize(
    ("written", "on_arrival"),
    [
        ("2020-01-01T00:00:00.001Z", 1),
        ("2020-01-01T00:00:00Z", 1),  # it expires at the moment it is written
        ("2019-12-31T23:59:59.999Z", 0),  # it waited for too long: here
        (None, 0),
    ],
)
async def test_an_event_that_had_expired_when_it_was_written_is_counted_apart(
    written: str | None, on_arrival: int
) -> None:
    """No worker, however fast, could have answered it."""
    timestamp = None if written is None else datetime.fromisoformat(written).timestamp()
    bench, record = Bench(Scripted()), Record.of(expires_at="2020-01-01T00:00:00Z")
    await dead(bench, replace(record, timestamp=timestamp), "expired")
    assert bench.count("anabranch_expired_on_arrival_total") == on_arrival


async def test_an_event_that_expires_before_the_preflight_has_passed_is_not_searched() -> None:
    expiry = datetime.now(UTC) + timedelta(seconds=0.2)
    bench, record = Bench(Scripted()), Record.of(expires_at=expiry.isoformat())
    handling = asyncio.create_task(bench.processor.handle(record))
    await asyncio.sleep(max(0.0, (expiry - datetime.now(UTC)).total_seconds()) + 0.01)
    async with bench.preflight_passed(), asyncio.timeout(5):
        await handling
    assert bench.dead_letters() == {"expired": 1}
    assert bench.store.searches == 0


async def test_nothing_is_searched_before_a_preflight_has_passed() -> None:
    bench = Bench(Scripted())
    good = asyncio.create_task(bench.processor.handle(Record.of()))
    bad = asyncio.create_task(bench.processor.handle(Record(b"{")))
    await asyncio.sleep(0.02)
    assert bench.store.searches == 0
    assert bad.done()  # whether it can be decoded does not depend on the store
    async with bench.preflight_passed(), asyncio.timeout(5):
        await good
    assert bench.outcomes() == {"answered": 1, "dead_lettered": 1}


async def test_a_cancelled_event_leaves_no_trace() -> None:
    searching = asyncio.Event()

    async def hang() -> None:
        searching.set()
        await asyncio.Event().wait()

    bench = Bench(Scripted(hang))
    async with bench.preflight_passed(), asyncio.timeout(5):
        handling = asyncio.create_task(bench.processor.handle(Record.of()))
        await searching.wait()
        handling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handling
    assert (bench.broker.sent, bench.outcomes(), bench.retries()) == ([], {}, {})


async def test_an_event_may_meet_everything_and_be_answered() -> None:
    errors = [
        StoreUnavailable("down"),
        ValueError("odd"),
        SearchTimeout("slow"),
        StoreMisconfigured("table"),
        KeyError("odd"),
        StoreUnavailable("down"),
    ]
    bench = Bench(Scripted(*errors))
    await answered(bench, Record.of())
    assert sum(bench.retries().values()) == len(errors)


async def test_a_long_message_is_cut_to_fit_the_margin_of_the_topic() -> None:
    class Verbose(Codec):
        def decode_query(self, value: bytes) -> QueryEmbedding:
            del value
            raise UnknownProfile("x" * 5000)

    bench = Bench(Scripted())
    bench.processor._codec = Verbose()
    sent = await dead(bench, Record.of(), "unknown_profile")
    assert sum(len(name) + len(value) for name, value in sent.headers[3:]) < 2000


async def test_successes_are_silent_and_a_dead_letter_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="streams")
    bench = Bench(Scripted())
    async with bench.preflight_passed():
        caplog.clear()
        await bench.processor.handle(Record.of())
        assert caplog.records == []
        await bench.processor.handle(Record(b"{"))
    (line,) = caplog.records
    assert line.getMessage() == "dead letter"
    fields = vars(line)
    assert (fields["code"], fields["event_id"]) == ("undecodable", None)
    assert [fields[name] for name in POSITION] == ["retrieval.query-embeddings.v1", 3, 42]
    assert fields["reason"]


@pytest.mark.parametrize(
    "value",
    [
        json.dumps(event(k=CANARY)).encode(),
        json.dumps(event(profile=CANARY)).encode(),
        json.dumps(event(expires_at="2020-01-01T00:00:00Z")).encode(),
        json.dumps(event(topic_id=str(SLOW_SESSION))).encode(),
        CODEC.encode_query(QueryEmbedding.parse(event(profile=CANARY))),
        CODEC.encode_query(QueryEmbedding.parse(event(session_id=str(SLOW_SESSION)))),
    ],
    ids=["contract", "profile", "expired", "topic", "profile in Avro", "unexpected error"],
)
async def test_the_log_names_a_dead_letters_event(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Scripted(forever=ValueError(CANARY)))
    await bench.handle(Record(value))
    for line in caplog.records:  # of the attempts, too
        assert [vars(line)[name] for name in POSITION] == ["retrieval.query-embeddings.v1", 3, 42]
        assert vars(line)["event_id"] == "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d"
    assert [line.getMessage() for line in caplog.records].count("dead letter") == 1


@pytest.mark.parametrize("event_id", [CANARY, f"{SLOW_SESSION}\n{CANARY}", 7, None, ...])
async def test_the_log_names_an_event_only_by_a_uuid(
    event_id: object, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(Scripted())
    await bench.handle(Record.of(event_id=event_id))
    (line,) = (vars(one) for one in caplog.records if one.getMessage() == "dead letter")
    assert line["event_id"] is None
    assert line["reason"].startswith("event_id ")
    shows_nothing(dict(bench.dead_letter().headers[3:]), caplog)


async def test_a_replayed_event_has_no_age() -> None:
    """It is late because somebody replayed it late; the objective for age is about what comes in."""
    bench, record = Bench(Scripted()), Record.of(occurred_at="2020-01-01T00:00:00Z")
    replayed = with_replay_headers(record.headers, source=RecordPosition("dead", 0, 7), attempts=1)
    await answered(bench, replace(record, headers=replayed))
    assert bench.count("anabranch_event_age_seconds_count") == 0
    assert bench.count("anabranch_event_duration_seconds_count", profile="extraction") == 1


async def test_decoding_a_long_event_does_not_hold_up_the_others() -> None:
    bench = Bench(Scripted())
    padding = b"[" + b",".join([b"{}"] * 1_000_000) + b"]"
    record = Record(json.dumps(event()).encode()[:-1] + b', "unknown": ' + padding + b"}")
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        last = perf_counter()
        while True:
            await asyncio.sleep(0.001)
            longest, last = max(longest, perf_counter() - last), perf_counter()

    async with bench.preflight_passed():
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        began = perf_counter()
        await bench.processor.handle(record)
        seconds = perf_counter() - began
        await asyncio.sleep(0.002)
    watching.cancel()
    assert bench.outcomes() == {"answered": 1}
    assert longest < seconds / 2
