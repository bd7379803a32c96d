"""``python -m benchmarks.pooler``: what a store's search costs through PgBouncer, and without prepared statements.

Small searches, so that round trips and parsing weigh most. The ways take turns, so that a busy minute of the machine
counts for all of them. PgBouncer comes from `.ci/pgbouncer`, and is started as for the tests.
"""

import argparse
import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import UUID

import numpy as np

from benchmarks.goals import table_of
from streams.core.messages import QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, resolve_params
from streams.embedded.postgres import EmbeddedPostgres
from streams.retrieval import retrieve
from streams.store.postgres import PostgresStore
from streams.terminal import Console
from streams.tokens import count_tokens
from tests.conftest import PostgresServer
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors
from tests.integration.harness import query
from tests.integration.pgbouncer import PgBouncer, program

_SESSION: Final = UUID("0b8d7c1a-55e4-4c2f-8f7e-9a1b2c3d4e5f")
_TOPIC: Final = UUID("c0ffee00-1234-4abc-8def-0123456789ab")
_CONNECTIONS: Final = 8
_EVENTS_A_TURN: Final = 80
_VECTORS: Final = unit_vectors(200, 1)


@dataclass
class Way:
    """One way to the server."""

    name: str
    dsn: str
    statement_cache_size: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    async def opened(self, stack: AsyncExitStack) -> PostgresStore:
        store = PostgresStore(
            self.dsn,
            connections=_CONNECTIONS,
            search_timeout_seconds=10,
            exact_scan_rows=20_000,
            statement_cache_size=self.statement_cache_size,
        )
        await store.open()
        stack.push_async_callback(store.close, timeout_seconds=3)
        await _turn(self, store)
        for figures in (self.seconds, self.cpu_seconds, self.rates):
            figures.clear()  # the warm-up
        return store


async def _ask(store: PostgresStore) -> None:
    event = QueryEmbedding.parse(
        query(_VECTORS[0], principals=["user:1"], session_id=_SESSION, topic_id=_TOPIC, profile="extraction")
    )
    params = resolve_params(event, BUILTIN_PROFILES, "extraction")
    await retrieve(event, params, store, count_tokens, started=time.perf_counter())


async def _turn(way: Way, store: PostgresStore) -> None:
    """Some events one by one, then as many four at a time."""
    cpu = time.process_time()
    for _ in range(_EVENTS_A_TURN):
        began = time.perf_counter()
        await _ask(store)
        way.seconds.append(time.perf_counter() - began)
    way.cpu_seconds.append((time.process_time() - cpu) / _EVENTS_A_TURN)
    free = asyncio.Semaphore(_CONNECTIONS // 2)

    async def one() -> None:
        async with free:
            await _ask(store)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(_EVENTS_A_TURN)))
    way.rates.append(_EVENTS_A_TURN / (time.perf_counter() - began))


async def _main(arguments: argparse.Namespace, server: PostgresServer) -> None:
    database = server.database()
    document = Document(UUID(int=1), frozenset({"user:1"}), _SESSION)
    chunks = [
        Chunk(
            UUID(int=number + 10), document.id, "text", vector, _SESSION, None, [_TOPIC] if number % 2 else []
        )
        for number, vector in enumerate(_VECTORS)
    ]
    await load(database.writer, Corpus.of([document], chunks))
    with (
        PgBouncer(program("1.18"), database) as old,
        PgBouncer(program("1.24"), database, max_prepared_statements=200) as new,
    ):
        ways = [
            Way("direct, statement cache", database.worker, 100),
            Way("direct, no statement cache", database.worker, 0),
            Way("PgBouncer 1.18, no statement cache", old.dsn, 0),
            Way("PgBouncer 1.24, no statement cache", new.dsn, 0),
            Way("PgBouncer 1.24, statement cache", new.dsn, 100),
        ]
        async with AsyncExitStack() as stack:
            stores = [await way.opened(stack) for way in ways]
            for _ in range(arguments.rounds):
                for way, store in zip(ways, stores, strict=True):
                    await _turn(way, store)
    _show(ways)
    if arguments.json:
        arguments.json.write_text(json.dumps([_figures(way) for way in ways], indent=1) + "\n")


def _figures(way: Way) -> dict[str, float | str]:
    p50, p95 = np.percentile(1000 * np.array(way.seconds), [50, 95])
    return {
        "way": way.name,
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "client_cpu_ms": 1000 * float(np.median(way.cpu_seconds)),
        "events_per_second": float(np.median(way.rates)),
    }


def _show(ways: list[Way]) -> None:
    shown = table_of("p50 ms", "p95 ms", "client CPU ms", "events/s, 4 in flight", first="")
    for figures in map(_figures, ways):
        name, *numbers = figures.values()
        shown.add_row(str(name), *(f"{number:.2f}" for number in numbers))
    Console(width=118).print(shown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pooler")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    with EmbeddedPostgres() as embedded:
        running = PostgresServer(embedded)
        asyncio.run(_main(parser.parse_args(), running))
