"""The accounting itself: what it must name, and what it must let pass."""

from typing import Literal

from tests.accounting import Answer, Asked, Logged, account

EVENTS = [Asked(name, b"key") for name in "abc"] + [Asked("bad", b"other", "undecodable")]
LOG = [Logged(event.name, 0, offset) for offset, event in enumerate(EVENTS)]


def answer(name: str, content: bytes = b"", kind: Literal["result", "dead_letter"] = "result") -> Answer:
    return Answer(name, kind, content, "undecodable" if kind == "dead_letter" else None)


ANSWERS = [answer("a"), answer("b"), answer("c"), answer("bad", b"", "dead_letter")]


def test_every_event_answered_once_is_no_fault() -> None:
    verdict = account(EVENTS, LOG, ANSWERS, acknowledged="abc")
    assert verdict.events == 4
    assert verdict.violations == []
    assert (verdict.repeats, verdict.overtaken) == (0, 0)


def test_the_lost_are_named_with_their_place() -> None:
    verdict = account(EVENTS, LOG, [ANSWERS[0], ANSWERS[3]])
    assert verdict.lost == ["b at [0]@1", "c at [0]@2"]
    assert verdict.violations == ["2 lost: b at [0]@1, c at [0]@2"]


def test_repeats_are_counted_and_must_be_the_same_bytes() -> None:
    verdict = account(EVENTS, LOG, [*ANSWERS, answer("a"), answer("a"), answer("b", b"else")])
    assert verdict.repeats == 3
    assert verdict.lost == []
    assert verdict.violations == ["1 answered again with other bytes: b at [0]@1"]


def test_a_result_and_a_dead_letter_are_one_too_many() -> None:
    verdict = account(EVENTS, LOG, [*ANSWERS, answer("bad")])
    assert verdict.both == ["bad at [0]@3"]
    assert verdict.wrong == ["bad at [0]@3 (a result instead of undecodable)"]


def test_an_answer_of_the_wrong_kind_is_named() -> None:
    verdict = account(EVENTS, LOG, [answer("a", b"", "dead_letter"), *ANSWERS[1:]])
    assert verdict.wrong == ["a at [0]@0 (undecodable instead of a result)"]
    assert verdict.both == []


def test_what_nobody_asked_and_what_the_broker_forgot_are_named() -> None:
    verdict = account(EVENTS, LOG[:3], [*ANSWERS, answer("z")], acknowledged=["a", "bad"])
    assert verdict.strange == ["bad", "z"]
    assert verdict.vanished == ["bad"]
    compacted = account(EVENTS, LOG[:3], ANSWERS, acknowledged=["a", "bad"], replaceable=["bad"])
    assert compacted.violations == []


def test_first_answers_out_of_order_are_counted_for_each_key() -> None:
    order = [answer("b"), answer("bad", b"", "dead_letter"), answer("c"), answer("a"), answer("b")]
    assert account(EVENTS, LOG, order).overtaken == 1
    assert account(EVENTS, LOG, [answer("c"), answer("b"), answer("a")]).overtaken == 2


def test_events_without_the_reply_that_they_asked_for_are_named() -> None:
    events = [Asked("a", b"key", wants_reply=True), Asked("b", b"key", wants_reply=True), *EVENTS[2:]]
    assert account(events, LOG, ANSWERS, replies=["b", "a", "a"]).violations == []
    assert account(events, LOG, ANSWERS, replies="a").violations == ["1 without a reply: b at [0]@1"]
    assert account(events, LOG, ANSWERS, replies="abz").strange == ["z"]
