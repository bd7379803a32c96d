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
    │   └── GaveUp                 search_timeout | store_unavailable | internal_error
    └── TransientError         the world will recover: retry
        ├── StoreUnavailable       store_unavailable
        ├── SearchTimeout          search_timeout
        └── StoreMisconfigured     store_misconfigured (never a dead letter: no event's fault)

A class has one stable ``code``; the metric label, the dead letter's header and the documentation use it. A message
never quotes the event: no text, principal or embedding may reach a log or a header through it.
"""

from typing import ClassVar

__all__ = [
    "INTERNAL_ERROR",
    "AnabranchError",
    "ContractViolation",
    "DimensionMismatch",
    "Expired",
    "GaveUp",
    "ModelMismatch",
    "NonFiniteEmbedding",
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
    "UnsupportedVersion",
    "ZeroEmbedding",
    "dead_letter_codes",
]


# Under this code goes what nobody foresaw.
INTERNAL_ERROR = "internal_error"


class AnabranchError(Exception):
    """Root of the tree; ``code`` is stable across releases."""

    code: ClassVar[str]


class TerminalError(AnabranchError):
    """The event can never succeed; it is kept, byte for byte, on the dead-letter topic."""

    stage: ClassVar[str] = "decode"


class Undecodable(TerminalError):
    """The bytes are none of the three encodings, or break off in the middle of one."""

    code = "undecodable"


class UnknownSchema(TerminalError):
    """Well framed, but written with a schema that this worker does not have."""

    code = "unknown_schema"


class UnsupportedVersion(TerminalError):
    """``schema_version`` has another major than 1."""

    code = "unsupported_version"


class ContractViolation(TerminalError):
    """The event does not conform to the JSON contract."""

    code = "contract_violation"


class DimensionMismatch(TerminalError):
    """The embedding has another number of components than the contract's 768."""

    code = "dimension_mismatch"


class NonFiniteEmbedding(TerminalError):
    """A component is NaN, infinite, or beyond the range of float32."""

    code = "non_finite_embedding"


class ZeroEmbedding(TerminalError):
    """Every component is zero: no direction, so no cosine."""

    code = "zero_embedding"


class TopicWithoutSession(TerminalError):
    """``topic_id`` is only defined within a session."""

    code = "topic_without_session"


class UnknownProfile(TerminalError):
    """The event names a profile that this worker does not have."""

    code = "unknown_profile"


class ModelMismatch(TerminalError):
    """Embedded by another model than the store's: its neighbours would be noise."""

    code = "model_mismatch"


class Expired(TerminalError):
    """``expires_at`` has passed: the answer would be worthless."""

    code = "expired"


class ResultTooLarge(TerminalError):
    """The broker does not take a record of this size."""

    code = "result_too_large"
    stage = "publish"


class GaveUp(TerminalError):
    """A transient fault, or one that nobody foresaw, that came back on every attempt.

    Args:
        code: the code under which the event is dead-lettered.
        message: what happened, without the event's content.
        stage: where it happened.
    """

    def __init__(self, code: str, message: str, *, stage: str = "search") -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # one class for three codes: what differs is the cause, not the handling
        self.stage = stage  # type: ignore[misc]


def dead_letter_codes() -> frozenset[str]:
    """Every code that a dead letter can have."""
    own = {kind.code for kind in TerminalError.__subclasses__() if kind is not GaveUp}
    return frozenset(own | {StoreUnavailable.code, SearchTimeout.code, INTERNAL_ERROR})


class TransientError(AnabranchError):
    """The world will recover; the same event is tried again."""


class StoreUnavailable(TransientError):
    """PostgreSQL is unreachable, restarting, out of connections, or broke a deadlock at our cost."""

    code = "store_unavailable"


class SearchTimeout(TransientError):
    """One search took longer than the search timeout."""

    code = "search_timeout"


class StoreMisconfigured(TransientError):
    """The store refuses for a reason that is no event's fault: a missing table, index or permission.

    Args:
        message: what is wrong, and what mends it.
        unasked: no store was asked: the connection string, or a file that it names, cannot be used.
    """

    code = "store_misconfigured"

    def __init__(self, message: str, *, before_connect: bool = False) -> None:
        super().__init__(message)
        self.before_connect = before_connect
