"""`anabranch bench` measures the ceiling of a deployment with the deployment's settings."""

from pathlib import Path
from typing import Final
from uuid import UUID

import pytest

from streams.bench import BenchError
from streams.bench.ceiling import Job, record, run_ceiling
from streams.core.errors import UnknownProfile
from streams.core.messages import QueryEmbedding
from streams.settings import Settings
from streams.settings import load as load_settings
from streams.store.migrate import migrate
from tests.conftest import SETTING, Database
from tests.integration.connections import execute
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors
from tests.integration.harness import query
from tests.integration.pgbouncer import PgBouncer, program

CALLER: Final = "user:1"
VECTORS: Final = unit_vectors(40, 1)
CHUNKS: Final = [UUID(int=number + 10) for number in range(len(VECTORS))]


@pytest.fixture
async def loaded(database: Database) -> Database:
    document = Document(UUID(int=1), frozenset({CALLER}))
    chunks = [
        Chunk(chunk_id, document.id, "text", vector) for chunk_id, vector in zip(CHUNKS, VECTORS, strict=True)
    ]
    await load(database.writer, Corpus.of([document], chunks))
    return database


def settings_of(dsn: str, **others: object) -> Settings:
    return load_settings(
        {"DATABASE_CONNECTION_STRING": dsn, **{name: str(value) for name, value in others.items()}}
    )


def asked(**fields: object) -> list[QueryEmbedding]:
    return [QueryEmbedding.parse(query(vector, principals=[CALLER], **fields)) for vector in VECTORS[:3]]


async def answered(settings: Settings, folder: Path, **fields: object) -> list[int]:
    """How many chunks each query found, after the loop has sent the same statements."""
    recording = await record(settings, asked(**fields))
    file = folder / "recording"
    recording.save(file)
    result = await run_ceiling(
        Job(
            dsn=settings.store_dsn,
            recording=str(file),
            connections=4,
            statement_cache_size=settings.anabranch_statement_cache_size,
            warm_up=0,
            seconds=0.3,
        )
    )
    assert result.events > 0
    assert all(recording.events)
    return [len(answer) for answer in recording.answers]


async def test_it_has_the_deployments_profiles(loaded: Database, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(
        "[short]\nk_default = 3\nk_min = 1\nk_max = 5\n[long]\nk_default = 30\nk_min = 1\nk_max = 40\n"
    )
    settings = settings_of(loaded.worker, ANABRANCH_PROFILES_FILE=profiles, ANABRANCH_DEFAULT_PROFILE="short")
    assert await answered(settings, tmp_path) == [3, 3, 3]
    assert await answered(settings, tmp_path, profile="long") == [30, 30, 30]
    with pytest.raises(UnknownProfile):
        await record(settings_of(loaded.worker), asked(profile="long"))


async def test_it_has_the_deployments_bounds(loaded: Database) -> None:
    bounds = []
    for rows in (20_000, 7):
        recording = await record(settings_of(loaded.worker, ANABRANCH_EXACT_SCAN_ROWS=rows), asked())
        bounds.append(
            {
                any(value == rows for value in statement.values if isinstance(value, int))
                for event in recording.events
                for statement in event
            }
        )
    assert bounds == [{True}, {True}]


async def test_pgvector_may_be_in_another_schema(loaded: Database, tmp_path: Path) -> None:
    await execute(
        loaded.admin,
        "CREATE SCHEMA extensions; GRANT USAGE ON SCHEMA extensions TO PUBLIC;"
        "ALTER EXTENSION vector SET SCHEMA extensions",
    )
    await migrate(loaded.owner, principals_setting=SETTING)
    assert await answered(settings_of(loaded.worker), tmp_path) == [15, 15, 15]


@pytest.mark.slow
async def test_a_pooler_need_not_keep_prepared_statements(loaded: Database, tmp_path: Path) -> None:
    with PgBouncer(program("1.18"), loaded) as bouncer:
        settings = settings_of(bouncer.dsn, ANABRANCH_STATEMENT_CACHE_SIZE=0)
        assert await answered(settings, tmp_path) == [15, 15, 15]


async def test_a_failed_loop_is_one_line(loaded: Database, tmp_path: Path) -> None:
    file = tmp_path / "recording"
    (await record(settings_of(loaded.worker), asked())).save(file)
    await execute(
        loaded.admin, "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM anabranch_reader, PUBLIC"
    )
    with pytest.raises(BenchError, match="permission denied for function") as caught:
        await run_ceiling(Job(loaded.worker, str(file), 1, 100, 0, 0.1))
    assert len(str(caught.value).splitlines()) == 1
