"""The headers added to a dead letter. The event's key, value and own headers are unchanged.

The ``__connect.errors.*`` names are Kafka Connect's, so that existing tools understand them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streams.core.errors import TerminalError
from streams.core.headers import Headers

__all__ = [
    "CODE_HEADER",
    "MESSAGE_HEADER",
    "NotADeadLetter",
    "Origin",
    "error_headers",
    "fit_headers",
    "placeholder_headers",
    "read_dead_letter",
    "reply_error_headers",
    "without_error_headers",
]

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

_FIRST_HEADER = "anabranch.placeholder.first.offset"
_LAST_HEADER = "anabranch.placeholder.last.offset"
_SIZE_HEADER = "anabranch.placeholder.original.bytes"
_PLACEHOLDER = (_FIRST_HEADER, _LAST_HEADER, _SIZE_HEADER)

# Keeps dead letters within the margin by which the dead-letter topic's record limit exceeds the input topic's.
_MAX_MESSAGE_CHARACTERS = 1000


class NotADeadLetter(ValueError):
    """A record on the dead-letter topic that Anabranch did not write."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Why an event was dead-lettered, and where it was read.

    Attributes:
        placeholder: first and last offset that a placeholder stands for; None: the dead letter contains its event.
    """

    code: str
    topic: str
    partition: int
    offset: int
    placeholder: tuple[int, int] | None = None


def error_headers(
    error: TerminalError, *, topic: str, partition: int, offset: int
) -> Sequence[tuple[str, bytes]]:
    """The headers for the error and for where the event was read. The error's message does not quote the event."""
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


def reply_error_headers(error: TerminalError) -> Sequence[tuple[str, bytes]]:
    """The headers of a reply that is an error: the code and the message, as in the dead letter."""
    return [
        (CODE_HEADER, error.code.encode()),
        (MESSAGE_HEADER, str(error)[:_MAX_MESSAGE_CHARACTERS].encode()),
    ]


def without_error_headers(headers: Headers) -> Headers:
    """An event's headers without those by which a caller would take a reply for an error."""
    return [header for header in headers if header[0] not in (CODE_HEADER, MESSAGE_HEADER)]


def placeholder_headers(*, first: int, last: int, size: int) -> Sequence[tuple[str, bytes]]:
    """The headers after `error_headers` of a dead letter that does not contain its event or events.

    Args:
        first: offset, on the topic of origin, of the first event that it stands for.
        last: offset of the last one.
        size: bytes of the event's value, or of the batch as stored by the broker.
    """
    fields = {_FIRST_HEADER: first, _LAST_HEADER: last, _SIZE_HEADER: size}
    return [(name, str(value).encode()) for name, value in fields.items()]


def fit_headers(key: bytes | None, headers: Headers, room: int) -> tuple[bytes | None, Headers]:
    """The part of an event's key and headers that fits into the given size; each is kept whole or dropped."""
    if key is not None:
        if len(key) > room:
            key = None
        else:
            room -= len(key)
    kept = []
    for name, value in headers:
        size = len(name.encode()) + len(value or b"")  # Kafka has headers without a value
        if size <= room:
            kept.append((name, value))
            room -= size
    return key, kept


def read_dead_letter(headers: Headers) -> tuple[Origin, Headers]:
    """Split a dead letter's headers into where it came from and the event's own headers.

    Of each name, only the last header belongs to the dead letter, and a placeholder's headers come after all others.
    The event may already have had headers of the same names: Kafka Connect dead-lettered it before, or somebody
    published a dead letter again by hand.

    Raises:
        NotADeadLetter: the headers were not written by `error_headers`.
    """
    own = list(headers)
    parsed: dict[str, bytes] = {}
    end = max(
        (at for at, (name, value) in enumerate(own) if name == CODE_HEADER and value is not None), default=0
    )
    placeholder = {name: value for name, value in own[end:] if name in _PLACEHOLDER}
    own[end:] = [header for header in own[end:] if header[0] not in _PLACEHOLDER]
    for at in reversed(range(len(own))):
        name, value = own[at]
        if name in _ALL and name not in parsed and value is not None:
            parsed[name] = value
            del own[at]
    missing = [name for name in _ALL if name not in parsed]
    if missing:
        raise NotADeadLetter(f"it has no header {CODE_HEADER if CODE_HEADER in missing else missing[0]}")
    try:
        origin = Origin(
            code=parsed[CODE_HEADER].decode(),
            topic=parsed[_TOPIC_HEADER].decode(),
            partition=int(parsed[_PARTITION_HEADER]),
            offset=int(parsed[_OFFSET_HEADER]),
            placeholder=_span(placeholder.get(_FIRST_HEADER), placeholder.get(_LAST_HEADER)),
        )
    except ValueError:
        raise NotADeadLetter(
            "the headers with the event's topic, partition and offset are malformed"
        ) from None
    return origin, own


def _span(first: bytes | None, last: bytes | None) -> tuple[int, int] | None:
    return None if first is None or last is None else (int(first), int(last))
