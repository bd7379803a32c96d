"""The headers that a dead letter gets; its key, value and own headers stay as they came.

The ``__connect.errors.*`` names are Kafka Connect's, so that existing tools find their way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streams.core.errors import TerminalError

__all__ = ["CODE_HEADER", "MESSAGE_HEADER", "NotADeadLetter", "Origin", "error_headers", "read_dead_letter"]

CODE_HEADER = "anabranch.error.code"
MESSAGE_HEADER = "__connect.errors.exception.message"
_TOPIC_HEADER = "__connect.errors.topic"
_PARTITION_HEADER = "__connect.errors.partition"
_OFFSET_HEADER = "__connect.errors.offset"
_STAGE_HEADER = "__connect.errors.stage"
_CLASS_HEADER = "__connect.errors.class.name"
_ALL = (
    _TOPIC_HEADER,
    _PARTITION_HEADER,
    _OFFSET_HEADER,
    _STAGE_HEADER,
    _CLASS_HEADER,
    MESSAGE_HEADER,
    CODE_HEADER,
)

# Keeps a dead letter within the margin that its topic has over the input topic.
_MAX_MESSAGE_CHARACTERS = 1000

Headers = Sequence[tuple[str, bytes | None]]


class NotADeadLetter(ValueError):
    """A record on the dead-letter topic that Anabranch did not put there."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Why an event was put aside, and where it had been read."""

    code: str
    topic: str
    partition: int
    offset: int


def error_headers(
    error: TerminalError, *, topic: str, partition: int, offset: int
) -> Sequence[tuple[str, bytes]]:
    """What went wrong, and where the event was read. The error's message quotes nothing of the event."""
    fields = {
        _TOPIC_HEADER: topic,
        _PARTITION_HEADER: str(partition),
        _OFFSET_HEADER: str(offset),
        _STAGE_HEADER: error.stage,
        _CLASS_HEADER: type(error).__name__,
        MESSAGE_HEADER: str(error)[:_MAX_MESSAGE_CHARACTERS],
        CODE_HEADER: error.code,
    }
    return [(name, value.encode()) for name, value in fields.items()]


def read_dead_letter(headers: Headers) -> tuple[Origin, Headers]:
    """Take the headers of a dead letter apart: where it came from, and the event's own headers as they came.

    Of each name only the last header is the dead letter's. An event may have brought some of the same name with it:
    one that Kafka Connect had put aside before, or a dead letter that somebody published again by hand.

    Raises:
        Foreign: the headers are not what `error_headers` writes.
    """
    own = list(headers)
    told: dict[str, bytes] = {}
    for at in reversed(range(len(own))):
        name, value = own[at]
        if name in _ALL and name not in told and value is not None:
            told[name] = value
            del own[at]
    missing = [name for name in _ALL if name not in told]
    if missing:
        raise NotADeadLetter(f"no header {CODE_HEADER if CODE_HEADER in missing else missing[0]}")
    try:
        origin = Origin(
            code=told[CODE_HEADER].decode(),
            topic=told[_TOPIC_HEADER].decode(),
            partition=int(told[_PARTITION_HEADER]),
            offset=int(told[_OFFSET_HEADER]),
        )
    except ValueError:
        raise NotADeadLetter("the headers that say where it was read are malformed") from None
    return origin, own
