"""Embeddings of any model: migrate, load, search exactly and by the index, and check, with its number of dimensions."""

import json
import random
import re
from uuid import UUID

import asyncpg
import numpy as np
import pytest
from pgvector.asyncpg import register_vector

from streams.core.errors import DimensionMismatch, StoreMisconfigured
from streams.core.messages import QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, resolve_params
from streams.resources import schemas
from streams.retrieval import Search, retrieve, unit_vector
from streams.store.migrate import MigrationError, migrate, plan
from streams.store.reference import reference
from streams.store.statistics import collect
from streams.store.vector_index import read_vector_index
from streams.tokens import count_tokens
from tests.conftest import SETTING, Database
from tests.integration.connections import connected, execute, opened_store, problems
from tests.integration.corpora import Chunk, Corpus, Document, load, load_indexed, random_uuid
from tests.integration.harness import query
from tests.integration.oracle import numpy_distances
from tests.integration.store.test_verification import anabranch

K = 15
QUERIES = 20
CHUNKS = 1500
# A row with everything that a back end may write, besides the embedding.
FULL_ROW = """
    INSERT INTO documents (id) VALUES ('00000000-0000-0000-0000-000000000001');
    INSERT INTO document_chunks (document_id, session_id, parent_chunk_id, related_topic_ids, chunk_type,
                                 chunk_position, text_content, token_count, page, section, coordinates, metadata,
                                 embedding)
    SELECT id, id, id, array_fill(id, ARRAY[500]), 'theory', 1, repeat(md5('1'), 500), 1, 1, repeat('section', 30),
           '{{"x0": 1.5, "y0": 2.5, "x1": 3.5, "y1": 4.5}}', jsonb_build_object('key', repeat(md5('2'), 100)),
           array_fill(0.5::real, ARRAY[{0}])::vector
    FROM documents
"""


def corpus_of(dimensions: int) -> Corpus:
    """Chunks in clusters, as texts about the same things are."""
    rng = np.random.default_rng(dimensions)
    centres = rng.standard_normal((30, dimensions))
    vectors = centres[rng.integers(0, 30, CHUNKS)] + rng.standard_normal((CHUNKS, dimensions))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    document = Document(UUID(int=1), frozenset({"user:1"}))
    ids = random.Random(dimensions)
    return Corpus.of(
        [document],
        [
            Chunk(random_uuid(ids), document.id, "text", vector, token_count=1)
            for vector in vectors.astype(np.float32)
        ],
    )


@pytest.mark.parametrize("dimensions", [384, 768, 1024, 1536, 3072])
async def test_a_store_for_a_model(empty_database: Database, dimensions: int) -> None:
    database = empty_database
    await migrate(database.owner, principals_setting=SETTING, dimensions=dimensions)
    assert await migrate(database.owner, principals_setting=SETTING, dimensions=dimensions) == []
    corpus = corpus_of(dimensions)
    await load_indexed(database, corpus)
    assert await problems(database, dimensions=dimensions) == []
    async with connected(database.worker) as worker:
        assert (await read_vector_index(worker)).by_halfvec
    async with connected(database.owner) as owner:
        found = await collect(owner)
    assert (found.embeddings.dimensions, found.embeddings.dimensions_min) == (dimensions, dimensions)
    assert found.embeddings.storage == ("plain" if dimensions <= 1900 else "external")
    assert {index.state for index in found.indexes} == {"valid"}

    rng = np.random.default_rng(1)
    vectors = [chunk.embedding for chunk in corpus.chunks.values() if chunk.embedding is not None]
    recalls = []
    async with (
        opened_store(database.worker) as exact,
        opened_store(database.worker, exact_scan_rows=0) as by_index,
    ):
        for number in range(QUERIES):
            asked = vectors[number] + rng.standard_normal(dimensions) / dimensions**0.5
            event = QueryEmbedding.parse(query(asked, profile="extraction", k=K), dimensions=dimensions)
            distances = numpy_distances(corpus, asked)
            nearest = sorted(distances, key=distances.__getitem__)[:K]
            retrieved = await retrieve(
                event, resolve_params(event, BUILTIN_PROFILES, "docs"), exact, count_tokens, started=0
            )
            assert retrieved.result.query_embedding_dimensions == dimensions
            assert [passage.chunk_id for passage in retrieved.result.results] == nearest
            search = Search(unit_vector(asked), ["user:1"], None, None, None, expand_parents=False, limit=K)
            arm = await by_index.search(search)
            assert not arm.exact
            found_ids = [candidate.chunk_id for candidate in arm.candidates]
            assert [candidate.distance for candidate in arm.candidates] == pytest.approx(
                [distances[id_] for id_ in found_ids], abs=1e-5
            )
            recalls.append(len(set(found_ids) & set(nearest)) / K)
    assert np.mean(recalls) >= 0.99


@pytest.mark.parametrize("dimensions", [1900, 1901, 4000])
async def test_a_row_has_room_for_its_embedding(empty_database: Database, dimensions: int) -> None:
    await migrate(empty_database.owner, principals_setting=SETTING, dimensions=dimensions)
    await execute(empty_database.writer, FULL_ROW.format(dimensions))
    outside = "SELECT pg_column_toast_chunk_id(embedding) IS NOT NULL FROM document_chunks"
    async with connected(empty_database.owner) as owner:
        if owner.get_server_version().major >= 17:
            assert await owner.fetchval(outside) == (dimensions > 1900)
    assert await problems(empty_database, dimensions=dimensions) == []


async def test_why_large_embeddings_are_not_stored_in_their_rows(empty_database: Database) -> None:
    await migrate(empty_database.owner, principals_setting=SETTING, dimensions=3072)
    await execute(empty_database.owner, "ALTER TABLE document_chunks ALTER embedding SET STORAGE PLAIN")
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="row is too big"):
        await execute(empty_database.writer, FULL_ROW.format(3072))
    assert await problems(empty_database, dimensions=3072) == [
        "storage: embeddings of 3072 dimensions may not fit into their rows: writes fail"
    ]
    assert await migrate(empty_database.owner, principals_setting=SETTING, dimensions=3072) == [
        "set the storage of embedding in document_chunks to external"
    ]
    await execute(empty_database.writer, FULL_ROW.format(3072))


async def test_check_names_the_stores_dimensions_and_the_setting(empty_database: Database) -> None:
    """And nothing else: what depends on the dimensions is right for the store."""
    await migrate(empty_database.owner, principals_setting=SETTING, dimensions=3072)
    (problem,) = await problems(empty_database, dimensions=1024)
    assert problem == (
        "columns: column document_chunks.embedding is vector(3072), not vector(1024): the store's embeddings have 3072"
        " dimensions, but ANABRANCH_EMBEDDING_DIMENSIONS is 1024"
    )


def test_the_commands_take_the_setting(empty_database: Database) -> None:
    environment = {
        "DATABASE_ADMIN_CONNECTION_STRING": empty_database.owner,
        "DATABASE_CONNECTION_STRING": empty_database.worker,
        "ANABRANCH_RESULT_CONTRACT": "1.1.0",
    }
    migrated = anabranch("migrate", **environment, ANABRANCH_EMBEDDING_DIMENSIONS="384")
    assert migrated.returncode == 0, migrated.stderr

    def remedies(dimensions: str) -> list[str]:
        ended = anabranch("check", "--json", **environment, ANABRANCH_EMBEDDING_DIMENSIONS=dimensions)
        return [found["remedy"] for found in json.loads(ended.stdout) if found["check"] == "columns"]

    assert remedies("384") == [""]
    (remedy,) = remedies("1024")
    assert remedy.startswith("set ANABRANCH_EMBEDDING_DIMENSIONS=384, or ")
    again = anabranch("migrate", **environment)
    assert again.returncode == 1
    assert "is vector(384), not vector(768)" in again.stderr


async def test_migrate_leaves_a_store_with_other_dimensions_alone(empty_database: Database) -> None:
    await migrate(empty_database.owner, principals_setting=SETTING, dimensions=1024)
    with pytest.raises(
        MigrationError, match=r"is vector\(1024\), not vector\(768\); set ANABRANCH_EMBEDDING_DIMENSIONS=1024"
    ):
        await migrate(empty_database.owner, principals_setting=SETTING)
    assert await problems(empty_database, dimensions=1024) == []


async def test_a_dry_run_prints_the_dimensions(empty_database: Database) -> None:
    script = "\n".join(await plan(empty_database.owner, principals_setting=SETTING, dimensions=3072))
    assert set(re.findall(r"\bvector\(\d+\)", script)) == {"vector(3072)"}
    assert set(re.findall(r"\bhalfvec\(\d+\)", script)) == {"halfvec(3072)"}
    assert "SET STORAGE EXTERNAL" in script


def test_by_default_the_statements_are_those_of_the_files() -> None:
    files = [file.read_text() for file in (schemas() / "postgres").iterdir() if file.name.endswith(".sql")]
    text = "".join(files).replace(":'principals_setting'", f"'{SETTING}'").replace(":vector_schema", "public")
    changed = 0
    for statement, other in zip(reference(SETTING), reference(SETTING, "public", 769), strict=True):
        assert statement.sql in text
        assert other.sql == statement.sql.replace("(768)", "(769)")
        changed += statement != other
    assert changed == 4  # the table, the column for existing ones, the index, the search by the index


async def test_an_emptied_column_can_change_its_dimensions(database: Database) -> None:
    """With an outage: docs/embedding-model.md."""
    await load(database.writer, corpus_of(768))
    await execute(
        database.owner,
        "ALTER TABLE public.document_chunks ALTER COLUMN embedding TYPE vector(1024) USING NULL",
    )
    assert (await problems(database, dimensions=1024))[0].startswith(
        "functions: function anabranch_search_index is altered"
    )
    done = await migrate(database.owner, principals_setting=SETTING, dimensions=1024)
    assert done[:2] == [
        "set the storage of embedding in document_chunks to plain",  # another type resets it
        "created function anabranch_search_index",
    ]
    assert "created index document_chunks_embedding_halfvec on document_chunks" in done
    assert await problems(database, dimensions=1024) == []
    async with connected(database.writer) as writer:
        await register_vector(writer)
        await writer.execute("UPDATE document_chunks SET embedding = $1", np.ones(1024, np.float32))
    async with opened_store(database.worker) as store:  # of a worker that was not stopped
        before = Search(unit_vector([1.0] * 768), ["user:1"], None, None, None, expand_parents=False, limit=K)
        with pytest.raises(
            StoreMisconfigured, match=r"different halfvec dimensions 768 and 1024: .*ANABRANCH_EMB"
        ):
            await store.search(before)
    async with opened_store(database.worker, exact_scan_rows=0) as store:
        asked = unit_vector([1.0] * 1024)
        found = await store.search(Search(asked, ["user:1"], None, None, None, expand_parents=False, limit=K))
    assert len(found.candidates) == K


def test_an_event_has_the_dimensions_of_the_store() -> None:
    with pytest.raises(DimensionMismatch, match=r"^embedding has 768 components, expected 1024$"):
        QueryEmbedding.parse(query([0.5] * 768), dimensions=1024)
