"""What exactly is embedded for a question in words.

======================================================================  ========================
the question                                                            what is embedded
======================================================================  ========================
with ``topic_id`` and ``topic_title``                                   ``{topic_title}: {text}``
without ``topic_id``, under 20 tokens, and there is a summary           ``{summary}: {text}``
any other                                                               ``{text}``
======================================================================  ========================

Nothing is stripped or normalized. A blank title or summary counts as absent. The summary is the question's own, else
one made from its conversation. This module has no I/O: the caller makes the summary where `lacks_summary` says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from uuid import UUID

from streams.core.embedding_errors import EmptyText

__all__ = [
    "Message",
    "Question",
    "UpstreamWarning",
    "compose",
    "lacks_summary",
]

# A shorter text has too little meaning of its own: "and why?"
_SHORT_TOKENS: Final = 20


class UpstreamWarning(StrEnum):
    """The stable code of a warning about what was embedded."""

    TEXT_TRUNCATED = "text_truncated"
    SUMMARY_UNAVAILABLE = "summary_unavailable"


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the conversation before the question; ``role`` is ``user``, ``assistant`` or another name."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """The parts of a question that decide what is embedded.

    Attributes:
        conversation: recent messages, oldest first.
        conversation_summary: a summary that the producer made.
    """

    text: str
    topic_id: UUID | None = None
    topic_title: str | None = None
    conversation: Sequence[Message] = ()
    conversation_summary: str | None = None


def compose(question: Question, made_summary: str | None, count_tokens: Callable[[str], int]) -> str:
    """The text to embed.

    Args:
        question: the question.
        made_summary: a summary made from its conversation; only used if the question has none of its own.
        count_tokens: number of cl100k_base tokens of a text.

    Raises:
        EmptyText: the question's text is blank.
    """
    if _blank(question.text):
        raise EmptyText("the text is empty or only white space")
    if question.topic_id is not None:
        return question.text if _blank(question.topic_title) else f"{question.topic_title}: {question.text}"
    own = question.conversation_summary
    summary = made_summary if _blank(own) else own
    if _blank(summary) or count_tokens(question.text) >= _SHORT_TOKENS:
        return question.text
    return f"{summary}: {question.text}"


def lacks_summary(question: Question, count_tokens: Callable[[str], int]) -> bool:
    """Whether a summary of the conversation would change what is embedded."""
    return (
        question.topic_id is None
        and _blank(question.conversation_summary)
        and not all(_blank(message.text) for message in question.conversation)
        and not _blank(question.text)
        and count_tokens(question.text) < _SHORT_TOKENS
    )


def _blank(text: str | None) -> bool:
    return text is None or not text.strip()
