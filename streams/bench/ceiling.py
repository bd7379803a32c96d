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
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import UUID

import asyncpg
import uvloop
from pgvector.asyncpg import register_vector

from streams.bench import BenchError
from streams.bench.cpu import CpuMeter
from streams.configured import load_profiles
from streams.core.messages import QueryEmbedding
from streams.core.profiles import resolve_params
from streams.retrieval import retrieve
from streams.settings import Settings
from streams.store.catalog import vector_schema
from streams.store.postgres import PooledConnection, PostgresStore
from streams.tokens import count_tokens

__all__ = [
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


@dataclass(frozen=True)
class Statement:
    """One statement that the store sent, with its values."""

    sql: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Recording:
    """The statements of each query, and the chunks in its result."""

    events: Sequence[Sequence[Statement]]
    answers: Sequence[frozenset[UUID]]

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
        statement_cache_size: as the worker has it; 0: without prepared statements, for a pooler.
        warm_up: seconds before the measurement.
        seconds: of the measurement.
        processes: whose CPU time to measure: name to process id.
    """

    dsn: str
    recording: str
    connections: int
    statement_cache_size: int
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


async def record(settings: Settings, queries: Sequence[QueryEmbedding]) -> Recording:
    """Answer each query once, as a worker with these settings, and write down the statements.

    Args:
        settings: the worker's.
        queries: what to ask.

    Raises:
        SettingsError: the profiles cannot be used.
        TerminalError: a query can never be answered.
        TransientError: the store cannot be searched.
    """
    profiles = load_profiles(settings)
    store = PostgresStore(
        settings.store_dsn,
        connections=1,  # so that the arms' transactions follow one another
        search_timeout_seconds=settings.anabranch_search_timeout_seconds,
        exact_scan_rows=settings.anabranch_exact_scan_rows,
        statement_cache_size=settings.anabranch_statement_cache_size,
        max_replication_lag_seconds=settings.anabranch_max_replication_lag_seconds,
    )
    await store.open()
    sent: list[Statement] = []

    async def observe(connection: PooledConnection) -> None:
        connection.add_query_logger(
            lambda query: sent.append(Statement(query.query, tuple(query.args or ())))
        )

    events: list[list[Statement]] = []
    answers: list[frozenset[UUID]] = []
    try:
        await store.inspect(observe)
        for query in queries:
            params = resolve_params(query, profiles, settings.anabranch_default_profile)
            for attempt in range(2):  # the first sends the introspection of types too, and fills caches
                sent.clear()
                found = await retrieve(query, params, store, count_tokens, started=perf_counter())
                if attempt or events:
                    break
            events.append(list(sent))
            answers.append(frozenset(passage.chunk_id for passage in found.result.results))
    finally:
        await store.close(timeout_seconds=5)
    return Recording(events, answers)


def save(events: Sequence[Sequence[Statement]], file: Path) -> None:
    """Write statements, for a `Job`."""
    file.write_bytes(pickle.dumps([list(event) for event in events]))


async def _connect(job: Job, statements: Iterable[Statement]) -> asyncpg.Connection:
    connection = await asyncpg.connect(
        job.dsn,
        statement_cache_size=job.statement_cache_size,
        server_settings={"application_name": "anabranch bench"},
    )
    # The driver loads the types of all statements; in one transaction, so that a pooler does not change the server.
    async with connection.transaction():
        await register_vector(connection, schema=await vector_schema(connection, for_sql=False))
        for statement in statements:
            await connection.fetch(statement.sql, *statement.values)
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
    each_once = {statement.sql: statement for event in events for statement in event}.values()
    connections = [await _connect(job, each_once) for _ in range(job.connections)]
    try:
        ask = [await _answering(connection, events, job.statement_cache_size) for connection in connections]
        return await drive(
            ask, warm_up=job.warm_up, seconds=job.seconds, processes=with_client(job.processes)
        )
    finally:
        for connection in connections:
            await connection.close()


async def _answering(
    connection: asyncpg.Connection, events: Sequence[Sequence[Statement]], statement_cache_size: int
) -> Callable[[int], Awaitable[None]]:
    if statement_cache_size == 0:

        async def answer(number: int) -> None:
            for statement in events[number % len(events)]:
                await connection.fetch(statement.sql, *statement.values)

        return answer

    prepared = {
        sql: await connection.prepare(sql)
        for sql in {statement.sql for event in events for statement in event}
    }

    async def answer_prepared(number: int) -> None:
        for statement in events[number % len(events)]:
            await prepared[statement.sql].fetch(*statement.values)

    return answer_prepared


async def run_loop(program: Sequence[str], job: Any) -> LoopResult:
    """Run a loop in a process of its own, so that its CPU time is only the loop's.

    Raises:
        BenchError: the program failed; the message has the last line of its standard error.
    """
    process = await asyncio.create_subprocess_exec(
        *program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(json.dumps(asdict(job)).encode())
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise BenchError(f"{program[-1]} exited with code {process.returncode}: {last}")
    return LoopResult(**json.loads(output))


async def run_ceiling(job: Job) -> LoopResult:
    """Measure the ceiling.

    Raises:
        BenchError: the loop failed.
    """
    return await run_loop([sys.executable, "-m", "streams.bench.ceiling"], job)


def main() -> None:
    job = Job(**json.loads(sys.stdin.read()))
    events = pickle.loads(Path(job.recording).read_bytes())  # noqa: S301  # written by our parent
    result = uvloop.run(replay(job, events))
    sys.stdout.write(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
