"""`publish` and `results`: each result once over repeats, committed after the loop's body."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from streams.broker.clients import running_admin
from streams.client import Client, ClientClosed, ConnectionFailed, PublishTimeout, UnreadableResult
from streams.core.messages import RetrievalResult, result_id
from streams.wire import Codec
from tests.integration.client import kill_in_body
from tests.integration.client.conftest import Clients, pending
from tests.integration.corpora import unit_vectors
from tests.integration.embedder.stages import read_queries
from tests.integration.harness import Channel, until

VECTOR = unit_vectors(16, 2)[0]
# The embedded broker keeps each new member of a group waiting for ten seconds.
pytestmark = pytest.mark.parametrize("broker", ["either"], indirect=True)


async def answer(channel: Channel, event_id: UUID | None = None) -> UUID:
    """Put a result on the output topic, as a worker does; in one partition, so that there is an order."""
    event_id = event_id or uuid4()
    result = RetrievalResult.parse(
        {
            "schema_version": "1.0.0",
            "event_id": event_id,
            "result_id": result_id(event_id),
            "profile": "docs",
            "query_embedding_dimensions": 768,
            "k_effective": 5,
            "k_returned": 0,
            "score_type": "cosine_similarity",
            "tokens_used": 0,
            "query_time_ms": 1.5,
            "warnings": (),
            "results": (),
        }
    )
    await channel.producer.send_and_wait(channel.output, Codec().encode_result(result), partition=0)
    return event_id


async def take(client: Client, group: str, count: int, *, remember: int = 100_000) -> list[UUID]:
    """The events of the first results; the last of them is not committed."""
    taken: list[UUID] = []
    async with aclosing(client.results(group=group, remember=remember)) as results, asyncio.timeout(60):
        async for result in results:
            taken.append(result.event_id)
            if len(taken) == count:
                break
    return taken


@asynccontextmanager
async def admin(clients: Clients) -> AsyncIterator[AIOKafkaAdminClient]:
    async with running_admin({"bootstrap_servers": clients.channel.bootstrap_servers}) as opened:
        yield opened


async def committed(opened: AIOKafkaAdminClient, group: str) -> int:
    """Results committed in all partitions."""
    offsets = await opened.list_consumer_group_offsets(group)
    return sum(max(0, found.offset) for found in offsets.values())


async def test_repeats_are_delivered_once_and_committed_after_the_body(clients: Clients) -> None:
    group = f"{clients.channel.name}.extractor"
    seen: list[UUID] = []
    async with clients() as client, admin(clients) as opened:
        first, second, third = [await answer(clients.channel) for _ in range(3)]
        for repeated in (first, first, second):
            await answer(clients.channel, repeated)
        last = await answer(clients.channel)

        async def extract() -> None:
            async for result in client.results(group=group):
                assert result.result_id == result_id(result.event_id)
                # What was delivered before is committed, this one is not. The repeats are between third and last.
                assert await committed(opened, group) == (6 if result.event_id == last else len(seen))
                seen.append(result.event_id)
                if result.event_id == last:
                    raise EOFError

        with pytest.raises(EOFError):
            async with asyncio.timeout(60):
                await extract()
        assert seen == [first, second, third, last]
        # Its body did not end.
        assert await take(client, group, 1) == [last]
        assert pending(client) == 0
    assert not client._connections._consumers


async def test_the_memory_for_repeats_is_bounded(clients: Clients) -> None:
    async with clients() as client:
        ids = [await answer(clients.channel) for _ in range(4)]
        await answer(clients.channel, ids[-1])
        await answer(clients.channel, ids[0])
        end = await answer(clients.channel)
        assert await take(client, f"{client._output_topic}.few", 6, remember=2) == [*ids, ids[0], end]


async def test_a_client_that_is_closed_ends_iterations(clients: Clients) -> None:
    """One that waits for a result, and one whose body runs."""
    client = clients()
    in_body, go_on = asyncio.Event(), asyncio.Event()
    await answer(clients.channel)

    async def waits() -> None:
        async for _ in client.results(group=f"{clients.channel.name}.waits"):
            waiting.set()

    async def works() -> None:
        async for _ in client.results(group=f"{clients.channel.name}.works"):
            in_body.set()
            await go_on.wait()

    waiting = asyncio.Event()
    tasks = [asyncio.ensure_future(waits()), asyncio.ensure_future(works())]
    async with asyncio.timeout(60):
        await asyncio.gather(waiting.wait(), in_body.wait())
        await client.close()
        go_on.set()
        for task in tasks:
            with pytest.raises(ClientClosed):
                await task
    with pytest.raises(ClientClosed):
        await take(client, "any", 1)


async def test_a_record_that_cannot_be_decoded_stops_the_iteration(clients: Clients) -> None:
    channel = clients.channel
    await channel.producer.send_and_wait(channel.output, b"\xc3\x01unknown!")
    async with clients() as client:
        with pytest.raises(UnreadableResult) as caught:
            await take(client, f"{channel.name}.group", 1)
        assert caught.value.code == "unknown_schema"
        assert f"{channel.output}[" in caught.value.reason
    async with clients(output_topic="absent") as client:
        with pytest.raises(ConnectionFailed, match="missing topic: absent"):
            await take(client, "any", 1)


@pytest.mark.slow
async def test_a_result_in_whose_body_a_process_was_killed_is_delivered_again(
    clients: Clients, tmp_path: Path
) -> None:
    group = f"{clients.channel.name}.killed"
    log = tmp_path / "bodies.txt"
    ids = [str(await answer(clients.channel)) for _ in range(4)]

    def start(last: str) -> subprocess.Popen[bytes]:
        arguments = [clients.channel.bootstrap_servers, clients.channel.output, group, str(log), last]
        return subprocess.Popen(
            [sys.executable, "-m", kill_in_body.__name__, *arguments], cwd=kill_in_body.ROOT
        )

    async def bodies(*expected: str) -> None:
        """Start a process, and kill it when these bodies have begun."""
        log.write_text("")
        with start(expected[-1]) as process:
            try:
                await until(lambda: log.read_text().split() == [*expected], log.read_text, seconds=60)
            finally:
                process.kill()

    await bodies(ids[0], ids[1])
    await bodies(ids[1], ids[2], ids[3])


async def test_what_is_published_is_on_the_topic(clients: Clients) -> None:
    async with clients() as client:

        async def publish() -> list[UUID]:
            return [await client.publish(embedding=VECTOR, principals=["user:1"]) for _ in range(30)]

        published = [
            event_id for ids in await asyncio.gather(*(publish() for _ in range(10))) for event_id in ids
        ]
        assert pending(client) == 0
    queries = await read_queries(clients.channel, 300)
    assert sorted(published) == sorted(query.event_id for _, query in queries)
    assert all(record.key == str(query.event_id).encode() for record, query in queries)


async def test_what_is_not_acknowledged_in_time_raises(clients: Clients) -> None:
    """The event may be there; with its id it can be published again."""
    async with clients() as client:
        with pytest.raises(PublishTimeout) as caught:
            await client.publish(embedding=VECTOR, principals=["user:1"], timeout=0.0001)
        event_id = caught.value.event_id
        assert event_id == await client.publish(embedding=VECTOR, principals=["user:1"], event_id=event_id)
        await client.publish(embedding=VECTOR, principals=["user:1"], timeout=None)
        assert pending(client) == 0
