"""Where the index stops before it has found enough: search exactly, or say so."""

import random
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

import asyncpg
import numpy as np
import pytest

from streams.core.messages import QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, resolve_params
from streams.retrieval import retrieve
from streams.tokens import count_tokens
from streams.wire import result_to_json
from tests.conftest import Database
from tests.integration.connections import execute, opened_store
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.harness import query
from tests.integration.oracle import expected_result, numpy_distances

# A scan of the index alone, which gives up early: what 20,000 tuples are to a store of millions.
IMPATIENT = """
    ALTER DATABASE {name} SET enable_seqscan = off;
    ALTER DATABASE {name} SET enable_bitmapscan = off;
    ALTER DATABASE {name} SET enable_sort = off;
    ALTER DATABASE {name} SET hnsw.max_scan_tuples = 200;
    ALTER DATABASE {name} SET hnsw.scan_mem_multiplier = 1;
"""


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """1,200 chunks, one in twenty of which user:2 may read, and 40 farther away that user:1 may read."""
    rng = random.Random(8)
    near = Document(random_uuid(rng), frozenset({"user:3"}))
    among = Document(random_uuid(rng), frozenset({"user:2"}))
    far = Document(random_uuid(rng), frozenset({"user:1"}))
    axis, noise = unit_vectors(1, 1)[0], unit_vectors(1240, 2)
    return Corpus.of(
        [near, among, far],
        [
            Chunk(
                random_uuid(rng),
                far.id if number >= 1200 else among.id if number % 20 == 0 else near.id,
                "text",
                noise[number] + axis * np.float32(-1 if number >= 1200 else 1),
            )
            for number in range(1240)
        ],
    )


@pytest.fixture
async def impatient(database: Database, corpus: Corpus) -> AsyncIterator[Database]:
    # Few edges: with as many as by default, the first step of a scan sees almost all of so few chunks.
    await execute(
        database.owner,
        "DROP INDEX document_chunks_embedding_halfvec; SET search_path = public;"
        "CREATE INDEX few_edges ON document_chunks USING hnsw"
        " ((l2_normalize(embedding)::halfvec(768)) halfvec_cosine_ops) WITH (m = 4, ef_construction = 16)",
    )
    await load(database.writer, corpus)
    admin = await asyncpg.connect(database.admin)
    try:
        await admin.execute("LOAD 'vector'")
        for statement in IMPATIENT.format(name=database.name).strip().splitlines():
            await admin.execute(statement)
        await admin.execute("ANALYZE")
        yield database
    finally:
        await admin.close()


async def answer(
    database: Database, event: dict[str, Any], *, exact_scan_rows: int, small_scope_rows: int = 1000
) -> dict[str, Any]:
    async with opened_store(
        database.worker, exact_scan_rows=exact_scan_rows, small_scope_rows=small_scope_rows
    ) as store:
        parsed = QueryEmbedding.parse(event)
        rules = resolve_params(parsed, BUILTIN_PROFILES, "extraction")
        retrieved = await retrieve(parsed, rules, store, count_tokens, started=perf_counter())
        return result_to_json(retrieved.result)


async def test_it_searches_on_exactly_or_says_so(impatient: Database, corpus: Corpus) -> None:
    event = query(unit_vectors(1, 1)[0])
    wanted = expected_result(corpus, event, numpy_distances(corpus, event["embedding"]), count_tokens)

    # A scope that is small enough is searched exactly.
    found = await answer(impatient, event, exact_scan_rows=20_000)
    assert found["warnings"] == []
    assert [passage["chunk_id"] for passage in found["results"]] == [
        passage["chunk_id"] for passage in wanted["results"]
    ]
    assert found["k_returned"] == 15

    # A larger one is not, and the result says so.
    found = await answer(impatient, event, exact_scan_rows=10)
    assert found["warnings"] == ["scan_truncated"]
    assert found["k_returned"] < 15

    # Fewer than asked for is no truncation where there are no more.
    found = await answer(impatient, event | {"principals": ["nobody"]}, exact_scan_rows=10)
    assert (found["warnings"], found["results"]) == ([], [])


async def test_enough_rows_of_a_scan_that_gave_up_are_not_enough(
    impatient: Database, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the nearest of those that it came upon, not of those that there are."""
    monkeypatch.setattr("streams.store.postgres.EF_SEARCH", 40)  # 400 of so few chunks would be all of them
    event = query(unit_vectors(1, 1)[0], principals=["user:2"], k=10)
    wanted = expected_result(corpus, event, numpy_distances(corpus, event["embedding"]), count_tokens)

    found = await answer(impatient, event, exact_scan_rows=20_000, small_scope_rows=10)
    assert found["warnings"] == []
    assert [passage["chunk_id"] for passage in found["results"]] == [
        passage["chunk_id"] for passage in wanted["results"]
    ]

    found = await answer(impatient, event, exact_scan_rows=50, small_scope_rows=10)
    assert found["warnings"] == ["scan_truncated"]
    assert found["k_returned"] == 10
