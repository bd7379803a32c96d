"""The publisher on uvloop, as in a worker, whose connections are reset just before it writes."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import uvloop
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from streams.broker import publisher as module
from streams.broker.clients import running_admin
from streams.broker.publisher import Publisher
from streams.broker.topic_ids import TopicProbe
from streams.core.errors import ResultTooLarge
from streams.core.replies import ReplyRefused, ReplyTarget
from streams.embedded.broker import EmbeddedBroker
from streams.worker.replies import ReplyTopics
from tests.integration.harness import PARTITIONS, Channel, configure_topic, open_channel
from tests.integration.kafka.apache_kafka import ApacheKafka


def _producer_of(publisher: Publisher) -> Any:
    assert publisher._producer is not None
    return publisher._producer


@asynccontextmanager
async def reset_unnoticed(publisher: Publisher) -> AsyncIterator[None]:
    """Breaks every connection off; aiokafka is not told before the end, which stretches a moment that may be short."""
    unreported = []
    for connection in _producer_of(publisher).client._conns.values():
        transport = connection._writer.transport
        unreported.append(transport.get_protocol())
        transport.set_protocol(asyncio.Protocol())
        transport.abort()
    await asyncio.sleep(0.05)
    try:
        yield
    finally:
        for protocol in unreported:
            protocol.connection_lost(None)


async def publish(publisher: Publisher, topic: str) -> None:
    await publisher.publish(topic, b"key", b"value", [])


async def update_metadata(publisher: Publisher, topic: str) -> None:
    del topic
    await _producer_of(publisher).client.force_metadata_update()


@pytest.mark.parametrize("write", [publish, update_metadata])
def test_publishing_goes_on_after_a_reset(
    broker: EmbeddedBroker, write: Callable[[Publisher, str], Awaitable[None]]
) -> None:
    errors: list[BaseException] = []

    async def run() -> None:
        options = {"bootstrap_servers": broker.bootstrap_servers}
        async with open_channel(broker.bootstrap_servers, f"p{uuid4().hex[:8]}") as channel:
            publisher = Publisher(
                options, on_fault=errors.append, on_success=lambda: None, wait_seconds=(0.1, 0.2)
            )
            await publisher.on_start()
            try:
                await publish(publisher, channel.output)
                async with reset_unnoticed(publisher), asyncio.timeout(30):
                    await write(publisher, channel.output)
                    await publish(publisher, channel.output)
            finally:
                await publisher.on_stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert errors == []


def _fail_when_it_drains(publisher: Publisher) -> None:
    _producer_of(publisher)._message_accumulator.drain_by_nodes = _defect


def _fail_when_it_sends(publisher: Publisher) -> None:
    _producer_of(publisher)._sender._send_produce_req = _defect


def _defect(*_: object, **__: object) -> None:
    raise RuntimeError("unexpected")


@pytest.mark.parametrize("fail", [_fail_when_it_drains, _fail_when_it_sends])
def test_a_producer_whose_sender_has_ended_is_replaced(
    broker: EmbeddedBroker, fail: Callable[[Publisher], None]
) -> None:
    errors: list[BaseException] = []

    async def run() -> None:
        options = {"bootstrap_servers": broker.bootstrap_servers}
        async with open_channel(broker.bootstrap_servers, f"p{uuid4().hex[:8]}") as channel:
            publisher = Publisher(
                options, on_fault=errors.append, on_success=lambda: None, wait_seconds=(0.1, 0.2)
            )
            await publisher.on_start()
            try:
                await publish(publisher, channel.output)
                first = publisher._producer
                fail(publisher)
                async with asyncio.timeout(30):
                    await asyncio.gather(*(publish(publisher, channel.output) for _ in range(5)))
                assert publisher._producer is not first
            finally:
                await publisher.on_stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert {type(error).__name__ for error in errors} == {"KafkaError"}
    gc.collect()  # what aiokafka leaves behind is logged now, and not in the middle of another test


class Replying:
    """What replies are sent with, and the broker's administrator."""

    def __init__(self, publisher: Publisher, topics: ReplyTopics, admin: AIOKafkaAdminClient) -> None:
        self._publisher = publisher
        self._topics = topics
        self.admin = admin

    async def reply(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None = None,
        *,
        value: bytes = b"value",
        expires_at: datetime | None = None,
    ) -> str:
        """The reason why it cannot be sent; else nothing."""
        target = ReplyTarget(topic, partition)
        try:
            await self._publisher.publish_reply(
                target, key, value, [], check=self._topics.check, expires_at=expires_at
            )
        except (ReplyRefused, ResultTooLarge) as refused:
            return refused.code
        return ""


@asynccontextmanager
async def replying(channel: Channel, on_fault: Callable[[BaseException], None]) -> AsyncIterator[Replying]:
    options = {"bootstrap_servers": channel.bootstrap_servers}
    probe = TopicProbe(options, [channel.replies, channel.output], timeout_seconds=5)
    publisher = Publisher(
        options, on_fault=on_fault, on_success=lambda: None, wait_seconds=(0.1, 0.2), connect_first=False
    )
    await publisher.on_start()
    try:
        async with running_admin(options) as admin:
            yield Replying(publisher, ReplyTopics(probe.fetch_partitions), admin)
    finally:
        await publisher.on_stop()
        await probe.close()


@pytest.mark.parametrize("broker", ["either"], indirect=True)
async def test_a_reply_topic_that_is_deleted_delays_a_reply_and_no_other(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REQUEST_TIMEOUT_MS", 1500)  # how long aiokafka waits for a topic
    errors: list[BaseException] = []
    async with replying(channel, errors.append) as own, asyncio.timeout(30):
        assert [await own.reply(topic, 0) for topic in (channel.replies, channel.output)] == ["", ""]
        await own.admin.delete_topics([channel.replies])
        refused = asyncio.gather(*(own.reply(channel.replies, number % PARTITIONS) for number in range(20)))
        while not refused.done():
            async with asyncio.timeout(1):
                assert await own.reply(channel.output, 0) == ""
            await asyncio.sleep(0.05)
        assert set(await refused) <= {"reply_topic_missing", ""}  # the broker may take some yet
        assert await own.reply(channel.replies, 0) == "reply_topic_missing"


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)  # the embedded one cannot add partitions
async def test_a_partition_that_was_added_can_be_replied_to(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the producer's metadata are from before."""
    monkeypatch.setattr("streams.worker.replies._MISSING_SECONDS", 0.1)
    errors: list[BaseException] = []
    async with replying(channel, errors.append) as own, asyncio.timeout(30):
        assert await own.reply(channel.replies, 0) == ""
        assert await own.reply(channel.replies, PARTITIONS) == "reply_partition_missing"
        await own.admin.create_partitions({channel.replies: NewPartitions(PARTITIONS + 1)})
        while await own.reply(channel.replies, PARTITIONS):  # noqa: ASYNC110  # the broker may not have it yet
            await asyncio.sleep(0.1)
    assert errors == []


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)  # the embedded one takes records without a key
async def test_a_compacted_reply_topic_takes_replies_with_a_key_only(channel: Channel) -> None:
    """Although records of both kinds are in one batch, which the broker rejects as a whole."""
    errors: list[BaseException] = []
    await configure_topic(channel.bootstrap_servers, channel.replies, **{"cleanup.policy": "compact"})
    async with replying(channel, errors.append) as own, asyncio.timeout(30):
        keys = [b"key" if number % 3 else None for number in range(90)]
        codes = await asyncio.gather(
            *(own.reply(channel.replies, number % 2, key) for number, key in enumerate(keys))
        )
        assert codes == ["" if key else "reply_rejected" for key in keys]
        assert await own.reply(channel.replies, None, b"key") == ""
    assert errors == []


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)  # the embedded one has no such limit
async def test_a_reply_is_too_large_only_if_it_is_too_large_alone(channel: Channel) -> None:
    errors: list[BaseException] = []
    await configure_topic(channel.bootstrap_servers, channel.replies, **{"max.message.bytes": "2000"})
    async with replying(channel, errors.append) as own, asyncio.timeout(30):
        sizes = [1000] * 30 + [3000]
        codes = await asyncio.gather(
            *(own.reply(channel.replies, 0, b"key", value=b"a" * size) for size in sizes)
        )
        assert codes == [""] * 30 + ["result_too_large"]
    assert errors == []


@pytest.mark.parametrize("broker", ["kafka"], indirect=True)
async def test_a_reply_waits_for_kafka_no_longer_than_its_caller(
    channel: Channel, broker: ApacheKafka
) -> None:
    errors: list[BaseException] = []
    async with replying(channel, errors.append) as own:
        assert await own.reply(channel.replies, 0) == ""
        await asyncio.to_thread(broker.stop)
        soon = datetime.now(UTC) + timedelta(seconds=1)
        async with asyncio.timeout(60):
            assert await own.reply(channel.replies, 0, expires_at=soon) == "reply_expired"
        assert datetime.now(UTC) >= soon
        lasting = asyncio.ensure_future(own.reply(channel.replies, 1))
        await asyncio.to_thread(broker.start)
        async with asyncio.timeout(60):
            assert await lasting == ""
