"""Request and reply: where the sender of an event wants a reply, and whether it can be sent there.

The headers are those of Spring's `ReplyingKafkaTemplate`. Does not belong here: publishing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streams.core.headers import Headers
from streams.core.warning_codes import WarningCode

__all__ = [
    "CORRELATION_ID_HEADER",
    "REPLY_PARTITION_HEADER",
    "REPLY_TOPIC_HEADER",
    "REPLY_WARNINGS",
    "ReplyRefused",
    "ReplyTarget",
    "missing_part",
    "read_reply_target",
    "reply_headers",
    "reply_request_headers",
]

REPLY_TOPIC_HEADER: Final = "kafka_replyTopic"
"""Name of the topic, in UTF-8. An event without this header wants no reply."""
REPLY_PARTITION_HEADER: Final = "kafka_replyPartition"
"""Partition of that topic: 4 bytes, signed, most significant byte first. Optional."""
CORRELATION_ID_HEADER: Final = "kafka_correlationId"
"""Any bytes; the reply has the same."""

REPLY_WARNINGS: Final = (
    WarningCode.REPLY_HEADERS_INVALID,
    WarningCode.REPLY_TOPIC_NOT_ALLOWED,
    WarningCode.REPLY_TOPIC_MISSING,
    WarningCode.REPLY_PARTITION_MISSING,
    WarningCode.REPLY_NOT_AUTHORIZED,
    WarningCode.REPLY_TOO_LARGE,
    WarningCode.REPLY_REJECTED,
    WarningCode.REPLY_EXPIRED,
)
"""Why a result that was to be a reply is not one."""

_PARTITION_BYTES: Final = 4


class ReplyRefused(Exception):
    """The result cannot be sent as a reply; it goes to the output topic, with a warning.

    Args:
        code: the warning's.
    """

    def __init__(self, code: WarningCode) -> None:
        super().__init__(code.value)
        self.code = code


@dataclass(frozen=True, slots=True)
class ReplyTarget:
    """Where a reply goes.

    Attributes:
        partition: None: chosen by the event's key.
    """

    topic: str
    partition: int | None = None


def read_reply_target(headers: Headers) -> ReplyTarget | None:
    """Where the event's sender wants the reply; None: nowhere. Of each name, the last header counts.

    Raises:
        ReplyRefused: the headers are malformed.
    """
    last = dict(headers)
    if REPLY_TOPIC_HEADER not in last:
        return None
    topic, partition = last[REPLY_TOPIC_HEADER], last.get(REPLY_PARTITION_HEADER)
    try:
        name = (topic or b"").decode()
    except UnicodeDecodeError:
        raise ReplyRefused(WarningCode.REPLY_HEADERS_INVALID) from None
    if not name or last.get(CORRELATION_ID_HEADER) is None:
        raise ReplyRefused(WarningCode.REPLY_HEADERS_INVALID)
    if REPLY_PARTITION_HEADER not in last:
        return ReplyTarget(name)
    number = -1 if partition is None else int.from_bytes(partition, "big", signed=True)
    if number < 0 or len(partition or b"") != _PARTITION_BYTES:
        raise ReplyRefused(WarningCode.REPLY_HEADERS_INVALID)
    return ReplyTarget(name, number)


def missing_part(target: ReplyTarget, existing: Mapping[str, int | None]) -> WarningCode | None:
    """Whether the topic or the partition is missing; None: both exist.

    Args:
        target: where a reply goes.
        existing: the number of partitions of each topic that exists; None: the broker does not report it.
    """
    if target.topic not in existing:
        return WarningCode.REPLY_TOPIC_MISSING
    partitions = existing[target.topic]
    if target.partition is None or partitions is None or target.partition < partitions:
        return None
    return WarningCode.REPLY_PARTITION_MISSING


def reply_request_headers(target: ReplyTarget, correlation_id: bytes) -> Sequence[tuple[str, bytes]]:
    """The headers with which an event asks for a reply."""
    headers = [(REPLY_TOPIC_HEADER, target.topic.encode()), (CORRELATION_ID_HEADER, correlation_id)]
    if target.partition is not None:
        headers.append(
            (REPLY_PARTITION_HEADER, target.partition.to_bytes(_PARTITION_BYTES, "big", signed=True))
        )
    return headers


def reply_headers(headers: Headers) -> Headers:
    """The headers of an event that say where its sender wants the reply, unchanged."""
    return [header for header in headers if header[0] in (REPLY_TOPIC_HEADER, REPLY_PARTITION_HEADER)]
