"""`anabranch publish`: publishes events, or questions in words, from JSONL."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar
from uuid import uuid4

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from streams.broker.clients import running_producer
from streams.broker.topics import partitions_of
from streams.core.errors import TerminalError
from streams.core.messages import (
    DIMENSIONS,
    QUERY_TEXT_VERSION,
    SCHEMA_VERSION,
    QueryEmbedding,
    QueryText,
    in_oldest_version,
)
from streams.rate_limiter import RateLimiter
from streams.settings import Settings
from streams.terminal import Console, echo
from streams.wire import Codec
from streams.wire.json_lines import load_line, numbered

__all__ = ["InvalidLine", "Line", "Published", "publish_events", "read_events", "read_texts"]

_Event = TypeVar("_Event", QueryEmbedding, QueryText)

_IDS_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Line(Generic[_Event]):
    """A valid line.

    Attributes:
        number: from 1.
        event: complete: what the line lacks is filled in.
        is_dated: whether the line has `occurred_at`.
    """

    number: int
    event: _Event
    is_dated: bool

    def event_at(self, now: datetime) -> _Event:
        """The event to publish at an instant, which is its `occurred_at` if the line has none."""
        return self.event if self.is_dated else self.event.model_copy(update={"occurred_at": now})


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A line that violates the contract.

    Attributes:
        number: from 1.
        code: of the error, as of a dead letter.
        reason: never quotes the line.
    """

    number: int
    code: str
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.code}: {self.reason}"


def read_events(
    lines: Iterable[bytes], *, dimensions: int = DIMENSIONS
) -> tuple[list[Line[QueryEmbedding]], list[InvalidLine]]:
    """Read query events. Each gets the oldest ``schema_version`` that can express it.

    Missing are filled in: ``schema_version``, ``event_id`` (random), and ``occurred_at`` when the event is published.

    Args:
        lines: JSON objects, one per line; blank lines are skipped.
        dimensions: the number of components that the embeddings must have.
    """
    return _read(
        lines,
        lambda record: in_oldest_version(QueryEmbedding.parse(record, dimensions=dimensions)),
        SCHEMA_VERSION,
    )


def read_texts(lines: Iterable[bytes]) -> tuple[list[Line[QueryText]], list[InvalidLine]]:
    """Read questions in words, and fill in what `read_events` fills in.

    Args:
        lines: JSON objects, one per line; blank lines are skipped.
    """
    return _read(lines, QueryText.parse, QUERY_TEXT_VERSION)


def _read(
    lines: Iterable[bytes], parse: Callable[[dict[str, Any]], _Event], version: str
) -> tuple[list[Line[_Event]], list[InvalidLine]]:
    valid, invalid = [], []
    for number, line in numbered(lines):
        try:
            record = load_line(line)
            missing = {"schema_version": version, "event_id": uuid4(), "occurred_at": datetime.now(UTC)}
            valid.append(Line(number, parse(missing | record), "occurred_at" in record))
        except TerminalError as error:
            invalid.append(InvalidLine(number, error.code, str(error)))
    return valid, invalid


async def publish_events(
    settings: Settings,
    options: dict[str, Any],
    lines: Sequence[Line[Any]],
    *,
    rate: float | None,
    acknowledged: Callable[[Line[Any]], object],
) -> None:
    """Publish as Avro, keyed by event id; returns when the broker has acknowledged all of them.

    Args:
        settings: for the topic.
        options: for the client.
        lines: what to publish.
        rate: events per second; None: unlimited.
        acknowledged: called with each line whose event the broker has acknowledged, in order as long as none fails.

    Raises:
        MissingTopics: the input topic does not exist.
        KafkaError: the broker is unreachable or rejects an event.
        OSError: from `acknowledged`; no more events are published.
    """
    await partitions_of(options, [settings.anabranch_input_topic])
    codec = Codec()
    limiter = None if rate is None else RateLimiter(rate, asyncio.get_running_loop().time)
    async with running_producer(options) as producer:
        deliveries = _Deliveries(acknowledged)
        for line in lines:
            if limiter is not None:
                await asyncio.sleep(limiter.delay())
            if deliveries.must_stop:
                break
            event = line.event_at(datetime.now(UTC))
            delivery = await producer.send(
                settings.anabranch_input_topic,
                value=codec.encode_text(event) if isinstance(event, QueryText) else codec.encode_query(event),
                key=str(event.event_id).encode(),
            )
            deliveries.add(line, delivery)
        await deliveries.finish()


class _Deliveries:
    """What was sent and is not yet acknowledged."""

    def __init__(self, acknowledged: Callable[[Line[Any]], object]) -> None:
        self._acknowledged = acknowledged
        self._waiting: deque[tuple[Line[Any], asyncio.Future[Any]]] = deque()
        self._output_error: OSError | None = None

    @property
    def must_stop(self) -> bool:
        """Whether a delivery failed, or its id could not be printed."""
        if self._output_error is not None:
            return True
        if not self._waiting:
            return False
        _, first = self._waiting[0]
        return first.done() and first.exception() is not None

    def add(self, line: Line[Any], delivery: asyncio.Future[Any]) -> None:
        self._waiting.append((line, delivery))
        delivery.add_done_callback(self._report)

    async def finish(self) -> None:
        """Wait for the rest; raise the first failure."""
        if self._waiting:
            await asyncio.wait([delivery for _, delivery in self._waiting])
        failures: list[BaseException] = []
        while self._waiting:
            self._report()
            if self._waiting:
                _, failed = self._waiting.popleft()
                failures += filter(None, [failed.exception()])
        for error in (self._output_error, *failures):
            if error is not None:
                raise error

    def _report(self, _: object = None) -> None:
        """Report what is acknowledged, up to the first delivery that is not."""
        while self._waiting:
            line, delivery = self._waiting[0]
            if not delivery.done() or delivery.exception() is not None:
                return
            self._waiting.popleft()
            try:
                self._acknowledged(line)
            except OSError as error:  # a callback's exception would only be logged
                self._output_error = error


class Published:
    """Prints the ids of what was published, while a bar shows the progress.

    If standard output is a terminal, it prints the first ids at the end, else every id as soon as its event is
    acknowledged, one per line. The bar is on standard error, if that is a terminal.

    Args:
        topic: where to.
        total: the number of events to publish.
    """

    def __init__(self, topic: str, total: int) -> None:
        self._topic = topic
        self._total = total
        self._on_terminal = sys.stdout.isatty()
        self._first: list[Line[Any]] = []
        self._count = 0
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("publishing"),
            BarColumn(),
            TextColumn("{task.completed} of {task.total} events"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,  # the ids may be piped
        )
        self._task = self._bar.add_task("", total=total)

    def acknowledged(self, line: Line[Any]) -> None:
        self._count += 1
        self._bar.advance(self._task)
        if not self._on_terminal:
            echo(str(line.event.event_id))
        elif len(self._first) < _IDS_SHOWN:
            self._first.append(line)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if error is not None and not self._count:
            return
        for line in self._first:
            echo(f"line {line.number}  {line.event.event_id}")
        if self._on_terminal and self._count > len(self._first):
            echo(f"and {self._count - len(self._first)} more; redirect the output to a file to get all ids")
        events = "1 event" if self._total == 1 else f"{self._total} events"
        if error is None:
            echo(f"published {events} to {self._topic}", err=not self._on_terminal)
        else:
            echo(f"published only {self._count} of {events} to {self._topic}", err=True)
