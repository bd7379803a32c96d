"""Both stages as they really run: an embedding stage and a worker, each in a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.embedding.imitation import KEY, Imitation, imitation
from tests.integration.embedder.stages import Texts, open_texts
from tests.integration.harness import Channel, OutputReader, Worker

MODEL = "some-model"


@pytest.fixture
async def server() -> AsyncIterator[Imitation]:
    """The provider, with as many dimensions as the store."""
    async with imitation() as started:
        started.dimensions = 768
        yield started


@pytest.fixture
async def texts(channel: Channel) -> AsyncIterator[Texts]:
    """The embedding stage's topics, before those of ``channel``."""
    async with open_texts(channel) as opened:
        yield opened


class StartEmbedder:
    """Starts ``anabranch embedder``, with the imitated OpenAI."""

    def __init__(self, folder: Path, texts: Texts, server: Imitation) -> None:
        self._folder, self._texts, self._server = folder, texts, server
        self.started: list[Worker] = []

    def __call__(self, **settings: str) -> Worker:
        own = {
            **self._texts.settings,
            "ANABRANCH_EMBEDDING_PROVIDER": "openai",
            "ANABRANCH_EMBEDDING_MODEL": MODEL,
            "ANABRANCH_EMBEDDING_BASE_URL": f"{self._server.url}/openai/v1",
            "ANABRANCH_EMBEDDING_API_KEY": KEY,
            "ANABRANCH_RETRY_BASE_SECONDS": "0.2",
            "ANABRANCH_RETRY_MAX_SECONDS": "0.5",
        }
        embedder = Worker(
            self._folder / f"embedder-{len(self.started)}.log",
            self._texts.channel,
            None,
            own | settings,
            ("-m", "streams", "embedder"),
        )
        self.started.append(embedder)
        return embedder


@pytest.fixture
def start_embedder(tmp_path: Path, texts: Texts, server: Imitation) -> Iterator[StartEmbedder]:
    start = StartEmbedder(tmp_path, texts, server)
    try:
        yield start
    finally:
        for embedder in start.started:
            embedder.end()
            print(f"--- {embedder.log_file.name} ---\n{embedder.log[-4000:]}")


@dataclass(frozen=True)
class Stages:
    """Everything around both stages.

    Attributes:
        texts: the embedding stage's topics.
        channel: the worker's.
        server: the provider.
        reader: what comes out of the worker.
        start_embedder: starts an embedding stage; takes settings.
        start_worker: starts a worker; takes the store's address and settings.
    """

    texts: Texts
    server: Imitation
    reader: OutputReader
    start_embedder: StartEmbedder
    start_worker: Callable[..., Worker]

    @property
    def channel(self) -> Channel:
        return self.texts.channel

    async def start(self, dsn: str, **settings: str) -> tuple[Worker, Worker]:
        """A worker and an embedding stage, both ready; the settings are the latter's."""
        worker, embedder = self.start_worker(dsn), self.start_embedder(**settings)
        await asyncio.gather(worker.until_ready(), embedder.until_ready())
        return worker, embedder


@pytest.fixture
def stages(
    texts: Texts,
    server: Imitation,
    output_reader: OutputReader,
    start_embedder: StartEmbedder,
    start_worker: Callable[..., Worker],
) -> Stages:
    return Stages(texts, server, output_reader, start_embedder, start_worker)
