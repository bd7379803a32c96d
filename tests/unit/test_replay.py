"""Which dead letters are replayed, what comes back of them, and what is remembered: without Kafka."""

import io
import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiokafka import TopicPartition
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from streams.broker.records import Unreadable
from streams.broker.topics import MissingTopics
from streams.cli import replay as view
from streams.cli.main import commands
from streams.core.errors import GaveUp, UnknownProfile, UnreadableBatch
from streams.rate_limiter import RateLimiter
from streams.replay.dead_letters import (
    DeadLetter,
    Disposition,
    Missing,
    ReplayFilter,
    disposition,
    parse_dead_letter,
    restore_headers,
)
from streams.replay.journal import JOURNAL_HEADER, BadEntry, Entry, Journal, is_entry
from streams.replay.lock import _Election
from streams.replay.offsets import Offsets
from streams.replay.run import Replay, ReplayError, _PartitionScan
from streams.replay.tally import Tally
from streams.terminal import Console
from streams.wire.deadletter import (
    NotADeadLetter,
    Origin,
    error_headers,
    placeholder_headers,
    read_dead_letter,
)
from streams.wire.replay_headers import RecordPosition, replay_attempts, replay_source, with_replay_headers

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
ADDED = error_headers(UnknownProfile("no such profile"), topic="in", partition=2, offset=7)
SOURCE = RecordPosition("dead.letters-v1", 3, 41)

# Names that an event may have brought with it, those of the marks and of dead letters among them.
NAMES = st.sampled_from(
    [
        *("traceparent", "x", "", "anabranch.error.code", "__connect.errors.offset", JOURNAL_HEADER),
        *("anabranch.placeholder.first.offset", "anabranch.placeholder.last.offset"),
    ]
)
HEADERS = st.lists(st.tuples(NAMES, st.none() | st.binary(max_size=20)))


def dead_letter(**fields: object) -> DeadLetter:
    defaults: dict[str, Any] = {
        "partition": 0,
        "offset": 5,
        "written_at": NOW,
        "code": "unknown_profile",
        "topic": "in",
        "attempts": 0,
    }
    return DeadLetter(**(defaults | fields))


# The event


@given(HEADERS)
def test_what_a_dead_letter_added_is_taken_off_again(own: list[tuple[str, bytes | None]]) -> None:
    origin, rest = read_dead_letter([*own, *ADDED])
    assert origin == Origin("unknown_profile", "in", 2, 7)
    assert list(rest) == own


@given(HEADERS, st.integers(0, 5))
def test_headers_come_back_byte_for_byte_however_often(
    own: list[tuple[str, bytes | None]], times: int
) -> None:
    """Replayed, put aside again by a worker that carries its headers along, and so on."""
    headers = list(own)
    for attempt in range(1, times + 1):
        source = RecordPosition("dead", 0, attempt)
        partition, restored = restore_headers([*headers, *ADDED], source=source)
        assert partition == 2
        assert list(restored[: len(own)]) == own
        assert len(restored) == len(own) + 2
        assert replay_attempts(restored) == attempt
        assert replay_source(restored) == source
        headers = list(restored)


@pytest.mark.parametrize("missing", [name for name, _ in ADDED])
def test_without_one_of_its_headers_it_is_not_ours(missing: str) -> None:
    with pytest.raises(NotADeadLetter, match=f"no header {missing}"):
        read_dead_letter([(name, value) for name, value in ADDED if name != missing])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("__connect.errors.partition", b"two"),
        ("__connect.errors.offset", b""),
        ("anabranch.error.code", b"\xff"),
    ],
)
def test_headers_that_nobody_of_ours_wrote(name: str, value: bytes) -> None:
    with pytest.raises(NotADeadLetter, match="malformed"):
        read_dead_letter([(known, value if known == name else reported) for known, reported in ADDED])


@pytest.mark.parametrize("value", [b"", b"-1", b"1.0", b" 1", b"9" * 10, "٣".encode(), None])
def test_an_attempt_count_that_cannot_be_read_is_none(value: bytes | None) -> None:
    assert replay_attempts([("anabranch.replay.attempts", value)]) is None


@pytest.mark.parametrize(
    "value", [b"", b"dead", b"dead[1]", b"dead[1]@", b"a b[1]@2", b"d[1]@2 ", b"\xff", None]
)
def test_a_source_that_cannot_be_read_is_none(value: bytes | None) -> None:
    assert replay_source([("anabranch.replay.from", value)]) is None


def test_a_source_survives_its_header() -> None:
    assert replay_source(with_replay_headers([], source=SOURCE, attempts=1)) == SOURCE


# Placeholders


@given(HEADERS)
def test_a_placeholder_is_known_by_the_headers_behind_all_others(own: list[tuple[str, bytes | None]]) -> None:
    added = [*own, *ADDED, *placeholder_headers(first=7, last=9, size=1234)]
    origin, rest = read_dead_letter(added)
    assert origin == Origin("unknown_profile", "in", 2, 7, (7, 9))
    assert list(rest) == own
    assert added[-1] == ("anabranch.placeholder.original.bytes", b"1234")


def test_a_placeholder_is_left_and_says_what_is_missing() -> None:
    found = parse_dead_letter(
        partition=0,
        offset=5,
        timestamp_ms=0,
        headers=[*ADDED, *placeholder_headers(first=7, last=9, size=1)],
        value=b"",
    )
    assert found.missing == Missing("in", 2, 7, 9)
    assert str(found.missing) == "in[2]@7–9"
    assert str(Missing("in", 2, 7, 7)) == "in[2]@7"
    assert disposition(found, input_topic="in", is_replayed=True, max_attempts=3) is Disposition.PLACEHOLDER
    tally = Tally([(found, Disposition.PLACEHOLDER)])
    assert tally.refused == 1
    assert tally.missing == [Missing("in", 2, 7, 9)]


# The choice


def test_nothing_chosen_is_everything() -> None:
    assert ReplayFilter().matches(dead_letter())
    assert ReplayFilter().matches(dead_letter(code=None))


@pytest.mark.parametrize(
    ("replay_filter", "taken"),
    [
        (ReplayFilter(codes=frozenset({"unknown_profile", "expired"})), True),
        (ReplayFilter(codes=frozenset({"expired"})), False),
        (ReplayFilter(partitions=frozenset({0, 3})), True),
        (ReplayFilter(partitions=frozenset({1})), False),
        (ReplayFilter(since=NOW), True),
        (ReplayFilter(since=NOW + timedelta(milliseconds=1)), False),
        (ReplayFilter(until=NOW), False),
        (ReplayFilter(until=NOW + timedelta(milliseconds=1)), True),
        (ReplayFilter(codes=frozenset({"unknown_profile"}), partitions=frozenset({1})), False),
    ],
)
def test_chosen_by_code_partition_and_time(replay_filter: ReplayFilter, *, taken: bool) -> None:
    assert replay_filter.matches(dead_letter()) is taken


def test_what_has_no_code_is_not_chosen_by_code() -> None:
    assert not ReplayFilter(codes=frozenset({"expired"})).matches(dead_letter(code=None))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Disposition.REPLAY),
        ({"offset": 6}, Disposition.ALREADY_REPLAYED),
        ({"attempts": 2}, Disposition.REPLAY),
        ({"attempts": 3}, Disposition.EXHAUSTED),
        ({"attempts": None}, Disposition.EXHAUSTED),
        ({"topic": "another"}, Disposition.OTHER_TOPIC),
        ({"code": None}, Disposition.NOT_A_DEAD_LETTER),
    ],
)
def test_dispositions(fields: dict[str, object], expected: Disposition) -> None:
    found = dead_letter(**fields)
    assert disposition(found, input_topic="in", is_replayed=found.offset == 6, max_attempts=3) is expected


@pytest.mark.parametrize("timestamp", [-1, 0, 2**63 - 1, -(2**63)])
def test_any_timestamp_is_some_instant(timestamp: int) -> None:
    parse_dead_letter(partition=0, offset=0, timestamp_ms=timestamp, headers=ADDED, value=b"")


def test_a_tombstone_is_nobodys_letter() -> None:
    assert parse_dead_letter(partition=0, offset=0, timestamp_ms=0, headers=ADDED, value=None).code is None


# The journal

OFFSETS = st.frozensets(st.integers(0, 2**62), max_size=50).map(Offsets.of)
ENTRIES = st.builds(
    Entry,
    run=st.sampled_from("abc"),
    replayed=OFFSETS,
    scan_from=st.none() | st.dictionaries(st.integers(0, 99), st.integers(0, 2**62)),
    settled=st.frozensets(st.sampled_from("abc")),
)


@given(ENTRIES)
def test_an_entry_survives_its_bytes(entry: Entry) -> None:
    assert Entry.read(entry.headers, entry.encode(), offset=2**62 + 1) == entry


def test_an_entry_of_many_is_short_where_they_follow_each_other() -> None:
    entry = Entry("run", Offsets.of([*range(1000), 2000]), None)
    assert json.loads(entry.encode())["replayed"] == [[0, 999], [2000, 2000]]


def test_a_letter_is_no_entry_whatever_its_event_brought() -> None:
    entry = Entry("run", Offsets.of({1}), None)
    assert is_entry(entry.headers)
    assert Entry.read([*entry.headers, *ADDED], entry.encode(), offset=9) is None
    assert Entry.read([("x", b"1")], entry.encode(), offset=9) is None


@pytest.mark.parametrize(
    ("version", "value"),
    [
        (b"2", b"{}"),
        (b"1", None),
        (b"1", b""),
        (b"1", b"[]"),
        (b"1", b"{}"),
        (b"1", b'{"run":"r","replayed":[[1]],"beyond":null,"settled":[]}'),
        (b"1", b'{"run":"r","replayed":[],"beyond":[],"settled":[]}'),
        (b"1", b'{"run":"r","replayed":[[0,10]],"beyond":null,"settled":[]}'),  # as far as itself
        (b"1", b'{"run":"r","replayed":[[0,999999999999999999]],"beyond":null,"settled":[]}'),
        (b"1", b'{"run":"r","replayed":[[5,4]],"beyond":null,"settled":[]}'),
        (b"1", b'{"run":"r","replayed":[[-1,4]],"beyond":null,"settled":[]}'),
        (b"1", b'{"run":"r","replayed":[[0,1e9]],"beyond":null,"settled":[]}'),
        (b"1", b'{"run":"r","replayed":[],"beyond":{"0":9223372036854775808},"settled":[]}'),
        (b"1", b"[" * 100_000),
    ],
)
def test_an_entry_that_cannot_be_read_is_not_passed_over(version: bytes, value: bytes | None) -> None:
    with pytest.raises(BadEntry):
        Entry.read([(JOURNAL_HEADER, version)], value, offset=10)


def test_a_run_is_unsettled_until_it_ends_or_another_has_looked() -> None:
    journal = Journal()
    assert journal.unsettled == frozenset()
    journal.add(Entry("a", Offsets.of(()), {0: 10, 1: 20}))
    journal.add(Entry("a", Offsets.of({1, 2}), {0: 12, 1: 20}))
    assert (journal.replayed, journal.unsettled) == (Offsets([(1, 2)]), frozenset({"a"}))
    assert (journal.scan_from(0), journal.scan_from(1), journal.scan_from(2)) == (12, 20, 0)
    # Killed. Another one looks, and is killed too; its own publications come after its look.
    journal.add(Entry("b", Offsets.of({3}), {0: 15, 1: 15}, settled=frozenset({"a"})))
    assert (journal.replayed, journal.unsettled) == (Offsets([(1, 3)]), frozenset({"b"}))
    assert journal.scan_from(0) == 15
    # The first was not dead after all: what it still says is true, and ends nobody else's run.
    journal.add(Entry("a", Offsets.of({4}), {0: 13, 1: 20}))
    assert (journal.scan_from(0), journal.scan_from(1)) == (13, 15)
    journal.add(Entry("a", Offsets.of(()), None))
    assert journal.unsettled == {"b"}
    journal.add(Entry("b", Offsets.of({5}), None))
    assert (journal.replayed, journal.unsettled) == (Offsets([(1, 5)]), frozenset())


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=12))
def test_offsets_are_a_set(spans: list[tuple[int, int]]) -> None:
    ranges = [(first, first + more) for first, more in spans]
    expected = {offset for first, last in ranges for offset in range(first, last + 1)}
    offsets = Offsets(ranges)
    assert {offset for offset in range(-2, 40) if offset in offsets} == expected
    assert offsets == Offsets.of(expected)
    assert all(after - last > 1 for (_, last), (after, _) in pairwise(offsets.ranges))


def test_a_range_takes_no_more_memory_than_what_says_it() -> None:
    journal = Journal()
    for run in range(1000):
        value = b'{"run":"x","replayed":[[%d,%d]],"beyond":null,"settled":[]}' % (
            run * 2**40,
            run * 2**40 + 2**39,
        )
        entry = Entry.read([(JOURNAL_HEADER, b"1")], value, offset=2**62)
        assert entry is not None
        journal.add(entry)
    assert 5 * 2**40 + 2**39 in journal.replayed
    assert 5 * 2**40 + 2**39 + 1 not in journal.replayed


# One at a time


def test_the_holder_keeps_the_lock_and_one_of_several_gets_it() -> None:
    first, second = _Election(), _Election()

    def elect(members: dict[str, _Election]) -> None:
        reported = members["a"].assign(
            None, {name: member.metadata(["t"]) for name, member in members.items()}
        )
        for name, member in members.items():
            member.on_assignment(reported[name])

    elect({"a": second, "b": first})
    assert [second.holds, first.holds] == [True, False]
    first.holds, second.holds = True, False
    elect({"a": second, "b": first})
    assert [second.holds, first.holds] == [False, True]


def test_pace_makes_up_for_nothing() -> None:
    clock = [100.0]
    rate_limiter = RateLimiter(4, lambda: clock[0])
    assert [rate_limiter.delay() for _ in range(3)] == [0, 0.25, 0.5]
    clock[0] = 200.0  # after a long delay: no burst
    assert [rate_limiter.delay() for _ in range(2)] == [0, 0.25]


# The command


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [
        (None, None, (None, None)),
        ("90s", None, (NOW - timedelta(seconds=90), None)),
        ("7d", "30m", (NOW - timedelta(days=7), NOW - timedelta(minutes=30))),
        ("2026-04-30T12:00:00Z", "2h", (NOW - timedelta(days=1), NOW - timedelta(hours=2))),
        ("2026-05-01T13:00:00+02:00", None, (NOW - timedelta(hours=1), None)),
    ],
)
def test_a_period(since: str | None, until: str | None, expected: object) -> None:
    assert view.period(since, until, now=NOW) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--since", "yesterday"], "--since"),
        (["--since", "2026-05-01T12:00:00"], "with an offset"),
        (["--until", "99999999d"], "--until"),
        (["--since", "1h", "--until", "2h"], "--since must be before --until"),
        (["--code", "unknown"], "'unknown' is not one of"),
        (["--code", "store_misconfigured"], "is not one of"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--max-attempts", "0"], "--max-attempts"),
        (["--partition", "-1"], "--partition"),
        (["--nonesuch"], "--nonesuch"),
        (["all"], "unexpected extra argument"),
    ],
)
def test_a_bad_option_is_reported_in_one_line(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(commands, ["replay", *arguments])
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1, done.output
    assert done.output.startswith("anabranch replay: ")
    assert said in done.output


def test_a_tally_counts_by_code_and_partition() -> None:
    later = NOW + timedelta(hours=1)
    tally = Tally(
        [
            (dead_letter(), Disposition.REPLAY),
            (dead_letter(offset=6, written_at=later), Disposition.ALREADY_REPLAYED),
            (dead_letter(partition=1, code="expired"), Disposition.EXHAUSTED),
            (dead_letter(partition=1, code=None), Disposition.NOT_A_DEAD_LETTER),
        ]
    )
    assert (tally.total, tally.refused, tally.count(Disposition.REPLAY)) == (4, 2, 1)
    assert [(row.code, row.partition) for row in tally.rows] == [
        (None, 1),
        ("expired", 1),
        ("unknown_profile", 0),
    ]
    assert (tally.rows[-1].oldest, tally.rows[-1].newest) == (NOW, later)
    assert tally.positions(Disposition.EXHAUSTED) == [(1, 5)]
    assert tally.to_json()[-1]["already"] == 1


def shown(tally: Tally, *, rate: float | None) -> list[str]:
    output = io.StringIO()
    view.show(view.Outcome(tally, "in", "dead", 3, rate, 0), Console(file=output, width=120))
    return output.getvalue().splitlines()


def test_a_dry_run_warns_of_events_that_fail_again() -> None:
    letters = [
        (dead_letter(), Disposition.REPLAY),
        (dead_letter(partition=1, code="expired"), Disposition.REPLAY),
        (dead_letter(partition=2, code="expired"), Disposition.REPLAY),
        (dead_letter(partition=1, code="zero_embedding"), Disposition.ALREADY_REPLAYED),
    ]
    assert shown(Tally(letters), rate=None)[-2:] == [
        "2 will fail again (expired): publish corrected events instead, and replay the others with --code",
        "nothing was written; use --apply to replay 3 to in",
    ]
    assert "fail again" not in "".join(shown(Tally(letters[:1]), rate=None))
    assert "fail again" not in "".join(shown(Tally(letters[-1:]), rate=None))


def test_a_replay_says_how_to_check() -> None:
    lines = shown(Tally([(dead_letter(), Disposition.REPLAY)]), rate=1.0)
    assert lines[-2] == "replayed 1 to in"
    assert lines[-1].endswith(": anabranch tail --dead-letters --from-beginning")
    assert shown(Tally([(dead_letter(), Disposition.EXHAUSTED)]), rate=1.0)[-1] == "replayed 0 to in"


@pytest.mark.parametrize(
    ("texts", "setting", "hint"),
    [(False, "(ANABRANCH_INPUT_TOPIC)", ""), (True, "(ANABRANCH_TEXT_TOPIC)", " --texts")],
)
def test_hints_fit_the_stage(texts: bool, setting: str, hint: str) -> None:  # noqa: FBT001  # a parameter of the test
    letters = [(dead_letter(), Disposition.REPLAY), (dead_letter(partition=1), Disposition.OTHER_TOPIC)]
    output = io.StringIO()
    outcome = view.Outcome(Tally(letters), "in", "dead", 3, 1.0, 0, texts=texts)
    view.show(outcome, Console(file=output, width=120))
    assert f"not read from in {setting}: " in output.getvalue()
    assert output.getvalue().endswith(f": anabranch tail --dead-letters --from-beginning{hint}\n")
    assert str(MissingTopics(["b", "a"], texts=texts)) == (
        f"missing topics: a, b; run `anabranch topics{hint}` to create them"
    )


def test_a_code_of_several_is_carried() -> None:
    headers = error_headers(GaveUp("search_timeout", "x"), topic="in", partition=0, offset=0)
    assert read_dead_letter(headers)[0].code == "search_timeout"


# A batch that was readable in the survey


@pytest.mark.parametrize("last", [5, 9])
async def test_letters_that_become_unreadable_are_refused(last: int) -> None:
    """The record that stands for them has the offset of the batch's last record, which may be nobody's letter."""
    unreadable = Unreadable(UnreadableBatch("the batch's checksum is wrong"), 4, last, 100)
    record = SimpleNamespace(topic="dead", partition=0, offset=last, key=None, value=unreadable, headers=())
    consumer: Any = SimpleNamespace(
        assign=lambda _: None,
        seek=lambda *_: None,
        beginning_offsets=AsyncMock(return_value={None: 0}),
        end_offsets=AsyncMock(return_value={}),
        getmany=AsyncMock(return_value={TopicPartition("dead", 0): [record]}),
        position=AsyncMock(return_value=last + 1),
    )
    run = Replay({}, input_topic="in", dead_letter_topic="dead", replay_filter=ReplayFilter(), max_attempts=3)
    scan = _PartitionScan(0, dead_letters=[dead_letter(offset=5)], end=10)
    publisher = AsyncMock(failed={})
    with pytest.raises(
        ReplayError, match=r"^the batch from dead\[0\]@4 to offset .* cannot be read"
    ) as error_of:
        await run._replay_partition(consumer, scan, publisher, [])
    assert "\n" not in str(error_of.value)
