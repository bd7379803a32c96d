"""Golden queries and results, made up."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from streams.core.messages import Passage, QueryEmbedding, RetrievalResult, result_id
from streams.evaluation.golden import Expectation, GoldenQuery

EMBEDDING = [1.0] + [0.0] * 767


def passage(rank: int = 1, **fields: Any) -> Passage:
    chunk_id = fields.pop("chunk_id", None) or uuid4()
    return Passage.parse(
        {
            "rank": rank,
            "chunk_id": chunk_id,
            "document_id": uuid4(),
            "matched_chunk_id": chunk_id,
            "scope": "global",
            "score": 0.5,
            "text_content": "Some text.",
            "token_count": 3,
            "metadata": {},
        }
        | fields
    )


def event(**fields: Any) -> QueryEmbedding:
    return QueryEmbedding.parse(
        {
            "schema_version": "1.0.0",
            "event_id": uuid4(),
            "occurred_at": "2026-01-01T00:00:00Z",
            "principals": ["user:1"],
            "embedding": EMBEDDING,
        }
        | fields
    )


def golden(key: str, expected: Sequence[Expectation], text: str | None = None) -> GoldenQuery:
    return GoldenQuery(key, text, event(), expected)


def result(
    passages: Sequence[Passage], *, query_time_ms: float = 5, warnings: Sequence[str] = ()
) -> RetrievalResult:
    event_id: UUID = uuid4()
    return RetrievalResult(
        schema_version="1.0.0",
        result_id=result_id(event_id),
        event_id=event_id,
        profile="extraction",
        query_embedding_dimensions=768,
        k_effective=15,
        k_returned=len(passages),
        score_type="cosine_similarity",
        tokens_used=sum(each.token_count for each in passages),
        query_time_ms=query_time_ms,
        warnings=tuple(warnings),
        results=tuple(passages),
    )
