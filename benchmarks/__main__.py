"""``python -m benchmarks``: every contestant in one run, interleaved round by round, and the table of goals."""

import argparse
import asyncio
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import uvloop
from rich.console import Console

from benchmarks import CRANFIELD
from benchmarks.contestants import Arena, Figures, Tuning, at, sweep
from benchmarks.goals import Goal, goals_of, show_goals, table_of
from streams.bench import BenchError
from streams.bench.stack import open_stack
from streams.bench.worker import RecordedEvent, read_records
from streams.bench.world import Question, Workload, base, grow
from streams.embedded.worker import WorkerError
from tests.integration.kafka.apache_kafka import VERSION, ApacheKafka, jars

_WIDTH: Final = 118
_ROOT: Final = Path(__file__).resolve().parents[1]
_LOADS: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
_SEPARATE_ROUNDS: Final = 2
_ACCESS_ROUNDS: Final = 6
_OVER_KAFKA: Final = ("faststream", "langchain")
_COLUMNS: Final = (
    "events/s", "spread", "recall chat", "extraction", "PostgreSQL", "worker", "broker", "generator"
)  # fmt: skip
_TITLES: Final = {
    "pipeline": "a  pipeline",
    "ceiling": "b  ceiling: the same SQL",
    "plain": "c  plain statements",
    "faststream": "d  FastStream",
    "langchain": "e  langchain-postgres",
    "plain, our index": "c' plain, our index",
    "faststream, our index": "d' FastStream, our index",
}


class Benchmark:
    """One whole run.

    Args:
        arena: what is measured.
        console: for the report.
        rounds: of the comparison.
        seconds: of one measurement.
    """

    def __init__(self, arena: Arena, console: Console, *, rounds: int, seconds: float) -> None:
        self._arena = arena
        self._console = console
        self._rounds = rounds
        self._seconds = seconds
        self._peers = arena.peers_python is not None
        self.tuned: dict[str, Tuning] = {}
        self.figures: list[Figures] = []
        self.loads: list[dict[str, float]] = []
        self.access: dict[str, list[float]] = {"with": [], "without": []}
        self.ratios: dict[str, float] = {}

    def median(self, contestant: str, workload: Workload, value: Callable[[Figures], float]) -> float:
        values = [value(each) for each in self._of(contestant, workload)]
        return float(np.median(values)) if values else float("nan")

    def _of(self, contestant: str, workload: Workload) -> list[Figures]:
        return [each for each in self.figures if (each.contestant, each.workload) == (contestant, workload)]

    async def run(self) -> list[Goal]:
        await self._tune()
        for number in range(self._rounds):
            await self._round(number)
        await self._information()
        await self._load_ladder()
        await self._access()
        return goals_of(self)

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    # Before the rounds

    async def _tune(self) -> None:
        goal = self._arena.recall["ceiling"]["extraction"]
        self._say(
            f"\n[bold]Recall[/] of ours, extraction: {goal:.3f}. The peers' ef_search that reaches it, else 1,000:"
        )
        reached = {}
        for name in ("plain", *(["langchain", "plain, our index"] if self._peers else [])):
            ef_search, tried = await self._arena.reach(name, goal=goal)
            reached[name] = ef_search
            self._say(
                f"  {_TITLES[name]}: {ef_search:,}  "
                + ", ".join(f"{ef_search} {recall:.3f}" for ef_search, recall in tried)
            )
        self._say("\n[bold]Sweep[/]: events/s by concurrency; the best is used")
        arena, seconds = self._arena, self._seconds / 2
        await self._sweep("ceiling", lambda t: arena.ceiling("mixed", t, seconds), map(Tuning, (2, 4, 8, 16)))
        plain = Tuning(8, reached["plain"])
        await self._sweep(
            "plain",
            lambda t: arena.plain("mixed", t, seconds),
            [at(plain, concurrency=c, plan=plan) for plan in ("auto", "force_custom_plan") for c in (4, 8)],
        )
        # The peers' arms are the same statements.
        arena.recall["plain"] = await arena.plain_recall(
            reached["plain"], ours=False, kinds=("chat", "extraction")
        )

        async def pipeline(tuning: Tuning) -> Figures:
            async with arena.pipeline(tuning) as (generator, meter):
                return await arena.saturated("pipeline", "mixed", generator, meter, seconds)

        await self._sweep("pipeline", pipeline, map(Tuning, (4, 8, 16)))
        if not self._peers:
            return
        self.tuned["plain, our index"] = at(self.tuned["plain"], ef_search=reached["plain, our index"])
        arena.recall["plain, our index"] = await arena.plain_recall(
            reached["plain, our index"], ours=True, kinds=("chat", "extraction")
        )
        for name in _OVER_KAFKA:
            ef_search = reached["langchain" if name == "langchain" else "plain"]

            async def peer(tuning: Tuning, name: str = name) -> Figures:
                async with arena.peer(name, tuning) as (generator, meter):
                    return await arena.saturated(name, "mixed", generator, meter, seconds)

            await self._sweep(name, peer, [Tuning(4, ef_search), Tuning(8, ef_search), Tuning(16, ef_search)])

    async def _sweep(self, name: str, measure: Callable[[Tuning], Any], tunings: Iterable[Tuning]) -> None:
        best, tried = await sweep(measure, tunings)
        self.tuned[name] = best
        plans = len({tuning.plan for tuning, _ in tried}) > 1
        self._say(
            f"  {_TITLES[name]}: "
            + ", ".join(
                f"{'[bold]' if tuning == best else ''}{tuning.concurrency}"
                f"{f' {tuning.plan}' if plans else ''}: {per_second:.0f}{'[/]' if tuning == best else ''}"
                for tuning, per_second in tried
            )
        )

    # The comparison

    async def _round(self, number: int) -> None:
        """Everything once, each time in another order, so that a busy minute does not hit the same contestant."""
        arena, seconds = self._arena, self._seconds
        workloads: tuple[Workload, ...] = (
            ("mixed", "chat", "extraction") if number < _SEPARATE_ROUNDS else ("mixed",)
        )

        async def ceiling() -> None:
            for workload in workloads:
                self.figures.append(await arena.ceiling(workload, self.tuned["ceiling"], seconds))

        async def plain() -> None:
            for workload in workloads:
                self.figures.append(await arena.plain(workload, self.tuned["plain"], seconds))

        async def pipeline() -> None:
            async with arena.pipeline(self.tuned["pipeline"], keep_results=True) as (generator, meter):
                for workload in workloads:
                    self.figures.append(
                        await arena.saturated("pipeline", workload, generator, meter, seconds)
                    )

        turns: list[Callable[[], Any]] = [pipeline, ceiling, plain]
        if self._peers:
            turns += [partial(self._peer_round, name) for name in _OVER_KAFKA]
        first = number % len(turns)
        for turn in turns[first:] + turns[:first]:
            await turn()

    async def _peer_round(self, name: str) -> None:
        async with self._arena.peer(name, self.tuned[name], keep_results=True) as (generator, meter):
            self.figures.append(await self._arena.saturated(name, "mixed", generator, meter, self._seconds))

    async def _information(self) -> None:
        """The same statements on the pipeline's index."""
        if not self._peers:
            return
        name = "faststream, our index"
        self.tuned[name] = at(self.tuned["faststream"], ef_search=self.tuned["plain, our index"].ef_search)
        for _ in range(2):
            self.figures.append(
                await self._arena.plain("mixed", self.tuned["plain, our index"], self._seconds, ours=True)
            )
            await self._peer_round(name)

    async def _load_ladder(self) -> None:
        """The pipeline in an open loop at shares of its own throughput, with each event's durations."""
        most = self.median("pipeline", "mixed", lambda each: each.per_second)
        recording = self._arena.stack.directory / "records"
        async with self._arena.pipeline(self.tuned["pipeline"], recording=recording) as (generator, meter):
            await generator.saturate(in_flight=8, warm_up=0, seconds=self._seconds / 2, meter=meter)
            for share in _LOADS:
                seconds = 3 * self._seconds if share == 0.5 else 2 * self._seconds
                measured = await generator.offer(
                    per_second=share * most, warm_up=2, seconds=seconds, meter=meter
                )
                records = {str(each.event_id).encode(): each for each in read_records(recording)}
                answered = [
                    (self._arena.question("mixed", number), records[key])
                    for key, number in measured.numbers.items()
                    if key in records
                ]
                events = [event for _, event in answered]
                columns = {
                    "latency": measured.latencies,
                    "duration": [each.duration for each in events],
                    "outside": [each.duration - each.search for each in events],
                    "slower": [each.slower_arm for each in events],
                    "fan-out": fan_out_ratios(answered),
                }
                line = {"share": share, "per_second": share * most, "unanswered": float(measured.unanswered)}
                for name, values in columns.items():
                    p50, p95, p99 = np.percentile(values, [50, 95, 99])
                    line |= {f"{name} p50": float(p50), f"{name} p95": float(p95), f"{name} p99": float(p99)}
                line["worker cpu"] = 1e6 * measured.cpu["worker"] / max(1, measured.answered)
                self.loads.append(line)

    async def _access(self) -> None:
        for number in range(_ACCESS_ROUNDS):
            for unguarded in (False, True) if number % 2 else (True, False):
                result = await self._arena.guarded(self._seconds / 2, unguarded=unguarded)
                self.access["without" if unguarded else "with"].append(float(np.median(result.latencies)))

    # The report

    def show(self) -> None:
        table = table_of(*_COLUMNS, first="mixed")
        for name, title in _TITLES.items():
            if self._of(name, "mixed"):
                table.add_row(title, *self._row(name, "mixed"))
        self._console.print("\nClosed loop: recall@15 (chat: @9) against exact search; CPU in µs per event")
        self._console.print(table)
        for workload in ("chat", "extraction"):
            table = table_of(*_COLUMNS, first=workload)
            for name in ("pipeline", "ceiling", "plain"):
                table.add_row(_TITLES[name], *self._row(name, workload))
            self._console.print()
            self._console.print(table)
        table = table_of("pipeline is", "per CPU-second", first="mixed, ratios of medians")
        for name, title in _TITLES.items():
            if name != "pipeline" and self._of(name, "mixed"):
                table.add_row(
                    f"to {title}", f"{self.throughput_ratio(name):.2f}", f"{self.cpu_ratio(name):.2f}"
                )
        self._console.print()
        self._console.print(table)
        table = table_of(
            "events/s", "latency p50", "p95", "p99", "duration p50", "p99", "outside SQL p50", "p99", "arm p50", "p99",
            first="load",
        )  # fmt: skip
        for line in self.loads:
            table.add_row(
                f"{line['share']:.0%}",
                f"{line['per_second']:.0f}",
                *(
                    f"{1000 * line[column]:.1f}"
                    for column in (
                        "latency p50", "latency p95", "latency p99", "duration p50", "duration p99", "outside p50",
                        "outside p99", "slower p50", "slower p99",
                    )
                ),
            )  # fmt: skip
        self._console.print(
            "\nThe pipeline in an open loop; ms; latency from the time at which an event was due"
        )
        self._console.print(table)

    def throughput_ratio(self, name: str) -> float:
        return self.median("pipeline", "mixed", lambda each: each.per_second) / self.median(
            name, "mixed", lambda each: each.per_second
        )

    def cpu_ratio(self, name: str) -> float:
        """Events per CPU-second of PostgreSQL and worker, to those of another."""
        return self.median(name, "mixed", lambda each: each.own_cpu) / self.median(
            "pipeline", "mixed", lambda each: each.own_cpu
        )

    def recall(self, name: str, workload: Workload, kind: str) -> float:
        return self.median(name, workload, lambda each: each.recall.get(kind, float("nan")))

    def _row(self, name: str, workload: Workload) -> list[str]:
        rates = [each.per_second for each in self._of(name, workload)]

        def cpu(*processes: str) -> str:
            value = self.median(name, workload, lambda each: sum(each.cpu.get(p, 0.0) for p in processes))
            return f"{value:,.0f}" if value else "–"

        def recall(kind: str) -> str:
            value = self.recall(name, workload, kind)
            return "" if np.isnan(value) or workload not in ("mixed", kind) else f"{value:.3f}"

        return [
            f"{np.median(rates):.0f}",
            f"{min(rates):.0f}–{max(rates):.0f}",
            recall("chat"),
            recall("extraction"),
            cpu("postgres"),
            cpu("worker", "client"),
            cpu("broker"),
            cpu("generator"),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "tuned": {name: asdict(tuning) for name, tuning in self.tuned.items()},
            "figures": [asdict(each) for each in self.figures],
            "loads": self.loads,
            "access": self.access,
        }


def fan_out_ratios(answered: Iterable[tuple[Question, RecordedEvent]]) -> list[float]:
    """Search time to the slower arm, of the events with two arms; with one arm, it is always about 1."""
    return [event.search / event.slower_arm for question, event in answered if question.kind == "chat"]


def commit() -> str:
    """The commit of the checkout, marked if there are changes."""
    try:
        found = subprocess.run(
            ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"],  # noqa: S607  # of the PATH
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


async def bench(options: argparse.Namespace, console: Console) -> bool:
    began = perf_counter()
    of = base(CRANFIELD)
    machine = (
        f"{os.cpu_count()} processors ({platform.machine()}), load {os.getloadavg()[0]:.1f} at the start"
    )
    console.print(
        f"[bold]Anabranch, benchmarked[/] at {commit()} on {machine}, Python {platform.python_version()};"
        f" {options.chunks:,} chunks grown from {of.name}, seed {options.seed};"
        f" {f'Apache Kafka {VERSION}' if options.apache_kafka else 'the embedded broker'}"
    )
    world = grow(of, options.chunks, options.seed)
    peers = options.peers_python if options.peers_python.exists() else None
    if peers is None:
        console.print("FastStream and langchain-postgres are not installed: their lines are left out")
    with ApacheKafka(jars()) if options.apache_kafka else nullcontext() as broker:
        async with open_stack(broker=broker) as stack:
            arena = Arena(stack, world, count=options.questions, seed=options.seed, peers_python=peers)
            facts = await arena.prepare(peers=True)
            console.print(
                f"[dim]vector index: {facts['index bytes'] / 2**20:.0f} MiB, built in {facts['index seconds']:.0f} s;"
                f" everything loaded after {perf_counter() - began:.0f} s[/]"
            )
            benchmark = Benchmark(arena, console, rounds=options.rounds, seconds=options.seconds)
            goals = await benchmark.run()
    benchmark.show()
    show_goals(console, goals)
    console.print(f"\n[dim]{perf_counter() - began:.0f} s[/]")
    into: Path = options.into
    into.mkdir(parents=True, exist_ok=True)
    result = {
        "commit": commit(),
        "machine": machine,
        "facts": facts,
        **benchmark.as_json(),
        "goals": [asdict(goal) for goal in goals],
    }
    (into / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    try:
        from benchmarks import plots  # noqa: PLC0415  # needs matplotlib
    except ImportError:
        console.print("matplotlib is not installed: no plots")
    else:
        plots.latencies(benchmark.loads, into / "latency.png")
        plots.throughput(
            {
                _TITLES[name]: [
                    each.per_second
                    for each in benchmark.figures
                    if (each.contestant, each.workload) == (name, "mixed")
                ]
                for name in _TITLES
            },
            into / "throughput.png",
        )
    return all(goal.reached for goal in goals if goal.value is not None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--chunks", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement")
    parser.add_argument("--questions", type=int, default=200, help="distinct questions of each kind")
    parser.add_argument(
        "--apache-kafka", action="store_true", help="instead of the embedded broker; needs Java and Maven"
    )
    parser.add_argument("--into", type=Path, default=Path("build/bench"), help="folder for JSON and plots")
    parser.add_argument("--peers-python", type=Path, default=_ROOT / ".venv-peers" / "bin" / "python")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        reached = uvloop.run(bench(options, console))
    except (BenchError, WorkerError, asyncio.CancelledError, KeyboardInterrupt) as error:
        console.print(f"[red]✗[/] {error}", soft_wrap=True)
        return 1
    return 1 if options.strict and not reached else 0


if __name__ == "__main__":
    sys.exit(main())
