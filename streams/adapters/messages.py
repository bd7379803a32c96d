"""What a question and a passage are in other libraries."""

from collections.abc import Sequence
from typing import Any, Final

from streams.client import Passage, RetrievalResult
from streams.core.messages import query_hash

__all__ = ["metadata_of", "question"]

_OF_THE_RESULT: Final = {"event_id", "result_id", "profile", "score_type", "warnings"}


def question(text: str, embedding: Sequence[float] | None) -> dict[str, Any]:
    """Arguments of `Client.retrieve`: the text, or if it was embedded, its embedding and its hash."""
    if embedding is None:
        return {"text": text}
    return {"embedding": embedding, "query_hash": query_hash(text)}


def metadata_of(passage: Passage, result: RetrievalResult) -> dict[str, Any]:
    """All fields of a passage but its text, and those of its result that say where it comes from; as JSON's types.

    The store's metadata stays in a field of its own, ``metadata``, because its keys are the back end's.
    """
    return {
        **passage.model_dump(mode="json", exclude={"text_content"}),
        **result.model_dump(mode="json", include=_OF_THE_RESULT),
    }
