"""The contestants: how to start each, and one measurement of it."""

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg
import numpy as np

from benchmarks import peer_store
from benchmarks.peers.plain import PlainStore, connect, search, server_settings
from benchmarks.plain_loop import PlainJob
from benchmarks.unguarded import create_unguarded_functions, unguarded
from streams import resources
from streams.bench import BenchError
from streams.bench.ceiling import Job, LoopResult, Recording, Statement, record, run_ceiling, run_loop, save
from streams.bench.cpu import CpuMeter
from streams.bench.generator import IN_FLIGHT, Generator, Measured
from streams.bench.stack import PRINCIPALS_SETTING, Stack, Topics
from streams.bench.world import EventFactory, Question, Workload, World, exact, load, questions
from streams.wire import Codec

__all__ = ["Arena", "Figures", "Tuning", "mean_recall"]

_ROOT: Final = Path(__file__).resolve().parents[1]
_STORE, _PEERS = "bench_store", "bench_peers"
_WARM_UP: Final = 1.5
_JOIN_SECONDS: Final = 60.0
_RECALL_RESULTS: Final = 300
_EF_SEARCH: Final = (40, 60, 100, 200, 400, 800, 1000)
# A peer reaches our recall if it is this close.
_EQUAL: Final = 0.002
# What the pipeline's vector index is on.
_NEAREST: Final = "(l2_normalize(c.embedding)::halfvec(768)) <=> $1::halfvec(768)"


@dataclass(frozen=True)
class Tuning:
    """How a contestant runs.

    Attributes:
        concurrency: connections of a loop, or events that a consumer processes concurrently.
        ef_search: None: the contestant's own.
        plan: the loop's plan_cache_mode.
    """

    concurrency: int = 8
    ef_search: int | None = None
    plan: str = "auto"


@dataclass
class Figures:
    """One measurement; CPU in microseconds per event, by process."""

    contestant: str
    workload: Workload
    per_second: float
    cpu: dict[str, float]
    p50: float
    p99: float
    recall: dict[str, float] = field(default_factory=dict)
    unanswered: int = 0

    @property
    def own_cpu(self) -> float:
        """Microseconds of PostgreSQL and of the contestant's process per event."""
        return self.cpu["postgres"] + self.cpu.get("worker", self.cpu.get("client", 0.0))


def mean_recall(found: Iterable[tuple[Question, set[UUID], Iterable[UUID]]]) -> dict[str, float]:
    """Recall against exact search, by kind of question; questions with no answer at all do not count."""
    shares: dict[str, list[float]] = {}
    for question, best, returned in found:
        if best:
            shares.setdefault(question.kind, []).append(len(best.intersection(returned)) / len(best))
    return {kind: float(np.mean(each)) for kind, each in shares.items()}


class Arena:
    """A store, a broker, questions, and what every contestant is measured with.

    Args:
        stack: the servers.
        world: what the stores hold.
        count: distinct questions of each kind.
        seed: of the questions.
        peers_python: the interpreter of the peers' environment; None: without those that need it.
    """

    def __init__(
        self, stack: Stack, world: World, *, count: int, seed: int, peers_python: Path | None
    ) -> None:
        self.stack = stack
        self.world = world
        self.peers_python = peers_python
        self.codec = Codec()
        chat, extraction = questions(world, "chat", count, seed), questions(world, "extraction", count, seed)
        mixed = [question for pair in zip(chat, extraction, strict=True) for question in pair]
        self.questions: dict[Workload, list[Question]] = {
            "chat": chat,
            "extraction": extraction,
            "mixed": mixed,
        }
        self.auditors = [
            question
            for pair in zip(
                questions(world, "chat", count // 2, seed, auditor=True),
                questions(world, "extraction", count // 2, seed, auditor=True),
                strict=True,
            )
            for question in pair
        ]
        # Little to search: what the pipeline adds shows best.
        self.small = [
            replace(question, session=session, session_id=world.session_ids[session])
            for question, session in zip(extraction, cycle(range(40, 60)), strict=False)
        ]
        self.small_factory = EventFactory(self.codec, [question.event() for question in self.small])
        self.factories = {
            name: EventFactory(self.codec, [question.event() for question in asked])
            for name, asked in self.questions.items()
        }
        self.best = {id(question): exact(world, question) for question in mixed}
        self.recall: dict[str, dict[str, float]] = {}
        self._topics: dict[str, Topics] = {}

    @property
    def worker_dsn(self) -> str:
        return self.stack.dsn("bench_worker", _STORE)

    async def prepare(self, *, peers: bool) -> dict[str, float]:
        """Fill the stores, and record the ceiling's statements; returns seconds and sizes."""
        await self.stack.create_store(_STORE)
        facts = {"index seconds": await load(self.world, self.stack.admin_dsn(_STORE))}
        connection = await asyncpg.connect(self.stack.admin_dsn(_STORE))
        facts["index bytes"] = await connection.fetchval(
            "SELECT pg_relation_size('document_chunks_embedding_halfvec')"
        )
        if peers:
            await connection.execute(f"CREATE DATABASE {_PEERS}")
        await connection.close()
        if peers:
            sets = await peer_store.load(self.world, self.stack.admin_dsn(_PEERS))
            self._sets_file.write_text(json.dumps(sets), encoding="utf-8")
        for workload, asked in self.questions.items():
            if workload == "mixed":
                continue
            recording = await self._record(asked)
            self._save(workload, recording.events)
            self._save_events(workload, asked)
            self.recall.setdefault("ceiling", {}).update(
                mean_recall(
                    (question, self.best[id(question)], answer)
                    for question, answer in zip(asked, recording.answers, strict=True)
                )
            )
        both = zip(*(self._load(workload) for workload in ("chat", "extraction")), strict=True)
        self._save("mixed", [event for pair in both for event in pair])
        self._save_events("mixed", self.questions["mixed"])
        for name, asked in (("auditors", self.auditors), ("small", self.small)):
            self._save(name, (await self._record(asked)).events)
        await create_unguarded_functions(
            self.stack.admin_dsn(_STORE), "bench_unguarded", principals_setting=PRINCIPALS_SETTING
        )
        self._save(
            "auditors-unguarded",
            [
                [replace(statement, sql=unguarded(statement.sql)) for statement in event]
                for event in self._load("auditors")
            ],
        )
        return facts

    async def _record(self, asked: Sequence[Question]) -> Recording:
        queries = [question.event() for question in asked]
        return await record(self.stack.worker_settings(_STORE), queries)

    def meter(self) -> CpuMeter:
        return CpuMeter(self.stack.processes)

    # The loops

    async def ceiling(
        self, workload: Workload, tuning: Tuning, seconds: float, *, warm_up: float = _WARM_UP
    ) -> Figures:
        return self._figures("ceiling", workload, await self._ceiling(workload, tuning, seconds, warm_up))

    async def small_ceiling(self, seconds: float, *, warm_up: float) -> LoopResult:
        """The ceiling for small sessions, one event at a time."""
        return await self._ceiling("small", Tuning(1), seconds, warm_up)

    async def guarded(self, seconds: float, *, unguarded: bool) -> LoopResult:
        """The ceiling by a caller who may read everything, one at a time: as a worker, or without access control."""
        if not unguarded:
            return await self._ceiling("auditors", Tuning(1), seconds, _WARM_UP, "bench_worker")
        return await self._ceiling("auditors-unguarded", Tuning(1), seconds, _WARM_UP, "bench_unguarded")

    async def _ceiling(
        self,
        recording: str,
        tuning: Tuning,
        seconds: float,
        warm_up: float,
        role: str = "bench_worker",
    ) -> LoopResult:
        settings = self.stack.worker_settings(_STORE)
        job = Job(
            dsn=self.stack.dsn(role, _STORE),
            recording=str(self._file(recording)),
            connections=tuning.concurrency,
            statement_cache_size=settings.anabranch_statement_cache_size,
            warm_up=warm_up,
            seconds=seconds,
            processes={"postgres": self.stack.postgres.pid},
        )
        return await run_ceiling(job)

    def plain_store(self, *, ours: bool) -> PlainStore:
        """The peers' own tables, or the pipeline's tables and index."""
        if not ours:
            return PlainStore()
        return PlainStore(
            chunks="public.document_chunks",
            documents="public.documents",
            topics="c.related_topic_ids",
            nearest=_NEAREST,
            setting=PRINCIPALS_SETTING,
            json=True,
        )

    async def plain(
        self, workload: Workload, tuning: Tuning, seconds: float, *, ours: bool = False
    ) -> Figures:
        job = PlainJob(
            dsn=self._plain_dsn(ours=ours),
            events=str(self._file(f"{workload}-events")),
            connections=tuning.concurrency,
            warm_up=_WARM_UP,
            seconds=seconds,
            store=asdict(self.plain_store(ours=ours)),
            ef_search=tuning.ef_search or 40,
            plan_cache_mode=tuning.plan,
            processes={"postgres": self.stack.postgres.pid},
        )
        name = "plain, our index" if ours else "plain"
        return self._figures(
            name, workload, await run_loop([sys.executable, "-m", "benchmarks.plain_loop"], job)
        )

    async def plain_recall(
        self, ef_search: int, *, ours: bool, kinds: Sequence[Workload]
    ) -> dict[str, float]:
        connection = await asyncpg.connect(
            self._plain_dsn(ours=ours), server_settings=server_settings(ef_search, "force_custom_plan")
        )
        try:
            await connect(connection)
            store = self.plain_store(ours=ours)
            found = []
            for kind in kinds:
                for question in self.questions[kind]:
                    rows = await search(connection, store, _event(question))
                    found.append((question, self.best[id(question)], [row["id"] for row in rows]))
        finally:
            await connection.close()
        return mean_recall(found)

    async def reach(self, name: str, *, goal: float) -> tuple[int, list[tuple[int, float]]]:
        """The smallest ef_search that reaches a recall of extraction, else the largest; and all that were tried."""
        tried = []
        for ef_search in _EF_SEARCH:
            if name == "langchain":
                recall = await self.langchain_recall(ef_search, kinds=("extraction",))
            else:
                recall = await self.plain_recall(
                    ef_search, ours=name == "plain, our index", kinds=("extraction",)
                )
            tried.append((ef_search, recall["extraction"]))
            if recall["extraction"] >= goal - _EQUAL:
                break
        return tried[-1][0], tried

    def _plain_dsn(self, *, ours: bool) -> str:
        return self.stack.dsn("bench_worker", _STORE if ours else _PEERS)

    # Over Kafka

    @asynccontextmanager
    async def pipeline(
        self,
        tuning: Tuning,
        *,
        settings: Mapping[str, str] | None = None,
        recording: Path | None = None,
        delay_while: Path | None = None,
        keep_results: bool = False,
        name: str = "pipeline",
        partitions: int = 3,
        workers: int = 1,
    ) -> AsyncIterator[tuple[Generator, CpuMeter]]:
        """One or more workers, and a generator for them; the meter has the first worker only."""
        topics = await self._topics_of(name, partitions)
        started = [
            self.stack.start_worker(
                topics,
                database=_STORE,
                settings={"ANABRANCH_CONCURRENCY": str(tuning.concurrency), **(settings or {})},
                record=recording,
                delay_while=delay_while,
            )
            for _ in range(workers)
        ]
        try:
            for worker in started:
                await worker.until_ready()
            async with self._generator(topics, keep_results=keep_results) as generator:
                yield generator, CpuMeter({**self.stack.processes, "worker": started[0].pid})
        finally:
            for worker in started:
                await asyncio.to_thread(worker.stop)

    @asynccontextmanager
    async def peer(
        self, name: str, tuning: Tuning, *, keep_results: bool = False
    ) -> AsyncIterator[tuple[Generator, CpuMeter]]:
        """FastStream or LangChain, and a generator for it."""
        topics = await self._topics_of(name.replace(", ", "-").replace(" ", "-"))
        arguments = [
            "--bootstrap-servers", self.stack.broker.bootstrap_servers,
            "--input-topic", topics.input,
            "--output-topic", topics.output,
            "--fetch-max-wait-ms", "20" if self.stack.fetch_waits_fully else "500",
            *self._peer_arguments(name, tuning),
        ]  # fmt: skip
        log_file = self.stack.directory / "peer.log"
        with log_file.open("ab") as log:
            process = subprocess.Popen(  # our own script; it returns at once
                self._peer_program(name, arguments),
                env=self._peer_environment(),
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            async with self._generator(topics, keep_results=keep_results) as generator:
                try:
                    await generator.first_answer(timeout_seconds=_JOIN_SECONDS)
                except TimeoutError:
                    raise BenchError(f"{name} does not answer:\n{log_file.read_text()[-2000:]}") from None
                yield generator, CpuMeter({**self.stack.processes, "worker": process.pid})
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    async def langchain_recall(self, ef_search: int, *, kinds: Sequence[Workload]) -> dict[str, float]:
        arguments = [
            "--recall",
            "--bootstrap-servers",
            "-",
            "--input-topic",
            "-",
            "--output-topic",
            "-",
            "--fetch-max-wait-ms",
            "500",
        ]
        process = await asyncio.create_subprocess_exec(
            *self._peer_program(
                "langchain", [*arguments, *self._peer_arguments("langchain", Tuning(1, ef_search))]
            ),
            env=self._peer_environment(),
            cwd=_ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        asked = [question for kind in kinds for question in self.questions[kind]]
        lines = "\n".join(
            json.dumps({**_event(question), "embedding": question.vector.tolist()}, default=str)
            for question in asked
        )
        output, errors = await process.communicate(lines.encode())
        if process.returncode != 0:
            raise BenchError(f"langchain: {errors.decode()[-2000:]}")
        return mean_recall(
            (question, self.best[id(question)], map(UUID, json.loads(line)))
            for question, line in zip(asked, output.splitlines(), strict=True)
        )

    async def saturated(
        self,
        name: str,
        workload: Workload,
        generator: Generator,
        meter: CpuMeter,
        seconds: float,
        *,
        warm_up: float = _WARM_UP,
    ) -> Figures:
        """A closed loop over Kafka."""
        generator.ask(self.factories[workload])
        measured = await generator.saturate(
            in_flight=IN_FLIGHT, warm_up=warm_up, seconds=seconds, meter=meter
        )
        figures = self._figures(name, workload, measured)
        if measured.results:
            figures.recall = self.recall_of(workload, measured)
        return figures

    def question(self, workload: Workload, number: int) -> Question:
        """What the event with a number asks."""
        asked = self.questions[workload]
        return asked[number % len(asked)]

    def recall_of(self, workload: Workload, measured: Measured) -> dict[str, float]:
        """Recall of the results of a measurement."""
        found = []
        for key, value in list(measured.results.items())[:_RECALL_RESULTS]:
            question = self.question(workload, measured.numbers[key])
            if value.startswith(b"{"):
                ids = [UUID(passage["id"]) for passage in json.loads(value)["results"]]
            else:
                ids = [passage.chunk_id for passage in self.codec.decode_result(value).results]
            found.append((question, self.best[id(question)], ids))
        return mean_recall(found)

    def _figures(self, name: str, workload: Workload, result: Measured | LoopResult) -> Figures:
        if isinstance(result, Measured):
            events, recall, unanswered = result.answered, {}, result.unanswered
        else:
            events, recall, unanswered = result.events, dict(self.recall.get(name, {})), 0
        return Figures(
            name,
            workload,
            result.per_second,
            {process: 1e6 * seconds / max(1, events) for process, seconds in result.cpu.items()},
            *_percentiles(result.latencies),
            recall,
            unanswered,
        )

    def _generator(self, topics: Topics, *, keep_results: bool) -> Any:
        return Generator.running(
            self.stack.client_options,
            input_topic=topics.input,
            output_topic=topics.output,
            make=self.factories["mixed"],
            keep_results=keep_results,
            fetch_waits_fully=self.stack.fetch_waits_fully,
        )

    async def _topics_of(self, name: str, partitions: int = 3) -> Topics:
        if name not in self._topics:
            self._topics[name] = await self.stack.create_topics(name, partitions=partitions)
        return self._topics[name]

    def _peer_program(self, name: str, arguments: Sequence[str]) -> list[str]:
        module = "langchain_peer" if name == "langchain" else "faststream_peer"
        return [str(self.peers_python), "-m", f"benchmarks.peers.{module}", *arguments]

    def _peer_arguments(self, name: str, tuning: Tuning) -> list[str]:
        ours = name.endswith("our index")
        arguments = [
            "--dsn", self._plain_dsn(ours=ours),
            "--schema", str(resources.schemas() / "avro" / "released" / "query_embedding.1.0.0.avsc"),
            "--concurrency", str(tuning.concurrency),
            "--ef-search", str(tuning.ef_search or 40),
        ]  # fmt: skip
        if name == "langchain":
            arguments += ["--sets", str(self._sets_file)]
        elif ours:
            arguments += ["--our-store", json.dumps(asdict(self.plain_store(ours=True)))]
        return arguments

    def _peer_environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(_ROOT)}

    # Files

    @property
    def _sets_file(self) -> Path:
        return self.stack.directory / "sets.json"

    def _file(self, name: str) -> Path:
        return self.stack.directory / f"{name}.pickle"

    def _save(self, name: str, events: Sequence[Sequence[Statement]]) -> None:
        save(events, self._file(name))

    def _save_events(self, name: str, asked: Sequence[Question]) -> None:
        self._file(f"{name}-events").write_bytes(pickle.dumps([_event(question) for question in asked]))

    def _load(self, name: str) -> Any:
        return pickle.loads(self._file(name).read_bytes())  # noqa: S301  # our own file


def _percentiles(latencies: Sequence[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(latencies or [float("nan")], [50, 99])
    return float(p50), float(p99)


def _event(question: Question) -> dict[str, Any]:
    return {
        "embedding": question.vector,
        "principals": list(question.principals),
        "session_id": question.session_id,
        "topic_id": question.topic_id,
    }


async def sweep(
    measure: Callable[[Tuning], Any], tunings: Iterable[Tuning]
) -> tuple[Tuning, list[tuple[Tuning, float]]]:
    """The tuning with the most events per second, and all that were tried."""
    tried = [(tuning, (await measure(tuning)).per_second) for tuning in tunings]
    return max(tried, key=lambda each: each[1])[0], tried


def at(tuning: Tuning, **changes: Any) -> Tuning:
    return replace(tuning, **changes)
