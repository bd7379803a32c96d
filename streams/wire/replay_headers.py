"""The headers that a replay adds to an event: which dead letter it was, and how often it was replayed.

A worker copies them, like every header, to what it publishes for the event: to another dead letter, so that attempts
add up, and to the result, so that its consumer can recognize a late answer.
"""

import re
from typing import NamedTuple

from streams.core.headers import Headers

__all__ = [
    "ATTEMPTS_HEADER",
    "FROM_HEADER",
    "Headers",
    "RecordPosition",
    "replay_attempts",
    "replay_source",
    "with_replay_headers",
]

FROM_HEADER = "anabranch.replay.from"
ATTEMPTS_HEADER = "anabranch.replay.attempts"

_POSITION = re.compile(r"([a-zA-Z0-9._-]{1,249})\[(\d{1,10})\]@(\d{1,19})", re.ASCII)
_ATTEMPTS = re.compile(rb"\d{1,9}")


class RecordPosition(NamedTuple):
    """A record's topic, partition and offset."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def replay_attempts(headers: Headers) -> int | None:
    """How often this event has been replayed. None if the header is invalid, so Anabranch did not write it."""
    found = [value for name, value in headers if name == ATTEMPTS_HEADER]
    if not found:
        return 0
    last = found[-1]
    return int(last) if last is not None and _ATTEMPTS.fullmatch(last) else None


def replay_source(headers: Headers) -> RecordPosition | None:
    """The dead letter that a replayed event came from; None for any other event."""
    found = [value for name, value in headers if name == FROM_HEADER]
    if not found or found[-1] is None:
        return None
    match = _POSITION.fullmatch(found[-1].decode(errors="replace"))
    return None if match is None else RecordPosition(match[1], int(match[2]), int(match[3]))


def with_replay_headers(headers: Headers, *, source: RecordPosition, attempts: int) -> Headers:
    """The event's own headers in order, then the replay headers, which replace those of an earlier replay."""
    own = [(name, value) for name, value in headers if name not in (FROM_HEADER, ATTEMPTS_HEADER)]
    return [*own, (FROM_HEADER, str(source).encode()), (ATTEMPTS_HEADER, str(attempts).encode())]
