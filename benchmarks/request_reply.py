"""``python -m benchmarks.request_reply``: the latency of `retrieve` beside publishing an event and consuming results.

Both ask the same question of the same worker, one at a time, in turn, so that a busy minute of the machine counts for
both. Publishing and consuming is `LivePipeline`: it waits on the output topic for the record with the event's key. Each
latency begins with a vector and ends with a decoded result.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np
import uvloop
from rich.console import Console

from benchmarks import CRANFIELD
from benchmarks.goals import Goal, show_goals, table_of
from streams.bench.stack import Stack, Topics, open_stack
from streams.bench.world import Question, World, base, grow, load, questions
from streams.broker.topics import create_topics, topic_specs
from streams.client import Client
from streams.evaluation.live import LivePipeline
from streams.evaluation.query_runner import Answered
from streams.wire import Codec
from tests.integration.kafka.apache_kafka import ApacheKafka, jars

_DATABASE: Final = "request_reply"
_REPLIES: Final = "bench.request-reply.replies"
# As `LivePipeline` waits; the embedded broker delays an empty fetch for the full wait.
_FETCH_WAIT_SECONDS: Final = 0.01
_TIMEOUT_SECONDS: Final = 30.0
_WARM_UP: Final = 30
# Between two events: the phase of a broker's fetch waits must not depend on the event before.
_PAUSE_SECONDS: Final = 0.05
_GOAL: Final = 1.1
_LIVE: Final = "publish and consume"
_RETRIEVE: Final = "retrieve"

Ask = Callable[[Question], Awaitable[object]]


async def measure(
    ways: Mapping[str, Ask], asked: list[Question], rounds: int
) -> dict[str, list[list[float]]]:
    """Milliseconds of each event, by way and round."""
    rng = random.Random(1)  # noqa: S311  # pauses
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for times in seconds.values():
            times.append([])
        for question in asked[:_WARM_UP] if number < 0 else asked:
            for name in rng.sample(list(ways), len(ways)):
                await asyncio.sleep(rng.uniform(0, _PAUSE_SECONDS))
                began = perf_counter()
                await ways[name](question)
                seconds[name][-1].append(1000 * (perf_counter() - began))
    return {name: times[1:] for name, times in seconds.items()}


async def run(stack: Stack, world: World, asked: list[Question], rounds: int) -> dict[str, list[list[float]]]:
    await stack.create_store(_DATABASE)
    await load(world, stack.admin_dsn(_DATABASE))
    topics = await stack.create_topics("request-reply")
    await _create_replies(stack, topics)
    worker = stack.start_worker(topics, database=_DATABASE, settings={"ANABRANCH_REPLY_TOPICS": _REPLIES})
    try:
        await worker.until_ready()
        async with (
            Client(
                stack.broker.bootstrap_servers,
                input_topic=topics.input,
                output_topic=topics.output,
                reply_topic=_REPLIES,
                fetch_max_wait_seconds=_FETCH_WAIT_SECONDS,
            ) as client,
            LivePipeline(
                stack.client_options,
                codec=Codec(),
                input_topic=topics.input,
                output_topic=topics.output,
                dead_letter_topic=topics.dead_letters,
                timeout_seconds=_TIMEOUT_SECONDS,
            ) as pipeline,
        ):

            async def live(question: Question) -> None:
                outcome = await pipeline.ask(question.event())
                if not isinstance(outcome, Answered):
                    raise RuntimeError(f"not answered: {outcome}")  # noqa: TRY004  # an outcome, not an argument

            async def retrieve(question: Question) -> None:
                await client.retrieve(
                    embedding=question.vector,
                    principals=question.principals,
                    profile=question.kind,
                    session_id=question.session_id,
                    topic_id=question.topic_id,
                    timeout=_TIMEOUT_SECONDS,
                )

            return await measure({_LIVE: live, _RETRIEVE: retrieve}, asked, rounds)
    finally:
        worker.stop()


async def _create_replies(stack: Stack, topics: Topics) -> None:
    [*_, replies] = topic_specs(
        input_topic=topics.input,
        output_topic=topics.output,
        dead_letter_topic=topics.dead_letters,
        partitions=1,
        replication_factor=1,
        max_event_bytes=1024 * 1024,
        reply_topics=[_REPLIES],
    )
    await create_topics(stack.client_options, [replies])


async def _main(arguments: argparse.Namespace) -> None:
    console = Console(width=118)
    of = base(CRANFIELD if CRANFIELD.is_dir() else None)
    world = grow(of, arguments.chunks, 1)
    asked = questions(world, "chat", arguments.events, 1)
    with ApacheKafka(jars()) if arguments.apache_kafka else nullcontext() as kafka:
        async with open_stack(broker=kafka) as stack:
            measured = await run(stack, world, asked, arguments.rounds)
    broker = "Apache Kafka" if arguments.apache_kafka else "embedded broker"
    console.print(
        f"{arguments.chunks:,} chunks, {broker}; {arguments.rounds} rounds of {arguments.events} questions each way",
        soft_wrap=True,
    )
    table = table_of("p50 ms", "p95 ms", "p99 ms", first="")
    for name, rounds in measured.items():
        table.add_row(
            name, *(f"{value:.2f}" for value in np.percentile(np.concatenate(rounds), [50, 95, 99]))
        )
    console.print(table)
    ratios = [
        median(retrieve) / median(live)
        for live, retrieve in zip(measured[_LIVE], measured[_RETRIEVE], strict=True)
    ]
    console.print("ratio of medians by round: " + ", ".join(f"{ratio:.3f}" for ratio in ratios))
    show_goals(console, [Goal("retrieve / publish and consume, p50", median(ratios), _GOAL, "≤")])
    if arguments.json:
        arguments.json.write_text(json.dumps({"milliseconds": measured, "ratios": ratios}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request_reply")
    parser.add_argument("--chunks", type=int, default=5000, help="in the store (%(default)s)")
    parser.add_argument("--events", type=int, default=100, help="of a round, each way (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--apache-kafka", action="store_true", help="instead of the embedded broker")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    uvloop.run(_main(parser.parse_args()))
