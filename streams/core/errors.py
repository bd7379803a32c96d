"""Everything that can go wrong with an event, along one axis.

::

    AnabranchError
    ├── TerminalError          this event can never succeed: a dead letter
    │   ├── Undecodable            undecodable
    │   ├── UnknownSchema          unknown_schema
    │   ├── UnsupportedVersion     unsupported_version
    │   ├── ContractViolation      contract_violation
    │   ├── DimensionMismatch      dimension_mismatch
    │   ├── NonFiniteEmbedding     non_finite_embedding
    │   ├── ZeroEmbedding          zero_embedding
    │   ├── TopicWithoutSession    topic_without_session
    │   ├── UnknownProfile         unknown_profile
    │   ├── ModelMismatch          model_mismatch
    │   ├── Expired                expired
    │   ├── ResultTooLarge         result_too_large
    │   ├── UnreadableBatch        unreadable_batch
    │   ├── RecordTooLarge         record_too_large
    │   └── GaveUp                 search_timeout | store_unavailable | internal_error
    └── TransientError         expected to recover: retry
        ├── StoreUnavailable       store_unavailable
        ├── SearchTimeout          search_timeout
        └── StoreMisconfigured     store_misconfigured (never a dead letter: the event is not at fault)

The embedding stage's own errors are in `streams.core.embedding_errors`.

Each class has one stable ``code``, which the metric label, the dead letter's header and the documentation use. A
message never quotes the event, so that no text, principal or embedding reaches a log or a header.
"""

from datetime import datetime
from typing import ClassVar
from uuid import UUID

__all__ = [
    "INTERNAL_ERROR",
    "AnabranchError",
    "ContractViolation",
    "DimensionMismatch",
    "Expired",
    "GaveUp",
    "ModelMismatch",
    "NonFiniteEmbedding",
    "RecordTooLarge",
    "ResultTooLarge",
    "SearchTimeout",
    "StoreMisconfigured",
    "StoreUnavailable",
    "TerminalError",
    "TopicWithoutSession",
    "TransientError",
    "Undecodable",
    "UnknownProfile",
    "UnknownSchema",
    "UnreadableBatch",
    "UnsupportedVersion",
    "ZeroEmbedding",
    "codes_that_fail_again",
    "dead_letter_codes",
]


# The code of unexpected errors.
INTERNAL_ERROR = "internal_error"


class AnabranchError(Exception):
    """Root of the tree; ``code`` is stable across releases."""

    code: ClassVar[str]


class TerminalError(AnabranchError):
    """The event can never succeed; the worker writes it, byte for byte, to the dead-letter topic.

    Attributes:
        fails_again: the event itself is wrong: it fails again whenever it is replayed, with any settings.
        event_id: the event's, if it was decoded far enough.
        expires_at: likewise.
    """

    stage: ClassVar[str] = "decode"
    fails_again: ClassVar[bool] = False
    event_id: UUID | None = None
    expires_at: datetime | None = None


class Undecodable(TerminalError):
    """The bytes are not in any of the three encodings, or are truncated."""

    code = "undecodable"
    fails_again = True


class UnknownSchema(TerminalError):
    """The framing is valid, but this worker does not have the schema the event was written with."""

    code = "unknown_schema"


class UnsupportedVersion(TerminalError):
    """The major version of ``schema_version`` is not 1."""

    code = "unsupported_version"
    fails_again = True


class ContractViolation(TerminalError):
    """The event does not conform to the JSON contract."""

    code = "contract_violation"
    fails_again = True


class DimensionMismatch(TerminalError):
    """The embedding does not have as many components as the store's."""

    code = "dimension_mismatch"
    fails_again = True


class NonFiniteEmbedding(TerminalError):
    """A component is NaN, infinite, or outside the float32 range."""

    code = "non_finite_embedding"
    fails_again = True


class ZeroEmbedding(TerminalError):
    """The embedding is all zeros: it has no direction, so cosine similarity is undefined."""

    code = "zero_embedding"
    fails_again = True


class TopicWithoutSession(TerminalError):
    """``topic_id`` is given without ``session_id``; a topic is only defined within a session."""

    code = "topic_without_session"
    fails_again = True


class UnknownProfile(TerminalError):
    """The event names a profile that this worker does not have."""

    code = "unknown_profile"


class ModelMismatch(TerminalError):
    """The event was embedded with a different model than the store's, so its neighbours would be meaningless."""

    code = "model_mismatch"


class Expired(TerminalError):
    """``expires_at`` has passed: nobody needs the answer any more."""

    code = "expired"
    fails_again = True
    expires_at: datetime

    def __init__(self, message: str, *, expires_at: datetime) -> None:
        super().__init__(message)
        self.expires_at = expires_at


class ResultTooLarge(TerminalError):
    """The broker does not accept a record of this size."""

    code = "result_too_large"
    stage = "publish"


class UnreadableBatch(TerminalError):
    """A batch of the input topic cannot be read, even when fetched again; its events are unknown."""

    code = "unreadable_batch"
    stage = "read"


class RecordTooLarge(TerminalError):
    """A compressed batch decompresses to more than the limit; its events are unknown."""

    code = "record_too_large"
    stage = "read"


class GaveUp(TerminalError):
    """A transient or unexpected error that occurred on every attempt.

    Args:
        code: the code with which the event is dead-lettered.
        message: what happened, without the event's content.
        stage: where it happened.
    """

    def __init__(self, code: str, message: str, *, stage: str = "search") -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # one class for three codes: the cause differs, the handling does not
        self.stage = stage  # type: ignore[misc]  # as above


def dead_letter_codes() -> frozenset[str]:
    """All codes that a worker's dead letter can have."""
    own = {kind.code for kind in _own_terminal_errors()}
    return frozenset(own | {StoreUnavailable.code, SearchTimeout.code, INTERNAL_ERROR})


def codes_that_fail_again() -> frozenset[str]:
    """Codes of a worker's dead letters whose events must be corrected: a replay fails again."""
    return frozenset(kind.code for kind in _own_terminal_errors() if kind.fails_again)


def _own_terminal_errors() -> list[type[TerminalError]]:
    # Another module's class of several errors does not have a code.
    return [kind for kind in TerminalError.__subclasses__() if "code" in vars(kind)]


class TransientError(AnabranchError):
    """The cause is expected to go away; the worker retries the same event.

    Attributes:
        needs_fix: an operator must act. The event is not at fault, so it is never dead-lettered.
    """

    needs_fix: ClassVar[bool] = False


class StoreUnavailable(TransientError):
    """PostgreSQL is unreachable, restarting, out of connections, or cancelled our side of a deadlock."""

    code = "store_unavailable"


class SearchTimeout(TransientError):
    """A search took longer than the search timeout."""

    code = "search_timeout"


class StoreMisconfigured(TransientError):
    """The store is set up incorrectly, for example a missing table, index or permission. The event is not at fault.

    Args:
        message: what is wrong, and how to fix it.
        before_connect: the error occurred before connecting: the connection string, or a file it names, is unusable.
    """

    code = "store_misconfigured"
    needs_fix = True

    def __init__(self, message: str, *, before_connect: bool = False) -> None:
        super().__init__(message)
        self.before_connect = before_connect
