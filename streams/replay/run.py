"""A replay on Kafka: reads the dead letters, publishes the selected ones, and records which.

It only considers what is in the log when it starts, so dead letters that come back meanwhile do not keep it running.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition

from streams.broker.clients import running_consumer, running_producer
from streams.broker.publisher import TOO_LARGE_ERRORS
from streams.broker.range_reader import read_range
from streams.broker.records import Unreadable
from streams.broker.topics import partitions_of
from streams.rate_limiter import RateLimiter
from streams.replay.dead_letters import (
    DeadLetter,
    Disposition,
    ReplayFilter,
    disposition,
    parse_dead_letter,
    restore_headers,
)
from streams.replay.journal import BadEntry, Entry, Journal
from streams.replay.lock import Lock, LockHeld, lock_group
from streams.replay.offsets import Offsets
from streams.replay.tally import Tally
from streams.wire.replay_headers import RecordPosition, replay_source

__all__ = ["BadPartition", "Replay", "ReplayError"]

# Maximum number of events that are published but not recorded if the replay dies; the next one searches for them.
_BATCH_RECORDS = 100
_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_SECONDS = 1.0

# If there is nothing left to read, a broker would otherwise delay the fetch response for longer.
_FETCH_WAIT_MS = 100


class ReplayError(Exception):
    """The replay is not possible; the message is one line."""


class BadPartition(ReplayError):
    """A selected partition does not exist."""


@dataclass(slots=True)
class _PartitionScan:
    """One partition of the dead-letter topic.

    Attributes:
        recovered: dead letters that an unsettled run had published but not recorded.
        settled: the unsettled runs that were checked for that.
        scan_from: ends of the input partitions at the time of the check.
        end: offset after the last record at that time.
    """

    partition: int
    journal: Journal = field(default_factory=Journal)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    recovered: set[int] = field(default_factory=set)
    settled: frozenset[str] = frozenset()
    scan_from: Mapping[int, int] = field(default_factory=dict)
    end: int = 0


class Replay:
    """One replay.

    Args:
        options: keyword arguments of the Kafka clients.
        max_attempts: skip dead letters whose event was replayed this often.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        input_topic: str,
        dead_letter_topic: str,
        replay_filter: ReplayFilter,
        max_attempts: int,
    ) -> None:
        self._options = options
        self._input_topic = input_topic
        self._dead_letter_topic = dead_letter_topic
        self._filter = replay_filter
        self._max_attempts = max_attempts
        self.recovered = 0
        """Number of dead letters known to be replayed only from replay headers in the input topic."""

    async def preview(self) -> Tally:
        """Show how the selected dead letters would be handled. Writes nothing.

        Raises:
            MissingTopics: a topic does not exist.
            ReplayError: a partition is missing, or records that are needed to decide what to replay cannot be read.
            KafkaError: the broker is unreachable or rejects the request.
        """
        dead_letters, inputs = await self._partitions()
        async with self._reader() as consumer:
            return self._tally(await self._scan_partitions(consumer, dead_letters, inputs))

    async def apply(self, *, rate: float, on_progress: Callable[[int, int], object]) -> Tally:
        """Replay the selected dead letters, and return how each was handled.

        Args:
            rate: maximum events per second.
            on_progress: called with the number of events replayed and recorded, and the total.

        Raises:
            ReplayError: see `preview`; or another replay is running.
            KafkaError: see `preview`; the next replay knows what has been replayed so far.
        """
        dead_letters, inputs = await self._partitions()
        async with self._reader() as consumer:
            try:
                async with Lock(self._options, self._dead_letter_topic) as lock, self._producer() as producer:
                    scans = await self._scan_partitions(consumer, dead_letters, inputs)
                    tally = self._tally(scans)
                    publisher = _BatchPublisher(
                        producer,
                        lock,
                        input_topic=self._input_topic,
                        dead_letter_topic=self._dead_letter_topic,
                        rate_limiter=RateLimiter(rate, time.monotonic),
                        on_progress=lambda done: on_progress(done, tally.count(Disposition.REPLAY)),
                    )
                    for scan in scans:
                        await self._replay_partition(consumer, scan, publisher, inputs)
                    return self._tally(scans, publisher.failed)
            except LockHeld:
                raise ReplayError(
                    f"another replay of {self._dead_letter_topic} is running"
                    f" (the other member of the consumer group {lock_group(self._dead_letter_topic)})"
                ) from None

    # Reading

    async def _scan_partitions(
        self, consumer: AIOKafkaConsumer, dead_letters: Iterable[TopicPartition], inputs: list[TopicPartition]
    ) -> list[_PartitionScan]:
        scans = []
        for partition in dead_letters:
            if self._filter.partitions and partition.partition not in self._filter.partitions:
                continue
            scan = _PartitionScan(partition.partition)
            async for record in read_range(consumer, partition, 0):
                self._add_record(scan, record)
            if scan.journal.unsettled and any(
                self._is_due(scan, dead_letter) for dead_letter in scan.dead_letters
            ):
                await self._find_published(consumer, scan, inputs)
            scans.append(scan)
        self.recovered = sum(
            dead_letter.offset in scan.recovered and dead_letter.offset not in scan.journal.replayed
            for scan in scans
            for dead_letter in scan.dead_letters
        )
        return scans

    def _add_record(self, scan: _PartitionScan, record: ConsumerRecord) -> None:
        scan.end = record.offset + 1
        _refuse_unreadable(record, "it may contain a record of what has been replayed")
        try:
            entry = Entry.read(record.headers, record.value, offset=record.offset)
        except BadEntry as error:
            position = RecordPosition(record.topic, record.partition, record.offset)
            raise ReplayError(f"the replay journal entry at {position} cannot be read: {error}") from None
        if entry is not None:
            scan.journal.add(entry)
            return
        dead_letter = parse_dead_letter(
            partition=record.partition,
            offset=record.offset,
            timestamp_ms=record.timestamp,
            headers=record.headers,
            value=record.value,
        )
        if self._filter.matches(dead_letter):
            scan.dead_letters.append(dead_letter)

    async def _find_published(
        self, consumer: AIOKafkaConsumer, scan: _PartitionScan, inputs: list[TopicPartition]
    ) -> None:
        """Search for the replay headers of dead letters that unfinished runs have published."""
        scan.scan_from = await _ends(consumer, inputs)
        for partition in inputs:
            async for record in read_range(consumer, partition, scan.journal.scan_from(partition.partition)):
                _refuse_unreadable(record, "it may contain events that an interrupted replay published")
                source = replay_source(record.headers)
                here = source is not None and source[:2] == (self._dead_letter_topic, scan.partition)
                # Anyone who can write to the input topic can write any replay header; ignore those of dead letters that
                # do not exist.
                if source is not None and here and source.offset < scan.end:
                    scan.recovered.add(source.offset)
        scan.settled = scan.journal.unsettled

    def _disposition(self, scan: _PartitionScan, dead_letter: DeadLetter) -> Disposition:
        return disposition(
            dead_letter,
            input_topic=self._input_topic,
            is_replayed=dead_letter.offset in scan.journal.replayed or dead_letter.offset in scan.recovered,
            max_attempts=self._max_attempts,
        )

    def _is_due(self, scan: _PartitionScan, dead_letter: DeadLetter) -> bool:
        return self._disposition(scan, dead_letter) is Disposition.REPLAY

    def _tally(
        self, scans: Iterable[_PartitionScan], failed: Mapping[tuple[int, int], Disposition] | None = None
    ) -> Tally:
        return Tally(
            (
                dead_letter,
                (failed or {}).get((dead_letter.partition, dead_letter.offset))
                or self._disposition(scan, dead_letter),
            )
            for scan in scans
            for dead_letter in scan.dead_letters
        )

    # Replaying

    async def _replay_partition(
        self,
        consumer: AIOKafkaConsumer,
        scan: _PartitionScan,
        publisher: "_BatchPublisher",
        inputs: list[TopicPartition],
    ) -> None:
        due = {dead_letter.offset for dead_letter in scan.dead_letters if self._is_due(scan, dead_letter)}
        if not due and not scan.recovered:
            return
        if not scan.settled:
            scan.scan_from = await _ends(consumer, inputs)
        await publisher.begin(scan, more=bool(due))
        if not due:
            return
        partition = TopicPartition(self._dead_letter_topic, scan.partition)
        async for record in read_range(consumer, partition, min(due), max(due) + 1):
            _refuse_unreadable(record, "it contains dead letters to replay")
            if record.offset in due:
                due.discard(record.offset)
                await publisher.publish(record)
        for offset in due:  # deleted by retention
            publisher.failed[scan.partition, offset] = Disposition.DELETED
        await publisher.flush(more=False)

    # Kafka

    async def _partitions(self) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """The partitions of the dead-letter topic and of the input topic."""
        topics = (self._dead_letter_topic, self._input_topic)
        there = await partitions_of(self._options, topics)
        dead_letters, inputs = (
            [TopicPartition(topic, number) for number in there[topic]] for topic in topics
        )
        missing = self._filter.partitions - set(there[self._dead_letter_topic])
        if missing:
            raise BadPartition(
                f"{self._dead_letter_topic} has no partition {min(missing)}; its partitions are 0 to"
                f" {len(dead_letters) - 1}"
            )
        return dead_letters, inputs

    def _reader(self) -> AbstractAsyncContextManager[AIOKafkaConsumer]:
        return running_consumer(self._options, auto_offset_reset="earliest", fetch_max_wait_ms=_FETCH_WAIT_MS)

    def _producer(self) -> AbstractAsyncContextManager[AIOKafkaProducer]:
        # The input topic's largest event did not have replay headers. With compression there is room for them, unless
        # the event is incompressible.
        return running_producer(self._options, compression_type="gzip")


async def _ends(consumer: AIOKafkaConsumer, partitions: list[TopicPartition]) -> dict[int, int]:
    ends = await consumer.end_offsets(partitions)
    return {partition.partition: end for partition, end in ends.items()}


def _refuse_unreadable(record: ConsumerRecord, consequence: str) -> None:
    if isinstance(record.value, Unreadable):
        position = RecordPosition(record.topic, record.partition, record.value.first)
        raise ReplayError(
            f"the batch from {position} to offset {record.value.last} cannot be read ({record.value.error});"
            f" {consequence}. Select other partitions of the dead-letter topic with --partition"
        )


class _BatchPublisher:
    """Publishes in batches: each is completely acknowledged and recorded before the next one starts.

    Attributes:
        failed: dead letters that should have been replayed, but were not.
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        lock: Lock,
        *,
        input_topic: str,
        dead_letter_topic: str,
        rate_limiter: RateLimiter,
        on_progress: Callable[[int], object],
    ) -> None:
        self._producer = producer
        self._lock = lock
        self._input_topic = input_topic
        self._dead_letter_topic = dead_letter_topic
        self._rate_limiter = rate_limiter
        self._on_progress = on_progress
        self._run = str(uuid4())
        self._entries = 0
        self._done = 0
        self._partition = 0
        self._scan_from: dict[int, int] = {}
        self._batch: dict[int, asyncio.Future[Any]] = {}
        self._batch_bytes = 0
        self._batch_began = 0.0
        self.failed: dict[tuple[int, int], Disposition] = {}

    async def begin(self, scan: _PartitionScan, *, more: bool) -> None:
        """Record where this partition's replay headers will be, before the first dead letter is published."""
        self._partition = scan.partition
        self._scan_from = dict(scan.scan_from)
        await self._write(Offsets.of(scan.recovered), more=more, settled=scan.settled)

    async def publish(self, record: ConsumerRecord) -> None:
        """Publish one dead letter's event; returns before the broker has acknowledged it."""
        delay = self._rate_limiter.delay()
        if self._batch and time.monotonic() + delay - self._batch_began >= _BATCH_SECONDS:
            await self.flush(more=True)
        await asyncio.sleep(delay)
        source = RecordPosition(record.topic, record.partition, record.offset)
        partition, headers = restore_headers(record.headers, source=source)
        if not self._batch:
            self._lock.verify()
            self._batch_began = time.monotonic()
        self._batch[record.offset] = await self._producer.send(
            self._input_topic,
            value=record.value,
            key=record.key,
            headers=headers,
            # Use the original partition, unless the topic was created again with fewer partitions.
            partition=partition if partition in self._scan_from else None,
        )
        self._batch_bytes += len(record.value) + len(record.key or b"")
        if len(self._batch) >= _BATCH_RECORDS or self._batch_bytes >= _BATCH_BYTES:
            await self.flush(more=True)

    async def flush(self, *, more: bool) -> None:
        """Wait for the batch, and record it.

        Args:
            more: whether more dead letters of this partition follow.

        Raises:
            KafkaError: part of it may have been published; the previous entry says where to search.
        """
        batch, self._batch, self._batch_bytes = self._batch, {}, 0
        replayed = set()
        outcomes = await asyncio.gather(*batch.values(), return_exceptions=True)
        for offset, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, TOO_LARGE_ERRORS):
                self.failed[self._partition, offset] = Disposition.TOO_LARGE
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                replayed.add(offset)
                scan_from = self._scan_from.get(outcome.partition, 0)
                self._scan_from[outcome.partition] = max(scan_from, outcome.offset + 1)
        await self._write(Offsets.of(replayed), more=more)
        self._done += len(replayed)
        self._on_progress(self._done)

    async def _write(self, replayed: Offsets, *, more: bool, settled: frozenset[str] = frozenset()) -> None:
        entry = Entry(self._run, replayed, self._scan_from if more else None, settled)
        self._entries += 1
        await self._producer.send_and_wait(
            self._dead_letter_topic,
            value=entry.encode(),
            # A unique key, so that a compacted topic keeps every entry.
            key=f"anabranch.replay:{self._run}:{self._entries}".encode(),
            headers=entry.headers,
            partition=self._partition,
        )
