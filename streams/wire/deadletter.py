"""The headers that a dead letter gets; its key, value and own headers stay as they came.

The ``__connect.errors.*`` names are Kafka Connect's, so that existing tools find their way.
"""

from collections.abc import Sequence

from streams.core.errors import TerminalError

__all__ = ["CODE_HEADER", "MESSAGE_HEADER", "error_headers"]

CODE_HEADER = "anabranch.error.code"
MESSAGE_HEADER = "__connect.errors.exception.message"

# Keeps a dead letter within the margin that its topic has over the input topic.
_MOST_MESSAGE_CHARACTERS = 1000


def error_headers(
    error: TerminalError, *, topic: str, partition: int, offset: int
) -> Sequence[tuple[str, bytes]]:
    """What went wrong, and where the event was read. The error's message quotes nothing of the event."""
    fields = {
        "__connect.errors.topic": topic,
        "__connect.errors.partition": str(partition),
        "__connect.errors.offset": str(offset),
        "__connect.errors.stage": error.stage,
        "__connect.errors.class.name": type(error).__name__,
        MESSAGE_HEADER: str(error)[:_MOST_MESSAGE_CHARACTERS],
        CODE_HEADER: error.code,
    }
    return [(name, value.encode()) for name, value in fields.items()]
