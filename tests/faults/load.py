"""Load that does not wait for answers, and remembers what it asked."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import count, cycle

import numpy as np
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord
from fastavro import schemaless_writer

from streams.core.replies import CORRELATION_ID_HEADER, ReplyTarget, reply_request_headers
from tests.accounting import Answer, Asked
from tests.bad_inputs import BAD_INPUTS, RESULT_WRITER
from tests.batches import Headers, batch, produce
from tests.integration.corpora import unit_vectors
from tests.integration.embedder.stages import question
from tests.integration.harness import PARTITIONS, as_avro, as_json, query, read_result

__all__ = [
    "NAME_HEADER",
    "Event",
    "Load",
    "answer_of",
    "good_events",
    "name_of",
    "names_of",
    "poisoned",
    "questions",
    "reply_name_of",
]

# Carried from each event to its answers, whatever becomes of it.
NAME_HEADER = "fault-suite-event"

_KEYS = 24
# Not a divisor of the number of keys: every partition has some.
_REPLY_EVERY = 5
_VECTORS = unit_vectors(16, 2)
_SEND_TIMEOUT_MS = 120_000
_MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Event:
    """An event to send, and what is to come of it."""

    asked: Asked
    value: bytes


def good_events(vectors: Sequence[np.ndarray] | np.ndarray = _VECTORS, **fields: object) -> Iterator[Event]:
    """Each with one short answer, under one of a few keys; some ask for a reply too.

    Args:
        vectors: what is asked for, in turn.
        fields: the same for every event.
    """
    for number, vector in enumerate(cycle(vectors)):
        event = query(vector, **{"profile": "docs", "k": 1, "similarity_threshold": 0, **fields})
        asked = Asked(event["event_id"], b"key-%d" % (number % _KEYS), wants_reply=number % _REPLY_EVERY == 0)
        yield Event(asked, as_avro(event))


def questions() -> Iterator[Event]:
    """Questions in words, as `good_events`; one in twenty is empty."""
    for number in count():
        text = " " if number % 20 == 10 else f"What is said about number {number}?"
        event = question(text, profile="docs", k=1, similarity_threshold=0)
        code = "empty_text" if text == " " else None
        yield Event(Asked(event["event_id"], b"key-%d" % (number % _KEYS), code), as_json(event))


def poisoned(events: Iterator[Event], *, every: int) -> Iterator[Event]:
    """Of so many events one that can never succeed: each kind of bad input in turn."""
    kinds = cycle(BAD_INPUTS)
    for number in count():
        if number % every == every // 2:
            kind, value, code = next(kinds)
            yield Event(Asked(f"{kind} ({number})", b"bad-%d" % (number % _KEYS), code), value)
        else:
            yield next(events)


class Load:
    """Sends events at a steady pace, whether or not anybody answers.

    Args:
        bootstrap_servers: past the proxies.
        topic: where to.
        replies: where replies go.
        events: what to send.
        per_second: how many.

    Attributes:
        asked: what was made, by name.
        acknowledged: names that the broker has confirmed.
        places: partition and offset to the name of what stands there, where it was sent as part of a batch.
        sent: name to partition, and the moment it was sent (seconds since the epoch), of these.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        events: Iterator[Event],
        *,
        replies: str,
        per_second: float,
    ) -> None:
        self._topic = topic
        self._replies = replies
        self._events = events
        self.per_second = per_second
        self.asked: dict[str, Asked] = {}
        self.acknowledged: set[str] = set()
        self.places: dict[tuple[int, int], str] = {}
        self.sent: dict[str, tuple[int, float]] = {}
        self._over = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self.producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers,
            enable_idempotence=True,  # the input topic has each event once
            linger_ms=5,
            request_timeout_ms=_SEND_TIMEOUT_MS,
            max_request_size=_MAX_BYTES,
        )

    async def start(self) -> None:
        """Begins to send."""
        self._running = asyncio.create_task(self._run())

    async def finish(self) -> None:
        """Sends nothing new, and waits for what is under way."""
        self._over.set()
        if self._running is not None:
            await self._running
        if self._sending:
            await asyncio.wait(set(self._sending))

    async def close(self) -> None:
        self._over.set()
        if self._running is not None:
            self._running.cancel()
        for task in set(self._sending):
            task.cancel()
        await self.producer.stop()

    def send(self, event: Event, partition: int | None = None) -> None:
        """Sends one now, out of turn."""
        self.asked[event.asked.name] = event.asked
        task = asyncio.create_task(self._send(event, partition))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def send_batch(
        self,
        events: Sequence[Event],
        partition: int,
        codec: str = "none",
        compress: Callable[[bytes], bytes] = bytes,
        headers: Headers = (),
    ) -> None:
        """Sends a batch of its own, with more headers, and waits until it is there."""
        records = [(event.asked.key, event.value, [*self.headers(event), *headers]) for event in events]
        self.asked |= {event.asked.name: event.asked for event in events}
        made = await asyncio.to_thread(batch, records, codec, compress)  # the proxies live in this loop
        first = await produce(self.producer, self._topic, partition, made)
        for offset, event in enumerate(events, start=first):
            self.places[partition, offset] = event.asked.name
            self.acknowledged.add(event.asked.name)

    async def send_now(self, event: Event, partition: int) -> None:
        """As `send`, and waits until it is there."""
        self.asked[event.asked.name] = event.asked
        await self._send(event, partition)

    async def _run(self) -> None:
        began = time.monotonic()
        for number in count():
            if self._over.is_set():
                return
            await asyncio.sleep(max(0.0, began + number / self.per_second - time.monotonic()))
            self.send(next(self._events))

    def headers(self, event: Event) -> list[tuple[str, bytes]]:
        """Its name, and where its reply goes if it wants one."""
        asked = event.asked
        headers = [(NAME_HEADER, asked.name.encode())]
        if asked.wants_reply:
            partition = len(self.asked) % PARTITIONS
            headers += reply_request_headers(ReplyTarget(self._replies, partition), asked.name.encode())
        return headers

    async def _send(self, event: Event, partition: int | None) -> None:
        name = event.asked.name
        began = time.time()
        try:
            sent = await self.producer.send_and_wait(
                self._topic,
                event.value,
                key=event.asked.key,
                partition=partition,
                headers=self.headers(event),
            )
        except KafkaError:
            return  # the input topic tells whether it came
        self.acknowledged.add(name)
        self.sent[name] = sent.partition, began


def name_of(record: ConsumerRecord) -> str:
    """Which event a record is, or answers."""
    return str(dict(record.headers)[NAME_HEADER], "utf-8")


def names_of(record: ConsumerRecord, places: Mapping[tuple[int, int], str]) -> list[str]:
    """The events that a record answers: several, by where they stand, if it is a placeholder for a batch."""
    headers = dict(record.headers)
    if NAME_HEADER in headers:
        return [name_of(record)]
    first, last = (int(headers[f"anabranch.placeholder.{end}.offset"]) for end in ("first", "last"))
    partition = int(headers["__connect.errors.partition"])
    return [places.get((partition, at), f"[{partition}]@{at}") for at in range(first, last + 1)]


def reply_name_of(record: ConsumerRecord) -> str:
    """Which event a reply is one to; it has that event's correlation id, and its result or an error's code."""
    name, headers = name_of(record), dict(record.headers)
    assert headers[CORRELATION_ID_HEADER].decode() == name
    if record.value:
        assert str(read_result(record.value)["event_id"]) == name
    else:
        assert "anabranch.error.code" in headers
    return name


def answer_of(record: ConsumerRecord, name: str, *, is_result: bool) -> Answer:
    """What the accounting needs to know of a record that came out, as the answer to one of its events."""
    headers = repr(list(record.headers)).encode()
    if not is_result:
        content = b"\0".join([record.key or b"", record.value or b"", headers])
        code = dict(record.headers)["anabranch.error.code"].decode()
        return Answer(name, "dead_letter", content, code)
    result = read_result(record.value)
    assert str(result["event_id"]) == name, f"the answer to {name} is one to {result['event_id']}"
    out = BytesIO()
    schemaless_writer(out, RESULT_WRITER.schema, result | {"query_time_ms": 0})
    return Answer(name, "result", b"\0".join([record.key or b"", out.getvalue(), headers]))
