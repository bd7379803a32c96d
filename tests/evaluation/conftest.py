"""Surroundings of the two ways: a store with the sample corpus, a broker with topics, a worker."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from streams import sample
from streams.demo.corpus import load_corpus
from streams.embedded.broker import EmbeddedBroker
from tests.conftest import Database, PostgresServer
from tests.integration.harness import Channel, Worker, open_channel

StartWorker = Callable[[str, Channel], Worker]
StartEmbedder = Callable[[Channel, Mapping[str, str]], Worker]


@pytest.fixture(scope="session")
def store(postgres: PostgresServer) -> Iterator[Database]:
    """A database with the sample corpus, which no test changes."""
    created = postgres.database()
    with ThreadPoolExecutor(max_workers=1) as thread:  # out of the way of a test's own event loop
        thread.submit(asyncio.run, load_corpus(created.admin, sample.load())).result()
    yield created
    postgres.drop(created)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest.fixture
def channel(broker: EmbeddedBroker) -> Channel:
    """Three topics and a group that no other test has; its producer is closed."""

    async def create() -> Channel:
        async with open_channel(broker.bootstrap_servers, f"v{uuid4().hex[:8]}") as opened:
            return opened

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, create()).result()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    """Starts a worker that is ready; it is ended with the test, by its own id."""
    started: list[Worker] = []

    def start(dsn: str, channel: Channel) -> Worker:
        worker = Worker(
            tmp_path / f"worker-{len(started)}.log",
            channel,
            dsn,
            {"ANABRANCH_FETCH_MAX_WAIT_SECONDS": "0.02"},
        )
        started.append(worker)
        asyncio.run(worker.until_ready())
        return worker

    try:
        yield start
    finally:
        for worker in started:
            worker.end()
            print(f"--- {worker.log_file.name} ---\n{worker.log[-4000:]}")  # shown where the test failed


@pytest.fixture
def start_embedder(tmp_path: Path, model_folder: Path) -> Iterator[StartEmbedder]:
    """Starts an embedding stage with the real model; it is ended with the test, by its own id."""
    started: list[Worker] = []

    def start(channel: Channel, settings: Mapping[str, str]) -> Worker:
        own = {
            "ANABRANCH_EMBEDDING_PROVIDER": "local",
            "ANABRANCH_EMBEDDING_PATH": str(model_folder),
            "ANABRANCH_EMBEDDING_MODEL": sample.load().embedding_model,
        }
        log_file = tmp_path / f"embedder-{len(started)}.log"
        started.append(Worker(log_file, channel, None, {**own, **settings}, ("-m", "streams", "embedder")))
        return started[-1]

    try:
        yield start
    finally:
        for embedder in started:
            embedder.end()
            print(f"--- {embedder.log_file.name} ---\n{embedder.log[-4000:]}")
