"""The headers that a replayed event has besides its own: which dead letter it was, and how often it was replayed.

A worker carries them to whatever becomes of the event, as it carries every header: to another dead letter, so that
attempts add up, and to the result, whose reader can tell a late answer by them.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "ATTEMPTS_HEADER",
    "FROM_HEADER",
    "Headers",
    "RecordPosition",
    "replay_attempts",
    "with_replay_headers",
    "replay_source",
]

FROM_HEADER = "anabranch.replay.from"
ATTEMPTS_HEADER = "anabranch.replay.attempts"

_PLACE = re.compile(r"([a-zA-Z0-9._-]{1,249})\[(\d{1,10})\]@(\d{1,19})", re.ASCII)
_ATTEMPTS = re.compile(rb"\d{1,9}")

Headers = Sequence[tuple[str, bytes | None]]


class RecordPosition(NamedTuple):
    """Where a record stands."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def replay_attempts(headers: Headers) -> int | None:
    """How often this event has been replayed; None where the mark cannot be read, which nobody of ours wrote."""
    found = [value for name, value in headers if name == ATTEMPTS_HEADER]
    if not found:
        return 0
    last = found[-1]
    return int(last) if last is not None and _ATTEMPTS.fullmatch(last) else None


def replay_source(headers: Headers) -> RecordPosition | None:
    """The dead letter that a replayed event was; None for any other event."""
    found = [value for name, value in headers if name == FROM_HEADER]
    if not found or found[-1] is None:
        return None
    match = _PLACE.fullmatch(found[-1].decode(errors="replace"))
    return None if match is None else RecordPosition(match[1], int(match[2]), int(match[3]))


def with_replay_headers(headers: Headers, *, source: RecordPosition, attempts: int) -> Headers:
    """The event's own headers in their order, then the marks; marks of an earlier replay give way to them."""
    own = [(name, value) for name, value in headers if name not in (FROM_HEADER, ATTEMPTS_HEADER)]
    return [*own, (FROM_HEADER, str(source).encode()), (ATTEMPTS_HEADER, str(attempts).encode())]
