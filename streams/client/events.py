"""Makes valid events from the arguments of a call."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypedDict
from uuid import UUID, uuid4

import numpy as np
import numpy.typing as npt

from streams.client.errors import InvalidEvent
from streams.core.errors import TerminalError
from streams.core.headers import Headers
from streams.core.messages import (
    QUERY_TEXT_VERSION,
    SCHEMA_VERSION,
    ConversationMessage,
    Filters,
    QueryEmbedding,
    QueryText,
    in_oldest_version,
)

__all__ = ["Embedding", "QueryOptions", "make_event"]

Embedding = Sequence[float] | npt.NDArray[np.floating]
"""Shape (dimensions,)."""


class QueryOptions(TypedDict, total=False):
    """Keyword arguments of `Client.retrieve` and `Client.publish`. None is the same as absent.

    The fields of the contracts have the contracts' rules; the profile's values apply to what is absent.

    Attributes:
        session_id: narrows the search to the session's chunks.
        topic_id: needs ``session_id``; searches the topic's own chunks too.
        profile: the name of a profile.
        k: the number of passages, clamped to the profile's range.
        similarity_threshold: minimum cosine similarity, 0 to 1.
        token_budget: maximum number of tokens of all passages.
        filters: a `Filters`, or a mapping with its fields.
        explain: whether the result says why it is empty or short.
        expires_at: with a time zone; a worker does not answer after it. Default of `retrieve`: the end of its timeout.
        event_id: default: a random one.
        occurred_at: when the question was asked, with a time zone; default: now.
        key: of the Kafka record; default: the event's id. The result has the same key.
        headers: of the Kafka record, for example ``traceparent``; the result has them too.
        embedding_model: only with an embedding: the name of the model that made it.
        query_hash: only with an embedding: SHA-256 of the text, in hexadecimal.
        topic_title: only with a text: precedes it in what is embedded.
        conversation: only with a text: the messages before it, oldest first, each with ``role`` and ``text``.
        conversation_summary: only with a text: instead of a summary of the conversation.
    """

    session_id: UUID | str | None
    topic_id: UUID | str | None
    profile: str | None
    k: int | None
    similarity_threshold: float | None
    token_budget: int | None
    filters: Filters | Mapping[str, Any] | None
    explain: bool | None
    expires_at: datetime | None
    event_id: UUID | str | None
    occurred_at: datetime | None
    key: bytes | None
    headers: Headers | None
    embedding_model: str | None
    query_hash: str | None
    topic_title: str | None
    conversation: Sequence[ConversationMessage | Mapping[str, str]] | None
    conversation_summary: str | None


_OF_THE_RECORD: Final = frozenset({"key", "headers"})
_OF_EMBEDDINGS: Final = frozenset({"embedding_model", "query_hash"})
_OF_TEXTS: Final = frozenset({"topic_title", "conversation", "conversation_summary"})


def make_event(
    *,
    principals: Iterable[str],
    embedding: Embedding | None,
    text: str | None,
    options: QueryOptions,
    dimensions: int | None,
    now: datetime,
) -> QueryEmbedding | QueryText:
    """Build an event, in the oldest minor version that can express it.

    Args:
        principals: the caller's.
        embedding: either this or ``text``.
        text: the question in words.
        options: the other fields, and the record's.
        dimensions: the number of components that the embedding must have; None: what the contract allows.
        now: the default of ``occurred_at``.

    Raises:
        InvalidEvent: the event violates its contract.
        TypeError: not exactly one of embedding and text is given, or an option or filter does not exist or belongs to
            the other.
    """
    if (embedding is None) == (text is None):
        raise TypeError("give either embedding or text")
    fields = _fields(options, _OF_TEXTS if text is None else _OF_EMBEDDINGS)
    fields = {"event_id": uuid4(), "occurred_at": now, **fields}
    # A string is a sequence of strings too.
    fields["principals"] = principals if isinstance(principals, str) else tuple(principals)
    try:
        if embedding is None:
            return QueryText.parse({**fields, "schema_version": QUERY_TEXT_VERSION, "text": text})
        # A NumPy array's items are not Python's numbers.
        components = embedding.tolist() if isinstance(embedding, np.ndarray) else list(embedding)
        query = {**fields, "schema_version": SCHEMA_VERSION, "embedding": components}
        return in_oldest_version(QueryEmbedding.parse(query, dimensions=dimensions))
    except TerminalError as error:
        raise InvalidEvent(error.code, str(error)) from None


def _fields(options: QueryOptions, excluded: frozenset[str]) -> dict[str, Any]:
    """The event's fields among the options. The model ignores unknown ones, so a misspelt one is found here."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _check_names("option", given, QueryOptions.__annotations__.keys())
    if misplaced := given.keys() & excluded:
        other = "text" if excluded is _OF_TEXTS else "embedding"
        raise TypeError(f"{', '.join(sorted(misplaced))}: only with {other}")
    filters = given.get("filters")
    if isinstance(filters, Mapping):
        _check_names("filter", filters, Filters.model_fields.keys())
        given["filters"] = dict(filters)
    if "conversation" in given:
        given["conversation"] = tuple(
            dict(message) if isinstance(message, Mapping) else message for message in given["conversation"]
        )
    return {name: value for name, value in given.items() if name not in _OF_THE_RECORD}


def _check_names(kind: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    if unknown := given.keys() - set(known):
        raise TypeError(f"unknown {kind}: {', '.join(sorted(unknown))}")
