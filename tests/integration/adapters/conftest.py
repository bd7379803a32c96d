"""Both stages and a store, once for all tests of a module: they run beside the tests, in a thread of their own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from uuid import UUID, uuid4

import numpy as np
import pytest

from streams.adapters import SharedClient
from streams.broker.topics import create_topics
from streams.client import Client
from streams.embedded.broker import EmbeddedBroker
from tests.conftest import Database, PostgresServer
from tests.embedding.imitation import imitation, vector
from tests.integration.corpora import Chunk, Corpus, Document, load
from tests.integration.embedder.conftest import StartEmbedder
from tests.integration.embedder.stages import open_texts
from tests.integration.harness import Worker, open_channel, topic_specs_of

DIMENSIONS = 768
QUESTION = "Can a ripple travel upstream against the current?"
SESSION, TOPIC = UUID(int=1), UUID(int=2)
NOTES, SECRET = UUID(int=3), UUID(int=4)
PROBLEM, PARENT, THEORY, HIDDEN = (UUID(int=number) for number in range(5, 9))


def corpus() -> Corpus:
    """The question's embedding is that of a problem, which its parent replaces, and of what user:1 may not read."""

    def embedding(text: str) -> np.ndarray:
        return np.array(vector(text, DIMENSIONS), dtype=np.float32)

    notes = Document(
        NOTES,
        frozenset({"user:1"}),
        session_id=SESSION,
        title="Open-Channel Flow",
        source_url="https://example.org/notes",
        file_description="Lecture Notes",
        document_type="notes",
        metadata={"course": "hydraulics", "year": 2020},
    )
    theory = Chunk(
        THEORY,
        NOTES,
        "Throw a pebble in.",
        embedding("something else"),
        session_id=SESSION,
        chunk_position=4,
        token_count=5,
        page=7,
        section="Waves",
        coordinates={"x0": 1.5, "y0": 2},
        metadata={"part": "waves"},
    )
    problem = Chunk(
        PROBLEM,
        NOTES,
        "Does it travel upstream?",
        embedding(QUESTION),
        session_id=SESSION,
        parent_chunk_id=PARENT,
        related_topic_ids=[TOPIC],
        chunk_type="problem",
    )
    parent = Chunk(PARENT, NOTES, "A problem, and its solution.", None, session_id=SESSION, token_count=6)
    hidden = Chunk(HIDDEN, SECRET, "Only for others.", embedding(QUESTION))
    return Corpus.of(
        [notes, Document(SECRET, frozenset({"user:2"}), title="Secret")], [theory, problem, parent, hidden]
    )


@asynccontextmanager
async def _stages(bootstrap_servers: str, database: Database, folder: Path) -> AsyncIterator[dict[str, str]]:
    await load(database.writer, corpus())
    async with (
        open_channel(bootstrap_servers, f"t{uuid4().hex[:8]}") as channel,
        open_texts(channel) as texts,
        imitation() as server,
    ):
        server.dimensions = DIMENSIONS
        settings = {
            "ANABRANCH_REPLY_TOPICS": f"{channel.name}.replies",
            "ANABRANCH_FETCH_MAX_WAIT_SECONDS": "0.02",  # the embedded broker delays an empty fetch for all of it
        }
        [spec, *_] = topic_specs_of(channel)
        await create_topics(
            {"bootstrap_servers": bootstrap_servers}, [replace(spec, name=settings["ANABRANCH_REPLY_TOPICS"])]
        )
        worker = Worker(folder / "worker.log", channel, database.worker, settings)
        start_embedder = StartEmbedder(folder, texts, server)
        try:
            embedder = start_embedder(**settings)
            await asyncio.gather(worker.until_ready(), embedder.until_ready())
            yield {
                "KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
                "ANABRANCH_INPUT_TOPIC": channel.input,
                "ANABRANCH_OUTPUT_TOPIC": channel.output,
                "ANABRANCH_DEAD_LETTER_TOPIC": channel.dead_letters,
                **texts.settings,
                **settings,
            }
        finally:
            for process in (worker, *start_embedder.started):
                process.end()


@pytest.fixture(scope="module")
def store(postgres: PostgresServer) -> Iterator[Database]:
    created = postgres.database()
    yield created
    postgres.drop(created)


@pytest.fixture(scope="module")
def environment(
    embedded_broker: EmbeddedBroker, store: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """A client's environment; both stages answer it."""
    folder = tmp_path_factory.mktemp("stages")
    ready: Future[dict[str, str]] = Future()
    ended = Event()

    async def serve() -> None:
        try:
            async with _stages(embedded_broker.bootstrap_servers, store, folder) as environment:
                ready.set_result(environment)
                await asyncio.to_thread(ended.wait)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    with ThreadPoolExecutor(max_workers=1) as thread:
        serving = thread.submit(asyncio.run, serve())
        try:
            yield ready.result()
        finally:
            ended.set()
            serving.result()


@pytest.fixture(scope="module")
def client(environment: dict[str, str]) -> Iterator[SharedClient]:
    with SharedClient(Client.from_environment(environment)) as opened:
        yield opened
