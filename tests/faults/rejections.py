"""What is refused: events that can never succeed, and topics that do not take what they are given."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, islice

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest

from tests.accounting import Asked
from tests.faults.fault import REPEATS_OF_A_MEMBER, Fault
from tests.faults.load import NAME_HEADER, Event, good_events, poisoned
from tests.faults.stack import CONCURRENCY, Stack
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.harness import PARTITIONS

__all__ = ["FAULTS"]

_MIB = 1024 * 1024
_LARGEST = 4 * _MIB  # what the input topic takes
_OVERHEAD = 200  # a batch's own, and the headers'
_RESULT_LIMIT = 16 * 1024

_BIG = unit_vectors(1, 99)[0]


def ten_percent_bad() -> Iterator[Event]:
    return poisoned(good_events(), every=10)


async def wait(stack: Stack) -> None:
    """The load itself is the fault."""
    del stack
    await asyncio.sleep(20)


async def send_the_largest(stack: Stack) -> None:
    """Bad events of the largest size that the input topic takes, of bytes that nothing compresses."""
    for _ in range(3):
        name = f"largest {stack.rng.random()}"
        room = _LARGEST - _OVERHEAD - len(NAME_HEADER) - len(name)
        noise = b"\xff" + random.Random(stack.rng.random()).randbytes(room - 1)
        stack.load.send(Event(Asked(name, b"largest", "undecodable"), noise))
        await asyncio.sleep(1)


async def make_some_big(stack: Stack) -> None:
    """Some readers' result is larger than what the output topic takes."""
    await stack.configure_topic(stack.channel.output, {"max.message.bytes": str(_RESULT_LIMIT)})
    rng = random.Random(5)
    document = Document(random_uuid(rng), frozenset({"user:big"}))
    text = rng.randbytes(_RESULT_LIMIT).hex()
    await load(
        stack.database.writer,
        Corpus.of([document], [Chunk(random_uuid(rng), document.id, text, _BIG, token_count=1)]),
    )


def some_big() -> Iterator[Event]:
    """One in ten has a result that is too large."""
    small = good_events()
    big = good_events([_BIG], principals=["user:big"])
    for number in count():
        if number % 10 == 5:
            event = next(big)
            yield Event(Asked(event.asked.name, b"big-%d" % (number % 7), "result_too_large"), event.value)
        else:
            yield next(small)


@asynccontextmanager
async def administrator(stack: Stack) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=stack.channel.bootstrap_servers)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


# In the numbers of Kafka's protocol.
_TOPIC, _LITERAL, _WRITE, _DENY = 2, 3, 4, 2


@asynccontextmanager
async def _writing_forbidden(stack: Stack, *topics: str) -> AsyncIterator[None]:
    rejections = [(_TOPIC, topic, _LITERAL, "User:worker", "*", _WRITE, _DENY) for topic in topics]
    async with administrator(stack) as client:
        for rejection in rejections:
            response = await client._send_request(CreateAclsRequest(*rejection))
            assert [error for error, *_ in response.creation_responses] == [0], response
        try:
            yield
        finally:
            for rejection in rejections:
                await client._send_request(DeleteAclsRequest(*rejection))


async def forbid(stack: Stack) -> None:
    """Nobody may write results or dead letters, for a while."""
    async with _writing_forbidden(stack, stack.channel.output, stack.channel.dead_letters):
        await stack.until_unready(seconds=20)
        await asyncio.sleep(8)


def all_bad() -> Iterator[Event]:
    return poisoned(good_events(), every=1)


async def forbid_results(stack: Stack) -> None:
    """Results cannot be written, for a while, and dead letters can: no worker is ready at any moment of it."""
    async with _writing_forbidden(stack, stack.channel.output):
        for partition, event in enumerate(islice(good_events(), PARTITIONS)):
            stack.load.send(event, partition)
        await stack.until_unready(seconds=20)
        dead_letters = len(stack.output_reader.dead_letters)
        for _ in range(80):
            for worker in stack.members:
                assert not await asyncio.to_thread(worker.is_ready), "ready though no result can be written"
            await asyncio.sleep(0.1)
        assert len(stack.output_reader.dead_letters) > dead_letters + 20


async def ask_for_three_copies(stack: Stack) -> None:
    await stack.configure_topic(stack.channel.output, {"min.insync.replicas": "3"})


async def too_few_copies(stack: Stack) -> None:
    """With one of three dead, the output topic has not as many copies as it insists on."""
    broker = stack.rng.choice(stack.cluster.kafka.brokers)
    await asyncio.to_thread(broker.stop, kill=True)
    try:
        await stack.until_unready(seconds=40)
        await asyncio.sleep(5)
    finally:
        await asyncio.to_thread(broker.start)


FAULTS = [
    Fault("poison-every-ten", wait, events=ten_percent_bad, repeats=0),
    Fault("poison-of-the-largest-size", send_the_largest, rounds=3, repeats=0),
    Fault("output-record-too-large", wait, prepare=make_some_big, events=some_big, repeats=0),
    Fault("output-unauthorized", forbid, rounds=2, repeats=2 * CONCURRENCY),
    Fault("results-unauthorized", forbid_results, workers=1, events=all_bad, repeats=2 * CONCURRENCY),
    Fault(
        "output-not-enough-replicas",
        too_few_copies,
        prepare=ask_for_three_copies,
        brokers=3,
        limit_seconds=60,
        repeats=2 * REPEATS_OF_A_MEMBER,
    ),
]
