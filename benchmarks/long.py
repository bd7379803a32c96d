"""``python -m benchmarks.long``: how cost grows, a backlog, and memory over many events. Takes about an hour.

Each part can be run alone; the results of the others are kept in the JSON.
"""

import argparse
import asyncio
import json
import logging
import platform
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from urllib.request import urlopen

import asyncpg
import numpy as np
import uvloop
from rich.console import Console

from benchmarks import CRANFIELD
from benchmarks.__main__ import commit
from benchmarks.contestants import Arena, Tuning
from benchmarks.goals import Goal, show_goals
from streams.bench import BenchError
from streams.bench.cpu import resident_bytes
from streams.bench.stack import Stack, Topics, open_stack
from streams.bench.world import EventFactory, Question, World, base, grow, questions
from streams.broker.clients import running_producer
from streams.core.messages import Filters, QueryEmbedding
from streams.embedded.worker import WorkerError, WorkerProcess
from streams.retrieval import Search, unit_vector
from streams.store.postgres import PostgresStore

_SIZES: Final = (10_000, 20_000, 50_000, 100_000, 200_000)
_MIDDLE: Final = 50_000
_QUESTIONS: Final = 60
_SEARCHES: Final = 120
_SECONDS: Final = 5.0
_PARTS: Final = ("chunks", "search", "scale", "backlog", "memory")
_BIG: Final = {"shared_buffers": "3GB"}
_PUBLISH_AT_ONCE: Final = 2000


class Long:
    """The parts of the long run.

    Args:
        console: for the report.
        backlog: events that wait.
        events: how many events the memory part processes.
        sizes: chunks of the first part.
        chunks: of the others.
    """

    def __init__(
        self, console: Console, *, backlog: int, events: int, sizes: Sequence[int], chunks: int
    ) -> None:
        self._console = console
        self._backlog = backlog
        self._events = events
        self._sizes = sizes
        self._chunks = chunks
        self._base = base(CRANFIELD)

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    @asynccontextmanager
    async def _arena(self, chunks: int) -> AsyncIterator[tuple[Arena, dict[str, float]]]:
        world = grow(self._base, chunks, 1)
        async with open_stack(_BIG) as stack:
            arena = Arena(stack, world, count=_QUESTIONS, seed=1, peers_python=None)
            yield arena, await arena.prepare(peers=False)

    async def chunks(self) -> list[dict[str, float]]:
        """The ceiling's latency and throughput, the index's size and build time, against chunks."""
        rows = []
        for size in self._sizes:
            async with self._arena(size) as (arena, facts):
                row: dict[str, float] = {"chunks": size, **facts}
                for workload in ("chat", "extraction", "mixed"):
                    alone = await arena.ceiling(workload, Tuning(1), _SECONDS)
                    row |= {f"{workload} p50": alone.p50, f"{workload} p99": alone.p99}
                many = await arena.ceiling("mixed", Tuning(8), _SECONDS)
                row |= {"per_second": many.per_second, "postgres cpu": many.cpu["postgres"]}
                row |= {f"recall {kind}": value for kind, value in arena.recall["ceiling"].items()}
            rows.append(row)
            self._say(
                f"  {size:>7,} chunks: p50 {1000 * row['mixed p50']:.1f} ms, p99 {1000 * row['mixed p99']:.1f} ms,"
                f" {many.per_second:.0f}/s, recall {row['recall extraction']:.3f}; index"
                f" {facts['index bytes'] / 2**20:.0f} MiB in {facts['index seconds']:.0f} s"
            )
        return rows

    async def search(self) -> dict[str, list[dict[str, Any]]]:
        """One arm's search, against rows, filters, and the sets of readers that contain the caller."""
        found: dict[str, list[dict[str, Any]]] = {"k": [], "filter": [], "grants": []}
        async with self._arena(self._chunks) as (arena, _):
            await _grant(arena.stack, arena.world)
            store = await _open(arena.worker_dsn)
            try:
                asked = questions(arena.world, "extraction", _SEARCHES, 2, auditor=True)
                for limit in (5, 15, 50, 100, 200, 500):
                    found["k"].append({"k": limit, **await _searches(store, asked, limit=limit)})
                for name, changes in _filters(arena.world).items():
                    found["filter"].append({"filter": name, **await _searches(store, asked, **changes)})
                for grants in (1, 10, 100, 1000):
                    changes = {"principals": [f"grants:{grants}"]}
                    found["grants"].append({"grants": grants, **await _searches(store, asked, **changes)})
            finally:
                await store.close(timeout_seconds=5)
        for rows in found.values():
            for row in rows:
                name, value = next(iter(row.items()))
                self._say(f"  {name} {value}: p50 {1000 * row['p50']:.1f} ms, p99 {1000 * row['p99']:.1f} ms")
        return found

    async def scale(self) -> dict[str, list[dict[str, float]]]:
        """The pipeline's throughput against concurrency, partitions and workers."""
        found: dict[str, list[dict[str, float]]] = {"concurrency": [], "partitions": [], "workers": []}
        async with self._arena(self._chunks) as (arena, _):
            for concurrency in (1, 2, 4, 8, 16, 32):
                loop = await arena.ceiling("mixed", Tuning(concurrency), _SECONDS)
                async with arena.pipeline(Tuning(concurrency)) as (generator, meter):
                    figures = await arena.saturated("pipeline", "mixed", generator, meter, _SECONDS)
                found["concurrency"].append(
                    {"concurrency": concurrency, "per_second": figures.per_second, "ceiling": loop.per_second}
                )
            for partitions in (1, 3, 6, 12):
                name = f"partitions-{partitions}"
                async with arena.pipeline(Tuning(8), name=name, partitions=partitions) as (generator, meter):
                    figures = await arena.saturated("pipeline", "mixed", generator, meter, _SECONDS)
                found["partitions"].append({"partitions": partitions, "per_second": figures.per_second})
            for workers in (1, 2, 3):
                async with arena.pipeline(Tuning(8), name=f"workers-{workers}", workers=workers) as (
                    generator,
                    meter,
                ):
                    figures = await arena.saturated("pipeline", "mixed", generator, meter, _SECONDS)
                found["workers"].append({"workers": workers, "per_second": figures.per_second})
        for name, rows in found.items():
            self._say(
                f"  {name}: " + ", ".join(f"{row[name]:.0f}: {row['per_second']:.0f}/s" for row in rows)
            )
        return found

    async def backlog(self) -> dict[str, Any]:
        """Waiting events: does throughput fall, does memory grow; and what do expired events cost?"""
        async with self._arena(self._chunks) as (arena, _):
            short = [_short(question) for question in arena.questions["mixed"]]
            topics = await arena.stack.create_topics("backlog")
            await _publish(arena.stack, topics, EventFactory(arena.codec, short), self._backlog)
            samples = await _drain(arena, topics, self._backlog)
            expired = [
                question.event(lifetime=timedelta(seconds=-1)) for question in arena.questions["mixed"]
            ]
            topics = await arena.stack.create_topics("expired")
            count = self._backlog // 10
            await _publish(arena.stack, topics, EventFactory(arena.codec, expired), count)
            skipped = await _drain(arena, topics, count)
        tenth = max(1, len(samples) // 10)
        early, late = _rate(samples[: tenth + 1]), _rate(samples[-tenth - 1 :])
        rss = max(sample["rss"] for sample in samples)
        cpu = 1e6 * (skipped[-1]["postgres"] - skipped[0]["postgres"]) / count
        self._say(
            f"  {self._backlog:,} events waited: {early:.0f}/s at first, {late:.0f}/s at last, RSS at most"
            f" {rss / 2**20:.0f} MiB; {count:,} expired ones: {_rate(skipped):.0f}/s, {cpu:.0f} µs of PostgreSQL each"
        )
        return {
            "events": self._backlog,
            "samples": samples,
            "first tenth": early,
            "last tenth": late,
            "rss": rss,
            "expired per_second": _rate(skipped),
            "expired postgres cpu": cpu,
        }

    async def memory(self) -> dict[str, Any]:
        """The worker's memory over many events; on a small store, because only their number matters."""
        async with self._arena(2000) as (arena, _):
            short = [_short(question) for question in arena.questions["mixed"]]
            topics = await arena.stack.create_topics("memory")
            factory = EventFactory(arena.codec, short)
            publishing = asyncio.create_task(_publish(arena.stack, topics, factory, self._events))
            samples = await _drain(arena, topics, self._events)
            await publishing
        early = next(each["rss"] for each in samples if each["events"] >= min(10_000, self._events / 20))
        late = samples[-1]["rss"]
        self._say(
            f"  RSS {early / 2**20:.1f} MiB after 10,000 events, {late / 2**20:.1f} MiB after"
            f" {samples[-1]['events']:,.0f}: {late / early:.3f}"
        )
        return {"samples": samples, "ratio": late / early}


async def _grant(stack: Stack, world: World) -> None:
    """Callers in 1, 10, 100 and 1,000 sets of readers: each of the first thousand documents has a set of its own."""
    connection = await asyncpg.connect(stack.admin_dsn("bench_store"))
    try:
        await connection.executemany(
            "INSERT INTO document_grants (document_id, principal) VALUES ($1, $2)",
            [
                (world.document_ids[number], principal)
                for number in range(1000)
                for principal in (
                    f"user:{number}",
                    *(f"grants:{n}" for n in (1, 10, 100, 1000) if number < n),
                )
            ],
        )
        await connection.execute("VACUUM ANALYZE")
    finally:
        await connection.close()


def _filters(world: World) -> dict[str, dict[str, Any]]:
    return {
        "none": {},
        "session, 19 %": {"session_id": world.session_ids[0]},
        "session, 1 %": {"session_id": world.session_ids[19]},
        "URL prefix, 22 %": {"filters": Filters(source_url_prefix="https://example.org/1")},
        "URL prefix, 2 %": {"filters": Filters(source_url_prefix="https://example.org/11")},
        "metadata, 1 document": {"filters": Filters(metadata={"number": "7"})},
    }


async def _open(dsn: str) -> PostgresStore:
    store = PostgresStore(
        dsn,
        connections=2,
        search_timeout_seconds=20,
        exact_scan_rows=20_000,
    )
    await store.open()
    await store.warm_up()
    return store


async def _searches(store: PostgresStore, asked: Sequence[Question], **changes: Any) -> dict[str, float]:
    """Percentiles of a search, after a warm-up."""
    seconds = []
    for number, question in enumerate((*asked[:20], *asked)):
        search = Search(
            **{
                "vector": unit_vector(tuple(map(float, question.vector))),
                "principals": list(question.principals),
                "session_id": None,
                "topic_id": None,
                "filters": None,
                "expand_parents": False,
                "limit": 15,
                **changes,
            }
        )
        began = perf_counter()
        await store.search(search)
        if number >= 20:
            seconds.append(perf_counter() - began)
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def _short(question: Question) -> QueryEmbedding:
    """With few passages, so that the results of many events fit into the embedded broker's memory."""
    return question.event().model_copy(update={"profile": "docs", "k": 1})


async def _publish(
    stack: Stack, topics: Topics, make: Callable[[int], tuple[bytes, bytes]], count: int
) -> None:
    async with running_producer(stack.client_options) as producer:
        for first in range(0, count, _PUBLISH_AT_ONCE):
            sent = []
            for number in range(first, min(first + _PUBLISH_AT_ONCE, count)):
                key, value = make(number)
                sent.append(await producer.send(topics.input, value=value, key=key))
            for acknowledged in sent:
                await acknowledged


async def _drain(arena: Arena, topics: Topics, count: int) -> list[dict[str, float]]:
    """Start a worker, and sample it until it has finished all events."""
    worker = arena.stack.start_worker(topics, database="bench_store")
    samples: list[dict[str, float]] = []
    began = perf_counter()
    try:
        await worker.until_ready()
        while not samples or samples[-1]["events"] < count:
            samples.append(await _sample(arena, worker, perf_counter() - began))
            await asyncio.sleep(1)
    finally:
        await asyncio.to_thread(worker.stop)
    return samples


async def _sample(arena: Arena, worker: WorkerProcess, seconds: float) -> dict[str, float]:
    text = await asyncio.to_thread(_metrics, worker.port)
    events = sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("anabranch_events_total{")
    )
    cpu = arena.meter().read()
    return {
        "seconds": seconds,
        "events": events,
        "rss": float(resident_bytes(worker.pid)),
        "postgres": cpu["postgres"],
    }


def _metrics(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:  # a local http URL
        return str(answer.read().decode())


def _rate(samples: Sequence[dict[str, float]]) -> float:
    first, last = samples[0], samples[-1]
    return (last["events"] - first["events"]) / max(1e-9, last["seconds"] - first["seconds"])


def goals_of(found: dict[str, Any]) -> list[Goal]:
    """The rows of the table that `make bench` leaves to this run."""
    p50 = {row["chunks"]: row["mixed p50"] for row in found.get("chunks", [])}
    growth = p50[100_000] / p50[10_000] if {10_000, 100_000} <= p50.keys() else None
    memory = found.get("memory", {}).get("ratio")
    return [
        Goal("100,000 chunks / 10,000 chunks, p50 of a search", growth, 1.5, "≤"),
        Goal("RSS after 200,000 events / after 10,000", memory, 1.05, "≤", digits=3),
    ]


def _plot(found: dict[str, Any], file: Path) -> None:
    from benchmarks import plots  # noqa: PLC0415  # needs matplotlib

    panels: list[tuple[str, str, str, dict[str, list[tuple[float | str, float]]]]] = []
    if "chunks" in found:
        rows = found["chunks"]
        panels.append(
            ("latency, one event at a time", "thousands of chunks", "ms",
             {f"{w} {p}": [(row["chunks"] / 1000, 1000 * row[f"{w} {p}"]) for row in rows]
              for w in ("chat", "extraction") for p in ("p50", "p99")})
        )  # fmt: skip
        panels.append(
            ("CPU of PostgreSQL per event, eight at once", "thousands of chunks", "ms",
             {"mixed": [(row["chunks"] / 1000, row["postgres cpu"] / 1000) for row in rows]})
        )  # fmt: skip
        panels.append(
            ("vector index", "thousands of chunks", "",
             {"MiB": [(row["chunks"] / 1000, row["index bytes"] / 2**20) for row in rows],
              "seconds to build": [(row["chunks"] / 1000, row["index seconds"]) for row in rows]})
        )  # fmt: skip
    if "search" in found:
        for name, title, x in (
            ("k", "one arm: k", "k"),
            ("grants", "one arm: grants", "sets of readers that include the caller"),
            ("filter", "one arm: filters", ""),
        ):
            rows = found["search"][name]
            panels.append(
                (title, x, "ms", {p: [(row[name], 1000 * row[p]) for row in rows] for p in ("p50", "p99")})
            )
    if "scale" in found:
        for name, rows in found["scale"].items():
            series = {"pipeline": [(row[name], row["per_second"]) for row in rows]}
            if "ceiling" in rows[0]:
                series["ceiling"] = [(row[name], row["ceiling"]) for row in rows]
            panels.append((name, name, "events/s", series))
    for name in ("backlog", "memory"):
        if name in found:
            samples = found[name]["samples"]
            panels.append(
                (f"memory, {name}", "thousands of events", "MiB",
                 {"RSS": [(each["events"] / 1000, each["rss"] / 2**20) for each in samples]})
            )  # fmt: skip
    plots.lines(panels, file)


async def long(options: argparse.Namespace, console: Console) -> None:
    began = perf_counter()
    file: Path = options.into / "long.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    run = Long(
        console, backlog=options.backlog, events=options.events, sizes=options.sizes, chunks=options.chunks
    )
    console.print(
        f"[bold]Anabranch, benchmarked at length[/] at {commit()}, Python {platform.python_version()}"
    )
    options.into.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        console.print(f"\n[bold]{part}[/]")
        found[part] = await getattr(run, part)()
        found["commit"] = commit()
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    goals = goals_of(found)
    found["goals"] = [asdict(goal) for goal in goals]
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show_goals(console, goals)
    console.print(f"\n[dim]{perf_counter() - began:.0f} s[/]")
    try:
        _plot(found, options.into / "long.png")
    except ImportError:
        console.print("matplotlib is not installed: no plots")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-long", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", default=list(_PARTS), help=f"of {', '.join(_PARTS)}; all by default"
    )
    parser.add_argument("--backlog", type=int, default=100_000, help="waiting events")
    parser.add_argument("--events", type=int, default=200_000, help="of the memory part")
    parser.add_argument("--chunks", type=int, default=_MIDDLE, help="of the parts that do not vary them")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="chunks")
    parser.add_argument("--into", type=Path, default=Path("build/bench"), help="folder for JSON and plots")
    options = parser.parse_args()
    if unknown := {*options.parts} - {*_PARTS}:
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    console = Console(width=None if sys.stdout.isatty() else 118, highlight=False)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        uvloop.run(long(options, console))
    except (BenchError, WorkerError, asyncio.CancelledError, KeyboardInterrupt) as error:
        console.print(f"[red]✗[/] {type(error).__name__} {error}", soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
