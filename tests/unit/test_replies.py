"""Request and reply: where a reply goes, and what becomes of one that cannot be sent."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from streams.broker.publisher import CheckTarget, Publisher
from streams.core.errors import ResultTooLarge
from streams.core.replies import (
    CORRELATION_ID_HEADER,
    REPLY_PARTITION_HEADER,
    REPLY_TOPIC_HEADER,
    ReplyRefused,
    ReplyTarget,
    missing_part,
    read_reply_target,
    reply_request_headers,
)
from streams.core.warning_codes import WarningCode
from streams.settings import Settings
from streams.wire.replay_headers import RecordPosition, with_replay_headers
from streams.worker.app import WorkerApp
from streams.worker.replies import ReplyTopics
from tests.unit import test_text_processor
from tests.unit.test_processor import CODEC, Bench, Broker, Record, Scripted, Sent

ID = b"\x00\xff the caller's"
TARGET = ReplyTarget("replies", 3)
Headers = Sequence[tuple[str, bytes | None]]


def asking(target: ReplyTarget = TARGET, **changes: Any) -> Record:
    """An event whose sender wants a reply."""
    record = Record.of(**changes)
    return replace(record, headers=[*record.headers, *reply_request_headers(target, ID)])


def changed(name: str, value: bytes | None) -> Record:
    record = asking()
    return replace(record, headers=[(n, value if n == name else v) for n, v in record.headers])


def sent_by_topic(bench: Bench) -> dict[str, Sent]:
    found = {sent.topic: sent for sent in bench.broker.sent}
    assert len(found) == len(bench.broker.sent)
    return found


@given(
    target=st.builds(
        ReplyTarget,
        st.text(min_size=1).filter(lambda name: name.isascii())
        | st.text(st.characters(codec="utf-8"), min_size=1),
        st.none() | st.integers(0, 2**31 - 1),
    ),
    correlation_id=st.binary(),
    others=st.lists(
        st.tuples(st.sampled_from(["traceparent", "kafka_replytopic", ""]), st.none() | st.binary())
    ),
    data=st.data(),
)
def test_what_is_asked_for_is_read(
    target: ReplyTarget, correlation_id: bytes, others: list[tuple[str, bytes | None]], data: st.DataObject
) -> None:
    headers = data.draw(st.permutations([*others, *reply_request_headers(target, correlation_id)]))
    assert read_reply_target(headers) == target


_VALUES = (
    st.none() | st.binary(max_size=6) | st.sampled_from([b"replies", b"\0\0\0\x03", b"\xff\xff\xff\xff"])
)
_NAMES = st.sampled_from([REPLY_TOPIC_HEADER, REPLY_PARTITION_HEADER, CORRELATION_ID_HEADER])


def is_utf_8(value: bytes) -> bool:
    try:
        return bool(value.decode())
    except UnicodeDecodeError:
        return False


@given(headers=st.lists(st.tuples(_NAMES, _VALUES)))
def test_any_headers_are_a_target_or_none_or_refused(headers: list[tuple[str, bytes | None]]) -> None:
    topic, partition, correlation_id = (
        [value for name, value in headers if name == wanted][-1:]
        for wanted in (REPLY_TOPIC_HEADER, REPLY_PARTITION_HEADER, CORRELATION_ID_HEADER)
    )
    is_valid = (
        is_utf_8(topic[0] or b"" if topic else b"")
        and all(value is not None and len(value) == 4 and value[0] < 0x80 for value in partition)
        and correlation_id not in ([], [None])
    )
    if topic and not is_valid:
        with pytest.raises(ReplyRefused, match=r"^reply_headers_invalid$"):
            read_reply_target(headers)
        return
    target = read_reply_target(headers)
    assert (target is None) == (not topic)
    if target is not None:
        assert [target.topic.encode()] == topic
        number = target.partition
        assert ([] if number is None else [number.to_bytes(4, "big")]) == partition


def test_which_part_is_missing() -> None:
    existing = {"replies": 4, "unknown number": None}
    assert missing_part(ReplyTarget("replies", 3), existing) is None
    assert missing_part(ReplyTarget("replies"), existing) is None
    assert missing_part(ReplyTarget("unknown number", 99), existing) is None
    assert missing_part(ReplyTarget("replies", 4), existing) is WarningCode.REPLY_PARTITION_MISSING
    assert missing_part(ReplyTarget("others", 0), existing) is WarningCode.REPLY_TOPIC_MISSING


@pytest.mark.parametrize("target", [TARGET, ReplyTarget("replies")])
async def test_a_reply_has_the_result_s_bytes_key_and_headers(target: ReplyTarget) -> None:
    bench, record = Bench(Scripted()), asking(target)
    await bench.handle(record)
    found = sent_by_topic(bench)
    assert list(found) == ["replies", "results"]
    reply, result = found.values()
    assert (reply.partition, reply.key) == (target.partition, record.key)
    assert (reply.value, reply.headers) == (result.value, result.headers)
    assert [value for name, value in reply.headers if name == CORRELATION_ID_HEADER] == [ID]
    assert ("traceparent", b"00-aa-bb-01") in reply.headers
    assert CODEC.decode_result(reply.value).warnings == ()
    assert bench.replies() == {"answered": 1}
    assert bench.outcomes() == {"answered": 1}


class Gated(Broker):
    """Acknowledges nothing on one topic until it is opened."""

    def __init__(self, topic: str) -> None:
        super().__init__()
        self._topic = topic
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def publish(self, topic: str, key: bytes | None, value: bytes, headers: Headers) -> None:
        await super().publish(topic, key, value, headers)
        await self._wait(topic)

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
        await super().publish_reply(target, key, value, headers, check=check, expires_at=expires_at)
        await self._wait(target.topic)

    async def _wait(self, topic: str) -> None:
        if topic == self._topic:
            self.reached.set()
            await self.opened.wait()


@pytest.mark.parametrize(
    ("topic", "record"),
    [
        ("replies", asking()),
        ("results", asking()),
        ("replies", asking(profile="unknown")),
        ("dead", asking(profile="unknown")),
    ],
)
async def test_an_event_is_done_when_everything_is_acknowledged(topic: str, record: Record) -> None:
    broker = Gated(topic)
    bench = Bench(Scripted(), broker)
    handling = asyncio.create_task(bench.handle(record))
    await broker.reached.wait()
    await asyncio.sleep(0.01)
    assert not handling.done()
    assert bench.outcomes() == {}
    broker.opened.set()
    await handling
    assert sum(bench.outcomes().values()) == 1
    assert len(bench.broker.sent) == 2


async def test_reply_only() -> None:
    bench = Bench(Scripted(), reply_only=True)
    await bench.handle(asking())
    assert list(sent_by_topic(bench)) == ["replies"]
    assert bench.outcomes() == {"answered": 1}


async def test_reply_only_is_not_for_events_that_want_no_reply() -> None:
    bench = Bench(Scripted(), reply_only=True)
    await bench.handle(Record.of())
    assert list(sent_by_topic(bench)) == ["results"]
    assert bench.replies() == {}


async def test_an_event_s_own_error_headers_do_not_make_its_reply_an_error() -> None:
    record = asking()
    record = replace(record, headers=[*record.headers, ("anabranch.error.code", b"expired")])
    bench = Bench(Scripted())
    await bench.handle(record)
    assert "anabranch.error.code" not in dict(sent_by_topic(bench)["replies"].headers)


@pytest.mark.parametrize("reply_only", [False, True])
@pytest.mark.parametrize(
    ("record", "code"),
    [
        (changed(REPLY_TOPIC_HEADER, b"\xff\xfe"), "reply_headers_invalid"),
        (changed(REPLY_TOPIC_HEADER, b""), "reply_headers_invalid"),
        (changed(REPLY_TOPIC_HEADER, None), "reply_headers_invalid"),
        (changed(REPLY_PARTITION_HEADER, b"\0\0\x03"), "reply_headers_invalid"),
        (changed(REPLY_PARTITION_HEADER, None), "reply_headers_invalid"),
        (changed(REPLY_PARTITION_HEADER, b"\xff\xff\xff\xff"), "reply_headers_invalid"),
        (changed(CORRELATION_ID_HEADER, None), "reply_headers_invalid"),
        (changed(REPLY_TOPIC_HEADER, b"results"), "reply_topic_not_allowed"),
        (changed(REPLY_TOPIC_HEADER, "Überall".encode()), "reply_topic_not_allowed"),
        (changed(REPLY_TOPIC_HEADER, b"not created"), "reply_topic_missing"),
        (changed(REPLY_PARTITION_HEADER, b"\0\0\0\x04"), "reply_partition_missing"),
        (changed(REPLY_PARTITION_HEADER, b"\x7f\xff\xff\xff"), "reply_partition_missing"),
    ],
)
async def test_a_result_that_cannot_be_a_reply_goes_to_the_output_topic_with_a_warning(
    record: Record, code: str, *, reply_only: bool
) -> None:
    bench = Bench(Scripted(), reply_only=reply_only)
    await bench.handle(record)
    sent = sent_by_topic(bench)
    assert list(sent) == ["results"]
    assert CODEC.decode_result(sent["results"].value).warnings == (code,)
    assert bench.count("anabranch_warnings_total", code=code) == 1
    assert (bench.replies(), bench.outcomes()) == ({code: 1}, {"answered": 1})


async def test_a_dead_letter_stays_as_it_is_where_its_reply_cannot_be_sent() -> None:
    bench, record = Bench(Scripted()), replace(changed(REPLY_TOPIC_HEADER, b"not created"), value=b"{")
    await bench.handle(record)
    assert bench.dead_letter().value == b"{"
    assert (bench.replies(), bench.outcomes()) == ({"reply_topic_missing": 1}, {"dead_lettered": 1})


@pytest.mark.parametrize("code", ["reply_not_authorized", "reply_rejected", "reply_expired"])
async def test_a_reply_that_the_broker_does_not_take(code: str) -> None:
    refused = ReplyRefused(WarningCode(code))
    bench = Bench(Scripted(), Broker(replies=[refused]), reply_only=True)
    await bench.handle(asking())
    assert CODEC.decode_result(sent_by_topic(bench)["results"].value).warnings == (code,)
    assert (bench.replies(), bench.outcomes()) == ({code: 1}, {"answered": 1})


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, [None]),
        ({"expires_at": "2999-01-01T00:00:00Z"}, [datetime(2999, 1, 1, tzinfo=UTC)]),
        ({"expires_at": "2020-01-01T00:00:00Z"}, [datetime(2020, 1, 1, tzinfo=UTC)]),
        (
            {"expires_at": "2999-01-01T00:00:00Z", "profile": "unknown"},
            [datetime(2999, 1, 1, tzinfo=UTC)],
        ),
        ({"expires_at": "2020-01-01T00:00:00Z", "embedding": [1.0]}, [datetime(2020, 1, 1, tzinfo=UTC)]),
        ({"expires_at": "tomorrow", "embedding": [1.0]}, [None]),
        ({"expires_at": 7}, [None]),
    ],
)
async def test_a_reply_is_attempted_as_long_as_the_caller_waits(
    changes: dict[str, Any], limits: list[datetime | None]
) -> None:
    bench = Bench(Scripted())
    await bench.handle(asking(**changes))
    assert bench.broker.reply_limits == limits


@pytest.mark.parametrize("changes", [{}, {"text": ""}])
async def test_the_embedding_stage_attempts_a_reply_as_long_as_the_caller_waits(
    changes: dict[str, Any],
) -> None:
    bench = test_text_processor.Bench()
    record = test_text_processor.question(expires_at="2020-01-01T00:00:00Z", **changes)
    await bench.handle(replace(record, headers=[*record.headers, *reply_request_headers(TARGET, ID)]))
    assert bench.broker.reply_limits == [datetime(2020, 1, 1, tzinfo=UTC)]


async def test_a_result_too_large_for_the_reply_topic_is_an_error_there() -> None:
    bench = Bench(Scripted(), Broker(replies=[ResultTooLarge("too large")]), reply_only=True)
    await bench.handle(asking())
    sent = sent_by_topic(bench)
    assert (sent["replies"].value, sent["replies"].header("anabranch.error.code")) == (
        b"",
        "result_too_large",
    )
    assert CODEC.decode_result(sent["results"].value).warnings == ("reply_too_large",)
    assert (bench.replies(), bench.outcomes()) == ({"reply_too_large": 1}, {"answered": 1})


async def test_a_caller_has_one_reply_although_the_output_topic_does_not_take_the_result() -> None:
    bench = Bench(Scripted(), Broker(ResultTooLarge("too large")))
    await bench.handle(asking())
    assert list(sent_by_topic(bench)) == ["replies", "dead"]
    assert (bench.replies(), bench.outcomes()) == ({"answered": 1}, {"dead_lettered": 1})


async def test_a_caller_has_one_reply_although_the_event_is_tried_again() -> None:
    bench = Bench(Scripted(), Broker(RuntimeError("unexpected")))
    await bench.handle(asking())
    assert list(sent_by_topic(bench)) == ["replies", "results"]


@pytest.mark.parametrize(
    ("output", "topics", "outcome"),
    [
        (ResultTooLarge("too large"), ["replies", "dead"], "dead_lettered"),
        (RuntimeError("unexpected"), ["replies", "results"], "answered"),
    ],
)
async def test_a_caller_has_one_reply_although_neither_topic_takes_the_result_at_first(
    output: Exception, topics: list[str], outcome: str
) -> None:
    bench = Bench(Scripted(), Broker(output, replies=[ResultTooLarge("too large")]))
    await bench.handle(asking())
    sent = sent_by_topic(bench)
    assert list(sent) == topics
    assert sent["replies"].header("anabranch.error.code") == "result_too_large"
    assert (bench.replies(), bench.outcomes()) == ({"reply_too_large": 1}, {outcome: 1})
    if "results" in sent:
        assert CODEC.decode_result(sent["results"].value).warnings == ("reply_too_large",)


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (replace(asking(), value=b"{"), "undecodable"),
        (asking(profile="unknown"), "unknown_profile"),
        (asking(expires_at="2020-01-01T00:00:00Z"), "expired"),
    ],
)
async def test_the_caller_learns_of_a_dead_letter(record: Record, code: str) -> None:
    bench = Bench(Scripted())
    await bench.handle(record)
    sent = sent_by_topic(bench)
    assert list(sent) == ["dead", "replies"]
    dead, reply = sent.values()
    assert (dead.value, list(dead.headers[: len(record.headers)])) == (record.value, list(record.headers))
    assert (reply.partition, reply.key, reply.value) == (TARGET.partition, record.key, b"")
    headers = dict(reply.headers)
    assert headers[CORRELATION_ID_HEADER] == ID
    assert reply.header("anabranch.error.code") == code
    reason = "__connect.errors.exception.message"
    assert reply.header(reason) == dead.header(reason)
    assert not {name for name in headers if name.startswith("__connect")} - {reason}
    assert (bench.replies(), bench.outcomes()) == ({"dead_lettered": 1}, {"dead_lettered": 1})


async def test_a_replayed_event_gets_no_reply() -> None:
    """Its caller is gone, and with `reply_only` nobody would see the result."""
    record = asking()
    source = RecordPosition("dead", 0, 1)
    record = replace(record, headers=with_replay_headers(record.headers, source=source, attempts=1))
    bench = Bench(Scripted(), reply_only=True)
    await bench.handle(record)
    assert list(sent_by_topic(bench)) == ["results"]
    assert bench.replies() == {}


async def test_the_embedding_stage_passes_the_request_on() -> None:
    bench, record = test_text_processor.Bench(), test_text_processor.question()
    request = [*reply_request_headers(TARGET, ID), ("__TypeId__", b"of the question")]
    await bench.handle(replace(record, headers=[*record.headers, *request]))
    (query,) = bench.broker.sent
    assert query.topic == "queries"
    assert read_reply_target(query.headers) == TARGET
    assert dict(query.headers)[CORRELATION_ID_HEADER] == ID
    assert "__TypeId__" not in dict(query.headers)


async def test_the_embedding_stage_replies_to_what_it_dead_letters() -> None:
    bench, record = test_text_processor.Bench(), test_text_processor.question(text=" ")
    record = replace(record, headers=[*record.headers, *reply_request_headers(TARGET, ID)])
    await bench.handle(record)
    dead, reply = bench.broker.sent
    assert (dead.topic, reply.topic, reply.value) == ("dead", "replies", b"")
    assert reply.header("anabranch.error.code") == "empty_text"
    assert bench.count("anabranch_replies_total", outcome="dead_lettered") == 1


class Existing:
    """What a broker reports, one after the other."""

    def __init__(self, *reports: Mapping[str, int | None] | Exception) -> None:
        self._reports = list(reports)

    async def __call__(self) -> Mapping[str, int | None]:
        report = self._reports.pop(0)
        if isinstance(report, Exception):
            raise report
        return report

    @property
    def left(self) -> int:
        return len(self._reports)


async def code_of(topics: ReplyTopics, *, again: bool = False) -> WarningCode | None:
    try:
        await topics.check(TARGET, again=again)
    except ReplyRefused as refused:
        return refused.code
    return None


async def test_the_broker_is_asked_once_about_a_topic_that_exists() -> None:
    existing = Existing({"replies": 4}, {})
    topics = ReplyTopics(existing)
    assert [await code_of(topics) for _ in range(3)] == [None] * 3
    assert existing.left == 1
    assert await code_of(topics, again=True) is WarningCode.REPLY_TOPIC_MISSING


async def test_a_missing_topic_is_asked_about_again_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    existing = Existing({}, {"replies": 1}, {"replies": 4})
    topics = ReplyTopics(existing)
    assert [await code_of(topics) for _ in range(3)] == [WarningCode.REPLY_TOPIC_MISSING] * 3
    assert existing.left == 2
    monkeypatch.setattr("streams.worker.replies._MISSING_SECONDS", -1.0)
    assert await code_of(topics) is WarningCode.REPLY_PARTITION_MISSING
    assert await code_of(topics) is None


async def test_a_broker_that_does_not_answer_is_not_a_missing_topic() -> None:
    topics = ReplyTopics(Existing(KafkaConnectionError(), {"replies": 4}))
    with pytest.raises(KafkaConnectionError):
        await topics.check(TARGET, again=False)
    assert await code_of(topics) is None


@pytest.mark.parametrize("outage", [False, True])
async def test_a_refusal_after_an_outage_reports_that_kafka_answers_again(*, outage: bool) -> None:
    """Otherwise the worker stays unready until it has sent a reply. A refusal alone says nothing about Kafka."""
    reported: list[str] = []
    reports: list[Mapping[str, int | None] | Exception] = [{"replies": 1}]
    if outage:
        reports.insert(0, KafkaConnectionError())
    publisher = Publisher(
        {},
        on_fault=lambda _: reported.append("fault"),
        on_success=lambda: reported.append("success"),
        wait_seconds=(0.001, 0.001),
        connect_first=False,
    )
    with pytest.raises(ReplyRefused):
        await publisher.publish_reply(TARGET, None, b"", [], check=ReplyTopics(Existing(*reports)).check)
    assert reported == (["fault", "success"] if outage else [])


class Unreachable:
    """A publisher whose broker never answers, and what it has reported."""

    def __init__(self, fetch: Callable[[], Awaitable[Mapping[str, int | None]]]) -> None:
        self.reported: list[str] = []
        self._topics = ReplyTopics(fetch)
        self._publisher = Publisher(
            {},
            on_fault=lambda _: self.reported.append("fault"),
            on_success=lambda: self.reported.append("success"),
            on_last_reply=lambda: self.reported.append("last"),
            wait_seconds=(0.001, 0.001),
            connect_first=False,
        )

    async def reply(self, expires_at: datetime) -> None:
        with pytest.raises(ReplyRefused, match=r"^reply_expired$"):
            await self._publisher.publish_reply(
                TARGET, None, b"", [], check=self._topics.check, expires_at=expires_at
            )
        assert expires_at < datetime.now(UTC)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Unreachable:
    monkeypatch.setattr("streams.broker.publisher._LAST_ATTEMPT_SECONDS", 0.05)

    async def fetch() -> Mapping[str, int | None]:
        raise KafkaConnectionError

    return Unreachable(fetch)


async def test_a_reply_is_abandoned_when_its_caller_has_stopped_waiting(unreachable: Unreachable) -> None:
    """And the worker does not stay unready because of it."""
    for expires_at in (datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC) + timedelta(seconds=0.2)):
        await unreachable.reply(expires_at)
        assert set(unreachable.reported[:-1]) == {"fault"}
        assert unreachable.reported[-1] == "last"
        unreachable.reported.clear()


async def test_replies_that_expire_one_after_another_are_one_outage(unreachable: Unreachable) -> None:
    """Otherwise each makes the worker ready and unready again, with another line in its log."""
    now = datetime.now(UTC)
    replies = [unreachable.reply(now + timedelta(seconds=0.1 + 0.02 * number)) for number in range(20)]
    await asyncio.gather(*replies)
    assert set(unreachable.reported[:-1]) == {"fault"}
    assert unreachable.reported[-1] == "last"


async def test_a_reply_is_abandoned_although_a_library_ignores_that_it_is_cancelled(
    unreachable: Unreachable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka does while it closes a client."""
    calls = 0

    async def check(_: ReplyTarget, **__: bool) -> None:
        nonlocal calls
        calls += 1
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            if calls > 1:
                raise
        raise KafkaConnectionError

    monkeypatch.setattr(unreachable, "_topics", SimpleNamespace(check=check))
    async with asyncio.timeout(10):
        await unreachable.reply(datetime(2020, 1, 1, tzinfo=UTC))


async def test_the_answer_to_one_reply_s_question_is_awaited_for_the_others() -> None:
    """aiokafka leaves a connection open if its bootstrap is cancelled."""
    asked, answer = asyncio.Event(), asyncio.Event()
    ends: list[str] = []

    async def fetch() -> Mapping[str, int | None]:
        asked.set()
        try:
            await answer.wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        ends.append("answered")
        return {TARGET.topic: 4}

    topics = ReplyTopics(fetch)
    expired = asyncio.create_task(topics.check(TARGET, again=False))
    await asked.wait()
    waiting = asyncio.create_task(topics.check(TARGET, again=False))
    expired.cancel()
    await asyncio.sleep(0)
    answer.set()
    await waiting
    await topics.close()
    assert (ends, expired.cancelled()) == (["answered"], True)


async def test_abandoned_replies_share_one_question_which_does_not_outlive_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a long outage, one for each would keep the later ones waiting."""
    monkeypatch.setattr("streams.worker.replies._CLOSE_SECONDS", 0.05)
    tasks = asyncio.all_tasks()
    asked = 0

    async def unanswered() -> Mapping[str, int | None]:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        return {}

    topics = ReplyTopics(unanswered)
    for _ in range(10):
        expired = asyncio.create_task(topics.check(TARGET, again=False))
        await asyncio.sleep(0.01)
        expired.cancel()
    await topics.close()
    assert (asked, asyncio.all_tasks()) == (1, tasks)


async def test_an_abandoned_reply_does_not_interrupt_the_connection_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """aiokafka leaves a connection open if its bootstrap is cancelled."""
    monkeypatch.setattr("streams.broker.publisher._LAST_ATTEMPT_SECONDS", 0.05)
    events: list[str] = []
    reachable = asyncio.Event()

    class Producer:
        def __init__(self) -> None:
            self._sender = SimpleNamespace(sender_task=asyncio.get_running_loop().create_future())

        async def start(self) -> None:
            events.append("connecting")
            await reachable.wait()
            events.append("connected")

        async def stop(self) -> None:
            events.append("stopped")

        async def partitions_for(self, _: str) -> set[int]:
            return {TARGET.partition or 0}

        async def send_and_wait(self, topic: str, **_: object) -> None:
            events.append(f"sent to {topic}")

    monkeypatch.setattr("streams.broker.publisher.new_producer", lambda *_, **__: Producer())
    publisher = Publisher(
        {},
        on_fault=lambda error: events.append(repr(error)),
        on_success=lambda: events.append("accepted"),
        wait_seconds=(0.001, 0.001),
        connect_first=False,
    )
    send = partial(
        publisher.publish_reply, TARGET, None, b"", [], check=ReplyTopics(Existing({"replies": 4})).check
    )
    with pytest.raises(ReplyRefused, match=r"^reply_expired$"):
        await send(expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    waiting = asyncio.create_task(send())
    await asyncio.sleep(0.01)
    reachable.set()
    await waiting
    await publisher.on_stop()
    assert events == ["connecting", "connected", "sent to replies", "accepted", "stopped"]


async def test_a_worker_is_unready_only_while_somebody_waits_for_the_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streams.broker.publisher._LAST_ATTEMPT_SECONDS", 0.3)
    app = WorkerApp(
        Settings(
            database_connection_string=SecretStr("postgresql://me@db/app"), anabranch_retry_base_seconds=0.01
        )
    )
    problems: list[str | None] = []

    async def unreachable() -> Mapping[str, int | None]:
        problems.append(app._readiness().kafka_problem)
        raise KafkaConnectionError

    with pytest.raises(ReplyRefused, match=r"^reply_expired$"):
        await app.reply_publisher.publish_reply(
            TARGET,
            None,
            b"",
            [],
            check=ReplyTopics(unreachable).check,
            expires_at=datetime(2020, 1, 1, tzinfo=UTC),
        )
    assert problems[0] is None
    assert set(problems[1:]) == {"Kafka does not accept replies"}
    assert app._readiness().kafka_problem is None
