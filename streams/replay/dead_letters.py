"""Dead letters as they are read back: which are chosen, and what becomes of each."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from streams.wire.deadletter import NotADeadLetter, read_dead_letter
from streams.wire.replay_headers import Headers, RecordPosition, replay_attempts, with_replay_headers

__all__ = [
    "REFUSED",
    "ReplayFilter",
    "Event",
    "Disposition",
    "DeadLetter",
    "fate",
    "parse_dead_letter",
    "restore_event",
]

_LATEST_MS = 253_402_300_799_999  # the end of the year 9999; a timestamp is any 64 bits


class Disposition(StrEnum):
    """What becomes of a chosen dead letter."""

    REPLAY = "replay"
    ALREADY = "already"
    """Replayed before."""
    EXHAUSTED = "exhausted"
    """Replayed as often as may be, and back again."""
    ELSEWHERE = "elsewhere"
    """Its event was read from another topic than the input topic."""
    FOREIGN = "foreign"
    """Not written by Anabranch."""
    TOO_LARGE = "too_large"
    """The input topic does not take it with its marks."""
    GONE = "gone"
    """Removed by retention while the replay was under way."""


REFUSED = frozenset(
    {
        Disposition.EXHAUSTED,
        Disposition.ELSEWHERE,
        Disposition.FOREIGN,
        Disposition.TOO_LARGE,
        Disposition.GONE,
    }
)
"""Chosen, and left all the same."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One record of the dead-letter topic, without its content.

    Attributes:
        code: None where it is not Anabranch's.
        topic: where its event was read; empty where it is not Anabranch's.
        attempts: how often it has been replayed; None where its mark cannot be read.
        written_at: the record's timestamp.
    """

    partition: int
    offset: int
    written_at: datetime
    code: str | None = None
    topic: str = ""
    attempts: int | None = 0


@dataclass(frozen=True, slots=True)
class ReplayFilter:
    """Which dead letters. What is empty or None chooses all.

    Attributes:
        partitions: of the dead-letter topic.
        since: written at this instant or later.
        until: written before this instant.
    """

    codes: frozenset[str] = frozenset()
    partitions: frozenset[int] = frozenset()
    since: datetime | None = None
    until: datetime | None = None

    def takes(self, letter: DeadLetter) -> bool:
        """Whether a dead letter is meant."""
        return (
            (not self.codes or letter.code in self.codes)
            and (not self.partitions or letter.partition in self.partitions)
            and (self.since is None or self.since <= letter.written_at)
            and (self.until is None or letter.written_at < self.until)
        )


@dataclass(frozen=True, slots=True)
class Event:
    """A record for the input topic.

    Attributes:
        partition: where the event was read the first time.
    """

    partition: int
    key: bytes | None
    value: bytes
    headers: Headers


def parse_dead_letter(
    *, partition: int, offset: int, timestamp_ms: int, headers: Headers, value: bytes | None
) -> DeadLetter:
    """Say what a record of the dead-letter topic is."""
    written_at = datetime.fromtimestamp(min(max(timestamp_ms, 0), _LATEST_MS) / 1000, UTC)
    try:
        origin, own = read_dead_letter(headers)
    except NotADeadLetter:
        return DeadLetter(partition, offset, written_at)
    if value is None:  # a worker skips tombstones, and puts none aside
        return DeadLetter(partition, offset, written_at)
    return DeadLetter(partition, offset, written_at, origin.code, origin.topic, replay_attempts(own))


def fate(
    letter: DeadLetter, *, input_topic: str, replayed: AbstractSet[int], max_attempts: int
) -> Disposition:
    """What is to become of a chosen dead letter; `replayed` are offsets in its partition."""
    if letter.code is None:
        return Disposition.FOREIGN
    if letter.offset in replayed:
        return Disposition.ALREADY
    if letter.topic != input_topic:
        return Disposition.ELSEWHERE
    if letter.attempts is None or letter.attempts >= max_attempts:
        return Disposition.EXHAUSTED
    return Disposition.REPLAY


def restore_event(*, source: RecordPosition, key: bytes | None, value: bytes, headers: Headers) -> Event:
    """The event that a dead letter holds: key, value and headers byte for byte, and the marks.

    Raises:
        Foreign: it is not Anabranch's.
    """
    origin, own = read_dead_letter(headers)
    attempts = (replay_attempts(own) or 0) + 1
    return Event(origin.partition, key, value, with_replay_headers(own, source=source, attempts=attempts))
