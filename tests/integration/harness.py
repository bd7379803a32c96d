"""A worker's surroundings: its process, its topics, and what comes out of them."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.request import urlopen
from uuid import UUID, uuid4

import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.structs import ConsumerRecord
from fastavro import schemaless_reader
from prometheus_client.parser import text_string_to_metric_families

from streams.broker.clients import running_admin
from streams.broker.topics import TopicSpec, create_topics, topic_specs
from streams.core.messages import QueryEmbedding
from streams.wire import Codec
from tests import accounting
from tests.accounting import Answer, Asked, Logged, Verdict
from tests.bad_inputs import NEWER_RESULT_WRITER, RESULT_WRITER
from tests.integration.corpora import unit_vectors

__all__ = [
    "PARTITIONS",
    "Channel",
    "OutputReader",
    "Samples",
    "Worker",
    "account",
    "anabranch",
    "as_avro",
    "as_json",
    "check_end",
    "command_seconds",
    "event_id_of",
    "events",
    "free_port",
    "open_channel",
    "query",
    "read_result",
    "start_anabranch",
    "topic_specs_of",
    "until",
]

Headers = Sequence[tuple[str, bytes | None]]

_ROOT = Path(__file__).resolve().parents[2]

PARTITIONS = 3
# More than the largest bad input.
_MAX_BYTES = 4 * 1024 * 1024

# Short clocks: a group of one waits this long for members that never come.
_CLOCKS = {
    "ANABRANCH_REBALANCE_TIMEOUT_SECONDS": "2",
    "ANABRANCH_SESSION_TIMEOUT_SECONDS": "6",
    "ANABRANCH_GRACE_PERIOD_SECONDS": "3",
    "ANABRANCH_LOG_FORMAT": "console",
}
# What the issue promises beyond the grace period.
_END_MARGIN_SECONDS = 5.0
# The shortest command takes a third of a second; a machine on which it takes longer than this is slow.
_SLOW_COMMAND_SECONDS = 0.75


# Topics


@dataclass(frozen=True)
class Channel:
    """One test's topics and group."""

    bootstrap_servers: str
    name: str
    producer: AIOKafkaProducer

    @property
    def input(self) -> str:
        return f"{self.name}.queries"

    @property
    def output(self) -> str:
        return f"{self.name}.results"

    @property
    def dead_letters(self) -> str:
        return f"{self.name}.dead"

    @property
    def replies(self) -> str:
        return f"{self.name}.replies"

    async def send(
        self,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        *,
        partition: int | None = None,
    ) -> tuple[int, int]:
        """Puts one event on the input topic; returns its partition and offset."""
        sent = await self.producer.send_and_wait(
            self.input, value, key=key, headers=list(headers), partition=partition
        )
        return sent.partition, sent.offset

    async def send_all(self, events: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        """Puts many (value, key) on the input topic, without waiting for each."""
        sent = [await self.producer.send(self.input, value, key=key) for value, key in events]
        await asyncio.gather(*sent)


@asynccontextmanager
async def open_channel(bootstrap_servers: str, name: str, *, copies: int = 1) -> AsyncIterator[Channel]:
    """Creates the topics as `anabranch topics` does, with so many replicas."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap_servers, acks="all", linger_ms=5, max_request_size=2 * _MAX_BYTES
    )
    channel = Channel(bootstrap_servers, name, producer)
    await create_topics({"bootstrap_servers": bootstrap_servers}, topic_specs_of(channel, copies=copies))
    await producer.start()
    try:
        yield channel
    finally:
        await producer.stop()


def topic_specs_of(channel: Channel, *, copies: int = 1) -> list[TopicSpec]:
    """The channel's topics, as `anabranch topics` creates them."""
    return topic_specs(
        input_topic=channel.input,
        output_topic=channel.output,
        dead_letter_topic=channel.dead_letters,
        partitions=PARTITIONS,
        replication_factor=copies,
        max_event_bytes=_MAX_BYTES,
        reply_topics=[channel.replies],
    )


async def configure_topic(bootstrap_servers: str, topic: str, **config: str) -> None:
    """Sets options of a topic; the others become the broker's defaults. Returns when the broker reports them."""
    async with running_admin({"bootstrap_servers": bootstrap_servers}) as admin, asyncio.timeout(30):
        wanted = ConfigResource(ConfigResourceType.TOPIC, topic, configs=config)
        [response] = await admin.alter_configs([wanted])
        assert [error for error, *_ in response.resources] == [0], response
        reported: dict[str, str] = {}
        while not config.items() <= reported.items():
            [response] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
            reported = {name: value for name, value, *_ in response.resources[0][4]}


class OutputReader:
    """Reads results, dead letters and replies into memory, in the background, from the beginning."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._reading: asyncio.Task[None] | None = None
        self._consumer: AIOKafkaConsumer | None = None
        self.results: list[ConsumerRecord] = []
        self.dead_letters: list[ConsumerRecord] = []
        self.replies: list[ConsumerRecord] = []

    async def __aenter__(self) -> Self:
        self._consumer = AIOKafkaConsumer(
            *self._records_by_topic(),
            bootstrap_servers=self._channel.bootstrap_servers,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=2 * _MAX_BYTES,
        )
        await self._consumer.start()
        self._reading = asyncio.create_task(self._read(self._consumer))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reading is not None
        assert self._consumer is not None
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        # Where a broker went away, aiokafka passes on how it cancelled its own tasks, and does not get to its client.
        with suppress(asyncio.CancelledError):
            await self._consumer.stop()
        await self._consumer._client.close()

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        records = self._records_by_topic()
        async for record in consumer:
            records[record.topic].append(record)

    def _records_by_topic(self) -> dict[str, list[ConsumerRecord]]:
        channel = self._channel
        return {
            channel.output: self.results,
            channel.dead_letters: self.dead_letters,
            channel.replies: self.replies,
        }

    async def until(
        self, *, results: int = 0, dead_letters: int = 0, replies: int = 0, seconds: float = 60
    ) -> None:
        """Waits until at least so many have come."""
        assert self._reading is not None
        reading = self._reading

        def there() -> bool:
            if reading.done():
                reading.result()  # its exception, if it has one
            return (
                len(self.results) >= results
                and len(self.dead_letters) >= dead_letters
                and len(self.replies) >= replies
            )

        await until(
            there,
            lambda: (
                f"{len(self.results)} of {results} results, "
                f"{len(self.dead_letters)} of {dead_letters} dead letters, "
                f"{len(self.replies)} of {replies} replies"
            ),
            seconds=seconds,
        )

    async def until_answered(self, asked: set[str], *, seconds: float) -> None:
        """Waits until each of these events has a result."""
        answered: set[str] = set()
        seen = 0

        def there() -> bool:
            nonlocal seen
            answered.update(event_id_of(record) for record in self.results[seen:])
            seen = len(self.results)
            return asked <= answered

        def progress() -> str:
            lost = sorted(asked - answered)
            return f"{len(lost)} of {len(asked)} events have no result: {', '.join(lost[:10])}"

        await until(there, progress, seconds=seconds)


async def until(condition: Callable[[], bool], progress: Callable[[], str], *, seconds: float) -> None:
    """Waits for a condition.

    Raises:
        AssertionError: it does not come true in time; with the progress so far.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:.0f} s: {progress()}")
        await asyncio.sleep(0.02)


# Accounting


def account(asked: Iterable[str], results: Iterable[ConsumerRecord]) -> Verdict:
    """The accounting where each event has a result; an event's offset is its number in the order of asking."""
    names = list(dict.fromkeys(asked))
    return accounting.account(
        [Asked(name, None) for name in names],
        [Logged(name, 0, number) for number, name in enumerate(names)],
        [Answer(event_id_of(record), "result", b"") for record in results],
    )


def event_id_of(record: ConsumerRecord) -> str:
    return str(read_result(record.value)["event_id"])


# Messages

_CODEC = Codec()


def query(embedding: Sequence[float] | np.ndarray, **fields: Any) -> dict[str, Any]:
    """A query event, now, with an id of its own, as a JSON dictionary."""
    return {
        "schema_version": "1.0.0",
        "event_id": str(uuid4()),
        "occurred_at": datetime.now(UTC).isoformat(),
        "principals": ["user:1"],
        "embedding": [float(component) for component in embedding],
    } | {name: str(value) if isinstance(value, UUID) else value for name, value in fields.items()}


def as_json(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event).encode()


def as_avro(event: Mapping[str, Any]) -> bytes:
    """In Avro single-object encoding."""
    return _CODEC.encode_query(QueryEmbedding.parse(dict(event)))


def events(count: int) -> dict[str, bytes]:
    """Event id to value, for events that a small store answers."""
    vectors = unit_vectors(16, 2)
    asked = (
        query(vectors[number % 16], profile="docs", k=1, similarity_threshold=0) for number in range(count)
    )
    return {event["event_id"]: as_avro(event) for event in asked}


def read_result(value: bytes | None) -> dict[str, Any]:
    """A result, by Avro's own rules and the derived schema: nothing of the worker's codec takes part."""
    assert value is not None
    assert value[:2] == b"\xc3\x01"
    writers = {writer.fingerprint: writer for writer in (RESULT_WRITER, NEWER_RESULT_WRITER)}
    writer = writers[value[2:10]]
    stream = BytesIO(value[10:])
    result = schemaless_reader(stream, writer.schema)
    assert stream.read() == b""
    assert isinstance(result, dict)
    assert result["schema_version"] == ("1.0.0" if writer is RESULT_WRITER else "1.1.0")
    return result


# Processes


def _environment(channel: Channel, dsn: str | None) -> dict[str, str]:
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "KAFKA_BOOTSTRAP_SERVERS": channel.bootstrap_servers,
        "ANABRANCH_INPUT_TOPIC": channel.input,
        "ANABRANCH_OUTPUT_TOPIC": channel.output,
        "ANABRANCH_DEAD_LETTER_TOPIC": channel.dead_letters,
        "ANABRANCH_REPLY_TOPICS": channel.replies,
    }
    if dsn is not None:
        environment["DATABASE_CONNECTION_STRING"] = dsn
    return environment


def anabranch(
    *arguments: str, channel: Channel, dsn: str | None = None, given: str = "", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Any of the commands, as an operator runs it.

    Args:
        arguments: the command and its options.
        channel: the topics.
        dsn: ``DATABASE_CONNECTION_STRING``.
        given: standard input.
        settings: more of the environment.
    """
    return subprocess.run(
        [sys.executable, "-m", "streams", *arguments],
        cwd=_ROOT,
        env={**_environment(channel, dsn), **settings},
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def command_seconds() -> float:
    """How long the shortest command takes: a measure of how fast this machine is at the moment."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "streams", "--version"], cwd=_ROOT, capture_output=True, check=True)
    return time.monotonic() - began


def start_anabranch(*arguments: str, channel: Channel) -> subprocess.Popen[str]:
    """The same, not waited for; its output is piped."""
    return subprocess.Popen(
        [sys.executable, "-m", "streams", *arguments],
        cwd=_ROOT,
        env=_environment(channel, None),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Samples:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, str] = {}
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            self.families[family.name] = family.type
            for sample in family.samples:
                self._values[sample.name, frozenset(sample.labels.items())] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """One sample; absent is an error."""
        return self._values[name, frozenset(labels.items())]

    def all(self, name: str) -> dict[tuple[str, ...], float]:
        """Label values (in the order of the labels' names) to value."""
        return {
            tuple(value for _, value in sorted(labels)): number
            for (sample, labels), number in self._values.items()
            if sample == name
        }

    def nonzero(self, name: str) -> dict[tuple[str, ...], float]:
        """As `all`, without the series that are there from the start."""
        return {labels: number for labels, number in self.all(name).items() if number}

    def total(self, name: str) -> float:
        return sum(self.all(name).values())

    def labels(self) -> dict[str, set[str]]:
        """Each metric's name to its labels' names; a histogram counts as one, without ``le``."""
        names: dict[str, set[str]] = {}
        for name, labels in self._values:
            for suffix in ("_bucket", "_count", "_sum", "_created"):
                base = name.removesuffix(suffix)
                if base in self.families and self.families[base] == "histogram":
                    break
            else:
                base = name
            if not base.endswith("_created"):
                names.setdefault(base, set()).update(label for label, _ in labels if label != "le")
        return names


class Worker:
    """``anabranch worker`` in a process of its own, logging into a file.

    Args:
        program: what Python runs instead.
    """

    def __init__(
        self,
        log_file: Path,
        channel: Channel,
        dsn: str | None,
        settings: Mapping[str, str],
        program: Sequence[str] = ("-m", "streams", "worker"),
    ) -> None:
        self.log_file = log_file
        self.port = free_port()
        environment = {
            **_environment(channel, dsn),
            "ANABRANCH_CONSUMER_GROUP": channel.name,
            "ANABRANCH_WEB_PORT": str(self.port),
            **_CLOCKS,
            **settings,
        }
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error::ResourceWarning", *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                env=environment,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def page(self, path: str) -> tuple[int, str]:
        """Status and body; 0 where nobody answers."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (URLError, OSError) as error:
            return 0, str(error)

    def is_live(self) -> bool:
        return self.page("/healthz/live")[0] == 200

    def is_ready(self) -> bool:
        return self.page("/healthz/ready")[0] == 200

    async def scrape(self) -> Samples:
        status, text = await asyncio.to_thread(self.page, "/metrics")
        assert status == 200, text
        return Samples(text)

    async def until_ready(self, *, ready: bool = True, seconds: float = 30) -> float:
        """Waits for readiness, or the end of it; returns how long that took."""
        began = time.monotonic()
        while True:
            assert self.process.poll() is None, f"the worker ended:\n{self.log[-4000:]}"
            status, body = await asyncio.to_thread(self.page, "/healthz/ready")
            if status == (200 if ready else 503):
                return time.monotonic() - began
            assert time.monotonic() - began < seconds, f"readiness is {status} {body}\n{self.log[-4000:]}"
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    async def terminate(self, *, seconds: float = 15) -> tuple[int, float]:
        """SIGTERM; returns the exit code and how long it took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return await self.ended(seconds=seconds), time.monotonic() - began

    async def ended(self, *, seconds: float) -> int:
        """Waits for its end; returns the exit code."""
        await until(
            lambda: self.process.poll() is not None,
            lambda: f"it runs on\n{self.log[-4000:]}",
            seconds=seconds,
        )
        assert self.process.returncode is not None
        return self.process.returncode

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.kill()


def check_end(worker: Worker, code: int, seconds: float, *, grace_seconds: float) -> None:
    """Checks that a worker ended in time after SIGTERM, with exit code 0.

    On a slow machine the cleanup may take longer than the time limit, which ends the worker with exit code 1, in time.
    """
    assert seconds < grace_seconds + _END_MARGIN_SECONDS, f"ended {seconds:.1f} s after SIGTERM"
    if code == 1 and "forcing exit" in worker.log:
        assert command_seconds() > _SLOW_COMMAND_SECONDS, f"the shutdown hung:\n{worker.log[-4000:]}"
    else:
        assert code == 0, f"exit code {code} after SIGTERM\n{worker.log[-4000:]}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
