"""Dead letters as read from their topic: which are selected, and how each is handled."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from streams.wire.deadletter import NotADeadLetter, read_dead_letter
from streams.wire.replay_headers import Headers, RecordPosition, replay_attempts, with_replay_headers

__all__ = [
    "REFUSED",
    "DeadLetter",
    "Disposition",
    "ReplayFilter",
    "disposition",
    "instant_of",
    "parse_dead_letter",
    "restore_headers",
]

_LATEST_MS = 253_402_300_799_999  # the end of the year 9999; a timestamp may be any 64-bit value


class Disposition(StrEnum):
    """How a selected dead letter is handled. The values are keys of the JSON output."""

    REPLAY = "replay"
    ALREADY_REPLAYED = "already"
    """Already replayed."""
    EXHAUSTED = "exhausted"
    """Replayed the maximum number of times, and dead-lettered again."""
    OTHER_TOPIC = "elsewhere"
    """Its event was not read from the input topic."""
    NOT_A_DEAD_LETTER = "foreign"
    """Not written by Anabranch."""
    TOO_LARGE = "too_large"
    """Too large for the input topic with its replay headers."""
    PLACEHOLDER = "placeholder"
    """Contains only the position of its event, not the event."""
    DELETED = "gone"
    """Deleted by retention during the replay."""


REFUSED = frozenset(
    {
        Disposition.EXHAUSTED,
        Disposition.OTHER_TOPIC,
        Disposition.NOT_A_DEAD_LETTER,
        Disposition.TOO_LARGE,
        Disposition.PLACEHOLDER,
        Disposition.DELETED,
    }
)
"""The dispositions of selected dead letters that cannot be replayed."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One record of the dead-letter topic, without its content.

    Attributes:
        code: None if Anabranch did not write it.
        topic: where its event was read; empty if Anabranch did not write it.
        attempts: how often it has been replayed; None if its replay header is invalid.
        written_at: the record's timestamp.
        missing: what a placeholder stands for; None if the dead letter contains its event.
    """

    partition: int
    offset: int
    written_at: datetime
    code: str | None = None
    topic: str = ""
    attempts: int | None = 0
    missing: "Missing | None" = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Events that a dead letter stands for without containing them."""

    topic: str
    partition: int
    first: int
    last: int

    def __str__(self) -> str:
        span = str(self.first) if self.first == self.last else f"{self.first}–{self.last}"
        return f"{self.topic}[{self.partition}]@{span}"


@dataclass(frozen=True, slots=True)
class ReplayFilter:
    """Selects dead letters. An attribute that is empty or None selects all.

    Attributes:
        partitions: partitions of the dead-letter topic.
        since: written at this instant or later.
        until: written before this instant.
    """

    codes: frozenset[str] = frozenset()
    partitions: frozenset[int] = frozenset()
    since: datetime | None = None
    until: datetime | None = None

    def matches(self, dead_letter: DeadLetter) -> bool:
        """Whether a dead letter is selected."""
        return (
            (not self.codes or dead_letter.code in self.codes)
            and (not self.partitions or dead_letter.partition in self.partitions)
            and (self.since is None or self.since <= dead_letter.written_at)
            and (self.until is None or dead_letter.written_at < self.until)
        )


def instant_of(timestamp_ms: int) -> datetime:
    """A record's timestamp, between 1970 and 9999."""
    return datetime.fromtimestamp(min(max(timestamp_ms, 0), _LATEST_MS) / 1000, UTC)


def parse_dead_letter(
    *, partition: int, offset: int, timestamp_ms: int, headers: Headers, value: bytes | None
) -> DeadLetter:
    """Classify a record of the dead-letter topic."""
    written_at = instant_of(timestamp_ms)
    try:
        origin, own = read_dead_letter(headers)
    except NotADeadLetter:
        return DeadLetter(partition, offset, written_at)
    if value is None:  # a worker skips tombstones and never writes them
        return DeadLetter(partition, offset, written_at)
    missing = origin.placeholder and Missing(origin.topic, origin.partition, *origin.placeholder)
    return DeadLetter(partition, offset, written_at, origin.code, origin.topic, replay_attempts(own), missing)


def disposition(
    dead_letter: DeadLetter, *, input_topic: str, is_replayed: bool, max_attempts: int
) -> Disposition:
    """Decide how to handle a selected dead letter."""
    if dead_letter.code is None:
        return Disposition.NOT_A_DEAD_LETTER
    if dead_letter.missing is not None:
        return Disposition.PLACEHOLDER
    if is_replayed:
        return Disposition.ALREADY_REPLAYED
    if dead_letter.topic != input_topic:
        return Disposition.OTHER_TOPIC
    if dead_letter.attempts is None or dead_letter.attempts >= max_attempts:
        return Disposition.EXHAUSTED
    return Disposition.REPLAY


def restore_headers(headers: Headers, *, source: RecordPosition) -> tuple[int, Headers]:
    """The partition where a dead letter's event was first read; the event's own headers, plus the replay headers.

    Raises:
        NotADeadLetter: Anabranch did not write it.
    """
    origin, own = read_dead_letter(headers)
    attempts = (replay_attempts(own) or 0) + 1
    return origin.partition, with_replay_headers(own, source=source, attempts=attempts)
