"""Valid instances of the contracts, and mutations, as JSON values. Seeded, so that a failure repeats."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]

UUIDS = [
    "6F1C2F5E-8F0B-4D6A-9D43-0A7C1F2E3B4D",
    "00000000-0000-0000-0000-000000000000",
    "ffffffff-FFFF-ffff-ffff-ffffffffffff",
]
INSTANTS = [
    "2025-06-01T12:34:56Z",
    "2025-06-01t12:34:56.5z",
    "2025-06-01T12:34:56.123456789123+05:30",
    "2024-02-29T23:59:59.999999999-23:59",
    "0001-01-01T00:00:00Z",
    "0001-01-01T05:00:00-03:00",
    "0001-01-02T00:00:00+23:59",
    "0099-12-31T00:00:00-00:00",
    "9999-12-31T23:59:59.999999999Z",
    "9999-12-31T00:00:00+00:01",
    "9999-12-30T23:59:59-23:59",
    "1969-12-31T23:59:59.999999Z",
]
TEXTS = [
    "",
    "a",
    "§ 1.2",
    "line\nline\n",
    "\x7f\x01\t",
    "\U0001f600 zwj\u200d",
    "\ufeff",
    "\ufffe\uffff",
    "%_\\",
    "x" * 300,
    "é" * 3,
    "e\u0301",
    "\n",
    "\ud7ff\ue000",
]
HASH = "9F86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 10, 15, 64, 768, 769, 4000, 4001),
    *(
        10.0,
        1e3,
        768.0,
        1.0,
        0.0,
        -0.0,
        0.5,
        1.5,
        -0.5,
        1.0000000000000002,
        -1.0000000000000002,
        5e-324,
        1e-400,
    ),
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**53 + 1, 2**63, -(2**63) - 1, 10**60, -(10**60)),
    *(2147483647.0, 2147483648.0, 1e30, -1e30, 1e308, -1e308, float("inf"), -float("inf")),
    *(
        "10",
        "1",
        "0.1",
        "true",
        "null",
        "NaN",
        "local",
        "global",
        "Local",
        "cosine_similarity",
        "k_clamped",
        "K",
        "k_",
        "9a",
        "k\n",
    ),
    *(
        "1.0.0",
        "1.2.3",
        "1.10.200",
        "1.0",
        "1.0.0.0",
        "1.01.0",
        "1.0.0\n",
        " 1.0.0",
        "v1.0.0",
        "1.0.0-rc.1",
        "1.0.0+b",
        "1.x.y",
    ),
    *("2.0.0", "0.0.0", "10.0.0", "2.0.0-rc.1", "2.0", "02.0.0", "\u0661.0.0", "1.\u0660.0"),
    *UUIDS,
    *(
        "6f1c2f5e8f0b4d6a9d430a7c1f2e3b4d",
        "{6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d}",
        "urn:uuid:6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d",
    ),
    *(
        "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d\n",
        "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4g",
        "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4",
        "\uff16f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d",
    ),
    *INSTANTS,
    *(
        "2025-06-01",
        "2025-06-01T12:34:56",
        "2025-06-01 12:34:56Z",
        "2025-06-01T12:34Z",
        "2025-06-01T12:34:56.Z",
        "2025-06-01T12:34:56Z\n",
    ),
    *(
        "2025-02-29T00:00:00Z",
        "2025-04-31T00:00:00Z",
        "2025-13-01T00:00:00Z",
        "2025-00-01T00:00:00Z",
        "2025-01-00T00:00:00Z",
        "1900-02-29T00:00:00Z",
    ),
    *(
        "2025-06-01T24:00:00Z",
        "2025-06-01T23:60:00Z",
        "2016-12-31T23:59:60Z",
        "2025-06-01T12:34:56+24:00",
        "2025-06-01T12:34:56+00:60",
    ),
    *(
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+00:01",
        "0001-01-01T12:00:00+01:00",
        "9999-12-31T00:00:00-00:01",
        "9999-12-31T23:00:00-10:00",
    ),
    *(
        "2025-06-01T12:34:56+0530",
        "2025-06-01T12:34:56,5Z",
        "20250601T123456Z",
        "2025-06-01T12:34:56\u221205:00",
        "\u0662025-06-01T12:34:56Z",
        "12025-06-01T12:34:56Z",
    ),
    *("\0", "a\0b", "abc\0\n", "\ud800", "\udc00x", "a\udfff", "\udc00\ud800", "\U0010ffff", "\ud83d\ude00"),
    *("x" * 256, "x" * 257, "\U0001f600" * 256, "\U0001f600" * 257),
    *TEXTS,
    *(
        HASH,
        HASH.lower(),
        HASH[:-1],
        HASH + "0",
        HASH[:-1] + "\n",
        HASH + "\n",
        HASH[:-1] + "g",
        HASH[:-1] + "\uff10",
    ),
    *(
        [],
        [None],
        [1],
        ["a"],
        ["user:1", "public"],
        [""],
        ["a", 1],
        [[]],
        [{}],
        ["a"] * 64,
        ["a"] * 65,
        ["k_clamped", "x1"],
        ["x" * 257],
    ),
    *(
        {},
        {"a": "b"},
        {"a": 1},
        {"a": 1.5, "b": -0.0},
        {"a": None},
        {"a": True},
        {"": ""},
        {"a\0": "b"},
        {"\ud800": "b"},
        {"a": "\ud800"},
        {"a": "\0"},
    ),
    *(
        {"a": float("inf")},
        {"x0": 10**60},
        {"x0": "1"},
        {"a": {"b": "c"}},
        {"section": None, "metadata": None},
        {"unknown": [1, {"x": None}]},
        {"section": 1},
    ),
    *(
        {"a": ["b", "c"]},
        {"a": []},
        {"a": ["b"] * 64},
        {"a": ["b"] * 65},
        {"a": ["b", 1]},
        {"a": ["\0"]},
        {"a\0": ["b"]},
        {"a": {"gt": 1, "lt": None}},
        {"a": {"gt": None}},
        {"a": {"min": 1}},
        {"a": {"gt": "1"}},
        {"a": {"gt": True, "lt": 1}},
        {"a": {"gt": float("inf")}},
        {"a": {"gt": 10**100, "lt": -(10**308)}},
        {"a": {"gt": 10**309}},
        {"a": {"gt": 10**400}},
        {"a": {"after": "2025-06-01T12:34:56Z", "unknown": 1}},
        {"a": {"after": "2025-06-01"}},
        {"a": {"after": 1}},
        {"a\0": {"gt": 1}},
    ),
    *(["text_truncated"] * 16, ["text_truncated"] * 17, ["x" * 64], ["x" * 65]),
]


def _maybe(rng: random.Random, instance: Json, name: str, make: Callable[[], Any]) -> None:
    """A field that may be null: absent, null, or a value."""
    turn = rng.random()
    if turn < 0.2:
        instance[name] = None
    elif turn < 0.8:
        instance[name] = make()


def _map(rng: random.Random, values: Callable[[], Any]) -> Json:
    return {rng.choice(TEXTS): values() for _ in range(rng.randrange(4))}


def _ranges(rng: random.Random) -> Json:
    made: Json = {}
    for key in rng.sample(TEXTS, rng.randrange(4)):
        bounds: Json = {}
        for name in ("gte", "gt", "lte", "lt"):
            _maybe(rng, bounds, name, lambda: rng.choice([0, -1, 1.5, 2**53 + 1, -1e308, 1e-320]))
        for name in ("at_or_after", "after", "at_or_before", "before"):
            _maybe(rng, bounds, name, lambda: rng.choice(INSTANTS))
        if any(bound is not None for bound in bounds.values()):
            made[key] = bounds
    return made


def components(rng: random.Random) -> list[Any]:
    """768 numbers of some length: also integers, zeros, and lengths that float32 knows only as zero."""
    scale = 10.0 ** rng.choice([0, 0, 0, -3, 5, -25, 20, 37, -40, -44, -60, -300])
    values: list[Any] = [rng.uniform(-1, 1) * scale for _ in range(768)]
    turn = rng.random()
    if turn < 0.2:
        values = [0.0] * 768
        values[rng.randrange(768)] = rng.choice([1, -1, 5e-324, 1e-46, 3.4028234663852886e38, -(2**127)])
    elif turn < 0.3:
        values = [rng.randrange(-5, 5) for _ in range(767)] + [1]
    elif turn < 0.4:
        values[:300] = [0, -0.0, 0.0] * 100
    return values


def _filters(rng: random.Random, *, newer: bool) -> Json:
    def text() -> str:
        return rng.choice(TEXTS)

    given: Json = {}
    for name in ("section", "source_url_prefix", "document_type"):
        _maybe(rng, given, name, text)
    _maybe(rng, given, "metadata", lambda: _map(rng, text))
    if newer:
        for name in ("metadata_contains", "metadata_any"):
            _maybe(rng, given, name, lambda: _map(rng, lambda: [text()] * rng.choice([1, 2, 64])))
        _maybe(rng, given, "metadata_range", lambda: _ranges(rng))
    return given


def query_event(rng: random.Random, embedding: list[Any] | None = None, *, newer: bool = True) -> Json:
    """A valid event; with or without the fields that 1.0.0 does not have."""

    def uuid() -> str:
        return rng.choice([rng.choice(UUIDS), f"{rng.getrandbits(128):032x}"[:32]])

    def dashed() -> str:
        text = uuid()
        return text if "-" in text else "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def text() -> str:
        return rng.choice(TEXTS)

    event: Json = {
        "schema_version": rng.choice(["1.0.0", "1.0.1", "1.7.0", "1.12.345"]),
        "event_id": dashed(),
        "occurred_at": rng.choice(INSTANTS),
        "principals": [(text() + "p")[:256] for _ in range(rng.choice([1, 2, 64]))],
        "embedding": components(rng) if embedding is None else embedding,
    }
    _maybe(rng, event, "session_id", dashed)
    if event.get("session_id"):
        _maybe(rng, event, "topic_id", dashed)
    _maybe(rng, event, "profile", text)
    _maybe(rng, event, "k", lambda: rng.choice([0, -3, 10, 10.0, 1e3, 2**31, 2**70, -(2**40), -1e300]))
    _maybe(
        rng, event, "similarity_threshold", lambda: rng.choice([0, 1, 0.5, 1.0, -0.0, 5e-324, rng.random()])
    )
    _maybe(rng, event, "token_budget", lambda: rng.choice([1, 1.0, 3500, 2**31 - 1, 2**31, 2**63, 1e18]))
    _maybe(rng, event, "filters", lambda: _filters(rng, newer=newer))
    _maybe(rng, event, "embedding_model", text)
    _maybe(rng, event, "query_hash", lambda: HASH)
    _maybe(rng, event, "expires_at", lambda: rng.choice(INSTANTS))
    if newer and rng.random() < 0.7:
        _maybe(rng, event, "explain", lambda: rng.choice([True, False]))
        _maybe(rng, event, "upstream_warnings", lambda: ["text_truncated", "x" * 64][: rng.randrange(3)])
    if rng.random() < 0.3:
        event["unknown"] = rng.choice(VALUES)
    return event


def query_text(rng: random.Random) -> Json:
    """A valid question in words."""
    event = query_event(rng, [])
    for name in ("embedding", "embedding_model", "query_hash", "upstream_warnings"):
        event.pop(name, None)

    def text() -> str:
        return rng.choice(TEXTS)

    event["text"] = text() + rng.choice(["?", "x" * 2000, "\U0001f600"])
    _maybe(rng, event, "topic_title", text)
    _maybe(rng, event, "conversation_summary", text)
    _maybe(
        rng,
        event,
        "conversation",
        lambda: [
            {"role": (text() + "r")[:64], "text": text()} | rng.choice([{}, {"unknown": 1}])
            for _ in range(rng.choice([0, 1, 3, 64]))
        ],
    )
    return event


def explanation(rng: random.Random) -> Json:
    counts = (
        *("candidates", "below_threshold", "duplicates", "same_parent"),
        *("over_budget", "missing", "not_needed", "returned"),
    )
    arms = [
        {"scope": scope} | {name: rng.choice([0, 7, 7.0, 2**31 - 1]) for name in counts}
        for scope in ("local", "global")
    ]
    return {"arms": arms[rng.randrange(3) :] or arms}


def retrieval_result(rng: random.Random, *, newer: bool = True) -> Json:
    """A valid result; with or without what 1.0.0 does not have."""

    def text() -> str:
        return rng.choice(TEXTS)

    def int32() -> Any:
        return rng.choice([0, 1, 7, 7.0, -1, 2**31 - 1, -(2**31)])

    def passage(rank: int) -> Json:
        made: Json = {
            "rank": rank,
            **{name: rng.choice(UUIDS) for name in ("chunk_id", "document_id", "matched_chunk_id")},
            "scope": rng.choice(["local", "global"]),
            "score": rng.choice([1, -1, 0, -0.0, rng.uniform(-1, 1)]),
            "text_content": text(),
            "token_count": rng.choice([0, 12, 12.0]),
            "metadata": _map(rng, text),
        }
        for name in ("header", "section", "title", "source_url"):
            _maybe(rng, made, name, text)
        for name in ("page", "chunk_position"):
            _maybe(rng, made, name, int32)
        _maybe(
            rng,
            made,
            "coordinates",
            lambda: _map(rng, lambda: rng.choice([0, 1.5, -1e308, 2**53 + 1, 1e-320])),
        )
        return made

    count = rng.choice([0, 1, 3])
    result: Json = {
        "schema_version": rng.choice(["1.0.0", "1.3.0"]),
        "result_id": rng.choice(UUIDS),
        "event_id": rng.choice(UUIDS),
        "profile": text(),
        "query_embedding_dimensions": rng.choice([768, 768.0, *([1, 384.0, 4000] if newer else [])]),
        "k_effective": 9,
        "k_returned": count,
        "score_type": "cosine_similarity",
        "tokens_used": rng.choice([0, 3499, 1e3]),
        "query_time_ms": rng.choice([0, 12, 3.25, 1e9]),
        "warnings": rng.choice([[], ["k_clamped"], ["scan_truncated", "parent_missing"]]),
        "results": [passage(rank + 1) for rank in range(count)],
    }
    _maybe(rng, result, "query_hash", lambda: HASH)
    _maybe(rng, result, "embedding_model", text)
    for name in ("session_id", "topic_id"):
        _maybe(rng, result, name, lambda: rng.choice(UUIDS))
    _maybe(rng, result, "k_requested", int32)
    _maybe(rng, result, "similarity_threshold", lambda: rng.choice([0, 1, 0.75]))
    _maybe(rng, result, "token_budget", lambda: rng.choice([1, 3500.0]))
    if newer:
        _maybe(rng, result, "explanation", lambda: explanation(rng))
    return result


def to_json(instance: Any) -> bytes:
    """As text; infinity is written as a number that float64 cannot hold."""
    return json.dumps(instance).replace("Infinity", "1e400").encode()


def places(instance: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in an instance, but of an embedding's components."""
    for key, value in instance.items() if isinstance(instance, dict) else enumerate(instance):
        yield (*at, key)
        if isinstance(value, (dict, list)) and key != "embedding":
            yield from places(value, (*at, key))


def put(instance: Json, at: tuple[Any, ...], value: Any) -> Json:
    """A copy with one value changed, or taken away if it is ``...``; an embedding is shared, not copied."""
    shared = {id(instance["embedding"]): instance["embedding"]} if "embedding" in instance else {}
    changed = copy.deepcopy(instance, dict(shared))
    target: Any = changed
    for step in at[:-1]:
        target = target[step]
    if value is ...:
        del target[at[-1]]
    else:
        target[at[-1]] = value
    return changed


def broken_components(rng: random.Random) -> list[Any]:
    """Embeddings that are valid or not, mostly by one component or by their number."""
    values: list[Any] = [
        rng.uniform(-1, 1) for _ in range(rng.choice([768, 768, 768, 768, 767, 769, 0, 1, 1536]))
    ]
    if values and rng.random() < 0.8:
        values[rng.randrange(len(values))] = rng.choice(
            [
                None,
                True,
                "0.1",
                [],
                {},
                0,
                1,
                10**38,
                10**39,
                -(10**60),
                3.4028234663852886e38,
                3.4028234663852890e38,
                340282346638528859811704183484516925440,
                340282346638528859811704183484516925441,
                float("inf"),
                -float("inf"),
                1e-320,
            ]
        )
    elif rng.random() < 0.5:
        values = [rng.choice([0, 0.0, -0.0]) for _ in values]
    return values
