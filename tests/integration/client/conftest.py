"""A client beside a real worker process, and everything that a client must not leave behind."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from streams.client import Client
from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus
from tests.integration.harness import Channel, Worker

# The embedded broker delays an empty fetch for the full wait.
_FETCH_WAIT_SECONDS = 0.02


@dataclass(frozen=True)
class Clients:
    """Makes clients and workers of one channel. All clients share a partition of the reply topic."""

    channel: Channel
    database: Database
    start_worker: Callable[..., Worker]

    def __call__(self, **options: Any) -> Client:
        channel = self.channel
        defaults = {
            "input_topic": channel.input,
            "output_topic": channel.output,
            "reply_topic": channel.replies,
            "reply_partition": 0,
            "fetch_max_wait_seconds": _FETCH_WAIT_SECONDS,
        }
        return Client(channel.bootstrap_servers, **{**defaults, **options})

    async def worker(self) -> Worker:
        """One that is ready, and answers from `tiny_corpus`."""
        worker = self.start_worker(
            self.database.worker, ANABRANCH_FETCH_MAX_WAIT_SECONDS=str(_FETCH_WAIT_SECONDS)
        )
        await worker.until_ready()
        return worker


@pytest.fixture
async def clients(
    channel: Channel, database: Database, start_worker: Callable[..., Worker]
) -> AsyncIterator[Clients]:
    await load(database.writer, tiny_corpus())
    # A reply that nobody waits for; and the channel's producer has opened its connections before tasks are counted.
    await channel.producer.send_and_wait(channel.replies, b"", partition=0)
    async with nothing_left():
        yield Clients(channel, database, start_worker)


def client_environment(channel: Channel) -> dict[str, str]:
    """What `Client.from_environment` reads for the topics."""
    return {
        "ANABRANCH_INPUT_TOPIC": channel.input,
        "ANABRANCH_OUTPUT_TOPIC": channel.output,
        "ANABRANCH_DEAD_LETTER_TOPIC": channel.dead_letters,
        "ANABRANCH_REPLY_TOPICS": channel.replies,
    }


def pending(client: Client) -> int:
    """How many calls the client still knows of."""
    replies = client._connections._replies
    waiting = 0 if replies is None else len(replies._waiting)
    return waiting + len(client._deadlines)


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Check that no task stays behind, and that no future was dropped with an exception."""
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    before, previous = asyncio.all_tasks(), loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        yield
        for _ in range(100):  # what was cancelled takes a few turns
            if not (left := asyncio.all_tasks() - before - {asyncio.current_task()}):
                break
            await asyncio.sleep(0.02)
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(previous)
    assert not left
    assert not complaints
