"""``python -m benchmarks.arms``: what a chat event's search time consists of, beyond its slower arm.

One event at a time, without Kafka. Each question takes turns: its two arms in parallel with the texts, as the worker
searches, then each arm alone.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final
from uuid import UUID

import numpy as np
import uvloop

from benchmarks import CRANFIELD
from benchmarks.__main__ import commit
from benchmarks.contestants import Arena
from benchmarks.goals import table_of
from streams.bench.stack import open_stack
from streams.bench.world import base, grow, questions
from streams.core.profiles import BUILTIN_PROFILES, resolve_params
from streams.retrieval import ArmResult, Search, StoredPassage, retrieve
from streams.store.postgres import PostgresStore
from streams.terminal import Console
from streams.tokens import count_tokens

_WARM_UP: Final = 30


class _TimedStore:
    """A store that remembers its calls and how long they took, in seconds."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self.searches: list[tuple[Search, float]] = []
        self.texts: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def search(self, search: Search) -> ArmResult:
        began = perf_counter()
        found = await self._store.search(search)
        self.searches.append((search, perf_counter() - began))
        return found

    async def passages(
        self, principals: Sequence[str], chunk_ids: Sequence[UUID]
    ) -> Mapping[UUID, StoredPassage]:
        began = perf_counter()
        found = await self._store.passages(principals, chunk_ids)
        self.texts.append(perf_counter() - began)
        return found


async def _measure(chunks: int, count: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = defaultdict(list)
    async with open_stack({"shared_buffers": "3GB"}) as stack:
        arena = Arena(stack, grow(base(CRANFIELD), chunks, 1), count=10, seed=1, peers_python=None)
        await arena.prepare(peers=False)
        store = PostgresStore(
            arena.worker_dsn, connections=3, search_timeout_seconds=20, exact_scan_rows=20_000
        )
        await store.open()
        await store.warm_up()
        try:
            for number, question in enumerate(questions(arena.world, "chat", _WARM_UP + count, 2)):
                query = question.event()
                timed = _TimedStore(store)
                began = perf_counter()
                answer = await retrieve(
                    query,
                    resolve_params(query, BUILTIN_PROFILES, "chat"),
                    timed,
                    count_tokens,
                    started=began,
                )
                alone = []
                for search, _ in timed.searches[:2]:
                    began = perf_counter()
                    await store.search(search)
                    alone.append(perf_counter() - began)
                # A third search would be a second round, because the first did not find enough.
                if number < _WARM_UP or len(timed.searches) != 2:
                    continue
                slower = max(each for _, each in timed.searches)
                seconds["slower arm, alone"].append(max(alone))
                seconds["slower arm, beside the other"].append(slower)
                seconds["texts"].append(sum(timed.texts))
                seconds["the rest"].append(answer.search_seconds - slower - sum(timed.texts))
                seconds["all"].append(answer.search_seconds)
        finally:
            await store.close(timeout_seconds=5)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arms", description=__doc__)
    parser.add_argument("--chunks", type=int, default=50_000)
    parser.add_argument("--events", type=int, default=400)
    options = parser.parse_args()
    seconds = uvloop.run(_measure(options.chunks, options.events))
    slower = np.array(seconds["slower arm, beside the other"])
    table = table_of("ms", "× the slower arm", first="median of")
    for name, each in seconds.items():
        table.add_row(name, f"{1000 * np.median(each):.2f}", f"{np.median(np.array(each) / slower):.2f}")
    console = Console(width=None if sys.stdout.isatty() else 118, highlight=False)
    console.print(
        f"{len(slower)} chat events with two searches, {options.chunks:,} chunks, commit {commit()}"
    )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
