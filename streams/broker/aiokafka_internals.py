"""Every internal name of aiokafka that Anabranch uses: patched, replaced, or without public access.

No other module uses one, and `tests/unit/test_internals.py` fails if a release of aiokafka renames one.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, update_wrapper, wraps
from typing import Any, NamedTuple

import aiokafka.client
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.consumer import fetcher
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.errors import BrokerResponseError, KafkaConnectionError, KafkaError, kafka_errors
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.structs import ConsumerRecord, TopicPartition

from streams.core.errors import UnreadableBatch

__all__ = [
    "FetchedRecords",
    "OwnConsumer",
    "OwnProducer",
    "PartitionRecords",
    "TolerantBatch",
    "bound_tls_shutdown",
    "client_of",
    "configure_consumer",
    "coordinator_of",
    "forbid_topic_creation",
    "name_invalid_records",
    "patch_connection_resets",
    "position_of",
    "replace_fetched_records",
    "sender_task",
]


# The clients of this project beside others in the same process, which stay as they are


class FetchedRecords(NamedTuple):
    """The classes with which a consumer reads fetched data.

    Attributes:
        memory_records: in place of aiokafka's `MemoryRecords`.
        partition_records: in place of aiokafka's `PartitionRecords`.
    """

    memory_records: Callable[[bytes], Any]
    partition_records: Callable[..., "PartitionRecords"]


# aiokafka has no options for these: it takes the classes from its modules. A client's tasks begin when it starts, and
# inherit the context.
_is_own: ContextVar[bool] = ContextVar("is_own", default=False)
_fetched_records: ContextVar[FetchedRecords | None] = ContextVar("fetched_records", default=None)


@contextmanager
def _own_client(fetched_records: FetchedRecords | None = None) -> Iterator[None]:
    """A client that starts in this context creates no topics, and reads fetched data with these classes.

    aiokafka's clients let the broker create every topic that they request metadata for (brokers from 0.11 on). Only
    `anabranch topics` creates topics: a topic created by the broker has one partition and default limits, and with a
    mistyped name it would silently receive events.
    """
    patch_connection_resets()
    bound_tls_shutdown()
    _let_clients_differ()
    own, fetched = _is_own.set(True), _fetched_records.set(fetched_records)
    try:
        yield
    finally:
        _fetched_records.reset(fetched)
        _is_own.reset(own)


class OwnProducer(AIOKafkaProducer):  # type: ignore[misc]  # aiokafka has no types
    """A producer that creates no topics."""

    async def start(self) -> None:
        with _own_client():
            await super().start()


class OwnConsumer(AIOKafkaConsumer):  # type: ignore[misc]  # aiokafka has no types
    """A consumer that creates no topics, and reads fetched data with its own classes.

    Args:
        topics: the topics to subscribe to.
        fetched_records: the classes.
        options: keyword arguments of `AIOKafkaConsumer`.
    """

    def __init__(self, *topics: str, fetched_records: FetchedRecords, **options: Any) -> None:
        super().__init__(*topics, **options)
        self._own_fetched_records = fetched_records

    async def start(self) -> None:
        with _own_client(self._own_fetched_records):
            await super().start()


def _let_clients_differ() -> None:
    """Let the classes that clients take from aiokafka's modules depend on the client."""
    if not isinstance(aiokafka.client.MetadataRequest, _MetadataRequest):
        aiokafka.client.MetadataRequest = _MetadataRequest(aiokafka.client.MetadataRequest)
    if not isinstance(fetcher.MemoryRecords, _FetchedRecords):
        fetcher.MemoryRecords = _FetchedRecords(0, fetcher.MemoryRecords)
    if not isinstance(fetcher.PartitionRecords, _FetchedRecords):
        fetcher.PartitionRecords = _FetchedRecords(1, fetcher.PartitionRecords)


class _MetadataRequest:
    def __init__(self, others: Callable[..., Any]) -> None:
        update_wrapper(self, others)
        self._others = others

    def __call__(self, topics: Any, **options: Any) -> Any:
        if _is_own.get():
            return MetadataRequest(topics, **{**options, "allow_auto_topic_creation": False})
        return self._others(topics, **options)


class _FetchedRecords:
    def __init__(self, index: int, others: Callable[..., Any]) -> None:
        update_wrapper(self, others)
        self._index = index
        self._others = others

    def __call__(self, *arguments: Any) -> Any:
        own = _fetched_records.get()
        return (self._others if own is None else own[self._index])(*arguments)


# Patches for every client of this process

_TLS_SHUTDOWN_SECONDS = 1.0


def forbid_topic_creation() -> None:
    """Make metadata requests of all clients in this process create no topics: Faust creates clients, too."""
    aiokafka.client.MetadataRequest = partial(MetadataRequest, allow_auto_topic_creation=False)


@cache
def patch_connection_resets() -> None:
    """Report connection resets to aiokafka with the exception that it expects.

    uvloop raises RuntimeError on a write to a closed transport. asyncio raises nothing, and aiokafka expects OSError
    (https://github.com/aio-libs/aiokafka/issues/1038). The unexpected exception permanently stops the producer's sender
    or its metadata updates: nothing would be published until the process restarts.
    """
    AIOKafkaConnection.send = _with_kafka_error(AIOKafkaConnection.send)
    AIOKafkaConnection._send_sasl_token = _with_kafka_error(AIOKafkaConnection._send_sasl_token)  # noqa: SLF001  # not public; it writes too


@cache
def bound_tls_shutdown() -> None:
    """Close TLS connections within a second.

    uvloop waits up to 30 s for the broker's part of the TLS shutdown. Apache Kafka sends none if two requests were
    still open on the connection. A worker would not stop within its grace period, and end with an error. Nothing is
    lost: aiokafka gives up all open requests before it closes a connection.
    """
    AIOKafkaConnection.close = _without_tls_shutdown(AIOKafkaConnection.close)


def _without_tls_shutdown(close: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(close)
    def patched(connection: Any, *args: Any, **kwargs: Any) -> Any:
        writer = connection._writer  # noqa: SLF001  # not public; closing forgets it
        closed = close(connection, *args, **kwargs)
        # A transport that was closed before does not report its TLS object any more.
        if writer is not None and connection._security_protocol.endswith("SSL"):  # noqa: SLF001  # not public
            loop = connection._loop  # noqa: SLF001  # not public; a finalizer has no running loop
            if not loop.is_closed():
                loop.call_later(_TLS_SHUTDOWN_SECONDS, writer.transport.abort)
        return closed

    return patched


def _with_kafka_error(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    def patched(connection: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return send(connection, *args, **kwargs)
        except KafkaError:
            raise  # it is a RuntimeError too, but aiokafka handles it
        except RuntimeError as error:
            connection.close(reason=CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(
                f"Connection at {connection.host}:{connection.port} broken: {error}"
            ) from error

    return patched


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc]  # aiokafka has no types
    errno = 87
    message = "INVALID_RECORD"
    description = "The broker rejects a record, for example one without a key for a compacted topic."


@cache
def name_invalid_records() -> None:
    """Give all clients of this process an error for a record that a topic's rules forbid.

    aiokafka raises UnknownError for it, as for a problem of the broker, which a retry may cure.
    """
    kafka_errors.setdefault(InvalidRecordError.errno, InvalidRecordError)


def replace_fetched_records(fetched_records: FetchedRecords) -> None:
    """Replace the classes with which every consumer of this process reads fetched data. Call this before one starts."""
    fetcher.MemoryRecords, fetcher.PartitionRecords = fetched_records


# Classes that are extended


class PartitionRecords(fetcher.PartitionRecords, ABC):  # type: ignore[misc]  # aiokafka has no types
    """The data of one partition in a fetch response; a subclass reads its batches.

    Attributes:
        next_fetch_offset: where the next fetch begins.
    """

    next_fetch_offset: int

    @abstractmethod
    def unpack(self, batches: Any, *, check_crc: bool) -> Iterator[ConsumerRecord]:
        """Read the batches.

        Args:
            batches: an instance of the class that replaces `MemoryRecords`.
            check_crc: whether to verify the batches' checksums.
        """

    @property
    def partition(self) -> TopicPartition:
        return self._tp

    def is_skipped(self, batch: Any) -> bool:
        """Whether to skip the batch: it marks the end of a transaction, or belongs to an aborted one."""
        if self._isolation_level == fetcher.READ_COMMITTED and batch.producer_id is not None:
            self._consume_aborted_up_to(batch.base_offset)
            if batch.is_control_batch and self._is_abort_marker(batch):
                self._aborted_producers.discard(batch.producer_id)
            if batch.is_transactional and batch.producer_id in self._aborted_producers:
                return True
        return bool(batch.is_control_batch)

    def consumer_record(self, record: Any) -> ConsumerRecord:
        """A record of a batch, in the form for consumers."""
        return self._consumer_record(self._tp, record)

    def _unpack_records(self) -> Iterator[ConsumerRecord]:
        return self.unpack(self._records, check_crc=self._check_crcs)

    def _is_abort_marker(self, batch: Any) -> bool:
        try:
            return bool(self._contains_abort_marker(batch))
        except (KafkaError, ValueError, IndexError, struct.error) as error:
            raise UnreadableBatch("the transaction marker is malformed") from error


class TolerantBatch(_DefaultRecordBatchPy):  # type: ignore[misc]  # aiokafka has no types
    r"""A batch whose header names may be any bytes; those that are not UTF-8 are escaped (``\xff``)."""

    _buffer: bytearray

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _Bytes(self._buffer)


class _Bytes(bytearray):
    """Bytes whose slices decode without errors."""

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return item if isinstance(item, int) else _Bytes(item)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        del errors
        return super().decode(encoding, "backslashreplace")


class _Subscription(SubscriptionState):  # type: ignore[misc]  # aiokafka has no types
    """Lets a member rejoin its group after it left because it had not polled for longer than the poll interval.

    aiokafka rejoins only after a poll, and Faust polls only after the rejoin. After an outage that is longer than the
    poll interval, the member would never come back.
    """

    def __init__(self, flowing: Callable[[], bool]) -> None:
        super().__init__()
        self._flowing = flowing

    @property
    def fetcher_idle_time(self) -> float:
        """Seconds since the last poll; 0 while polling is not allowed."""
        return super().fetcher_idle_time if self._flowing() else 0.0


# Parts of a client


def configure_consumer(
    consumer: AIOKafkaConsumer, *, fetch_max_wait_ms: int, flowing: Callable[[], bool]
) -> None:
    """Set options for which Faust has no settings. The consumer reads them when it starts.

    Args:
        consumer: a consumer that has not started.
        fetch_max_wait_ms: how long the broker may delay an empty fetch response.
        flowing: returns whether the consumer may poll now.
    """
    consumer._fetch_max_wait_ms = fetch_max_wait_ms  # noqa: SLF001  # see above
    # Events of aborted transactions must not be answered.
    consumer._isolation_level = "read_committed"  # noqa: SLF001  # see above
    consumer._subscription = _Subscription(flowing)  # noqa: SLF001  # see above


def client_of(consumer: AIOKafkaConsumer) -> AIOKafkaClient:
    """The client whose connections a consumer uses."""
    return consumer._client  # noqa: SLF001  # no public access


def coordinator_of(consumer: AIOKafkaConsumer) -> Any:
    """The consumer's group coordinator; None before the consumer has started."""
    return consumer._coordinator  # noqa: SLF001  # no public access


def position_of(consumer: AIOKafkaConsumer, partition: TopicPartition) -> int | None:
    """The next offset that a consumer reads; None if it is not known. From any thread.

    Unlike an event's offset, it is also past offsets without an event. aiokafka's own method waits for it.
    """
    subscription = consumer._subscription.subscription  # noqa: SLF001  # see above
    assignment = None if subscription is None else subscription.assignment
    state = None if assignment is None else assignment.state_value(partition)
    return None if state is None else state._position  # noqa: SLF001  # raises without one if it is public


def sender_task(producer: AIOKafkaProducer) -> Any:
    """The task that sends a producer's records."""
    return producer._sender.sender_task  # noqa: SLF001  # no public access
