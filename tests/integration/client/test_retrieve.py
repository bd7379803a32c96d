"""`retrieve`: each caller gets its own answer or a clear exception, whatever happens, and nothing is left behind."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from hashlib import sha256
from uuid import UUID, uuid4

import pytest
from aiokafka import AIOKafkaConsumer

from streams.client import (
    Client,
    ClientClosed,
    ClientError,
    ConnectionFailed,
    InvalidEvent,
    RetrievalFailed,
    RetrievalResult,
    RetrievalTimeout,
)
from tests.integration.client.conftest import Clients, pending
from tests.integration.corpora import unit_vectors
from tests.integration.harness import free_port, until
from tests.integration.kafka.apache_kafka import ApacheKafka

EMBEDDED = pytest.mark.parametrize("broker", ["embedded"], indirect=True)
KAFKA = pytest.mark.parametrize("broker", ["kafka"], indirect=True)
EITHER = pytest.mark.parametrize("broker", ["either"], indirect=True)
VECTOR = unit_vectors(16, 2)[0]


async def ask(client: Client, number: int, **options: object) -> RetrievalResult:
    """A question that no other caller asks; its answer names it."""
    identity = sha256(str(number).encode()).hexdigest()
    result = await client.retrieve(
        embedding=VECTOR,
        principals=["user:1"],
        profile="docs",
        k=1,
        similarity_threshold=0,
        query_hash=identity,
        **options,  # type: ignore[arg-type]  # a test's own
    )
    assert result.query_hash == identity
    return result


async def outcomes(calls: Sequence[Awaitable[RetrievalResult]]) -> Counter[str]:
    """How often each ended how; an exception that is not the client's is raised."""
    ends: Counter[str] = Counter()
    for end in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(end, BaseException) and not isinstance(end, ClientError):
            raise end
        if isinstance(end, RetrievalFailed):
            ends[end.code] += 1
        else:
            ends["answer" if isinstance(end, RetrievalResult) else type(end).__name__] += 1
    return ends


@EMBEDDED
async def test_a_thousand_callers_of_two_clients_get_their_own_answers(clients: Clients) -> None:
    """Both clients read the same partition. Every fifth call is invalid in a way that only a worker notices."""
    await clients.worker()

    async def refused(client: Client) -> RetrievalResult:
        return await client.retrieve(embedding=VECTOR, principals=["user:1"], profile="none", timeout=120)

    async with clients() as one, clients() as other:
        calls = [
            ask(client, number, timeout=120) if number % 5 else refused(client)
            for number in range(1000)
            for client in [(one, other)[number % 2]]
        ]
        assert await outcomes(calls) == {"answer": 800, "unknown_profile": 200}
        assert pending(one) == pending(other) == 0


@EITHER
async def test_an_answer_is_typed_and_has_what_was_asked_for(clients: Clients) -> None:
    await clients.worker()
    event_id = uuid4()
    async with clients() as client:
        result = await ask(
            client, 1, event_id=event_id, explain=True, headers=[("traceparent", b"00-1")], key=b"k"
        )
        [passage] = result.results
        assert result.event_id == event_id
        assert passage.prompt_text == (
            f"{passage.header}\n{passage.text_content}" if passage.header else passage.text_content
        )
        nothing = await client.retrieve(embedding=-VECTOR, principals=["user:1"], similarity_threshold=1)
        assert nothing.results == ()


@EMBEDDED
async def test_an_invalid_event_is_not_sent(clients: Clients) -> None:
    async with clients() as client:
        with pytest.raises(InvalidEvent) as caught:
            await client.retrieve(embedding=[0.0] * 768, principals=["user:1"])
        assert caught.value.code == "zero_embedding"
        with pytest.raises(ValueError, match="timeout"):
            await client.retrieve(embedding=VECTOR, principals=["user:1"], timeout=float("nan"))
        assert pending(client) == 0


@KAFKA
async def test_an_event_that_its_topic_does_not_accept_is_invalid(clients: Clients) -> None:
    """The embedded broker accepts any size."""
    async with clients() as client:
        with pytest.raises(InvalidEvent) as caught:
            await ask(client, 1, headers=[("big", bytes(5_000_000))])
        assert caught.value.code == "record_too_large"
        assert pending(client) == 0


@EITHER
async def test_a_call_times_out_and_its_event_is_not_answered_late(clients: Clients) -> None:
    async with clients() as client:
        ends = await asyncio.gather(
            *(ask(client, number, timeout=1) for number in range(20)), return_exceptions=True
        )
        assert {type(end) for end in ends} == {RetrievalTimeout}
        why = "check that a worker runs, and that ANABRANCH_REPLY_TOPICS there contains"
        assert str(ends[0]) == f"no reply within 1 s; {why} {clients.channel.replies}"
        assert pending(client) == 0
        worker = await clients.worker()
        await ask(client, 20)
        expired = 0.0
        async with asyncio.timeout(20):  # the last call's event is in one partition of three
            while expired < 20:
                expired = (await worker.scrape()).value("anabranch_dead_letters_total", code="expired")
                await asyncio.sleep(0.05)
        assert expired == 20
        # The late replies came, and nobody noticed.
        assert pending(client) == 0


@EMBEDDED
async def test_nothing_is_left_of_cancelled_calls_and_of_a_closed_client(clients: Clients) -> None:
    """There is no worker: all calls wait."""
    client = clients()
    calls = [asyncio.ensure_future(ask(client, number)) for number in range(50)]
    await until(lambda: pending(client) == 100, lambda: f"{pending(client)} pending", seconds=20)
    for call in calls[:20]:
        call.cancel()
    await asyncio.wait(calls[:20])
    assert all(call.cancelled() for call in calls[:20])
    assert pending(client) == 60
    await client.close()
    assert pending(client) == 0
    assert {type(call.exception()) for call in calls[20:]} == {ClientClosed}
    with pytest.raises(ClientClosed):
        await ask(client, 0)
    await client.close()


@EMBEDDED
async def test_a_client_may_be_closed_or_cancelled_before_it_is_connected(clients: Clients) -> None:
    for wait in (0, 0.01, 0.05):
        client = clients()
        calls = [asyncio.ensure_future(ask(client, number)) for number in range(3)]
        await asyncio.sleep(wait)
        calls[0].cancel()
        await client.close()
        await asyncio.wait(calls)
        assert calls[0].cancelled()
        assert {type(call.exception()) for call in calls[1:]} == {ClientClosed}


@EMBEDDED
async def test_a_fault_at_the_start_names_the_remedy(clients: Clients) -> None:
    async with Client(f"127.0.0.1:{free_port()}") as unreachable:
        with pytest.raises(ConnectionFailed, match="check KAFKA_BOOTSTRAP_SERVERS"):
            await ask(unreachable, 1)
    async with clients(reply_topic="absent") as client:
        with pytest.raises(ConnectionFailed, match="missing topic: absent; run `anabranch topics`"):
            await ask(client, 1)
    async with clients(text_topic="absent") as client:
        with pytest.raises(ConnectionFailed, match="missing topic: absent; run `anabranch topics --texts`"):
            await client.retrieve(text="Why?", principals=["user:1"])
    async with clients(reply_partition=3) as client:
        with pytest.raises(ConnectionFailed, match="has 3 partitions; reply_partition is 3"):
            await ask(client, 1)


@EITHER
async def test_callers_get_their_answers_although_a_worker_is_killed(clients: Clients) -> None:
    """Events are repeated, and so replies come twice."""
    worker = await clients.worker()
    answered: set[UUID] = set()

    async def asked(client: Client, number: int) -> RetrievalResult:
        result = await ask(client, number, timeout=90)
        answered.add(result.event_id)
        return result

    async with clients() as client:
        calls = [asyncio.ensure_future(asked(client, number)) for number in range(300)]
        await until(lambda: len(answered) > 30, lambda: f"{len(answered)} answers", seconds=30)
        worker.kill()
        assert len(answered) < 300
        await clients.worker()
        assert await outcomes(calls) == {"answer": 300}
        assert pending(client) == 0


@KAFKA
async def test_callers_get_their_answers_although_the_broker_restarts(
    clients: Clients, broker: ApacheKafka
) -> None:
    """And an iteration over results continues. On Apache Kafka: the embedded broker forgets everything."""
    await clients.worker()
    stop = asyncio.Event()
    ends: Counter[str] = Counter()
    answered: set[UUID] = set()
    delivered: Counter[UUID] = Counter()

    async def call(client: Client, number: int) -> RetrievalResult:
        """Every second caller waits long enough."""
        result = await ask(client, number, timeout=60 if number % 2 else 2)
        answered.add(result.event_id)
        return result

    async def caller(client: Client, number: int) -> None:
        while not stop.is_set():
            number += 1000
            ends.update(await outcomes([call(client, number)]))

    async def extract(client: Client) -> None:
        async for result in client.results(group=f"{clients.channel.name}.extractor"):
            delivered[result.event_id] += 1

    async with clients() as client:
        extracting = asyncio.ensure_future(extract(client))
        callers = [asyncio.ensure_future(caller(client, number)) for number in range(20)]
        await until(lambda: ends["answer"] > 50, lambda: str(ends), seconds=30)
        await asyncio.to_thread(broker.stop, kill=True)
        await until(lambda: ends["RetrievalTimeout"] >= 10, lambda: str(ends), seconds=30)
        await asyncio.to_thread(broker.start)
        before = ends["answer"]
        await until(lambda: ends["answer"] > before + 100, lambda: str(ends), seconds=60)
        stop.set()
        await asyncio.gather(*callers)
        assert ends.keys() == {"answer", "RetrievalTimeout"}
        await until(
            lambda: extracting.done() or answered <= delivered.keys(),
            lambda: f"{len(answered - delivered.keys())} of {len(answered)} results are missing",
            seconds=60,
        )
        assert not extracting.done(), extracting.exception()
        assert set(delivered.values()) == {1}
        extracting.cancel()
        await asyncio.wait([extracting])
        assert pending(client) == 0


@EITHER
async def test_replies_that_came_while_the_reader_was_broken_are_read(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer is replaced by one that continues where it ended."""
    await clients.worker()
    async with clients() as client:
        await ask(client, 0)
        replies, failures = client._connections._replies, 0

        async def fail(_: object) -> None:
            nonlocal failures
            failures += 1
            raise RuntimeError("unexpected")

        with monkeypatch.context() as patch:
            patch.setattr(AIOKafkaConsumer, "getone", fail)
            call = asyncio.ensure_future(ask(client, 1))
            await until(lambda: failures > 1, lambda: f"{failures} failures", seconds=30)
            with pytest.raises(RetrievalTimeout, match="replies cannot be read: RuntimeError"):
                await ask(client, 2, timeout=1)
        await call
        await ask(client, 3)
        assert replies is not None
        assert replies._position >= 3  # what was read is not read again
        assert pending(client) == 0


@EMBEDDED
async def test_a_client_belongs_to_one_event_loop(clients: Clients) -> None:
    async with clients() as client:
        with pytest.raises(RetrievalTimeout):
            await ask(client, 1, timeout=0.5)

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                asyncio.run(ask(client, 2))

        await asyncio.to_thread(elsewhere)
