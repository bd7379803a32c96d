"""How `anabranch publish` reads lines, and what it prints: without Kafka."""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from streams.cli import publish
from streams.cli.publish import InvalidLine, Line, Published, read_events, read_texts
from tests.bad_inputs import valid_event
from tests.evaluation import made_up

NOW = datetime(2026, 5, 1, tzinfo=UTC)
TEXT = {"principals": ["user:1"], "text": "What moves an estuary?"}
FILLED_IN = {"schema_version": ..., "event_id": ..., "occurred_at": ...}


def jsonl(*records: dict[str, Any]) -> Iterator[bytes]:
    return (json.dumps({k: v for k, v in each.items() if v is not ...}).encode() for each in records)


def test_what_is_missing_is_filled_in() -> None:
    before = datetime.now(UTC)
    [first, second], invalid = read_events(jsonl(*[valid_event(**FILLED_IN)] * 2))
    assert not invalid
    assert first.event.schema_version == "1.0.0"
    assert isinstance(first.event.event_id, UUID)
    assert first.event.event_id != second.event.event_id
    assert before <= first.event.occurred_at <= datetime.now(UTC)

    [text], invalid = read_texts(jsonl(TEXT))
    assert (text.event.text, text.event.schema_version, invalid) == (TEXT["text"], "1.0.0", [])


def test_an_event_without_a_time_occurs_when_it_is_published() -> None:
    """With --rate, that may be much later, and the latency of the answer counts from then."""
    [line], _ = read_events(jsonl(valid_event(occurred_at=...)))
    assert line.event_at(NOW) == line.event.model_copy(update={"occurred_at": NOW})
    [line], _ = read_events(jsonl(valid_event()))
    assert line.event_at(NOW) == line.event


def test_what_is_there_stays() -> None:
    [line], _ = read_events(jsonl(valid_event()))
    assert str(line.event.event_id) == valid_event()["event_id"]
    assert line.event.occurred_at < datetime.now(UTC) - timedelta(days=1)


def test_null_is_not_missing() -> None:
    """It is what a producer writes that has lost the id."""
    for name in FILLED_IN:
        valid, [invalid] = read_events(jsonl(valid_event(**{name: None})))
        assert (valid, invalid.code) == ([], "contract_violation")
        assert invalid.reason.startswith(name)


def test_every_invalid_line_is_named() -> None:
    lines = [
        *jsonl(valid_event(), valid_event(k="ten")),
        b"",
        b"\xff\n",
        b"no JSON\r\n",
        b"{",
        *jsonl(valid_event(schema_version="2.0.0"), valid_event(embedding=[1.0])),
        b"   \n",
        *jsonl(valid_event()),
    ]
    valid, invalid = read_events(lines)
    assert [line.number for line in valid] == [1, 10]
    assert list(map(str, invalid)) == [
        "line 2: contract_violation: k is not an integer",
        "line 4: undecodable: not UTF-8",
        "line 5: undecodable: not JSON",
        "line 6: undecodable: starts like JSON, but is invalid or truncated at character 1",
        "line 7: unsupported_version: schema_version has an unsupported major version; supported is 1.x.y",
        "line 8: dimension_mismatch: embedding has 1 components, expected 768",
    ]
    assert read_texts([b"{}"]) == (
        [],
        [InvalidLine(1, "contract_violation", "principals is required; text is required")],
    )


# Output


def lines(count: int) -> list[Line[Any]]:
    return [Line(number, made_up.event(event_id=uuid4()), is_dated=True) for number in range(1, count + 1)]


def acknowledge(
    monkeypatch: pytest.MonkeyPatch, count: int, *, of: int | None = None, on_terminal: bool = False
) -> list[str]:
    """The ids of so many events that are acknowledged, of so many to publish."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    published = Published("in", of or count)
    acknowledged = lines(count)
    with published:
        for line in acknowledged:
            published.acknowledged(line)
        if of is not None:
            raise KeyError
    return [str(line.event.event_id) for line in acknowledged]


def test_ids_are_one_per_line_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = acknowledge(monkeypatch, 30)
    out, err = capsys.readouterr()
    assert out.splitlines() == ids
    assert err == "published 30 events to in\n"


def test_ids_are_readable_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [event_id] = acknowledge(monkeypatch, 1, on_terminal=True)
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"line 1  {event_id}", "published 1 event to in"]
    assert err == ""
    acknowledge(monkeypatch, publish._IDS_SHOWN + 2, on_terminal=True)
    *ids, more, summary = capsys.readouterr().out.splitlines()
    assert len(ids) == publish._IDS_SHOWN
    assert more == "and 2 more; redirect the output to a file to get all ids"
    assert summary == f"published {publish._IDS_SHOWN + 2} events to in"


@pytest.mark.parametrize("on_terminal", [False, True])
def test_what_was_published_before_a_failure_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    on_terminal: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    with pytest.raises(KeyError):
        acknowledge(monkeypatch, 2, of=5, on_terminal=on_terminal)
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err == "published only 2 of 5 events to in\n"
    with pytest.raises(KeyError):
        acknowledge(monkeypatch, 0, of=5, on_terminal=on_terminal)
    assert capsys.readouterr() == ("", "")
