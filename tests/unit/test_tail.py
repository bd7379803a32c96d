"""What `anabranch tail` shows of records, on a terminal and for programs: without Kafka."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch
from uuid import UUID, uuid4

import pytest

from streams.broker.records import Unreadable
from streams.cli import tail
from streams.cli.tail import Shown, TailFilter
from streams.core.errors import UnknownProfile, UnreadableBatch
from streams.settings import load
from streams.terminal import Console
from streams.wire import Codec
from streams.wire.deadletter import error_headers, placeholder_headers
from tests.bad_inputs import EVENT_ID, SESSION_ID, avro_event, json_event
from tests.evaluation import made_up

ADDED = error_headers(UnknownProfile("no such profile"), topic="in", partition=2, offset=7)
CODEC = Codec()


def tailed(*records: Any, **options: Any) -> tuple[list[Shown], list[str]]:
    """What `anabranch tail` shows of these records, and its line for people."""

    @asynccontextmanager
    async def consumer(*_: Any, **__: Any) -> AsyncIterator[Any]:
        async def read() -> AsyncIterator[Any]:
            for one in records:
                yield one

        yield read()

    shown: list[Shown] = []
    notices: list[str] = []
    with (
        patch.object(tail, "running_consumer", consumer),
        patch.object(tail, "partitions_of", AsyncMock()),
    ):
        options = {"dead_letters": True, "from_beginning": False, "limit": None} | options
        asyncio.run(tail.tail_topic(load({}), {}, **options, show=shown.append, notify=notices.append))
    return shown, notices


def dead_letter(value: bytes | None, key: bytes | None = None, headers: Any = ADDED) -> Any:
    return SimpleNamespace(
        partition=2, offset=7, timestamp=1_777_636_800_250, key=key, value=value, headers=headers
    )


def result(*passages: Any, **fields: Any) -> Any:
    made = made_up.result(passages).model_copy(update=fields)
    return dead_letter(CODEC.encode_result(made), str(made.event_id).encode(), [])


def printed(*shown: Shown, width: int = 100) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    for each in shown:
        tail.print_readable(each, console)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("value", "event_id"),
    [
        (json_event(profile="main"), EVENT_ID),
        (json_event(k="canary"), EVENT_ID),
        (json_event(schema_version="2.0.0"), EVENT_ID),
        (avro_event(embedding=[0.5]), EVENT_ID),
        (json_event(event_id=EVENT_ID.upper()), EVENT_ID),
        (json_event(event_id="canary"), None),
        (json_event()[:-9], None),
        (b"", None),
        (None, None),
    ],
)
def test_a_tail_of_dead_letters_names_the_event_and_nothing_else_of_it(
    value: bytes | None, event_id: str | None
) -> None:
    ([found], _) = tailed(dead_letter(value, b"the key"))
    assert found.content == {
        "partition": 2,
        "offset": 7,
        "timestamp": "2026-05-01T12:00:00.250000Z",
        "key": "the key",
        "event_id": event_id,
        "headers": {name: content.decode() for name, content in ADDED},
    }
    assert "canary" not in "".join(printed(found))


@pytest.mark.parametrize(
    ("key", "expected"),
    [(None, None), (b"", ""), ("Ω".encode(), "Ω"), (b"\x1b[2J", "0x1b5b324a"), (b"\xff\x00", "0xff00")],
)
def test_a_key_is_text_or_hexadecimal(key: bytes | None, expected: str | None) -> None:
    ([found], _) = tailed(dead_letter(b"", key))
    assert found.content["key"] == expected


def test_a_tail_says_that_it_waits() -> None:
    assert tailed()[1] == ["waiting for new dead letters; --from-beginning shows older ones; Ctrl-C ends"]
    assert tailed(dead_letters=False)[1] == [
        "waiting for new results; --from-beginning shows older ones; Ctrl-C ends"
    ]
    assert tailed(from_beginning=True)[1] == ["showing dead letters from the beginning; Ctrl-C ends"]


# Filters


def selected(*records: Any, dead_letters: bool = False, **chosen: Any) -> list[int]:
    """The numbers of the records that are shown."""
    found = []
    for number, record in enumerate(records):
        options = {name: frozenset(values) for name, values in chosen.items()}
        if tailed(record, dead_letters=dead_letters, selected=TailFilter(**options))[0]:
            found.append(number)
    return found


def test_results_are_selected_by_event_session_and_profile() -> None:
    sessions, events = [uuid4(), uuid4()], [uuid4(), uuid4(), uuid4()]
    records = [
        result(event_id=events[0], session_id=sessions[0], profile="docs"),
        result(event_id=events[1], session_id=sessions[0], profile="chat"),
        result(event_id=events[2], session_id=sessions[1], profile="docs"),
    ]
    assert selected(*records) == [0, 1, 2]
    assert selected(*records, events=[events[1]]) == [1]
    assert selected(*records, events=events[1:]) == [1, 2]
    assert selected(*records, sessions=[sessions[0]]) == [0, 1]
    assert selected(*records, profiles=["docs"]) == [0, 2]
    assert selected(*records, profiles=["docs"], sessions=[sessions[0]]) == [0]
    assert selected(*records, events=[uuid4()]) == []


def test_dead_letters_are_selected_by_what_their_events_say() -> None:
    event_id, session_id = UUID(EVENT_ID), UUID(SESSION_ID)
    records = [
        dead_letter(json_event(profile="main")),
        dead_letter(avro_event(profile=None, embedding=[0.5])),  # another number of dimensions
        dead_letter(json_event(k="ten")),  # invalid: only its id is known
        dead_letter(b"neither", EVENT_ID.encode()),  # its key may be its id
        dead_letter(None),
    ]
    assert selected(*records, dead_letters=True) == [0, 1, 2, 3, 4]
    assert selected(*records, dead_letters=True, events=[event_id]) == [0, 1, 2, 3]
    assert selected(*records, dead_letters=True, sessions=[session_id]) == [0, 1]
    assert selected(*records, dead_letters=True, profiles=["main"]) == [0]
    # The default profile, which the event does not name.
    assert selected(*records, dead_letters=True, profiles=["extraction"]) == [1]


def test_the_limit_counts_what_is_shown() -> None:
    records = [result(profile=profile) for profile in ("a", "b", "a", "a")]
    shown, _ = tailed(*records, dead_letters=False, limit=2, selected=TailFilter(profiles=frozenset({"a"})))
    assert [each.profile for each in shown] == ["a", "a"]


# On a terminal


def test_a_result_is_readable() -> None:
    session = uuid4()
    passage = made_up.passage(title="Tides", page=3, text_content="Twice a day\nthe water " + "rises. " * 99)
    ([shown], _) = tailed(
        result(passage, made_up.passage(rank=2), session_id=session, warnings=("k_clamped",)),
        dead_letters=False,
    )
    heading, facts, warnings, first, second, end = printed(shown)
    assert heading == f"2026-05-01 12:00:00Z  event {shown.event_id}  extraction"
    assert facts == f"  2 passages, 6 tokens, 5 ms, session {session}"
    assert warnings == "  warnings: k_clamped"
    assert first.split()[:4] == ["1", "global", "0.500", "Twice"]
    assert "Twice a day the water rises." in first
    assert first.rstrip().endswith("Tides, p. 3")
    assert len(first) <= 100
    assert str(shown.content["results"][1]["document_id"])[:8] in second
    assert end == ""


def test_an_answer_without_passages_is_readable() -> None:
    ([shown], _) = tailed(result(), dead_letters=False)
    assert printed(shown)[1:] == ["  0 passages, 0 tokens, 5 ms", ""]


def test_a_dead_letter_is_readable() -> None:
    headers = [("traceparent", b"00-1"), *ADDED]
    ([shown], _) = tailed(dead_letter(json_event(), b"the key", headers))
    assert printed(shown, width=40) == [  # not wrapped: an id can be copied
        f"2026-05-01 12:00:00Z  unknown_profile  event {EVENT_ID}",
        "  key the key",
        "  no such profile",
        "  read from in, partition 2, offset 7; dead letter at partition 2, offset 7",
        "  headers: traceparent=00-1",
        "",
    ]


def test_a_placeholder_says_what_it_stands_for() -> None:
    headers = [
        *error_headers(UnreadableBatch("the checksum is wrong"), topic="in", partition=0, offset=4),
        *placeholder_headers(first=4, last=9, size=100),
    ]
    ([shown], _) = tailed(dead_letter(b"", None, headers))
    lines = printed(shown)
    assert lines[0].endswith("unreadable_batch  event unknown")
    assert lines[1] == "  without a key"
    assert "offset 4; stands for the offsets 4 to 9; dead letter" in lines[3]


def test_what_cannot_be_read_is_one_line() -> None:
    unreadable = dead_letter(None)
    unreadable.value = Unreadable(UnreadableBatch("the checksum is wrong"), 4, 9, 100)
    shown, _ = tailed(unreadable, dead_letter(b"x"), dead_letter(None), dead_letters=False)
    lines = printed(*shown)
    assert lines[0] == (
        "2026-05-01 12:00:00Z  unreadable: unreadable_batch  partition 2, offset 4, last offset 9"
    )
    assert lines[2] == "2026-05-01 12:00:00Z  undecodable: undecodable  partition 2, offset 7"
    assert lines[4] == lines[2]


def test_a_record_of_somebody_else_is_shown() -> None:
    ([shown], _) = tailed(dead_letter(json_event(), None, [("x", b"1"), ("y", None)]))
    lines = printed(shown)
    assert lines[0].endswith(f"not a dead letter  event {EVENT_ID}")
    assert lines[-2] == "  headers: x=1, y="


def test_json_is_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    ([shown], _) = tailed(result(made_up.passage()), dead_letters=False)
    tail.print_json(shown)
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line) == json.loads(json.dumps(shown.content))
