"""The rules of selection, each on a corpus that is made for it, on real rows and by both paths of the search.

What is expected is computed here by a rule of a line or two, from scores that the server gives. Random mixtures of
everything are in test_against_oracle.py.
"""

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import nextafter
from time import perf_counter
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from streams.core.messages import QueryEmbedding
from streams.core.profiles import Profile, resolve_params
from streams.retrieval import ArmResult, Search, StoredPassage, StoredSize, retrieve
from streams.store.postgres import PostgresStore
from streams.tokens import count_tokens
from streams.wire import Codec, result_to_json
from tests.conftest import Database
from tests.integration.connections import connected
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors
from tests.integration.harness import query

SESSION, TOPIC = UUID(int=0xA), UUID(int=0xB)
DOCUMENT = Document(UUID(int=0xD), frozenset({"user:1"}), session_id=SESSION)
DESCRIBED = Document(UUID(int=0xE), frozenset({"user:1"}), session_id=SESSION, file_description="Rivers")
SECRET = Document(UUID(int=0xF), frozenset({"user:2"}), session_id=SESSION)

PROFILES = {
    "plain": Profile(k_default=10, k_min=1, k_max=1000),
    "expand": Profile(k_default=10, k_min=1, k_max=1000, order="interleaved", expand_parents=True),
    "stop": Profile(k_default=100, k_min=1, k_max=1000, order="interleaved", token_budget=1),
    "skip": Profile(k_default=100, k_min=1, k_max=1000, order="interleaved", token_budget=1, overflow="skip"),
}

BY_THE_INDEX = """
    ALTER DATABASE {name} SET enable_seqscan = off;
    ALTER DATABASE {name} SET enable_bitmapscan = off;
    ALTER DATABASE {name} SET enable_sort = off;
"""

QUERY = unit_vectors(1, 5)[0]
_noise = unit_vectors(400, 6)
ASIDE = _noise - np.outer(_noise @ QUERY, QUERY)  # at right angles to the query


def near(number: int) -> np.ndarray:
    """The farther from the query the greater the number; never the same distance twice."""
    vector: np.ndarray = QUERY + ASIDE[number] * np.float32(0.02 * (number + 1))
    return vector


def chunk(number: int, vector: np.ndarray | None, **fields: Any) -> Chunk:
    values: dict[str, Any] = {
        "document_id": DOCUMENT.id,
        "text_content": f"text {number}",
        "session_id": SESSION,
    } | fields
    return Chunk(UUID(int=0x1000 + number), embedding=vector, **values)


@dataclass(frozen=True)
class Asked:
    """A store that holds a corpus, searched by one of the two paths."""

    store: Any

    async def __call__(self, profile: str = "plain", **fields: Any) -> dict[str, Any]:
        embedding = fields.pop("embedding", QUERY)
        return await self.decoded(
            QueryEmbedding.parse(query(embedding, profile=profile, session_id=SESSION, **fields))
        )

    async def decoded(self, event: QueryEmbedding) -> dict[str, Any]:
        rules = resolve_params(event, PROFILES, "plain")
        retrieved = await retrieve(event, rules, self.store, count_tokens, started=perf_counter())
        found = result_to_json(retrieved.result)
        # Of every answer, whatever was asked.
        assert [passage["rank"] for passage in found["results"]] == list(range(1, found["k_returned"] + 1))
        assert len({passage["chunk_id"] for passage in found["results"]}) == found["k_returned"]
        assert found["tokens_used"] == sum(passage["token_count"] for passage in found["results"])
        return found


Holding = Callable[..., Awaitable[Asked]]


@pytest.fixture(params=["exactly", "by the index"])
async def holding(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Holding]:
    """Loads chunks, and returns what asks about them."""
    stores: list[PostgresStore] = []

    async def hold(*chunks: Chunk) -> Asked:
        await load(database.writer, Corpus.of([DOCUMENT, DESCRIBED, SECRET, *FILTERED], chunks))
        async with connected(database.admin) as admin:
            for statement in BY_THE_INDEX.format(name=database.name).strip().splitlines():
                await admin.execute(statement)
            await admin.execute("ANALYZE")
        store = PostgresStore(
            database.worker,
            connections=2,
            search_timeout_seconds=10,
            exact_scan_rows=20_000,
            small_scope_rows=1000 if request.param == "exactly" else 0,
        )
        stores.append(store)
        await store.open()
        return Asked(store)

    yield hold
    for store in stores:
        await store.close(timeout_seconds=3)


def numbers(found: Mapping[str, Any], name: str = "chunk_id") -> list[int]:
    return [UUID(passage[name]).int - 0x1000 for passage in found["results"]]


def scores(found: Mapping[str, Any]) -> list[float]:
    return [passage["score"] for passage in found["results"]]


# The threshold


async def test_the_threshold_is_strict_and_equality_is_enough(holding: Holding) -> None:
    """At each score that there is, at the next number above it, and at the next one below."""
    ask = await holding(*(chunk(number, near(number)) for number in range(30)))
    everything = scores(await ask(k=30))
    assert len(set(everything)) == 30
    for score in everything:
        for threshold in (score, nextafter(score, 2), nextafter(score, -2)):
            if not 0 <= threshold <= 1:
                continue
            found = await ask(k=30, similarity_threshold=threshold)
            assert scores(found) == [one for one in everything if one >= threshold]
            assert found["warnings"] == []


async def test_nothing_below_the_threshold_fills_up_k(holding: Holding) -> None:
    ask = await holding(*(chunk(number, near(number) * np.float32(-1)) for number in range(20)))
    assert (await ask(k=10, similarity_threshold=0))["results"] == []
    assert (await ask(k=10))["k_returned"] == 10


# The order


async def test_ties_are_in_the_order_of_their_ids(holding: Holding) -> None:
    """Ninety chunks of three vectors, inserted in any order: wherever k cuts, it cuts by id."""
    rng = random.Random(1)
    order = rng.sample(range(90), 90)
    ask = await holding(*(chunk(number, near(number % 3)) for number in order))
    wanted = sorted(range(90), key=lambda number: (number % 3, number))
    for k in (1, 2, 29, 30, 31, 60, 61, 89, 90, 100):
        assert numbers(await ask(k=k)) == wanted[:k]


# Powers of two, which float32 keeps to the last bit: of other lengths the canonical form has other last bits.
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
async def test_the_length_of_a_query_changes_nothing(holding: Holding, scale: float) -> None:
    ask = await holding(*(chunk(number, near(number % 40), token_count=3) for number in range(80)))
    for seed in range(8):
        embedding = (QUERY + unit_vectors(1, seed)[0]).astype(np.float64)
        fields: dict[str, Any] = {
            "k": 20,
            "similarity_threshold": 0.4,
            "filters": {"source_url_prefix": ""} if seed == 7 else None,
        }
        plain = await ask(embedding=embedding, **fields)
        scaled = await ask(embedding=embedding * scale, **fields)
        assert scaled["results"] == plain["results"]
        assert plain["k_returned"] == (0 if seed == 7 else 20)


async def test_a_stored_zero_vector_is_never_returned(holding: Holding) -> None:
    zero = np.zeros(768, dtype=np.float32)
    ask = await holding(
        *(chunk(number, zero) for number in range(30)),
        *(chunk(number, near(number)) for number in range(30, 35)),
    )
    found = await ask(k=10)
    assert (numbers(found), found["warnings"]) == ([30, 31, 32, 33, 34], [])
    assert (await ask(k=10, filters={"section": "none"}))["results"] == []


# Parents


@pytest.mark.parametrize("children", [50, 200])
@pytest.mark.parametrize("topic", [None, TOPIC])
async def test_a_parent_comes_once_however_many_children_are_on_top(
    holding: Holding, children: int, topic: UUID | None
) -> None:
    family = [
        chunk(
            number,
            near(0),
            parent_chunk_id=UUID(int=0x1000 + 999),
            chunk_type="problem",
            related_topic_ids=[TOPIC],
        )
        for number in range(children)
    ]
    others = [chunk(number, near(number - 200)) for number in range(300, 320)]
    ask = await holding(*family, *others, chunk(999, None, text_content="The whole problem."))
    found = await ask("expand", k=9, topic_id=topic)
    assert numbers(found) == [999, *range(300, 308)]
    assert numbers(found, "matched_chunk_id") == [0, *range(300, 308)]
    assert (found["results"][0]["text_content"], found["warnings"]) == ("The whole problem.", [])
    # Without expansion they are chunks like others.
    assert numbers(await ask("plain", k=9, topic_id=topic)) == list(range(9))


async def test_a_parent_that_is_not_there_for_the_caller_leaves_its_child(holding: Holding) -> None:
    ask = await holding(
        chunk(0, near(0), chunk_type="problem", parent_chunk_id=UUID(int=1)),  # nowhere
        chunk(1, near(1), chunk_type="problem", parent_chunk_id=UUID(int=0x1000 + 11)),  # another one's
        chunk(2, near(2), chunk_type="problem", parent_chunk_id=UUID(int=0x1000 + 2)),  # itself
        chunk(3, near(3), chunk_type="theory", parent_chunk_id=UUID(int=1)),  # no problem
        chunk(
            4, near(4), chunk_type="problem", parent_chunk_id=UUID(int=0x1000 + 12)
        ),  # outside of the session
        chunk(11, None, document_id=SECRET.id),
        chunk(12, None, session_id=None),
    )
    found = await ask("expand")
    assert numbers(found) == [0, 1, 2, 3, 4]
    assert found["warnings"] == ["parent_missing"]
    assert (await ask("plain"))["warnings"] == []
    assert (await ask("expand", filters={"section": "none"}))["warnings"] == []
    # Told only of what is in the result.
    found = await ask("expand", k=1, similarity_threshold=0)
    assert (numbers(found), found["warnings"]) == ([0], ["parent_missing"])


# The child is in MEMO and meets every filter; each parent fails one condition, or none.
MEMO = Document(
    UUID(int=0x10),
    frozenset({"user:1"}),
    session_id=SESSION,
    source_url="https://example.org/100%/a",
    document_type="memo",
    metadata={"year": 2020, "draft": True, "tags": ["a"], "day": "2024-05-01"},
)
STATUTE = replace(MEMO, id=UUID(int=0x11), document_type="statute")
ELSEWHERE = replace(MEMO, id=UUID(int=0x12), source_url="https://example.org/100x/a")
UNDATED = replace(MEMO, id=UUID(int=0x13), metadata=None)
FILTERED = (MEMO, STATUTE, ELSEWHERE, UNDATED)
# More conditions than are written out in a statement.
ALL_ON_METADATA = {
    "metadata": {"year": "2020"},
    "metadata_contains": {"tags": ["a"]},
    "metadata_any": {"draft": ["true", "maybe"]},
    "metadata_range": {"year": {"gt": 2019}, "day": {"before": "2024-06-01T00:00:00Z"}},
}
YEAR, MORE = {"year": "2020"}, {"year": "2020", "draft": "true", "tags": '["a"]'}


@pytest.mark.parametrize(
    ("parent", "filters", "is_valid"),
    [
        ({}, None, True),
        ({}, {"section": "1", "document_type": "memo", "metadata": MORE}, True),
        ({"session_id": UUID(int=1)}, None, False),
        ({"session_id": None}, None, False),
        ({"section": "2"}, None, True),
        ({"section": "2"}, {"section": "1"}, False),
        ({"section": None}, {"section": "1"}, False),
        ({"document_id": STATUTE.id}, None, True),
        ({"document_id": STATUTE.id}, {"document_type": "memo"}, False),
        ({"document_id": STATUTE.id}, {"section": "1"}, True),
        ({"document_id": ELSEWHERE.id}, {"source_url_prefix": "https://example.org/"}, True),
        (
            {"document_id": ELSEWHERE.id},
            {"source_url_prefix": "https://example.org/100%"},
            False,
        ),
        ({"document_id": UNDATED.id}, {"metadata": YEAR}, False),
        ({"document_id": UNDATED.id, "metadata": {"year": "2020"}}, {"metadata": YEAR}, True),
        ({"metadata": {"year": 2021}}, {"metadata": YEAR}, False),
        ({"metadata": {"tags": ["b"]}}, {"metadata": MORE}, False),
        ({"metadata": {"tags": ["b"]}}, {"metadata": YEAR}, True),
        ({}, {"metadata_contains": {"tags": ["a"]}}, True),
        ({"metadata": {"tags": ["b"]}}, {"metadata_contains": {"tags": ["a"]}}, False),
        ({"metadata": {"tags": "a"}}, {"metadata_contains": {"tags": ["a"]}}, False),
        ({"document_id": UNDATED.id}, {"metadata_contains": {"tags": ["a"]}}, False),
        ({"metadata": {"year": 2021}}, {"metadata_any": {"year": ["2020", "2021"]}}, True),
        ({"metadata": {"year": 2022}}, {"metadata_any": {"year": ["2020", "2021"]}}, False),
        ({"metadata": {"year": "2021.5"}}, {"metadata_range": {"year": {"gte": 2020, "lt": 2022}}}, True),
        ({"metadata": {"year": 2022}}, {"metadata_range": {"year": {"gte": 2020, "lt": 2022}}}, False),
        ({"metadata": {"year": "MMXX"}}, {"metadata_range": {"year": {"gte": 2020, "lt": 2022}}}, False),
        ({}, {**ALL_ON_METADATA}, True),
        ({"metadata": {"tags": ["b"]}}, {**ALL_ON_METADATA}, False),
        ({"metadata": {"draft": False}}, {**ALL_ON_METADATA}, False),
        ({"metadata": {"day": "2024-06-01"}}, {**ALL_ON_METADATA}, False),
    ],
)
@pytest.mark.parametrize("topic", [None, TOPIC])
async def test_a_parent_meets_the_scope_and_the_filters_but_not_the_topic(
    holding: Holding,
    parent: Mapping[str, Any],
    filters: Mapping[str, Any] | None,
    is_valid: bool,  # noqa: FBT001  # a parameter of the test
    topic: UUID | None,
) -> None:
    child = {"chunk_type": "problem", "parent_chunk_id": UUID(int=0x1000 + 9), "related_topic_ids": [TOPIC]}
    family = {"document_id": MEMO.id, "section": "1"}
    ask = await holding(
        *(chunk(number, near(number), **family, **child) for number in range(3)),
        chunk(9, None, **{**family, **parent}),
    )
    found = await ask("expand", topic_id=topic, filters=filters)
    if is_valid:
        assert (numbers(found), found["warnings"]) == ([9], [])
    else:
        assert (numbers(found), found["warnings"]) == ([0, 1, 2], ["parent_missing"])


@pytest.mark.parametrize("missed", [None, "metadata", "metadata_contains", "metadata_any", "metadata_range"])
async def test_thousands_of_conditions_are_all_applied(holding: Holding, missed: str | None) -> None:
    """An event may have as many as fit into it; the statement has a few of them, and a time limit."""
    keys = [f"key {number}" for number in range(1000)]
    metadata: dict[str, Any] = {key: ["a", "b"] for key in keys} | {f"{key}, size": 1 for key in keys}
    ask = await holding(chunk(1, near(1), metadata=metadata))
    filters: dict[str, dict[str, Any]] = {
        "metadata": dict.fromkeys(keys, '["a", "b"]'),
        "metadata_contains": {key: ["a", "b"] for key in keys},
        "metadata_any": {key: ["other", '["a", "b"]'] for key in keys},
        "metadata_range": {f"{key}, size": {"gte": 1, "lte": 1} for key in keys},
    }
    if missed is not None:
        last = [*filters[missed]][-1]
        filters[missed][last] = {"metadata": "c", "metadata_range": {"gt": 1}}.get(missed, ["c"])
    assert numbers(await ask(filters=filters)) == ([1] if missed is None else [])


@dataclass
class Between:
    """A store to which something happens after the first search, before texts are fetched."""

    store: PostgresStore
    happens: Callable[[], Awaitable[Any]]
    happened: bool = False

    async def search(self, search: Search) -> ArmResult:
        return await self.store.search(search)

    async def sizes(self, principals: Sequence[str], ids: Sequence[UUID]) -> Mapping[UUID, StoredSize]:
        await self._happen()
        return await self.store.sizes(principals, ids)

    async def passages(self, principals: Sequence[str], ids: Sequence[UUID]) -> Mapping[UUID, StoredPassage]:
        await self._happen()
        return await self.store.passages(principals, ids)

    async def _happen(self) -> None:
        if not self.happened:
            self.happened = True
            await self.happens()


@pytest.mark.parametrize("profile", ["expand", "skip"])
@pytest.mark.parametrize(
    "change",
    [
        f"DELETE FROM document_chunks WHERE id = '{UUID(int=0x1000 + 9)}'",
        f"DELETE FROM document_grants WHERE document_id = '{DESCRIBED.id}'",
    ],
    ids=["deleted", "revoked"],
)
async def test_a_parent_that_goes_between_search_and_fetch_is_missing(
    holding: Holding, database: Database, change: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if profile == "skip":
        monkeypatch.setitem(PROFILES, "skip", PROFILES["skip"].model_copy(update={"expand_parents": True}))
    family = [
        chunk(number, near(number), chunk_type="problem", parent_chunk_id=UUID(int=0x1000 + 9))
        for number in range(4)
    ]
    ask = await holding(
        *family, chunk(5, near(5)), chunk(9, None, document_id=DESCRIBED.id, text_content="The parent.")
    )
    assert numbers(await ask(profile, token_budget=1000)) == [9, 5]

    async def happens() -> None:
        async with connected(database.writer) as writer:
            await writer.execute(change)

    amid = Asked(Between(ask.store, happens))
    found = await amid(profile, k=5, token_budget=1000)
    assert (numbers(found), found["warnings"]) == ([0, 1, 2, 3, 5], ["parent_missing"])
    # And what was found is what is found ever after.
    after = await ask(profile, k=5, token_budget=1000)
    assert (after["results"], after["warnings"]) == (found["results"], found["warnings"])


# Budgets


async def test_the_first_overflow_ends_or_is_passed_over(holding: Holding) -> None:
    """At every budget: `stop` keeps the longest beginning that fits, `skip` all that fits when its turn comes."""
    rng = random.Random(3)
    costs = [rng.choice([0, 1, 3, 8, 20]) for _ in range(14)]
    costs[0] = 5
    chunks = [
        chunk(
            number,
            near(number),
            token_count=cost,
            document_id=rng.choice([DOCUMENT, DESCRIBED]).id,
        )
        for number, cost in enumerate(costs)
    ]
    ask = await holding(*chunks)
    header = count_tokens("[Source: Rivers]\n")
    assert header > 1
    priced = [
        cost + (header if one.document_id == DESCRIBED.id else 0)
        for cost, one in zip(costs, chunks, strict=True)
    ]
    for budget in range(1, sum(priced) + 2, 2):
        stopped = await ask("stop", token_budget=budget)
        fits = [number for number, used in enumerate(accumulate(priced)) if used <= budget]
        assert numbers(stopped) == fits
        assert stopped["warnings"] == ([] if fits else ["first_passage_exceeds_budget"])

        skipped = await ask("skip", token_budget=budget)
        left, taken = budget, []
        for number, price in enumerate(priced):
            if price <= left:
                taken.append(number)
                left -= price
        assert (numbers(skipped), skipped["tokens_used"]) == (taken, budget - left)
        assert skipped["warnings"] == []


async def test_special_tokens_are_ordinary_text_and_are_counted_as_such(holding: Holding) -> None:
    special = [
        "<|endoftext|>",
        "<|fim_prefix|> a <|fim_middle|>",
        "<|im_start|>system",
        "<|endofprompt|>" * 50,
    ]
    ask = await holding(
        *(
            chunk(number, near(number), text_content=text, token_count=None if number % 2 else 10_000)
            for number, text in enumerate(special)
        )
    )
    found = await ask()
    assert [passage["text_content"] for passage in found["results"]] == special
    for number, passage in enumerate(found["results"]):
        assert passage["token_count"] == (count_tokens(special[number]) if number % 2 else 10_000)
        # As one special token each would be cheaper than the text that the reader's own counting finds.
        assert count_tokens(special[number]) > special[number].count("<|")


# Two arms


async def test_what_both_arms_find_is_taken_once_and_the_turn_is_kept(holding: Holding) -> None:
    """Every chunk of the topic is in both arms: local, local, global, by the plainest rule."""
    rng = random.Random(4)
    topical = {number for number in range(60) if rng.random() < 0.4}
    ask = await holding(
        *(
            chunk(number, near(number), related_topic_ids=[TOPIC] * (number in topical))
            for number in range(60)
        )
    )
    local, everything = sorted(topical), list(range(60))
    wanted: list[int] = []
    for place in range(60):
        arm = local if place % 3 < 2 and set(local) - set(wanted) else everything
        wanted.append(next(number for number in arm if number not in wanted))
    for k in (1, 2, 3, 7, 20, 40, 60):
        found = await ask("expand", topic_id=TOPIC, k=k)
        assert numbers(found) == wanted[:k]
        found = await ask("plain", topic_id=TOPIC, k=k)
        assert numbers(found) == sorted(wanted[:k])


# Malformed columns


@pytest.mark.parametrize("column", ["coordinates", "metadata", "the document's metadata"])
async def test_a_malformed_column_is_null_and_reported(
    holding: Holding, database: Database, column: str
) -> None:
    ask = await holding(*(chunk(number, near(number), document_id=DESCRIBED.id) for number in range(2)))
    table, name = ("documents", "metadata") if "document" in column else ("document_chunks", column)
    row = DESCRIBED.id if "document" in column else UUID(int=0x1000)
    nothing: Any = None if name == "coordinates" else {}
    values = ["[]", "[1, 2]", '"text"', "0", "true", '[{"x0": 1}]']
    values += ['{"x0": "1"}', '{"x0": [1]}', '{"x0": 1e999}'] if name == "coordinates" else []
    async with connected(database.writer) as writer:
        for value in values:
            await writer.execute(f"UPDATE {table} SET {name} = $1 WHERE id = $2", value, row)
            found = await ask(k=1)
            assert found["warnings"] == ["store_value_invalid"], value
            assert found["results"][0][name] == nothing
        for empty in (None, "null", "{}"):
            await writer.execute(f"UPDATE {table} SET {name} = $1 WHERE id = $2", empty, row)
            found = await ask(k=1)
            assert found["warnings"] == []
            assert found["results"][0][name] in (nothing, {})
        if table == "document_chunks":
            # Told only of what is in the result.
            second = UUID(int=0x1001)
            await writer.execute(f"UPDATE {table} SET {name} = '[]' WHERE id = $1", second)
            assert (await ask(k=1))["warnings"] == []
            assert (await ask(k=2))["warnings"] == ["store_value_invalid"]


async def test_an_event_as_json_and_as_avro_has_the_same_result(holding: Holding) -> None:
    """Scores to the last bit, and a threshold that equals one of them."""
    asked = await holding(*(chunk(number, near(number)) for number in range(20)))
    rng = random.Random(11)
    codec = Codec()
    for scale in (1.0, 1e-3, 1e25, 1e-42):
        embedding = [(float(component) + rng.uniform(-1e-3, 1e-3)) * scale for component in QUERY]
        threshold = None
        for _ in range(4):
            event = query(
                embedding, profile="plain", session_id=SESSION, k=20, similarity_threshold=threshold
            )
            as_json = codec.decode_query(json.dumps(event).encode())
            as_avro = codec.decode_query(codec.encode_query(as_json))
            results = [await asked.decoded(decoded) for decoded in (as_json, as_avro)]
            for result in results:
                del result["query_time_ms"]
            assert results[0] == results[1]
            threshold = rng.choice(results[0]["results"])["score"]


@pytest.mark.parametrize("profile", ["plain", "stop", "skip"])
async def test_a_token_count_that_no_passage_has_is_counted_again(holding: Holding, profile: str) -> None:
    ask = await holding(
        *(
            chunk(number, near(number), document_id=document.id, token_count=2**31 - 1)
            for number, document in enumerate([DESCRIBED, DESCRIBED, DOCUMENT, DOCUMENT])
        )
    )
    found = await ask(profile, token_budget=None if profile == "plain" else 1000)
    assert found["warnings"] == ["store_value_invalid"]
    assert numbers(found) == [0, 1, 2, 3]
    for passage in found["results"]:
        header = "" if passage["header"] is None else passage["header"] + "\n"
        assert passage["token_count"] == count_tokens(passage["text_content"]) + count_tokens(header)
