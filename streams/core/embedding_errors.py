"""Everything that can go wrong when a text is embedded: along the same axis as the errors of events.

::

    EmbeddingError
    ├── TextError                  this text can never be embedded: a dead letter
    │   ├── EmptyText                  empty_text
    │   └── TextRejected               text_rejected
    ├── ProviderUnavailable        provider_unavailable: expected to recover; block or dead-letter
    └── ProviderMisconfigured      provider_misconfigured: an operator must act; no text is at fault
        ├── KeyRejected                key_rejected
        └── WrongDimension             wrong_dimension

Each class has one stable ``code``. A message never quotes a text, a key or a provider's response, which may quote both.
"""

from typing import ClassVar

from streams.core.errors import (
    AnabranchError,
    DimensionMismatch,
    ModelMismatch,
    NonFiniteEmbedding,
    SearchTimeout,
    StoreUnavailable,
    TerminalError,
    TransientError,
    UnknownProfile,
    ZeroEmbedding,
    codes_that_fail_again,
    dead_letter_codes,
)

__all__ = [
    "EmbeddingError",
    "EmptyText",
    "KeyRejected",
    "ProviderMisconfigured",
    "ProviderUnavailable",
    "TextError",
    "TextRejected",
    "WrongDimension",
    "text_codes_that_fail_again",
    "text_dead_letter_codes",
]


class EmbeddingError(AnabranchError):
    """Root of the tree; ``code`` is stable across releases."""


class TextError(EmbeddingError, TerminalError):
    """This text can never be embedded; other texts can."""

    stage: ClassVar[str] = "embed"


class EmptyText(TextError):
    """The text is empty, or only white space."""

    code = "empty_text"
    fails_again = True


class TextRejected(TextError):
    """The provider rejects this text, even a part of it, and accepts others."""

    code = "text_rejected"


class ProviderUnavailable(EmbeddingError, TransientError):
    """The provider is unreachable, overloaded or broken, or its response is unusable.

    Args:
        message: what happened.
        status: HTTP status of the response; None: there was no complete response.
        retry_after_seconds: how long the provider asks to wait; None: it does not say.
    """

    code = "provider_unavailable"

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class ProviderMisconfigured(EmbeddingError, TransientError):
    """The provider's address, model, files or package are wrong. No text is at fault, so none is dead-lettered."""

    code = "provider_misconfigured"
    needs_fix = True


class KeyRejected(ProviderMisconfigured):
    """The provider does not accept the API key."""

    code = "key_rejected"


class WrongDimension(ProviderMisconfigured):
    """The model's embeddings do not have the configured number of dimensions."""

    code = "wrong_dimension"


# What only a worker checks.
_OF_WORKERS = frozenset(
    kind.code
    for kind in (
        DimensionMismatch,
        NonFiniteEmbedding,
        ZeroEmbedding,
        UnknownProfile,
        ModelMismatch,
        SearchTimeout,
        StoreUnavailable,
    )
)


def text_dead_letter_codes() -> frozenset[str]:
    """All codes that a dead letter of the embedding stage can have."""
    return dead_letter_codes() - _OF_WORKERS | {EmptyText.code, TextRejected.code, ProviderUnavailable.code}


def text_codes_that_fail_again() -> frozenset[str]:
    """Codes of the embedding stage's dead letters whose events must be corrected: a replay fails again."""
    return codes_that_fail_again() - _OF_WORKERS | {EmptyText.code}
