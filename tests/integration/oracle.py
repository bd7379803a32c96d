"""What the specification says a result must be, in the simplest way that could be right.

Nothing of the worker takes part but its tokenizer: everything is filtered, sorted and counted in plain Python
over the whole corpus. Distances are handed in, since the last bit of a float32 decides ties.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from operator import ge, gt, le, lt
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import numpy as np

from tests.integration.corpora import Chunk, Corpus, Document

__all__ = [
    "PROFILES",
    "ProfileRow",
    "expected_result",
    "merged_metadata",
    "metadata_rows",
    "numpy_distances",
    "parent_state",
]


@dataclass(frozen=True)
class ProfileRow:
    """A row of the specification's table of profiles."""

    k: int
    least: int
    most: int
    order: str = "similarity"
    parents: bool = False
    threshold: float | None = None
    budget: int | None = None
    overflow: str = "stop"


PROFILES = {
    "extraction": ProfileRow(15, 10, 15),
    "chat": ProfileRow(9, 1, 9, order="interleaved", parents=True, budget=3500),
    "docs": ProfileRow(5, 1, 20, threshold=0.5),
    "drafting": ProfileRow(5, 1, 20, threshold=0.75),
    # None that is shipped: an operator's.
    "packing": ProfileRow(6, 1, 30, order="interleaved", parents=True, budget=120, overflow="skip"),
}


def numpy_distances(corpus: Corpus, embedding: Any) -> dict[UUID, float]:
    """Cosine distances in float64; a zero vector has none."""
    asked = np.asarray(embedding, dtype=np.float64)
    asked = asked / np.linalg.norm(asked)
    distances = {}
    for chunk in corpus.chunks.values():
        if chunk.embedding is not None and (length := np.linalg.norm(chunk.embedding.astype(np.float64))) > 0:
            distances[chunk.id] = float(1 - chunk.embedding.astype(np.float64) @ asked / length)
    return distances


def expected_result(  # noqa: C901, PLR0915  # one rule after the other, as the specification tells them
    corpus: Corpus,
    event: Mapping[str, Any],
    distances: Mapping[UUID, float],
    count_tokens: Callable[[str], int],
) -> dict[str, Any]:
    """The result of an event (its JSON dictionary), without ``query_time_ms``."""
    name = event.get("profile") or "extraction"
    profile = PROFILES[name]
    k = profile.k if event.get("k") is None else min(max(event["k"], profile.least), profile.most)
    threshold = (
        profile.threshold if event.get("similarity_threshold") is None else event["similarity_threshold"]
    )
    budget = profile.budget if event.get("token_budget") is None else event["token_budget"]
    readers = {*event["principals"], "public"}
    session, topic = _uuid(event.get("session_id")), _uuid(event.get("topic_id"))

    def readable(chunk: Chunk | None) -> bool:
        return chunk is not None and bool(corpus.documents[chunk.document_id].readers & readers)

    def arm(*, local: bool) -> list[Chunk]:
        found = [
            chunk
            for chunk in corpus.chunks.values()
            if chunk.embedding is not None
            and chunk.embedding.any()
            and readable(chunk)
            and (session is None or chunk.session_id == session)
            and (not local or topic in chunk.related_topic_ids)
            and _matches(chunk, corpus.documents[chunk.document_id], event.get("filters") or {})
            and (threshold is None or 1 - distances[chunk.id] >= threshold)
        ]
        return sorted(found, key=lambda chunk: (distances[chunk.id], chunk.id))

    def parent_of(chunk: Chunk) -> Chunk | None:
        is_valid = profile.parents and parent_state(corpus, event, chunk) == "valid"
        return corpus.chunks[chunk.parent_chunk_id] if is_valid and chunk.parent_chunk_id else None

    def passage(chunk: Chunk, scope: str) -> tuple[dict[str, Any], bool]:
        parent = parent_of(chunk)
        shown = chunk if parent is None else parent
        document = corpus.documents[shown.document_id]
        has_header = document.file_description is not None and parent is None
        header = f"[Source: {document.file_description}]" if has_header else None
        coordinates, bad_coordinates = _coordinates(shown.coordinates)
        metadata, bad_metadata = merged_metadata(document.metadata, shown.metadata)
        bad_tokens = shown.token_count is not None and shown.token_count < 0
        counted = shown.token_count is not None and not bad_tokens
        tokens = shown.token_count if counted else count_tokens(shown.text_content)
        assert tokens is not None
        return {
            "chunk_id": str(shown.id),
            "document_id": str(shown.document_id),
            "matched_chunk_id": str(chunk.id),
            "scope": scope,
            "score": 1 - distances[chunk.id],
            "text_content": shown.text_content,
            "header": header,
            "token_count": tokens + (0 if header is None else count_tokens(header + "\n")),
            "page": shown.page,
            "section": shown.section,
            "coordinates": coordinates,
            "title": document.title,
            "source_url": document.source_url,
            "chunk_position": shown.chunk_position,
            "metadata": metadata,
        }, bad_coordinates or bad_metadata or bad_tokens

    # Selection: one queue an arm; a turn lasts until it has taken something.
    queues = {"global": arm(local=False)}
    if topic is not None:
        queues = {"local": arm(local=True), **queues}
    turns = ["local", "local", "global"] if topic is not None else ["global"]
    taken: list[tuple[dict[str, Any], bool, bool]] = []
    warnings = set()
    turn = 0
    while len(taken) < k and any(queues.values()):
        scope = turns[turn % len(turns)]
        if not queues[scope]:
            turn += 1
            continue
        chunk = queues[scope].pop(0)
        candidate, malformed = passage(chunk, scope)
        if any(candidate["chunk_id"] == other["chunk_id"] for other, _, _ in taken):
            continue
        used = sum(other["token_count"] for other, _, _ in taken)
        if budget is not None and used + candidate["token_count"] > budget:
            if profile.overflow == "skip":
                continue
            if not taken:
                warnings.add("first_passage_exceeds_budget")
            break
        orphan = (
            profile.parents
            and chunk.chunk_type == "problem"
            and chunk.parent_chunk_id is not None
            and parent_of(chunk) is None
        )
        taken.append((candidate, malformed, orphan))
        turn += 1

    if event.get("k") is not None and event["k"] != k:
        warnings.add("k_clamped")
    if any(malformed for _, malformed, _ in taken):
        warnings.add("store_value_invalid")
    if any(orphan for _, _, orphan in taken):
        warnings.add("parent_missing")
    passages = [candidate for candidate, _, _ in taken]
    if profile.order == "similarity":
        passages.sort(key=lambda one: (-one["score"], UUID(one["chunk_id"])))
    return {
        "schema_version": "1.0.0",
        "result_id": str(uuid5(NAMESPACE_URL, f"urn:anabranch:result:{event['event_id'].lower()}")),
        "event_id": event["event_id"].lower(),
        "query_hash": event.get("query_hash"),
        "embedding_model": event.get("embedding_model"),
        "profile": name,
        "session_id": None if session is None else str(session),
        "topic_id": None if topic is None else str(topic),
        "query_embedding_dimensions": 768,
        "k_requested": event.get("k"),
        "k_effective": k,
        "k_returned": len(passages),
        "score_type": "cosine_similarity",
        "similarity_threshold": threshold,
        "token_budget": budget,
        "tokens_used": sum(one["token_count"] for one in passages),
        "warnings": warnings,
        "results": [{"rank": rank, **one} for rank, one in enumerate(passages, start=1)],
    }


def parent_state(corpus: Corpus, event: Mapping[str, Any], chunk: Chunk) -> str:
    """Whether a chunk's parent may take its place in a profile that expands: ``valid``, or why not."""
    if chunk.chunk_type != "problem" or chunk.parent_chunk_id is None:
        return "none"
    parent = corpus.chunks.get(chunk.parent_chunk_id)
    if parent is None:
        return "missing"
    document = corpus.documents[parent.document_id]
    if not document.readers & {*event["principals"], "public"}:
        return "unreadable"
    if _uuid(event.get("session_id")) not in (None, parent.session_id):
        return "in another session"
    return "valid" if _matches(parent, document, event.get("filters") or {}) else "filtered out"


def _uuid(value: Any) -> UUID | None:
    return None if value is None else UUID(str(value))


def _text(value: Any) -> str:
    """A metadata value as results carry it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def merged_metadata(*layers: Any) -> tuple[dict[str, str], bool]:
    """A document's metadata overlaid by a chunk's, as results carry it; and whether one of them is malformed."""
    merged: dict[str, str] = {}
    malformed = False
    for layer in layers:
        if isinstance(layer, dict):
            merged |= {key: _text(value) for key, value in layer.items()}
        elif layer is not None:
            malformed = True
    return merged, malformed


def _coordinates(value: Any) -> tuple[dict[str, float] | None, bool]:
    if value is None:
        return None, False
    if not isinstance(value, dict):
        return None, True
    for number in value.values():
        if type(number) not in (int, float) or abs(number) > 1.7e308 or not math.isfinite(number):
            return None, True
    return {key: float(number) for key, number in value.items()}, False


_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_DATE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?([Zz]|[-+][0-9]{2}:?[0-9]{2})?)?"
)
_ORDER: Mapping[str, Callable[[Any, Any], bool]] = {
    "gte": ge, "gt": gt, "lte": le, "lt": lt,
    "at_or_after": ge, "after": gt, "at_or_before": le, "before": lt,
}  # fmt: skip


def metadata_number(text: str) -> float | None:
    """A metadata value as a number, or None: written as in JSON, and within the range of float64."""
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    vanished = number == 0 and re.search("[1-9]", re.split("[eE]", text)[0])
    return None if vanished or not math.isfinite(number) else number


def metadata_instant(text: str) -> datetime | None:
    """A metadata value as an instant, or None: ISO 8601, in UTC if it has no time zone."""
    if not _DATE.fullmatch(text):
        return None
    try:
        instant = datetime.fromisoformat(text.upper())
    except ValueError:
        return None
    return instant if instant.tzinfo else instant.replace(tzinfo=UTC)


def _is_within(text: str | None, bounds: Mapping[str, Any]) -> bool:
    if text is None:
        return False
    for name, bound in bounds.items():
        if bound is None:
            continue
        value: Any = metadata_instant(text) if isinstance(bound, str) else metadata_number(text)
        limit: Any = datetime.fromisoformat(bound) if isinstance(bound, str) else float(bound)
        if value is None or not _ORDER[name](value, limit):
            return False
    return True


def metadata_rows(*layers: Any) -> set[tuple[UUID, float | None, datetime | None]]:
    """The rows of chunk_metadata for a document's metadata overlaid by a chunk's: entry, number, instant."""
    rows: set[tuple[UUID, float | None, datetime | None]] = set()
    for key, value in _overlaid(*layers).items():
        rows.add((_entry(f"{key}\0{_text(value)}"), None, None))
        elements = value if isinstance(value, list) else []
        rows |= {(_entry(f"{key}\0\0{_text(element)}"), None, None) for element in elements}
        number, instant = metadata_number(_text(value)), metadata_instant(_text(value))
        if number is not None or instant is not None:
            rows.add((_entry(f"{key}\0\0\0"), number, instant))
    return rows


def _entry(text: str) -> UUID:
    return UUID(bytes=sha256(text.encode()).digest()[:16])


def _overlaid(*layers: Any) -> dict[str, Any]:
    return {key: value for layer in layers if isinstance(layer, dict) for key, value in layer.items()}


def _matches(chunk: Chunk, document: Document, filters: Mapping[str, Any]) -> bool:
    section, kind, prefix = (filters.get(name) for name in ("section", "document_type", "source_url_prefix"))
    raw = _overlaid(document.metadata, chunk.metadata)
    merged, _ = merged_metadata(document.metadata, chunk.metadata)
    equal, contains, one_of, ranges = (
        filters.get(name) or {}
        for name in ("metadata", "metadata_contains", "metadata_any", "metadata_range")
    )
    return (
        (section is None or chunk.section == section)
        and (kind is None or document.document_type == kind)
        and (prefix is None or (document.source_url is not None and document.source_url.startswith(prefix)))
        and all(merged.get(key) == value for key, value in equal.items())
        and all(
            isinstance(raw.get(key), list) and {*elements} <= {_text(element) for element in raw[key]}
            for key, elements in contains.items()
        )
        and all(merged.get(key) in values for key, values in one_of.items())
        and all(_is_within(merged.get(key), bounds) for key, bounds in ranges.items())
    )
