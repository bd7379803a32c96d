"""What a client raises. Every message is one line, and quotes no text, principal or embedding."""

from uuid import UUID

__all__ = [
    "ClientClosed",
    "ClientError",
    "ConnectionFailed",
    "InvalidEvent",
    "PublishTimeout",
    "RetrievalFailed",
    "RetrievalTimeout",
    "UnreadableResult",
]


class ClientError(Exception):
    """The base class."""


class InvalidEvent(ClientError):
    """The event violates its contract, or is larger than its topic accepts. It was not sent.

    Attributes:
        code: as a dead letter's, for example ``contract_violation`` or ``dimension_mismatch``.
        reason: the field and the rule.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class RetrievalFailed(ClientError):
    """The event was dead-lettered by a worker or the embedding stage, or the reply topic does not accept its result.

    Attributes:
        code: docs/delivery.md and docs/embedding.md list the codes.
        reason: what happened.
        event_id: the event's.
    """

    def __init__(self, code: str, reason: str, *, event_id: UUID) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
        self.event_id = event_id


class RetrievalTimeout(ClientError, TimeoutError):
    """There was no reply in time. The event may have been sent, and may still be answered on the output topic.

    Attributes:
        event_id: the event's.
    """

    def __init__(self, message: str, *, event_id: UUID) -> None:
        super().__init__(message)
        self.event_id = event_id


class PublishTimeout(ClientError, TimeoutError):
    """The broker did not acknowledge the event in time. It may have been sent; publish it again with its id.

    Attributes:
        event_id: the event's.
    """

    def __init__(self, message: str, *, event_id: UUID) -> None:
        super().__init__(message)
        self.event_id = event_id


class UnreadableResult(ClientError):
    """A result cannot be decoded, for example because this package is older than the worker.

    Attributes:
        code: as a dead letter's, for example ``unknown_schema``.
        reason: what is wrong, and where.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class ConnectionFailed(ClientError):
    """Kafka is unreachable or rejects the client, or a topic is missing; the message says what to do."""


class ClientClosed(ClientError):
    """The client was closed, before the call or while it waited."""
