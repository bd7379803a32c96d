"""Recall by selectivity and filter: does a filtered search find what exact search finds, as fast as can be?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, Self

import asyncpg
import numpy as np
from pgvector.asyncpg import register_vector

from streams.retrieval import Search
from streams.store.postgres import PostgresStore
from streams.store.vector_index import EF_SEARCH
from tests.conftest import Database
from tests.evaluate.outcome import Outcome, mark, milliseconds, table
from tests.evaluate.worlds import EVERYBODY, SHARES, Cell, Vectors, World

__all__ = ["LIMIT", "measure_recall", "search_of"]

LIMIT: Final = 15
# Of the mean over a cell's queries; in the correlated world over those that lean towards the rows, and over those that
# lean away: the approximate index's worst case, because their nearest rows are among those that the filter drops.
BOUND: Final = 0.99
# A search is slow where it takes so many times as long as plain SQL, and so many milliseconds longer: plain SQL knows
# nothing of principals and calls no function, which weighs on the quickest.
MAX_TIMES, MAX_EXTRA = 5.0, 15.0
_QUERIES: Final = 20

# The settings of the plain statements: those of the search, but in strict order, because nothing sorts the rows again;
# hnsw.ef_search is the searches'.
_OWNER_SETTINGS: Final = """
    SET jit = off; SET random_page_cost = 1; SET plan_cache_mode = force_custom_plan;
    SET hnsw.iterative_scan = strict_order
"""
_EXACTLY: Final = """
    WITH scope AS MATERIALIZED (SELECT c.id, c.embedding <=> $1 AS distance FROM {tables} WHERE {condition})
    SELECT id FROM scope ORDER BY distance LIMIT 15
"""
# By HNSW, where sorts are off.
_BY_INDEX: Final = """
    SELECT c.id FROM {tables} WHERE {condition}
    ORDER BY (l2_normalize(c.embedding)::halfvec(768)) <=> $1::vector::halfvec(768) LIMIT 15
"""


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
        return self.times > MAX_TIMES and more > MAX_EXTRA


def search_of(cell: Cell, vector: Vectors, limit: int = LIMIT) -> Search:
    """A search through a filter, by somebody who may read everything where it does not say otherwise."""
    defaults = {"principals": [EVERYBODY], "session_id": None, "topic_id": None, "filters": None}
    return Search(vector=vector, expand_parents=False, limit=limit, **{**defaults, **cell.fields})


async def measure_recall(world: World, database: Database, store: PostgresStore, seed: int) -> Outcome:
    """Search each cell of a world, and the same rows by plain statements as the owner."""
    # Two ways to answer in plain SQL: as the planner likes, and with nothing left to it but the vectors' index.
    free, bound = await asyncpg.connect(database.owner), await asyncpg.connect(database.owner)
    try:
        for owner in (free, bound):
            await register_vector(owner)
            await owner.execute(_OWNER_SETTINGS)
        await bound.execute("SET enable_sort = off; SET enable_seqscan = off; SET enable_bitmapscan = off")
        for owner in (free, bound):
            await owner.execute(f"SET hnsw.ef_search = {EF_SEARCH}")
        rng = np.random.default_rng(seed)
        drawn = rng.choice(len(world.queries), _QUERIES, replace=False)
        measured = []
        for cell in (world.whole, *world.callers(), *world.cells()):
            asked = _leaning(world, cell) if world.correlated and cell.by != "nothing" else drawn
            measured.append(await _measure(world, cell, asked, store, (free, bound)))
    finally:
        await free.close()
        await bound.close()
    return _outcome(world, measured)


def _leaning(world: World, cell: Cell) -> np.ndarray:
    """The queries that lean most towards the rows that are kept, then those that lean most away from them."""
    direction = world.vectors[cell.kept].mean(axis=0) - world.vectors.mean(axis=0)
    order = np.argsort(-(world.queries @ direction), kind="stable")
    return np.concatenate([order[: _QUERIES // 2], order[-_QUERIES // 2 :]])


async def _measure(
    world: World,
    cell: Cell,
    asked: np.ndarray,
    store: PostgresStore,
    owners: tuple[asyncpg.Connection, asyncpg.Connection],
) -> Measured:
    """Each query in turn by the search and in plain SQL, so that a busy minute weighs on all of them."""
    rows = np.flatnonzero(cell.kept)
    similarities = world.vectors[rows] @ world.queries[asked].T
    nearest = [set(rows[np.argsort(-column, kind="stable")[:LIMIT]].tolist()) for column in similarities.T]
    plain = [await _Plain.prepare("exact", _EXACTLY, cell, owners[0])]
    # An index scan for few rows reads on and on; exact search of them takes no time.
    if SHARES.get(cell.keeps, 1) >= 0.1:
        plain.append(await _Plain.prepare("HNSW", _BY_INDEX, cell, owners[1]))
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
        for way in plain:
            await way.ask(world, world.queries[query], best)
    expected = min(LIMIT, len(rows))
    # Wrong answers do not count, however fast.
    quickest = min(
        (way for way in plain if np.mean(way.recalls) >= BOUND), key=lambda way: np.median(way.seconds)
    )
    return Measured(
        cell,
        recalls,
        float(np.mean(returned)),
        expected,
        sum(number != expected for number in returned),
        truncated,
        seconds,
        float(np.median(quickest.seconds)),
        quickest.name,
    )


@dataclass(frozen=True)
class _Plain:
    """A plain statement over the same rows, by the owner, who may see them all."""

    name: str
    statement: asyncpg.prepared_stmt.PreparedStatement
    arguments: tuple[Any, ...]
    recalls: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    async def prepare(cls, name: str, text: str, cell: Cell, owner: asyncpg.Connection) -> Self:
        joined = "document_chunks c JOIN documents d ON d.id = c.document_id"
        tables = joined if "d." in cell.condition else "document_chunks c"
        statement = await owner.prepare(text.format(tables=tables, condition=cell.condition))
        return cls(name, statement, () if cell.argument is None else (cell.argument,))

    async def ask(self, world: World, vector: Vectors, best: set[int]) -> None:
        began = perf_counter()
        found = await self.statement.fetch(vector, *self.arguments)
        self.seconds.append(perf_counter() - began)
        self.recalls.append(len(best & {world.numbers[row["id"]] for row in found}) / len(best))


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
            *(mark(mean, f"{mean:.3f}", bound=BOUND, goal=BOUND, least=True) for mean in means),
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
        missed += [
            f"{where}: {mean:.3f} in the column {leaning}, below {BOUND}"
            for leaning, mean in zip(leanings, means, strict=True)
            if mean < BOUND
        ]
        if one.short:
            missed.append(f"{where}: {one.short} searches returned fewer rows than exist")
        if one.slow:
            missed.append(f"{where}: {one.times:.1f} times as long as plain SQL, over {MAX_TIMES:g}")
    return Outcome(f"Recall by selectivity and filter, {world.name} with the queries", [shown], missed)
