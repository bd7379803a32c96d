"""The load: sends events, waits for results, and measures from the time at which an event should have been sent.

`Generator.saturate` is a closed loop: a number of events is always waiting or in flight, so the pipeline is never idle.
`Generator.offer` is an open loop: events are due at a fixed rate, whether or not earlier ones were answered, and each
latency starts when the event was due, not when it could be sent (no coordinated omission).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from streams.bench.cpu import CpuMeter
from streams.broker.clients import running_consumer, running_producer

__all__ = ["IN_FLIGHT", "Generator", "Measured"]

#: Events waiting or in flight when a closed loop saturates: more than any consumer processes concurrently.
IN_FLIGHT: Final = 48
_FETCH_WAIT_MS: Final = 500
# Of a broker that always delays an empty fetch for the full wait.
_FULL_FETCH_WAIT_MS: Final = 5
_DRAIN_SECONDS: Final = 20.0

#: Makes the key and value of the event with a number.
Make = Callable[[int], tuple[bytes, bytes]]


@dataclass
class Measured:
    """What happened within a window.

    Attributes:
        seconds: its length.
        answered: events whose result arrived within it.
        latencies: of the events that were due within it, in seconds.
        numbers: key to number, for each of them that was answered.
        results: key to value, if results are kept.
        cpu: CPU seconds by name.
        unanswered: events due within it without a result after the drain.
    """

    seconds: float = 0.0
    answered: int = 0
    latencies: list[float] = field(default_factory=list)
    numbers: dict[bytes, int] = field(default_factory=dict)
    results: dict[bytes, bytes] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    unanswered: int = 0

    @property
    def per_second(self) -> float:
        return self.answered / self.seconds


class Generator:
    """Sends to one topic and reads from another; `open_generator` makes it.

    Args:
        keep_results: keep the values of results, to decode them after the measurement.
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        consumer: AIOKafkaConsumer,
        topic: str,
        make: Make,
        *,
        keep_results: bool,
    ) -> None:
        self._producer = producer
        self._consumer = consumer
        self._topic = topic
        self._make = make
        self._keep_results = keep_results
        self._next = 0
        self._due: dict[bytes, tuple[float, int]] = {}
        self._measured: Measured | None = None
        self._window = (0.0, 0.0)
        self._answered = asyncio.Event()
        self._refill: Callable[[], None] = lambda: None

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        options: Mapping[str, Any],
        *,
        input_topic: str,
        output_topic: str,
        make: Make,
        keep_results: bool = False,
        fetch_waits_fully: bool = False,
    ) -> AsyncIterator[Self]:
        """A generator that reads results from now on.

        Args:
            options: the Kafka client's.
            input_topic: where events go.
            output_topic: where results come from; a result has the event's key.
            make: makes events.
            keep_results: keep the values of results.
            fetch_waits_fully: see `streams.bench.stack.Stack.fetch_waits_fully`.
        """
        fetch_wait_ms = _FULL_FETCH_WAIT_MS if fetch_waits_fully else _FETCH_WAIT_MS
        async with (
            running_producer(options, linger_ms=0) as producer,
            running_consumer(options, fetch_max_wait_ms=fetch_wait_ms) as consumer,
        ):
            partitions = sorted(await producer.partitions_for(output_topic))
            consumer.assign([TopicPartition(output_topic, partition) for partition in partitions])
            await consumer.seek_to_end()
            for partition in consumer.assignment():
                await consumer.position(partition)
            generator = cls(producer, consumer, input_topic, make, keep_results=keep_results)
            reading = asyncio.create_task(generator.read())
            try:
                yield generator
            finally:
                reading.cancel()
                await asyncio.wait([reading])

    def ask(self, make: Make) -> None:
        """Make other events from now on."""
        self._make = make

    async def first_answer(self, *, timeout_seconds: float) -> None:
        """Send one event and wait for its result: the consumer has joined its group and is warm."""
        self._measured = None
        async with asyncio.timeout(timeout_seconds):
            await self._send(perf_counter())
            await self._drained()

    async def saturate(self, *, in_flight: int, warm_up: float, seconds: float, meter: CpuMeter) -> Measured:
        """Keep a number of events waiting or in flight."""

        def refill() -> None:
            if perf_counter() < self._window[1]:
                pending.append(asyncio.ensure_future(self._send(perf_counter())))

        pending: list[asyncio.Future[None]] = []
        began = perf_counter()
        measured = self._begin(began + warm_up, seconds)
        self._refill = refill
        for _ in range(in_flight):
            refill()
        await self._metered(meter, measured)
        self._refill = lambda: None
        await asyncio.gather(*pending)
        await self._drain(measured)
        return measured

    async def offer(self, *, per_second: float, warm_up: float, seconds: float, meter: CpuMeter) -> Measured:
        """Send at a fixed rate; latencies start when events were due."""
        began = perf_counter()
        measured = self._begin(began + warm_up, seconds)
        sending = asyncio.create_task(self._send_at(began, per_second, warm_up + seconds))
        await self._metered(meter, measured)
        await sending
        await self._drain(measured)
        return measured

    async def _send_at(self, began: float, per_second: float, seconds: float) -> None:
        pending = []
        for number in range(round(per_second * seconds)):
            due = began + number / per_second
            if (early := due - perf_counter()) > 0:
                await asyncio.sleep(early)
            pending.append(asyncio.ensure_future(self._send(due)))
        await asyncio.gather(*pending)

    def _begin(self, begin: float, seconds: float) -> Measured:
        self._window = (begin, begin + seconds)
        self._measured = Measured()
        return self._measured

    async def _metered(self, meter: CpuMeter, measured: Measured) -> None:
        begin, end = self._window
        await asyncio.sleep(begin - perf_counter())
        since, before = perf_counter(), meter.read()
        await asyncio.sleep(end - perf_counter())
        measured.seconds, after = perf_counter() - since, meter.read()
        measured.cpu = {name: after[name] - before[name] for name in before}

    async def _send(self, due: float) -> None:
        number, self._next = self._next, self._next + 1
        key, value = self._make(number)
        self._due[key] = (due, number)
        await self._producer.send(self._topic, value=value, key=key)

    async def read(self) -> None:
        async for record in self._consumer:
            now = perf_counter()
            waiting = self._due.pop(record.key, None)
            if waiting is None:  # a repeat, or left over from an earlier run
                continue
            due, number = waiting
            measured, (begin, end) = self._measured, self._window
            if measured is not None:
                if begin <= now <= end:
                    measured.answered += 1
                if begin <= due <= end:
                    measured.latencies.append(now - due)
                    measured.numbers[record.key] = number
                    if self._keep_results:
                        measured.results[record.key] = record.value
            self._refill()
            if not self._due:
                self._answered.set()

    async def _drained(self) -> None:
        while self._due:
            self._answered.clear()
            await self._answered.wait()

    async def _drain(self, measured: Measured) -> None:
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self._drained()
        except TimeoutError:
            begin, end = self._window
            measured.unanswered = sum(begin <= due <= end for due, _ in self._due.values())
            self._due.clear()
