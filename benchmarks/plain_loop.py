"""The plain statements in a bare loop: ``python -m benchmarks.plain_loop`` reads a `PlainJob` from standard input.

It runs in the project's environment, with the same loop as the ceiling.
"""

import json
import pickle
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from benchmarks.peers.plain import PlainStore, connect, search, server_settings
from streams.bench.ceiling import LoopResult, drive, with_client

__all__ = ["PlainJob"]


@dataclass(frozen=True)
class PlainJob:
    """One measurement; the fields are those of `streams.bench.ceiling.Job`, with the statements' options."""

    dsn: str
    events: str
    connections: int
    warm_up: float
    seconds: float
    store: dict[str, Any]
    ef_search: int
    plan_cache_mode: str = "auto"
    processes: dict[str, int] = field(default_factory=dict)


async def run(job: PlainJob, events: Sequence[Mapping[str, Any]]) -> LoopResult:
    store = PlainStore(**job.store)
    connections = []
    for _ in range(job.connections):
        settings = server_settings(job.ef_search, job.plan_cache_mode)
        connection = await asyncpg.connect(job.dsn, server_settings=settings)
        await connect(connection)
        connections.append(connection)

    def asking(connection: asyncpg.Connection) -> Callable[[int], Awaitable[object]]:
        return lambda number: search(connection, store, events[number % len(events)])

    try:
        return await drive(
            [asking(connection) for connection in connections],
            warm_up=job.warm_up,
            seconds=job.seconds,
            processes=with_client(job.processes),
        )
    finally:
        for connection in connections:
            await connection.close()


if __name__ == "__main__":
    plain_job = PlainJob(**json.loads(sys.stdin.read()))
    asked = pickle.loads(Path(plain_job.events).read_bytes())  # noqa: S301  # written by our parent
    result = uvloop.run(run(plain_job, asked))
    sys.stdout.write(json.dumps(asdict(result)))
