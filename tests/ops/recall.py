"""A degraded vector index: live recall tells the truth about it, an alert fires, and answers are as fast as before."""

import asyncio
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Final

import numpy as np

from tests.faults.load import Event, good_events
from tests.faults.stack import Stack
from tests.integration.connections import connected, execute
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, tiny_corpus, unit_vectors
from tests.integration.harness import Samples, read_result
from tests.latencies import percentile
from tests.ops.installation import Installation
from tests.ops.judge import Expectation
from tests.ops.scenario import Scenario

__all__ = ["DEGRADED_INDEX", "SCENARIOS", "interval", "shuffled_share"]

_CHUNKS: Final = 2500
_K: Final = 15
_SAMPLES: Final = 400
# The default is 0.01: with it, 400 samples take days.
_SHARE: Final = 0.1
_PER_SECOND: Final = 40.0
_GOOD_RECALL: Final = 0.97
_VECTORS: Final = unit_vectors(2000, 8)

# So few edges, found among so few candidates, that searches miss many rows.
_DEGRADE: Final = """
    DROP INDEX document_chunks_embedding_halfvec; SET search_path = public;
    CREATE INDEX document_chunks_embedding_halfvec ON document_chunks USING hnsw
      ((l2_normalize(embedding)::halfvec(768)) halfvec_cosine_ops) WITH (m = 2, ef_construction = 4);
"""
_DEFINITION: Final = "SELECT pg_get_indexdef('public.document_chunks_embedding_halfvec'::regclass)"

# Live recall off and on, so that a trend of the machine affects both alike.
_ROUNDS: Final = (False, True, True, False, False, True, True, False)
# A worker first saves a quarter of a second for exact searches.
_WARM_UP_SECONDS: Final = 22.0
_ROUND_SECONDS: Final = 12.0
# One of 70 ways to choose four of eight rounds. Only if all four are the slower ones, it is measurable.
_SIGNIFICANT: Final = 0.02


def _corpus() -> Corpus:
    rng = random.Random(5)
    document = Document(random_uuid(rng), frozenset({"user:1"}))
    return Corpus.of(
        [document],
        [
            Chunk(random_uuid(rng), document.id, "text", vector, token_count=1)
            for vector in unit_vectors(_CHUNKS, 6)
        ],
    )


def _events() -> Iterator[Event]:
    return good_events(_VECTORS, profile="extraction", k=_K, similarity_threshold=None)


async def degrade(installation: Installation) -> None:
    database = installation.stack.database
    await execute(database.owner, _DEGRADE)
    await load(database.writer, _corpus())
    await execute(database.owner, "VACUUM ANALYZE documents, document_chunks, chunk_topics, access_sets")


async def start_after_rounds(installation: Installation) -> None:
    """First the latency, with live recall off and on in turn; not watched, because restarts look like crashes."""
    stack = installation.stack
    await stack.load.start()
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for measured in _ROUNDS:
        worker = stack.start_worker(ANABRANCH_LIVE_RECALL_SHARE=str(_SHARE if measured else 0))
        await worker.until_ready(seconds=60)
        await stack.until_committed(60)
        await asyncio.sleep(_WARM_UP_SECONDS)
        if measured:
            await _until_samples(installation, None, 1)
        found[measured].append(await _latencies(stack))
        stack.members.remove(worker)
        await worker.terminate(seconds=30)
    _compare(installation, found)
    stack.start_worker(ANABRANCH_LIVE_RECALL_SHARE=str(_SHARE))


async def _latencies(stack: Stack) -> list[float]:
    since = time.time()
    await asyncio.sleep(_ROUND_SECONDS)
    until = time.time()
    await asyncio.sleep(1)
    published = stack.published()
    return [
        published.get(name, time.time()) - at
        for name, (_, at) in stack.load.sent.items()
        if since <= at < until
    ]


def _compare(installation: Installation, found: Mapping[bool, Sequence[Sequence[float]]]) -> None:
    p99 = {measured: [1000 * percentile(each, 0.99) for each in rounds] for measured, rounds in found.items()}
    share = shuffled_share(p99[False], p99[True])
    installation.figures.append(
        "p99 of answers: "
        + ", ".join(
            f"{median(p99[measured]):.0f} ms {name} live recall ({', '.join(f'{each:.0f}' for each in p99[measured])})"
            for measured, name in ((False, "without"), (True, "with"))
        )
        + f"; as large a difference by chance: {share:.0%}"
    )
    if share < _SIGNIFICANT:
        installation.problems.append("live recall makes p99 measurably longer")


def shuffled_share(without: Sequence[float], with_: Sequence[float]) -> float:
    """How often rounds drawn at random differ as much: the permutation test of "with is not longer"."""
    rounds = [*without, *with_]
    difference = fmean(with_) - fmean(without)
    drawn = [{*chosen} for chosen in combinations(range(len(rounds)), len(with_))]
    larger = sum(
        fmean(rounds[number] for number in chosen)
        - fmean(rounds[number] for number in range(len(rounds)) if number not in chosen)
        >= difference - 1e-9
        for chosen in drawn
    )
    return larger / len(drawn)


def interval(samples: Samples, before: Samples | None = None) -> tuple[float, float, float]:
    """Number of samples, their mean, and half of its 95 % confidence interval, as docs/metrics.md has it."""
    count, total, squares = (
        samples.value(f"anabranch_live_recall_{name}", size="normal")
        - (0 if before is None else before.value(f"anabranch_live_recall_{name}", size="normal"))
        for name in ("total", "sum", "squares_sum")
    )
    mean = total / count
    return count, mean, 1.96 * math.sqrt(max(0.0, squares - count * mean**2) / (count * (count - 1)))


async def compare_with_truth(installation: Installation) -> None:
    """The worker's own estimate after 400 samples, and the recall of all its answers, computed from their chunks.

    The interval misses the truth in one of 20 runs; then another 400 samples decide.
    """
    stack = installation.stack
    [worker] = stack.members
    before: Samples | None = None
    for attempt in (1, 2):
        samples = await _until_samples(installation, before, _SAMPLES)
        count, mean, margin = interval(samples, before)
        # Not in the event loop: the workers' connections pass through it.
        truth, answers = await asyncio.to_thread(_truth, stack)
        inside = abs(mean - truth) <= margin
        installation.figures.append(
            f"live recall after {count:.0f} samples: {mean:.3f} ± {margin:.3f}, {'' if inside else 'NOT '}"
            f"around the recall of all {answers:,} answers: {truth:.3f}"
        )
        if inside:
            return
        before = await worker.scrape()
        if attempt == 2:
            installation.problems.append("the 95 % interval did not include the truth, twice")


async def _until_samples(installation: Installation, before: Samples | None, wanted: int) -> Samples:
    [worker] = installation.stack.members
    while True:
        samples = await worker.scrape()
        count = samples.value("anabranch_live_recall_total", size="normal")
        if (
            count - (0 if before is None else before.value("anabranch_live_recall_total", size="normal"))
            >= wanted
        ):
            return samples
        await asyncio.sleep(0.5)


def _truth(stack: Stack) -> tuple[float, int]:
    """The mean recall of all answers so far, and their number: by brute force over all chunks."""
    chunks = [*_corpus().chunks.values(), *tiny_corpus().chunks.values()]
    vectors = np.stack([np.asarray(chunk.embedding, dtype=np.float64) for chunk in chunks])
    nearest = [
        {str(chunks[number].id) for number in np.argsort(-(vectors @ vector))[:_K]}
        for vector in _VECTORS.astype(np.float64)
    ]
    numbers = {name: number % len(_VECTORS) for number, name in enumerate([*stack.load.asked])}
    recalls: dict[str, float] = {}
    for record in [*stack.output_reader.results]:  # which grow meanwhile
        result = read_result(record.value)
        name = str(result["event_id"])
        recalls[name] = (
            len({str(each["chunk_id"]) for each in result["results"]} & nearest[numbers[name]]) / _K
        )
    return fmean(recalls.values()), len(recalls)


async def rebuild_index(installation: Installation) -> None:
    """The runbook: build the index again, here with the reference schema's parameters. New samples show the effect."""
    database = installation.stack.database
    reference = await asyncio.to_thread(installation.stack.store.database)
    definition = await _definition(reference.owner)
    await asyncio.to_thread(installation.stack.store.drop, reference)
    await execute(database.owner, f"DROP INDEX public.document_chunks_embedding_halfvec; {definition}")
    [worker] = installation.stack.members
    before = await worker.scrape()
    count, mean, margin = interval(await _until_samples(installation, before, 100), before)
    installation.figures.append(f"after the fix: {mean:.3f} ± {margin:.3f} from {count:.0f} samples")
    if mean < _GOOD_RECALL:
        installation.problems.append("recall stays low after the index was built again")
    await installation.stack.load.finish()
    await installation.stack.until_committed(60)
    await asyncio.sleep(1)
    missing = installation.stack.load.acknowledged - installation.stack.published().keys()
    if missing:
        installation.problems.append(f"{len(missing)} events have no result")


async def _definition(dsn: str) -> str:
    async with connected(dsn) as connection:
        return str(await connection.fetchval(_DEFINITION))


DEGRADED_INDEX = Scenario(
    "degraded-index",
    # It looks back a day: it resolves when enough new samples are good.
    Expectation({"RecallLow": 60}, recovery=None),
    compare_with_truth,
    rebuild_index,
    fault_minutes=30,
    runbook="a degraded vector index",
    prepare=degrade,
    start=start_after_rounds,
    workers=1,
    per_second=_PER_SECOND,
    events=_events,
    # Of so many events, the whole accounting would stop the event loop for seconds.
    accounted=False,
    alone=True,
)
SCENARIOS = [DEGRADED_INDEX]
