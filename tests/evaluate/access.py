"""What access control costs: the same searches with and without it, turn about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final
from unittest.mock import patch

import numpy as np

from benchmarks.unguarded import unguarded
from streams.store import postgres
from streams.store.postgres import PostgresStore
from tests.evaluate.outcome import Outcome, mark, milliseconds, table
from tests.evaluate.recall import search_of
from tests.evaluate.worlds import Cell, World

__all__ = ["Pairs", "measure_access"]

# The bound is on all searches of a caller together, and leaves room for a machine that is busy with other things. A
# single scope beyond it is only reported: a caller's sets cost much the same for each, and weigh on the smallest.
GOAL, BOUND = 1.15, 1.6
_PAIRS: Final = 30
_RESAMPLES: Final = 2000
_SCOPES: Final = (
    ("session", "50"),
    ("session", "10"),
    ("session", "1"),
    ("session", "0.1"),
    ("topic", "10"),
    ("topic", "1"),
    ("section", "10"),
    ("document type", "10"),
    ("URL prefix", "1"),
    ("metadata", "10"),
)


@dataclass(frozen=True)
class Pairs:
    """Seconds with and without, pair by pair."""

    cell: Cell
    guarded: Sequence[float]
    bare: Sequence[float]

    def ratio(self) -> float:
        return float(np.median(self.guarded) / np.median(self.bare))

    def interval(self, rng: np.random.Generator) -> tuple[float, float]:
        """Of 95 %, by resampling pairs."""
        drawn = rng.integers(0, len(self.guarded), (_RESAMPLES, len(self.guarded)))
        guarded, bare = np.array(self.guarded)[drawn], np.array(self.bare)[drawn]
        low, high = np.percentile(np.median(guarded, axis=1) / np.median(bare, axis=1), [2.5, 97.5])
        return float(low), float(high)


def _unguarded_statements() -> Mapping[str, str]:
    return {name: unguarded(text) for name, text in postgres._SQL.items()}


async def measure_access(
    world: World, guarded: PostgresStore, bare: PostgresStore, seed: int, *, sets: int
) -> Outcome:
    """Searches by somebody who may read every row, so that both ways have the same rows to search.

    Args:
        world: that both stores hold.
        guarded: logs in as a worker.
        bare: logs in as a role that bypasses row-level security, to a database with the unguarded functions.
        seed: of the queries drawn.
        sets: how many sets the caller is in.
    """
    rng = np.random.default_rng(seed)
    asked = rng.choice(len(world.queries), _PAIRS, replace=False)
    without = _unguarded_statements()
    measured = []
    for cell in (world.whole, *(world.cell(*scope) for scope in _SCOPES)):
        seconds: tuple[list[float], list[float]] = ([], [])
        for number, query in enumerate((asked[0], *asked)):
            search = search_of(cell, world.queries[query])
            answers = {}
            # Either comes first every other time.
            for way in (number % 2, 1 - number % 2):
                store, statements = (guarded, postgres._SQL) if way == 0 else (bare, without)
                with patch.dict(postgres._SQL, statements):
                    began = perf_counter()
                    answers[way] = await store.search(search)
                    took = perf_counter() - began
                if number:  # the first pair warms up
                    seconds[way].append(took)
            assert len(answers[0].candidates) == len(answers[1].candidates)
        measured.append(Pairs(cell, *seconds))
    return _outcome(world, measured, rng, sets)


def _outcome(world: World, measured: Sequence[Pairs], rng: np.random.Generator, sets: int) -> Outcome:
    shown = table("keeps", "filter", "p50 ms with", "without", "ratio", "95 % interval", words=2)
    missed: list[str] = []
    known: list[str] = []
    together = Pairs(
        world.whole,
        [second for pairs in measured for second in pairs.guarded],
        [second for pairs in measured for second in pairs.bare],
    )
    for pairs in (*measured, together):
        ratio, (low, high) = pairs.ratio(), pairs.interval(rng)
        everything = pairs is together
        shown.add_row(
            "" if everything else f"{pairs.cell.keeps} %",
            "all together" if everything else pairs.cell.by,
            milliseconds(1000 * float(np.median(pairs.guarded))),
            milliseconds(1000 * float(np.median(pairs.bare))),
            mark(ratio, f"{ratio:.2f}", bound=BOUND, goal=GOAL, least=False),
            f"{low:.2f} – {high:.2f}",
        )
        if ratio > BOUND:
            where = "all together" if everything else f"{pairs.cell.by}, {pairs.cell.keeps} %"
            (missed if everything else known).append(
                f"access control, {sets:,} sets, {where}: {ratio:.2f} times, over {BOUND}"
            )
    return Outcome(f"Cost of access control, a caller of {sets:,} sets", [shown], missed, known)
