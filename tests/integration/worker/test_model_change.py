"""What docs/embedding-model.md says: another model replaces the store's, and every question is answered.

The page's own commands copy the rows. Vectors of both models are made up: each chunk has a direction in either, and is
what a question in that direction finds.
"""

import asyncio
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import asyncpg
import numpy as np
import pytest
from pgvector.asyncpg import register_vector

from streams.broker.topics import create_topics
from streams.store.migrate import migrate
from tests.conftest import SETTING, Database, PostgresServer
from tests.integration.connections import problems
from tests.integration.corpora import Chunk, Corpus, Document, load
from tests.integration.harness import (
    Channel,
    OutputReader,
    Worker,
    account,
    as_json,
    query,
    read_result,
    topic_specs_of,
)

PAGE = (Path(__file__).parents[3] / "docs" / "embedding-model.md").read_text(encoding="utf-8")
OLD, NEW = 768, 1024
CHUNKS = 40
DOCUMENT = Document(UUID(int=1), frozenset({"user:1"}), title="The title", metadata={"year": 2020})


def vectors(dimensions: int) -> np.ndarray:
    """Each chunk's direction by one of the models, shape (CHUNKS, dimensions)."""
    return np.random.default_rng(dimensions).standard_normal((CHUNKS, dimensions)).astype(np.float32)


def chunk_id(number: int) -> UUID:
    return UUID(int=1000 + number)


def copying(postgres: PostgresServer) -> str:
    """The page's commands, with this server's psql."""
    (block,) = [found for found in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "COPY" in found]
    return (
        f'set -e -o pipefail\nexport PATH="{Path(postgres.embedded.program("psql")).parent}:$PATH"\n{block}'
    )


@pytest.fixture
def stores(database: Database, empty_database: Database) -> tuple[Database, Database]:
    return database, empty_database


async def embed(database: Database) -> None:
    connection = await asyncpg.connect(database.writer)
    try:
        await register_vector(connection)
        await connection.executemany(
            "UPDATE document_chunks SET embedding = $2 WHERE id = $1",
            [(chunk_id(number), vector) for number, vector in enumerate(vectors(NEW))],
        )
    finally:
        await connection.close()


@pytest.mark.parametrize("broker", ["either"], indirect=True)
async def test_a_model_is_changed_while_questions_are_answered(
    postgres: PostgresServer,
    stores: tuple[Database, Database],
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
) -> None:
    old, new = stores
    await load(
        old.writer,
        Corpus.of(
            [DOCUMENT],
            [
                *(
                    Chunk(chunk_id(number), DOCUMENT.id, f"Text {number}", vector, token_count=1)
                    for number, vector in enumerate(vectors(OLD))
                ),
                Chunk(chunk_id(CHUNKS), DOCUMENT.id, "A parent has no vector.", None),
            ],
        ),
    )
    asked: dict[str, tuple[str, int]] = {}  # event id → model, the nearest chunk

    async def ask(topic: Channel, model: str, dimensions: int, count: int) -> None:
        for number in range(count):
            event = query(vectors(dimensions)[number % CHUNKS], profile="docs", embedding_model=model)
            asked[event["event_id"]] = model, number % CHUNKS
            await topic.send(as_json(event))

    first = start_worker(old.worker, ANABRANCH_EMBEDDING_MODEL="old")
    await first.until_ready()
    await ask(channel, "old", OLD, 50)

    await migrate(new.owner, principals_setting=SETTING, dimensions=NEW)
    environment = {"OLD": old.admin, "NEW": new.admin}
    copied = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", copying(postgres)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert copied.returncode == 0, copied.stderr
    await embed(new)
    assert await problems(new, dimensions=NEW) == []

    beside = replace(channel, name=f"{channel.name}-new")
    (topic,) = [spec for spec in topic_specs_of(beside) if spec.name == beside.input]
    await create_topics({"bootstrap_servers": channel.bootstrap_servers}, [topic])
    second = start_worker(
        new.worker,
        ANABRANCH_EMBEDDING_DIMENSIONS=str(NEW),
        ANABRANCH_RESULT_CONTRACT="1.1.0",
        ANABRANCH_EMBEDDING_MODEL="new",
        ANABRANCH_INPUT_TOPIC=beside.input,
        ANABRANCH_CONSUMER_GROUP=beside.name,
    )
    await second.until_ready()
    # The producers switch one after another.
    await asyncio.gather(ask(channel, "old", OLD, 100), ask(beside, "new", NEW, 100))
    await ask(beside, "new", NEW, 50)
    await output_reader.until_answered(set(asked), seconds=60)
    first.end()
    second.end()

    assert output_reader.dead_letters == []
    verdict = account(asked, output_reader.results)
    assert (verdict.violations, verdict.repeats) == ([], 0)
    for record in output_reader.results:
        result = read_result(record.value)
        model, nearest = asked[str(result["event_id"])]
        assert result["embedding_model"] == model
        assert result["query_embedding_dimensions"] == (OLD if model == "old" else NEW)
        passage = result["results"][0]
        assert str(passage["chunk_id"]) == str(chunk_id(nearest))
        assert (passage["title"], passage["metadata"]) == ("The title", {"year": "2020"})


@pytest.mark.parametrize("broker", ["either"], indirect=True)
async def test_an_event_of_another_model_is_dead_lettered_with_both_numbers(
    empty_database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
) -> None:
    await migrate(empty_database.owner, principals_setting=SETTING, dimensions=NEW)
    await start_worker(
        empty_database.worker, ANABRANCH_EMBEDDING_DIMENSIONS=str(NEW), ANABRANCH_RESULT_CONTRACT="1.1.0"
    ).until_ready()
    await channel.send(as_json(query([0.5] * OLD)))
    await output_reader.until(dead_letters=1)
    headers = dict(output_reader.dead_letters[0].headers)
    assert headers["anabranch.error.code"] == b"dimension_mismatch"
    assert headers["__connect.errors.exception.message"] == b"embedding has 768 components, expected 1024"
