"""Recall by selectivity and filter: does a filtered search find what exact search finds, as fast as can be?"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import asyncpg
import numpy as np
from pgvector.asyncpg import register_vector

from streams.retrieval import Search
from streams.store.postgres import PostgresStore
from tests.conftest import Database
from tests.evaluate.outcome import Outcome, mark, milliseconds, table
from tests.evaluate.worlds import EVERYBODY, SHARES, Cell, Vectors, World

__all__ = ["LIMIT", "measure_recall", "search_of"]

LIMIT: Final = 15
BOUND, GOAL = 0.95, 0.99
# A search is slow where it takes so many times as long as plain SQL, and so many milliseconds longer: plain SQL knows
# nothing of askers and makes one round trip instead of four, which weighs on the quickest.
MOST_TIMES, MOST_MORE = 5.0, 15.0
_QUERIES: Final = 20

# What the plain statements are run with: the search's own settings, where they have a say.
_OWNER_SETTINGS: Final = """
    SET jit = off; SET random_page_cost = 1; SET plan_cache_mode = force_custom_plan;
    SET hnsw.ef_search = 400; SET hnsw.iterative_scan = strict_order
"""
_EXACTLY: Final = """
    WITH scope AS MATERIALIZED (SELECT c.id, c.embedding <=> $1 AS distance FROM {tables} WHERE {condition})
    SELECT id FROM scope ORDER BY distance LIMIT 15
"""
# By HNSW, where sorts are off.
_BY_INDEX: Final = "SELECT c.id FROM {tables} WHERE {condition} ORDER BY c.embedding <=> $1 LIMIT 15"


@dataclass(frozen=True)
class Measured:
    """One cell, searched.

    Attributes:
        recalls: of each query; in the correlated world first those that lean towards the rows, then those away.
        short: searches that returned fewer rows than there are.
        truncated: searches that said so.
        seconds: of each search.
        plain_seconds: the median of the better of the two plain statements.
        plain_way: which that was.
    """

    cell: Cell
    recalls: Sequence[float]
    returned: float
    expected: int
    short: int
    truncated: int
    seconds: Sequence[float]
    plain_seconds: float
    plain_way: str

    @property
    def times(self) -> float:
        return float(np.median(self.seconds)) / self.plain_seconds

    @property
    def slow(self) -> bool:
        more = 1000 * (float(np.median(self.seconds)) - self.plain_seconds)
        return self.times > MOST_TIMES and more > MOST_MORE


def search_of(cell: Cell, vector: Vectors, limit: int = LIMIT) -> Search:
    """A search through a filter, by somebody who may read everything where it does not say otherwise."""
    defaults = {"principals": [EVERYBODY], "session_id": None, "topic_id": None, "filters": None}
    return Search(vector=vector, expand_parents=False, limit=limit, **{**defaults, **cell.fields})


async def measure_recall(world: World, database: Database, store: PostgresStore, seed: int) -> Outcome:
    """Search each cell of a world, and the same rows by plain statements as the owner."""
    owner = await asyncpg.connect(database.owner)
    try:
        await register_vector(owner)
        await owner.execute(_OWNER_SETTINGS)
        rng = np.random.default_rng(seed)
        drawn = rng.choice(len(world.queries), _QUERIES, replace=False)
        measured = []
        for cell in (world.whole, *world.askers(), *world.cells()):
            asked = _leaning(world, cell) if world.correlated and cell.by != "nothing" else drawn
            measured.append(await _measure(world, cell, asked, store, owner))
    finally:
        await owner.close()
    return _outcome(world, measured)


def _leaning(world: World, cell: Cell) -> np.ndarray:
    """The queries that lean most towards the rows that are kept, then those that lean most away from them."""
    direction = world.vectors[cell.kept].mean(axis=0) - world.vectors.mean(axis=0)
    order = np.argsort(-(world.queries @ direction), kind="stable")
    return np.concatenate([order[: _QUERIES // 2], order[-_QUERIES // 2 :]])


async def _measure(
    world: World, cell: Cell, asked: np.ndarray, store: PostgresStore, owner: asyncpg.Connection
) -> Measured:
    rows = np.flatnonzero(cell.kept)
    similarities = world.vectors[rows] @ world.queries[asked].T
    nearest = [set(rows[np.argsort(-column, kind="stable")[:LIMIT]].tolist()) for column in similarities.T]
    await store.search(search_of(cell, world.queries[asked[0]]))  # not the first of its kind
    recalls, returned, truncated, seconds = [], [], 0, []
    for query, best in zip(asked, nearest, strict=True):
        search = search_of(cell, world.queries[query])
        began = perf_counter()
        found = await store.search(search)
        seconds.append(perf_counter() - began)
        numbers = [world.numbers[candidate.chunk_id] for candidate in found.candidates]
        recalls.append(len(best.intersection(numbers)) / len(best))
        returned.append(len(set(numbers)))
        truncated += found.truncated
    expected = min(LIMIT, len(rows))
    plain, way = await _plainly(world, cell, asked, nearest, owner)
    return Measured(
        cell,
        recalls,
        float(np.mean(returned)),
        expected,
        sum(number != expected for number in returned),
        truncated,
        seconds,
        plain,
        way,
    )


async def _plainly(
    world: World,
    cell: Cell,
    asked: np.ndarray,
    nearest: Sequence[set[int]],
    owner: asyncpg.Connection,
) -> tuple[float, str]:
    """The median of the better way, and which it is; wrong answers do not count, however fast."""
    same = {"world": world, "cell": cell, "asked": asked, "nearest": nearest, "owner": owner}
    best = await _run(_EXACTLY, **same), "exact"
    # An index scan for few rows reads on and on; exact search of them takes no time.
    if SHARES.get(cell.keeps, 1) >= 0.1:
        await owner.execute("SET enable_sort = off; SET enable_seqscan = off; SET enable_bitmapscan = off")
        best = min(best, (await _run(_BY_INDEX, **same), "HNSW"))
        await owner.execute("RESET enable_sort; RESET enable_seqscan; RESET enable_bitmapscan")
    return best


async def _run(
    statement: str,
    *,
    world: World,
    cell: Cell,
    asked: np.ndarray,
    nearest: Sequence[set[int]],
    owner: asyncpg.Connection,
) -> float:
    joined = "document_chunks c JOIN documents d ON d.id = c.document_id"
    text = statement.format(
        tables=joined if "d." in cell.condition else "document_chunks c", condition=cell.condition
    )
    arguments = () if cell.argument is None else (cell.argument,)
    prepared = await owner.prepare(text)
    await prepared.fetch(world.queries[asked[0]], *arguments)
    recalls, seconds = [], []
    for query, best in zip(asked, nearest, strict=True):
        began = perf_counter()
        found = await prepared.fetch(world.queries[query], *arguments)
        seconds.append(perf_counter() - began)
        recalls.append(len(best & {world.numbers[row["id"]] for row in found}) / len(best))
    return float(np.median(seconds)) if np.mean(recalls) >= BOUND else float("inf")


def _outcome(world: World, measured: Sequence[Measured]) -> Outcome:
    leanings = ("recall@15 towards", "away") if world.correlated else ("recall@15",)
    shown = table(
        "keeps",
        "filter",
        *leanings,
        "least",
        "rows",
        "truncated",
        "p50 ms",
        "p95",
        "plain SQL",
        "",
        "×",
        words=2,
    )
    missed: list[str] = []
    known: list[str] = []
    keeps = None
    for one in measured:
        if keeps not in (None, one.cell.keeps):
            shown.add_row()
        keeps = one.cell.keeps
        halves = np.array_split(np.array(one.recalls), len(leanings))
        means = [float(half.mean()) for half in halves]
        p50, p95 = np.percentile(1000 * np.array(one.seconds), [50, 95])
        shown.add_row(
            f"{keeps} %",
            one.cell.by,
            *(mark(mean, f"{mean:.3f}", bound=BOUND, goal=GOAL, least=True) for mean in means),
            f"{min(one.recalls):.2f}",
            f"{one.returned:g} of {one.expected}"
            if not one.short
            else f"[red]{one.returned:g} of {one.expected}[/]",
            str(one.truncated),
            milliseconds(p50),
            milliseconds(p95),
            milliseconds(1000 * one.plain_seconds),
            one.plain_way,
            f"[red]{one.times:.1f}[/]" if one.slow else f"{one.times:.1f}",
        )
        where = f"{world.name}, {one.cell.by}, {keeps} %"
        mean = float(np.mean(one.recalls))
        if mean < BOUND:
            missed.append(f"{where}: recall@15 is {mean:.3f}, below {BOUND}")
        elif world.correlated and means[1] < BOUND:
            known.append(f"{where}: recall@15 is {means[1]:.3f} for the queries that lean most away")
        if one.short:
            missed.append(f"{where}: {one.short} searches returned fewer rows than exist")
        if one.slow:
            # No index serves `@>` where policies go first: it is not leakproof, so every row is tested.
            (known if one.cell.by == "metadata" else missed).append(
                f"{where}: {one.times:.0f} times as long as plain SQL, over {MOST_TIMES:g}"
            )
    return Outcome(f"Recall by selectivity and filter, {world.name} with the queries", [shown], missed, known)
