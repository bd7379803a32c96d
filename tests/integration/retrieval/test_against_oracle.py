"""Retrieval from PostgreSQL equals what the specification says, on random corpora with everything awkward in them.

Distances are asked of the server itself, over all rows and without a policy, so that ties are decided by the same bits;
that they are right is tested against float64. Everything else is computed by the oracle.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from time import perf_counter
from typing import Any
from uuid import UUID

import asyncpg
import numpy as np
import pytest
from pgvector.asyncpg import register_vector

from streams.core.messages import QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, Profile, resolve_params
from streams.retrieval import Search, retrieve, unit_vector
from streams.store.postgres import PostgresStore
from streams.tokens import count_tokens
from streams.wire import result_to_json
from tests.conftest import Database, PostgresServer
from tests.integration.connections import opened_store
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.harness import query
from tests.integration.oracle import PROFILES, expected_result, numpy_distances, parent_state

packing = PROFILES["packing"]
ALL_PROFILES = {
    **BUILTIN_PROFILES,
    "packing": Profile(
        k_default=packing.k,
        k_min=packing.least,
        k_max=packing.most,
        order="interleaved",
        expand_parents=True,
        token_budget=packing.budget,
        overflow="skip",
    ),
}

READERS = ["user:1", "group:law", "public", "user,2", '"]', "ключ"]
TEXTS = [
    "",
    "A sentence of a few words.",
    "<|endoftext|> is ordinary text here, and so is <|fim_prefix|>.",
    "Ω≈ç√∫ 漢字 🌊 \u202e e\u0301",
    "line\nline\ttab \\ \" ' %s {0}",
    "word " * 40,
    "word " * 200,
]
URLS = [
    None,
    "https://example.org/a_b/1",
    "https://example.org/axb/1",
    "https://example.org/100%/2",
    "https://example.org/100x/2",
    "\\x",
]
METADATA: list[Any] = [
    None,
    {},
    {"year": 2020},
    {"year": "2020"},
    {"year": 2020.5, "draft": True},
    {"year": None, "tags": ["a", 1], "deep": {"a": {"b": None}}},
    {"text": 'quote " and \\ and é', "": "empty key"},
    {"tags": "[]", "draft": "true", "year": "null"},
    {"year": 2020, "draft": True, "tags": "[]", "text": "long"},
    {"tags": ["a", "b", "a", None, ["a"], {"a": 1}, "1"], "day": "2024-05-01", "size": 12},
    {"tags": {"a": "b"}, "day": "2024-05-01T12:00:00+02:00", "size": "12"},
    {"tags": "a", "day": "2024-05-01 10:00:00.000001", "size": -0.5},
    {"tags": [], "day": "2024-02-30", "size": int("9" * 400)},
    {"tags": ["architecture"], "day": 20240501, "size": "1e400", "year": "2021"},
    {"tags": ["b"], "day": "2023-12-31T23:59:59.999999Z", "size": "1e-320", "year": 1999},
    {"day": "2024-05-01T", "size": "12 ", "year": "MMXX"},
    # malformed
    [],
    ["year", "2020"],
    "year",
    5,
    True,
]
COORDINATES: list[Any] = [
    None,
    {},
    {"x0": 1, "y0": 2.5},
    {"x0": -1e300},
    # malformed
    {"x0": "1"},
    {"x0": True},
    {"x0": None},
    {"x0": 1e308, "y0": int("9" * 400)},
    [1, 2],
    "x0",
    7,
]
FILTERS: list[dict[str, Any]] = [
    {},
    {"section": "1%"},
    {"section": ""},
    {"document_type": "memo"},
    {"source_url_prefix": "https://example.org/"},
    {"source_url_prefix": "https://example.org/a_b"},
    {"source_url_prefix": "https://example.org/100%"},
    {"source_url_prefix": "\\"},
    {"source_url_prefix": ""},
    {"metadata": {}},
    {"metadata": {"year": "2020"}},
    {"metadata": {"year": "2020.5", "draft": "true"}},
    {"metadata": {"year": "null"}},
    {"metadata": {"tags": '["a", 1]'}},
    {"metadata": {"deep": '{"a": {"b": null}}'}},
    {"metadata": {"text": 'quote " and \\ and é', "": "empty key"}},
    {"metadata": {"absent": "x"}},
    {"metadata": {"year": "2020", "draft": "true", "tags": "[]"}},
    {"metadata": {"year": "2020", "draft": "true", "tags": "other"}},
    {"metadata": {"year": "2020", "draft": "true", "tags": "[]", "text": "long"}},
    {"section": "2_", "document_type": "memo", "metadata": {"year": "2020"}},
]
CONTAINS: list[dict[str, list[str]]] = [
    {},
    {"tags": ["a"]},
    {"tags": ["a", "b"]},
    {"tags": ["1"]},
    {"tags": ["null"]},
    {"tags": ['["a"]', '{"a": 1}', "a"]},
    {"tags": ["a", "a", "architecture"]},
    {"year": ["2020"]},
]
ANY: list[dict[str, list[str]]] = [
    {},
    {"year": ["2020", "2021", "2020"]},
    {"year": ["null", "absent"]},
    {"tags": ["[]", "a", '["b"]']},
    {"year": ["2020", "2020.5"], "draft": ["true", "false"]},
    {"size": ["12", "-0.5", *map(str, range(60))]},
]
RANGES: list[dict[str, dict[str, Any]]] = [
    {},
    {"year": {"gte": 2020}},
    {"year": {"gt": 2020, "lte": 2021}},
    {"year": {"gte": 2020, "lt": 2020.5}},
    {"year": {"gt": 2020, "lt": 2020}},
    {"size": {"lt": 0}},
    {"size": {"gt": 0, "lte": 1e-300}},
    {"size": {"gt": 1.7976931348623157e308}},
    {"size": {"gte": -1.7976931348623157e308}},
    {"day": {"at_or_after": "2024-05-01T00:00:00Z"}},
    {"day": {"after": "2024-05-01T00:00:00Z", "before": "2024-05-01T10:00:00.000001Z"}},
    {"day": {"at_or_before": "2024-05-01T02:00:00+02:00"}},
    {"day": {"before": "0001-01-01T00:00:00Z"}},
    {"day": {"after": "9999-12-31T23:59:59.999999Z"}},
    {"day": {"at_or_after": "2024-01-01T00:00:00Z", "gte": 0}},
    {"year": {"gte": 1999, "lt": None}, "size": {"lte": 12}, "day": {"at_or_after": "2023-01-01T00:00:00Z"}},
]


class World:
    """A random corpus, and random events about it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.sessions = [random_uuid(rng) for _ in range(2)]
        self.topics = [random_uuid(rng) for _ in range(3)]
        self.vectors = unit_vectors(60, seed)
        # Everything leans one way, so that thresholds of 0.5 and 0.75 have something above them.
        self.vectors = (self.vectors + self.vectors[0] * np.float32(1.5)).astype(np.float32)
        self.corpus = self._corpus()

    def _corpus(self) -> Corpus:
        rng = self.rng
        documents = [
            Document(
                random_uuid(rng),
                frozenset(rng.sample(READERS, rng.choice([0, 1, 2, 3]))),
                session_id=rng.choice([*self.sessions, None]),
                title=rng.choice([None, "Title", ""]),
                source_url=rng.choice(URLS),
                file_description=rng.choice([None, "A lease", "", "<|endoftext|>"]),
                document_type=rng.choice(["memo", "statute", None]),
                metadata=rng.choice(METADATA),
            )
            for _ in range(10)
        ]
        ids = [random_uuid(rng) for _ in range(240)]
        chunks = [self._chunk(id_, rng.choice(documents), ids) for id_ in ids]
        if rng.random() < 0.5:
            chunks += self._family(rng.choice(documents))
        return Corpus.of(documents, chunks)

    def _chunk(self, id_: UUID, document: Document, ids: list[UUID]) -> Chunk:
        rng = self.rng
        return Chunk(
            id_,
            document.id,
            rng.choice(TEXTS),
            self._embedding(),
            session_id=rng.choice([*self.sessions, self.sessions[0], None]),
            # Any other chunk, readable or not, itself included; or none that is there.
            parent_chunk_id=rng.choice([None, rng.choice(ids), rng.choice(ids[:5]), random_uuid(rng)]),
            related_topic_ids=rng.choices(self.topics, k=rng.randrange(4)),  # the same one twice, too
            chunk_type=rng.choice(["theory", "problem", "problem", None]),
            chunk_position=rng.choice([None, 0, rng.randrange(1000)]),
            token_count=rng.choice([None, None, 0, 7, 60, 2000, -1]),
            page=rng.choice([None, -1, 12]),
            section=rng.choice([None, "", "1%", "1x", "2_", "2x"]),
            coordinates=rng.choice(COORDINATES),
            metadata=rng.choice(METADATA),
        )

    def _embedding(self) -> np.ndarray | None:
        rng = self.rng
        vector: np.ndarray = self.vectors[rng.randrange(len(self.vectors))]
        match rng.randrange(12):
            case 0:
                return None
            case 1:
                return np.zeros(768, dtype=np.float32)
            case 2:
                # The same direction, to the last bit: the index compares normalized copies, and near ties are its own.
                return vector * np.float32(rng.choice([2, 0.25, 2.0**-20, 2.0**20]))
            case 3:
                return -vector
        return vector

    def _family(self, document: Document) -> list[Chunk]:
        """Fifty children of one parent, all nearer than anything else."""
        rng = self.rng
        parent = random_uuid(rng)
        session, topic = self.sessions[0], self.topics[0]
        children = [
            Chunk(
                random_uuid(rng),
                document.id,
                "A child.",
                self.vectors[0],
                session_id=session,
                parent_chunk_id=parent,
                related_topic_ids=[topic],
                chunk_type="problem",
            )
            for _ in range(50)
        ]
        return [*children, Chunk(parent, document.id, "The parent of fifty.", None, session_id=session)]

    def event(self) -> dict[str, Any]:
        rng = self.rng
        vector = self.vectors[rng.choice([0, 0, rng.randrange(60)])]
        if rng.random() < 0.3:
            vector = vector + unit_vectors(1, rng.randrange(1000))[0] * np.float32(0.3)
        session = rng.choice([*self.sessions, self.sessions[0], None])
        return query(
            vector.astype(np.float64) * rng.choice([1, 1e-30, 1e30]),
            principals=rng.sample(READERS, rng.randrange(1, 6)),
            session_id=session,
            topic_id=None if session is None else rng.choice([*self.topics, None]),
            profile=rng.choice([None, *PROFILES]),
            k=rng.choice([None, None, 1, 3, 9, 15, 30, -5]),
            similarity_threshold=rng.choice([None] * 6 + [0, 0.3, 1]),
            token_budget=rng.choice([None] * 5 + [1, 30, 300, 5000]),
            filters=self._filters() if rng.random() < 0.5 else None,
        )

    def _filters(self) -> dict[str, Any]:
        """Often one of those on metadata alone, sometimes several at once."""
        rng = self.rng
        chosen = dict(rng.choice(FILTERS))
        others: dict[str, list[Any]] = {
            "metadata_contains": CONTAINS,
            "metadata_any": ANY,
            "metadata_range": RANGES,
        }
        for name in rng.choices(list(others), k=rng.choice([0, 1, 1, 2, 3])):
            chosen = {} if rng.random() < 0.6 else chosen
            chosen[name] = rng.choice(others[name])
        return chosen


def opened(database: Database, **options: Any) -> AbstractAsyncContextManager[PostgresStore]:
    return opened_store(database.worker, **{"connections": 3, "search_timeout_seconds": 10} | options)


async def server_distances(admin: asyncpg.Connection, event: dict[str, Any]) -> dict[UUID, float]:
    rows = await admin.fetch(
        "SELECT id, embedding <=> $1 FROM document_chunks WHERE embedding IS NOT NULL",
        unit_vector(QueryEmbedding.parse(event).embedding),  # in its canonical form
    )
    return dict(map(tuple, rows))


@pytest.mark.parametrize("seed", range(20))
async def test_results_equal_the_oracle(
    seed: int, database: Database, figures: Callable[[str], None]
) -> None:
    world = World(seed)
    await load(database.writer, world.corpus)
    admin = await asyncpg.connect(database.admin)
    await register_vector(admin)
    seen: Counter[str] = Counter()
    try:
        async with opened(database) as store:
            for _ in range(60):
                event = world.event()
                distances = await server_distances(admin, event)
                wanted = expected_result(world.corpus, event, distances, count_tokens)
                parsed = QueryEmbedding.parse(event)
                rules = resolve_params(parsed, ALL_PROFILES, "extraction")
                retrieved = await retrieve(parsed, rules, store, count_tokens, started=perf_counter())
                found = result_to_json(retrieved.result)
                found["warnings"] = set(found["warnings"])
                assert found.pop("query_time_ms") > 0
                about = {name: value for name, value in event.items() if name != "embedding"}
                assert found["results"] == wanted["results"], about
                assert found == wanted, about
                seen.update(found["warnings"], passages=found["k_returned"], empty=not found["results"])
                if ALL_PROFILES[event["profile"] or "extraction"].expand_parents:
                    matched = [world.corpus.chunks[UUID(p["matched_chunk_id"])] for p in found["results"]]
                    seen.update(f"parent: {parent_state(world.corpus, event, chunk)}" for chunk in matched)
    finally:
        await admin.close()
    # The corpora are awkward enough to be worth it.
    assert seen["passages"] > 100
    if seed == 0:
        figures(", ".join(f"{number} {what}" for what, number in sorted(seen.items())))


@pytest.mark.parametrize("small_scope_rows", [1000, 0], ids=["exactly", "by the index"])
async def test_texts_in_the_same_call_are_those_of_a_call_of_their_own(
    database: Database, small_scope_rows: int
) -> None:
    world = World(77)
    await load(database.writer, world.corpus)
    seen: Counter[str] = Counter()
    async with opened(database, small_scope_rows=small_scope_rows) as store:
        for _ in range(300):
            event = QueryEmbedding.parse(world.event())
            search = Search(
                vector=unit_vector(event.embedding),
                principals=event.principals,
                session_id=event.session_id,
                topic_id=world.rng.choice([event.topic_id, None]),
                filters=event.filters,
                expand_parents=False,
                limit=world.rng.choice([1, 5, 15, 60, 300]),
            )
            alone = await store.search(search)
            texts = await store.passages(
                event.principals, [candidate.chunk_id for candidate in alone.candidates]
            )
            both = await store.search(replace(search, with_passages=True))
            assert both.passages == texts
            assert both.passages.keys() == {candidate.chunk_id for candidate in both.candidates}
            # In any order, since a selection ranks them; as text, since a distance may not be a number.
            assert sorted(map(repr, both.candidates)) == sorted(map(repr, alone.candidates))
            assert (both.complete, both.truncated) == (alone.complete, alone.truncated)
            seen.update(
                empty=not texts,
                limited=len(texts) == search.limit,
                complete=both.complete,
                partial=not both.complete,
            )
    assert min(seen.values()) > 10, seen


@pytest.mark.parametrize("seed", range(100, 104))
async def test_an_explanation_counts_what_the_oracle_finds(seed: int, database: Database) -> None:
    world = World(seed)
    await load(database.writer, world.corpus)
    admin = await asyncpg.connect(database.admin)
    await register_vector(admin)
    seen: Counter[str] = Counter()
    try:
        async with opened(database) as store:
            for _ in range(60):
                event = world.event() | {"explain": True}
                wanted = expected_result(
                    world.corpus, event, await server_distances(admin, event), count_tokens
                )
                found = await explained(store, event)
                arms = {arm["scope"]: arm for arm in found["explanation"]["arms"]}
                scopes = ["global"] if event["topic_id"] is None else ["local", "global"]
                assert [*arms] == scopes
                for scope, arm in arms.items():
                    outcomes = sum(
                        count for name, count in arm.items() if name not in {"scope", "candidates"}
                    )
                    assert arm["candidates"] == outcomes
                    assert arm["returned"] == sum(one["scope"] == scope for one in wanted["results"])
                    assert wanted["similarity_threshold"] is not None or not arm["below_threshold"]
                    assert wanted["token_budget"] is not None or not arm["over_budget"]
                    if wanted["token_budget"] is None and wanted["k_returned"] < wanted["k_effective"]:
                        assert arm["not_needed"] == 0  # the whole scope was looked through
                    seen.update({name: count for name, count in arm.items() if name != "scope"})
    finally:
        await admin.close()
    assert {name for name, count in seen.items() if not count} == {"missing"}, seen


async def explained(store: PostgresStore, event: dict[str, Any]) -> dict[str, Any]:
    """A result of contract 1.1.0, without its time."""
    parsed = QueryEmbedding.parse(event)
    params = resolve_params(parsed, ALL_PROFILES, "extraction")
    retrieved = await retrieve(parsed, params, store, count_tokens, started=perf_counter(), contract="1.1.0")
    result = result_to_json(retrieved.result)
    del result["query_time_ms"]
    return result


async def test_an_explanation_does_not_depend_on_rows_that_the_caller_cannot_read(
    postgres: PostgresServer, database: Database
) -> None:
    """With those rows, and in a store without them; both are searched exactly."""
    world = World(55)
    caller = ["user:1", "group:law"]
    readable = {
        id_ for id_, document in world.corpus.documents.items() if document.readers & {*caller, "public"}
    }
    hidden = [chunk for chunk in world.corpus.chunks.values() if chunk.document_id not in readable]
    without = Corpus.of(
        [world.corpus.documents[id_] for id_ in readable],
        [chunk for chunk in world.corpus.chunks.values() if chunk.document_id in readable],
    )
    assert len(without.chunks) > 50 < len(hidden)
    await load(database.writer, world.corpus)
    other = await asyncio.to_thread(postgres.database)
    seen: Counter[str] = Counter()
    try:
        await load(other.writer, without)
        async with opened(database) as store, opened(other) as store_without:
            for _ in range(300):
                event = world.event() | {"explain": True, "principals": caller}
                found = await explained(store, event)
                assert found == await explained(store_without, event), event["filters"]
                seen.update(
                    {
                        f"{arm['scope']} {name}": count
                        for arm in found["explanation"]["arms"]
                        for name, count in arm.items()
                        if name != "scope"
                    }
                )
    finally:
        await asyncio.to_thread(postgres.drop, other)
    assert min(count for name, count in seen.items() if not name.endswith("missing")) > 0, seen


async def test_distances_are_those_of_float64(database: Database) -> None:
    world = World(99)
    await load(database.writer, world.corpus)
    admin = await asyncpg.connect(database.admin)
    await register_vector(admin)
    try:
        for _ in range(10):
            event = world.event()
            found = await server_distances(admin, event)
            wanted = numpy_distances(world.corpus, event["embedding"])
            assert {id_ for id_, distance in found.items() if distance == distance} == wanted.keys()  # noqa: PLR0124  # no NaN
            for id_, distance in wanted.items():
                assert found[id_] == pytest.approx(distance, abs=2e-6)
    finally:
        await admin.close()
