"""The ceiling: the same SQL for the same events in a bare asyncpg loop, without Kafka, contracts or selection.

Nothing here knows the statements. `record` lets `retrieve` answer each query once, and writes down what its store
sends; the loop then sends the same statements with the same values, prepared, one event after another on each of its
connections. Run as a program, it measures itself: ``python -m streams.bench.ceiling`` reads a `Job` from standard input
and prints the `LoopResult` as JSON.
"""

import asyncio
import json
import os
import pickle
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from uuid import UUID

import asyncpg
import uvloop
from pgvector.asyncpg import register_vector

from streams.bench.cpu import CpuMeter
from streams.core.messages import QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, resolve_params
from streams.retrieval import retrieve
from streams.store.postgres import PooledConnection, PostgresStore
from streams.tokens import count_tokens

__all__ = [
    "Answer",
    "Job",
    "LoopResult",
    "Recording",
    "Statement",
    "drive",
    "record",
    "run_ceiling",
    "run_loop",
    "save",
    "with_client",
]

# Sent as they are: the driver's simple protocol, which the store uses for them too.
_CONTROL: Final = ("BEGIN", "COMMIT")


@dataclass(frozen=True)
class Statement:
    """One statement that the store sent, with its values."""

    sql: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What `retrieve` returned for one query."""

    chunk_ids: frozenset[UUID]
    search_seconds: float
    arm_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Recording:
    """The statements of each query, and the answers."""

    events: Sequence[Sequence[Statement]]
    answers: Sequence[Answer]

    def save(self, file: Path) -> None:
        """Write the statements, for a `Job`."""
        save(self.events, file)


@dataclass(frozen=True)
class Job:
    """One measurement of the loop.

    Attributes:
        dsn: of the role to search as.
        recording: a file with a pickled list of lists of `Statement`.
        connections: events in flight, one on each connection.
        warm_up: seconds before the measurement.
        seconds: of the measurement.
        processes: whose CPU time to measure: name to process id.
    """

    dsn: str
    recording: str
    connections: int
    warm_up: float
    seconds: float
    processes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoopResult:
    """A measurement of the loop; CPU in seconds by name, the loop's own as ``client``."""

    events: int
    seconds: float
    cpu: dict[str, float]
    latencies: list[float]

    @property
    def per_second(self) -> float:
        return self.events / self.seconds


async def record(dsn: str, queries: Sequence[QueryEmbedding]) -> Recording:
    """Answer each query once, and write down the statements.

    Args:
        dsn: of the worker's role.
        queries: what to ask.
    """
    store = PostgresStore(
        dsn,
        connections=1,  # so that the arms' transactions follow one another
        search_timeout_seconds=20,
        exact_scan_rows=20_000,
    )
    await store.open()
    sent: list[Statement] = []

    async def observe(connection: PooledConnection) -> None:
        connection.add_query_logger(
            lambda query: sent.append(Statement(query.query, tuple(query.args or ())))
        )

    events: list[list[Statement]] = []
    answers: list[Answer] = []
    try:
        await store.inspect(observe)
        for query in queries:
            params = resolve_params(query, BUILTIN_PROFILES, "extraction")
            for attempt in range(2):  # the first sends the introspection of types too, and fills caches
                sent.clear()
                found = await retrieve(query, params, store, count_tokens, started=perf_counter())
                if attempt or events:
                    break
            events.append(list(sent))
            answers.append(
                Answer(
                    frozenset(passage.chunk_id for passage in found.result.results),
                    found.search_seconds,
                    tuple(found.arm_seconds.values()),
                )
            )
    finally:
        await store.close(timeout_seconds=5)
    return Recording(events, answers)


def save(events: Sequence[Sequence[Statement]], file: Path) -> None:
    """Write statements, for a `Job`."""
    file.write_bytes(pickle.dumps([list(event) for event in events]))


async def _connect(dsn: str, **server_settings: str) -> asyncpg.Connection:
    connection = await asyncpg.connect(
        dsn, server_settings={"application_name": "anabranch bench", **server_settings}
    )
    await register_vector(connection)
    return connection


async def drive(
    ask: Sequence[Callable[[int], Awaitable[object]]],
    *,
    warm_up: float,
    seconds: float,
    processes: dict[str, int],
) -> LoopResult:
    """Ask one event after another on each connection, for a time.

    Args:
        ask: for each connection, what answers the event with a number.
        warm_up: seconds before the measurement.
        seconds: of the measurement.
        processes: whose CPU time to measure.
    """
    meter = CpuMeter(processes)
    latencies: list[float] = []
    begin = perf_counter() + warm_up
    end = begin + seconds

    async def worker(number: int) -> None:
        one, event = ask[number], number
        while (began := perf_counter()) < end:
            await one(event)
            done = perf_counter()
            if began >= begin and done <= end:
                latencies.append(done - began)
            event += len(ask)

    async def read_meter(at: float) -> tuple[float, dict[str, float]]:
        await asyncio.sleep(at - perf_counter())
        return perf_counter(), meter.read()

    working = asyncio.gather(*(worker(number) for number in range(len(ask))))
    (since, before), (until, after) = await asyncio.gather(read_meter(begin), read_meter(end))
    await working
    return LoopResult(
        events=len(latencies),
        seconds=until - since,
        cpu={name: after[name] - before[name] for name in before},
        latencies=latencies,
    )


def with_client(processes: dict[str, int]) -> dict[str, int]:
    """Processes to measure, and this one as ``client``."""
    return {**processes, "client": os.getpid()}


async def replay(job: Job, events: Sequence[Sequence[Statement]]) -> LoopResult:
    connections = [await _connect(job.dsn) for _ in range(job.connections)]
    try:
        ask = [await _answering(connection, events) for connection in connections]
        return await drive(
            ask, warm_up=job.warm_up, seconds=job.seconds, processes=with_client(job.processes)
        )
    finally:
        for connection in connections:
            await connection.close()


async def _answering(
    connection: asyncpg.Connection, events: Sequence[Sequence[Statement]]
) -> Callable[[int], Awaitable[None]]:
    prepared: dict[str, asyncpg.prepared_stmt.PreparedStatement | None] = {}
    for sql in {statement.sql for event in events for statement in event}:
        prepared[sql] = None if sql.startswith(_CONTROL) else await connection.prepare(sql)

    async def answer(number: int) -> None:
        for statement in events[number % len(events)]:
            ready = prepared[statement.sql]
            if ready is None:
                await connection.execute(statement.sql)
            else:
                await ready.fetch(*statement.values)

    return answer


async def run_loop(program: Sequence[str], job: Any) -> LoopResult:
    """Run a loop in a process of its own, so that its CPU time is only the loop's.

    Raises:
        RuntimeError: the program failed; the message has the end of its standard error.
    """
    process = await asyncio.create_subprocess_exec(
        *program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(json.dumps(asdict(job)).encode())
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(program)}: {errors.decode(errors='replace')[-2000:]}")
    return LoopResult(**json.loads(output))


async def run_ceiling(job: Job) -> LoopResult:
    """Measure the ceiling.

    Raises:
        RuntimeError: the loop failed.
    """
    return await run_loop([sys.executable, "-m", "streams.bench.ceiling"], job)


def main() -> None:
    job = Job(**json.loads(sys.stdin.read()))
    events = pickle.loads(Path(job.recording).read_bytes())  # noqa: S301  # written by our parent
    result = uvloop.run(replay(job, events))
    sys.stdout.write(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
