"""Dead letters as they are read back: which are chosen, and what becomes of each."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from streams.replay.marks import Headers, Place, attempts_of, marked
from streams.wire.deadletter import NotADeadLetter, read_dead_letter

__all__ = ["REFUSED", "Choice", "Event", "Fate", "Letter", "fate", "read_letter", "restored"]

_LATEST_MS = 253_402_300_799_999  # the end of the year 9999; a timestamp is any 64 bits


class Fate(StrEnum):
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


REFUSED = frozenset({Fate.EXHAUSTED, Fate.ELSEWHERE, Fate.FOREIGN, Fate.TOO_LARGE, Fate.GONE})
"""Chosen, and left all the same."""


@dataclass(frozen=True, slots=True)
class Letter:
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
class Choice:
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

    def takes(self, letter: Letter) -> bool:
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


def read_letter(
    *, partition: int, offset: int, timestamp_ms: int, headers: Headers, value: bytes | None
) -> Letter:
    """Say what a record of the dead-letter topic is."""
    written_at = datetime.fromtimestamp(min(max(timestamp_ms, 0), _LATEST_MS) / 1000, UTC)
    try:
        origin, own = read_dead_letter(headers)
    except NotADeadLetter:
        return Letter(partition, offset, written_at)
    if value is None:  # a worker skips tombstones, and puts none aside
        return Letter(partition, offset, written_at)
    return Letter(partition, offset, written_at, origin.code, origin.topic, attempts_of(own))


def fate(letter: Letter, *, input_topic: str, replayed: AbstractSet[int], max_attempts: int) -> Fate:
    """What is to become of a chosen dead letter; `replayed` are offsets in its partition."""
    if letter.code is None:
        return Fate.FOREIGN
    if letter.offset in replayed:
        return Fate.ALREADY
    if letter.topic != input_topic:
        return Fate.ELSEWHERE
    if letter.attempts is None or letter.attempts >= max_attempts:
        return Fate.EXHAUSTED
    return Fate.REPLAY


def restored(*, source: Place, key: bytes | None, value: bytes, headers: Headers) -> Event:
    """The event that a dead letter holds: key, value and headers byte for byte, and the marks.

    Raises:
        Foreign: it is not Anabranch's.
    """
    origin, own = read_dead_letter(headers)
    attempts = (attempts_of(own) or 0) + 1
    return Event(origin.partition, key, value, marked(own, source=source, attempts=attempts))
