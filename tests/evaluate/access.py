"""What access control costs: the same searches with and without it, turn about."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final
from unittest.mock import patch

import numpy as np

from streams.store import postgres
from streams.store.postgres import PostgresStore
from streams.store.reference import SEARCHES, reference
from tests.conftest import SETTING, Database
from tests.evaluate.outcome import Outcome, mark, milliseconds, table
from tests.evaluate.recall import search_of
from tests.evaluate.worlds import Cell, World
from tests.integration.connections import connected

__all__ = ["Pairs", "create_unguarded_functions", "measure_access"]

# The bound is on all searches of an asker together, and leaves room for a machine that is busy with other things. A
# single scope beyond it is told: what an asker's sets cost is much the same for each, and weighs on the smallest.
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
# The functions say the policies' condition once more, to lead the planner: that too is access control.
_SAID_AGAIN: Final = re.compile(
    r"\w+\.access_set_id = ANY \(ARRAY\(SELECT \w+\.id FROM public\.access_sets \w+\)\)"
)
# They also look whether the policies hold.
_LOOK: Final = "anabranch_require_row_security"
_NO_LOOK: Final = f"""
    CREATE FUNCTION unguarded.{_LOOK}() RETURNS void LANGUAGE plpgsql STABLE AS 'BEGIN END'
"""


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


async def create_unguarded_functions(database: Database) -> None:
    """Copies of the search functions without the policies' condition, and without the look whether these hold."""
    names = [
        statement.name
        for statement in reference(SETTING)
        if statement.kind == "function" and statement.file == SEARCHES
    ]
    ours = re.compile(rf"\bpublic\.({'|'.join(names)})\b")
    replaced = 0
    async with connected(database.admin, search_path="pg_catalog") as admin:
        await admin.execute("CREATE SCHEMA unguarded; GRANT USAGE ON SCHEMA unguarded TO unguarded")
        for row in await admin.fetch(
            "SELECT proname, pg_get_functiondef(oid) AS source FROM pg_proc"
            " WHERE pronamespace = 'public'::regnamespace AND proname = ANY ($1)",
            names,
        ):
            if row["proname"] == _LOOK:
                await admin.execute(_NO_LOOK)
                continue
            source, number = _SAID_AGAIN.subn("true", ours.sub(r"unguarded.\1", row["source"]))
            assert "access_sets" not in source, row["proname"]
            await admin.execute(source)
            replaced += number
    assert replaced > 0
    assert _unguarded_statements() != postgres._SQL


def _unguarded_statements() -> Mapping[str, str]:
    return {
        name: text.replace("public.anabranch_", "unguarded.anabranch_")
        for name, text in postgres._SQL.items()
    }


async def measure_access(
    world: World, guarded: PostgresStore, bare: PostgresStore, seed: int, *, sets: int
) -> Outcome:
    """Searches by somebody who may read every row, so that both ways have the same rows to search.

    Args:
        world: that both stores hold.
        guarded: logs in as a worker.
        bare: logs in as a role that bypasses row-level security, to a database with the unguarded functions.
        seed: of the queries drawn.
        sets: how many sets the asker is in.
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
    return Outcome(f"Cost of access control, an asker of {sets:,} sets", [shown], missed, known)
