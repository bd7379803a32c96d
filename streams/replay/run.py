"""A replay on Kafka: look at the dead letters, then publish the chosen ones and write down which.

What is in the log when it begins is all it looks at, so letters that come back meanwhile do not keep it going.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import MessageSizeTooLargeError, RecordListTooLargeError

from streams.broker.range_reader import read_range
from streams.broker.records import patch_fetcher
from streams.broker.topics import partitions_of
from streams.replay.dead_letters import (
    DeadLetter,
    Disposition,
    ReplayFilter,
    fate,
    parse_dead_letter,
    restore_event,
)
from streams.replay.journal import BadEntry, Entry, Journal
from streams.replay.lock import Lock, LockHeld, lock_group
from streams.replay.rate_limiter import RateLimiter
from streams.replay.tally import Tally
from streams.wire.replay_headers import RecordPosition, replay_source

__all__ = ["BadPartition", "Replay", "ReplayError"]

# What may have been published and not yet written down, if the replay dies: so much is looked for, or repeated.
_BATCH_LETTERS = 100
_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_SECONDS = 1.0

_TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
# The broker decides what is too large; this only has to be above anything that a topic may take.
_MAX_REQUEST_BYTES = 64 * 1024 * 1024
# A topic bounds batches, not records: above this bound, letters that fit alone would be refused together.
_MAX_BATCH_BYTES = 16 * 1024

# Where nothing is left to read, a broker would hold the fetch for longer.
_FETCH_WAIT_MS = 100


class ReplayError(Exception):
    """It cannot be done; one line."""


class BadPartition(ReplayError):
    """A chosen partition does not exist."""


@dataclass(slots=True)
class _PartitionScan:
    """One partition of the dead-letter topic.

    Attributes:
        recognised: letters that an unsettled run had published and not written down.
        settled: the unsettled runs that were looked into for that.
        beyond: ends of the input partitions when they were.
    """

    partition: int
    journal: Journal = field(default_factory=Journal)
    letters: list[DeadLetter] = field(default_factory=list)
    recognised: set[int] = field(default_factory=set)
    settled: frozenset[str] = frozenset()
    beyond: Mapping[int, int] = field(default_factory=dict)


class Replay:
    """One replay.

    Args:
        options: keyword arguments of the Kafka clients.
        max_attempts: letters whose event was replayed as often are left.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        input_topic: str,
        dead_letter_topic: str,
        choice: ReplayFilter,
        max_attempts: int,
    ) -> None:
        self._options = options
        self._input_topic = input_topic
        self._dead_letter_topic = dead_letter_topic
        self._choice = choice
        self._max_attempts = max_attempts
        self.recognised = 0
        """Letters of which only their marks in the input topic told that they had been replayed."""

    async def look(self) -> Tally:
        """What would become of the chosen letters. Nothing is written.

        Raises:
            ReplayError: a topic or partition is missing, or the journal cannot be read.
            KafkaError: the broker cannot be reached or refuses.
        """
        letters, inputs = await self._partitions()
        async with self._reader() as consumer:
            return self._tally(await self._survey(consumer, letters, inputs))

    async def apply(self, *, rate: float, on_progress: Callable[[int, int], object]) -> Tally:
        """Replay the chosen letters, and say what became of them.

        Args:
            rate: most events a second.
            on_progress: told how many have been replayed and written down, of how many.

        Raises:
            ReplayError: as `look`; or another replay is under way.
            KafkaError: as `look`; what has been replayed so far is known to the next replay.
        """
        letters, inputs = await self._partitions()
        async with self._reader() as consumer:
            try:
                async with Lock(self._options, self._dead_letter_topic) as lock, self._producer() as producer:
                    shares = await self._survey(consumer, letters, inputs)
                    tally = self._tally(shares)
                    posting = _BatchPublisher(
                        producer,
                        lock,
                        input_topic=self._input_topic,
                        dead_letter_topic=self._dead_letter_topic,
                        pace=RateLimiter(rate, time.monotonic),
                        on_progress=lambda done: on_progress(done, tally.count(Disposition.REPLAY)),
                    )
                    for share in shares:
                        await self._post(consumer, share, posting, inputs)
                    return self._tally(shares, posting.failed)
            except LockHeld:
                raise ReplayError(
                    f"another replay of {self._dead_letter_topic} is under way"
                    f" (the other member of the consumer group {lock_group(self._dead_letter_topic)})"
                ) from None

    # Looking

    async def _survey(
        self, consumer: AIOKafkaConsumer, letters: Iterable[TopicPartition], inputs: list[TopicPartition]
    ) -> list[_PartitionScan]:
        shares = []
        for partition in letters:
            if self._choice.partitions and partition.partition not in self._choice.partitions:
                continue
            share = _PartitionScan(partition.partition)
            async for record in read_range(consumer, partition, 0):
                self._take_in(share, record)
            if share.journal.unsettled and any(self._is_due(share, letter) for letter in share.letters):
                await self._recognise(consumer, share, inputs)
            shares.append(share)
        self.recognised = sum(
            letter.offset in share.recognised - share.journal.replayed
            for share in shares
            for letter in share.letters
        )
        return shares

    def _take_in(self, share: _PartitionScan, record: ConsumerRecord) -> None:
        try:
            entry = Entry.read(record.headers, record.value)
        except BadEntry as error:
            place = RecordPosition(record.topic, record.partition, record.offset)
            raise ReplayError(f"{place} says what has been replayed, but cannot be read: {error}") from None
        if entry is not None:
            share.journal.add(entry)
            return
        letter = parse_dead_letter(
            partition=record.partition,
            offset=record.offset,
            timestamp_ms=record.timestamp,
            headers=record.headers,
            value=record.value,
        )
        if self._choice.takes(letter):
            share.letters.append(letter)

    async def _recognise(
        self, consumer: AIOKafkaConsumer, share: _PartitionScan, inputs: list[TopicPartition]
    ) -> None:
        """Look for the marks of letters that runs which did not come to their end have published."""
        ends = await consumer.end_offsets(inputs)
        for partition in inputs:
            async for record in read_range(consumer, partition, share.journal.beyond(partition.partition)):
                source = replay_source(record.headers)
                if source is not None and source[:2] == (self._dead_letter_topic, share.partition):
                    share.recognised.add(source.offset)
        share.settled = share.journal.unsettled
        share.beyond = {partition.partition: end for partition, end in ends.items()}

    def _fate(self, share: _PartitionScan, letter: DeadLetter) -> Disposition:
        return fate(
            letter,
            input_topic=self._input_topic,
            replayed=share.journal.replayed | share.recognised
            if share.recognised
            else share.journal.replayed,
            max_attempts=self._max_attempts,
        )

    def _is_due(self, share: _PartitionScan, letter: DeadLetter) -> bool:
        return self._fate(share, letter) is Disposition.REPLAY

    def _tally(
        self, shares: Iterable[_PartitionScan], failed: Mapping[tuple[int, int], Disposition] | None = None
    ) -> Tally:
        return Tally(
            (letter, (failed or {}).get((letter.partition, letter.offset)) or self._fate(share, letter))
            for share in shares
            for letter in share.letters
        )

    # Replaying

    async def _post(
        self,
        consumer: AIOKafkaConsumer,
        share: _PartitionScan,
        posting: "_BatchPublisher",
        inputs: list[TopicPartition],
    ) -> None:
        due = {letter.offset for letter in share.letters if self._is_due(share, letter)}
        if not due and not share.recognised:
            return
        if not share.settled:
            ends = await consumer.end_offsets(inputs)
            share.beyond = {partition.partition: end for partition, end in ends.items()}
        await posting.begin(share, more=bool(due))
        if not due:
            return
        partition = TopicPartition(self._dead_letter_topic, share.partition)
        async for record in read_range(consumer, partition, min(due), max(due) + 1):
            if record.offset in due:
                due.discard(record.offset)
                await posting.post(record)
        for offset in due:  # retention was faster
            posting.failed[share.partition, offset] = Disposition.GONE
        await posting.end()

    # Kafka

    async def _partitions(self) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """Of the dead-letter topic, and of the input topic."""
        topics = (self._dead_letter_topic, self._input_topic)
        there = await partitions_of(self._options, topics)
        for topic in topics:
            if topic not in there:
                raise ReplayError(f"there is no topic {topic}; `anabranch topics` creates it")
        letters, inputs = ([TopicPartition(topic, number) for number in there[topic]] for topic in topics)
        missing = self._choice.partitions - set(there[self._dead_letter_topic])
        if missing:
            raise BadPartition(
                f"{self._dead_letter_topic} has no partition {min(missing)}; it has 0 to {len(letters) - 1}"
            )
        return letters, inputs

    @asynccontextmanager
    async def _reader(self) -> AsyncIterator[AIOKafkaConsumer]:
        patch_fetcher()
        consumer = AIOKafkaConsumer(
            **self._options,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=_FETCH_WAIT_MS,
        )
        try:
            await consumer.start()
            yield consumer
        finally:
            await consumer.stop()

    @asynccontextmanager
    async def _producer(self) -> AsyncIterator[AIOKafkaProducer]:
        producer = AIOKafkaProducer(
            **self._options,
            acks="all",
            linger_ms=5,
            max_batch_size=_MAX_BATCH_BYTES,
            max_request_size=_MAX_REQUEST_BYTES,
            # The largest event that the input topic takes came without marks. Compressed, it has room for them, unless
            # it is noise.
            compression_type="gzip",
        )
        try:
            await producer.start()
            yield producer
        finally:
            await producer.stop()


class _BatchPublisher:
    """Publishing in batches: each is acknowledged whole, and written down, before the next begins.

    Attributes:
        failed: letters that were due and were not replayed.
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        lock: Lock,
        *,
        input_topic: str,
        dead_letter_topic: str,
        pace: RateLimiter,
        on_progress: Callable[[int], object],
    ) -> None:
        self._producer = producer
        self._lock = lock
        self._input_topic = input_topic
        self._dead_letter_topic = dead_letter_topic
        self._pace = pace
        self._on_progress = on_progress
        self._run = str(uuid4())
        self._entries = 0
        self._done = 0
        self._partition = 0
        self._beyond: dict[int, int] = {}
        self._batch: dict[int, asyncio.Future[Any]] = {}
        self._batch_bytes = 0
        self._batch_began = 0.0
        self.failed: dict[tuple[int, int], Disposition] = {}

    async def begin(self, share: _PartitionScan, *, more: bool) -> None:
        """Say where the marks of this partition's letters will be found; before the first is published."""
        self._partition = share.partition
        self._beyond = dict(share.beyond)
        await self._write(frozenset(share.recognised), more=more, settled=share.settled)

    async def post(self, record: ConsumerRecord) -> None:
        """Publish one letter's event; returns before the broker has acknowledged it."""
        pause = self._pace.pause()
        if self._batch and time.monotonic() + pause - self._batch_began >= _BATCH_SECONDS:
            await self._settle(more=True)
        await asyncio.sleep(pause)
        event = restore_event(
            source=RecordPosition(record.topic, record.partition, record.offset),
            key=record.key,
            value=record.value,
            headers=record.headers,
        )
        if not self._batch:
            self._lock.verify()
            self._batch_began = time.monotonic()
        self._batch[record.offset] = await self._producer.send(
            self._input_topic,
            value=event.value,
            key=event.key,
            headers=event.headers,
            # Where it was, as its producer wished; the topic may have been made anew with fewer partitions.
            partition=event.partition if event.partition in self._beyond else None,
        )
        self._batch_bytes += len(event.value) + len(event.key or b"")
        if len(self._batch) >= _BATCH_LETTERS or self._batch_bytes >= _BATCH_BYTES:
            await self._settle(more=True)

    async def end(self) -> None:
        """After the last letter of a partition."""
        await self._settle(more=False)

    async def _settle(self, *, more: bool) -> None:
        """Wait for the batch, and write it down.

        Raises:
            KafkaError: some of it may have been published; the entry before says where to look.
        """
        batch, self._batch, self._batch_bytes = self._batch, {}, 0
        replayed = set()
        outcomes = await asyncio.gather(*batch.values(), return_exceptions=True)
        for offset, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, _TOO_LARGE):
                self.failed[self._partition, offset] = Disposition.TOO_LARGE
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                replayed.add(offset)
                beyond = self._beyond.get(outcome.partition, 0)
                self._beyond[outcome.partition] = max(beyond, outcome.offset + 1)
        await self._write(frozenset(replayed), more=more)
        self._done += len(replayed)
        self._on_progress(self._done)

    async def _write(
        self, replayed: frozenset[int], *, more: bool, settled: frozenset[str] = frozenset()
    ) -> None:
        entry = Entry(self._run, replayed, self._beyond if more else None, settled)
        self._entries += 1
        await self._producer.send_and_wait(
            self._dead_letter_topic,
            value=entry.encode(),
            # A key of its own, so that a compacted topic keeps every entry.
            key=f"anabranch.replay:{self._run}:{self._entries}".encode(),
            headers=entry.headers,
            partition=self._partition,
        )
