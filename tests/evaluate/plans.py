"""Plan stability: a search's thousandth execution reads what its first did, for every scope and filter.

The statements run inside a function, where EXPLAIN does not reach. What each execution reads is the same for the same
plan: how many scans of which tables and indexes it starts, and how many of their rows it gets. It looks at no clock.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Final, Literal
from uuid import UUID

import numpy as np

from streams.core.messages import Filters
from streams.store import postgres
from streams.store.filters import conditions
from streams.store.postgres import PooledConnection, PostgresStore
from tests.evaluate.outcome import Outcome, table

__all__ = [
    "EXECUTIONS",
    "SEARCHED_TABLES",
    "SEARCHES",
    "VECTOR_INDEX",
    "Asked",
    "Caller",
    "Reads",
    "Stability",
    "Way",
    "combinations_of",
    "measure_plans",
    "problems_of",
    "reads_of",
    "stability_of",
]

EXECUTIONS: Final = (1, 6, 12, 1000)

Way = Literal["exactly", "by the index"]
SEARCHES: Final[tuple[Way, ...]] = ("exactly", "by the index")
# small_scope, exact_scope: everything is small enough to read, or nothing is.
_BOUNDS: Final[Mapping[Way, tuple[int, int]]] = {"exactly": (1_000_000, 1_000_000), "by the index": (0, 0)}

SEARCHED_TABLES: Final = ("document_chunks", "documents", "chunk_topics", "chunk_metadata")
VECTOR_INDEX: Final = "document_chunks_embedding_halfvec"

_FILTERS: Final = ("section", "document type", "URL prefix", "metadata")
# What the other filters on metadata are combined with.
_OTHERS: Final = ("document type", "URL prefix")

# Counted since the beginning of the transaction, for tables only by sequential scans.
_COUNTERS: Final = """
    SELECT c.relname::text AS relation, pg_stat_get_xact_numscans(c.oid) AS scans,
           pg_stat_get_xact_tuples_returned(c.oid) AS rows
    FROM pg_class c
    WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'i')
"""

# As many executions as cheap as they can be: what is counted is how often a statement was executed before.
_SEARCH_OFTEN: Final = """
    DO $$
    BEGIN
      PERFORM set_config('hnsw.max_scan_tuples', '1', true);
      FOR i IN 1..{times} LOOP
        PERFORM {call};
      END LOOP;
    END $$
"""


@dataclass(frozen=True)
class Asked:
    """A combination of scope and filters, with the values: session, topic and those of the filters."""

    scope: str
    filters: tuple[str, ...]
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.scope}, by {' and '.join(self.filters) or 'nothing'}"


@dataclass(frozen=True)
class Caller:
    """Who searches, and by which vector."""

    principals: Sequence[str]
    vector: np.ndarray


@dataclass(frozen=True)
class Reads:
    """What one search read, and what it returned.

    Attributes:
        scans: of each table (sequential scans) and index that was scanned.
        rows: the rows, or index entries, that these scans returned.
        answer: ids, distances, parents and flags.
    """

    scans: Mapping[str, int]
    rows: Mapping[str, int]
    answer: tuple[Any, ...]

    @property
    def ids(self) -> list[UUID]:
        return list(self.answer[0] or ())

    @property
    def complete(self) -> bool:
        return bool(self.answer[4])


@dataclass(frozen=True)
class Stability:
    """What a search read at each of the executions."""

    reads: Mapping[int, Reads]

    @property
    def stable(self) -> bool:
        first, *others = self.reads.values()
        return all(other == first for other in others)


def combinations_of(
    *, session: UUID, topic: UUID, section: str, document_type: str, prefix: str, metadata: Filters
) -> Iterator[Asked]:
    """Every scope with every subset of the filters; and each other filter on metadata alone, and with two more.

    Args:
        session: the scope's.
        topic: the scope's.
        section: to filter by.
        document_type: to filter by.
        prefix: to filter by.
        metadata: to filter by: all filters on metadata.
    """
    values: dict[str, str | None] = {"section": section, "document type": document_type, "URL prefix": prefix}
    kinds: dict[str, list[str]] = {
        "metadata": ["metadata"],
        "contains": ["metadata_contains"],
        "any": ["metadata_any"],
        "range": ["metadata_range"],
        "all on metadata": [name for name in Filters.model_fields if name.startswith("metadata")],
    }
    for kind, names in kinds.items():
        values[kind] = conditions(Filters(**{name: getattr(metadata, name) for name in names}))[3]
    subsets = list(chain.from_iterable(combinations(_FILTERS, size) for size in range(len(_FILTERS) + 1)))
    for kind in [kind for kind in kinds if kind not in _FILTERS]:
        subsets += [(kind,), (*_OTHERS, kind)]
    for scope, ids in (
        ("everything", (None, None)),
        ("session", (session, None)),
        ("topic", (session, topic)),
    ):
        for subset in subsets:
            chosen = [values[name] if name in subset else None for name in _FILTERS[:3]]
            of_metadata = [values[name] for name in subset if name in kinds]
            yield Asked(scope, subset, (*ids, *chosen, *(of_metadata or [None])))


async def reads_of(
    connection: PooledConnection,
    way: Way,
    asked: Asked,
    caller: Caller,
    *,
    expand_parents: bool = False,
    limit: int = 15,
) -> Reads:
    """Search once, in a transaction of its own, and count what that reads.

    Args:
        connection: of a worker's role.
        way: how to search.
        asked: what is searched for.
        caller: who searches, and by which vector.
        expand_parents: whether to look up parents.
        limit: how many rows to return.
    """
    arguments = (*asked.values, limit, expand_parents, *_BOUNDS[way], True, 100, 60_000)
    async with connection.transaction():
        before = await _counters(connection)
        answer = await connection.fetchrow(
            postgres._SQL["search"].format(vector="vector"),
            json.dumps([*caller.principals]),
            caller.vector,
            *arguments,
        )
        after = await _counters(connection)
    assert answer is not None
    grown = {relation: (after[relation] - before.get(relation, np.zeros(2, int))) for relation in after}
    return Reads(
        {relation: int(scans) for relation, (scans, _) in grown.items() if scans},
        {relation: int(rows) for relation, (scans, rows) in grown.items() if scans},
        tuple(answer),
    )


async def _counters(connection: PooledConnection) -> dict[str, np.ndarray]:
    return {
        row["relation"]: np.array([row["scans"], row["rows"]]) for row in await connection.fetch(_COUNTERS)
    }


async def stability_of(
    connection: PooledConnection,
    way: Way,
    asked: Asked,
    caller: Caller,
    executions: Sequence[int] = EXECUTIONS,
) -> Stability:
    """Search as often as the last of the executions says, on one connection.

    Args:
        connection: of a worker's role.
        way: how to search.
        asked: what is searched for.
        caller: who searches, and by which vector.
        executions: at which it is counted what is read, in ascending order, from 1.
    """
    reads, done = {}, 0
    for execution in executions:
        if (between := execution - done - 1) > 0:
            await _search_often(connection, way, asked, caller, between)
        reads[execution], done = await reads_of(connection, way, asked, caller), execution
    return Stability(reads)


async def _search_often(
    connection: PooledConnection, way: Way, asked: Asked, caller: Caller, times: int
) -> None:
    # Without rows to read, an exact search costs little; the index is not read for somebody without rows.
    principals = ["nobody at all"] if way == "exactly" else caller.principals
    nowhere = tuple(value and UUID(int=1) for value in asked.values[:2])
    scope = nowhere if way == "exactly" else asked.values[:2]
    values = (
        json.dumps([*principals]),
        caller.vector.tolist(),
        *scope,
        *asked.values[2:],
        1,
        False,
        *_BOUNDS[way],
        True,
        1,
        60_000,
    )
    call = f"public.anabranch_search({', '.join(_literal(value) for value in values)})"
    async with connection.transaction():
        # The worker's time limit is for one search.
        await connection.execute("SET LOCAL statement_timeout = 0")
        await connection.execute(_SEARCH_OFTEN.format(times=times, call=call))


def problems_of(way: Way, reads: Reads) -> list[str]:
    """What is wrong with what a search read."""
    found = [
        f"{reads.scans[table]} sequential scans of {table}"
        for table in SEARCHED_TABLES
        if table in reads.scans
    ]
    by_index = reads.scans.get(VECTOR_INDEX, 0)
    if way == "exactly" and by_index:
        found.append(f"{by_index} scans of the vector index")
    empty = reads.complete and not reads.ids  # then there is nothing to find by the index
    if way == "by the index" and bool(by_index) == empty:
        found.append(f"{by_index} scans of the vector index")
    return found


async def measure_plans(
    store: PostgresStore, principals: Sequence[str], vector: np.ndarray, all_asked: Sequence[Asked]
) -> Outcome:
    """Search every combination a thousand times, both ways, on one connection."""
    shown = table("scope", "search", "combinations", "the same reads", "executions", "indexes", words=2)
    shown.columns[-1].justify = "left"
    missed = []
    for scope in dict.fromkeys(asked.scope for asked in all_asked):
        for way in SEARCHES:
            of_scope = [asked for asked in all_asked if asked.scope == scope]
            good, indexes = 0, set[str]()
            for asked in of_scope:
                async with store._connection() as connection:
                    found = await stability_of(connection, way, asked, Caller(principals, vector))
                wrong = problems_of(way, found.reads[1])
                if not found.stable:
                    wrong.append(f"not the same at executions {', '.join(map(str, EXECUTIONS))}")
                missed += [f"plans, {way}, {asked}: {problem}" for problem in wrong]
                good += not wrong
                indexes |= found.reads[1].scans.keys()
            shown.add_row(
                scope,
                way,
                str(len(of_scope)),
                f"[{'green' if good == len(of_scope) else 'red'}]{good}[/]",
                f"{len(of_scope) * EXECUTIONS[-1]:,}",
                str(len(indexes)),
            )
    return Outcome("Plan stability: executions 1, 6, 12 and 1,000 of one search", [shown], missed)


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool | int):
        return str(value).lower()
    if isinstance(value, list) and isinstance(value[0], str):
        return f"ARRAY[{', '.join(_literal(text) for text in value)}]"
    if isinstance(value, list):
        return "'[" + ",".join(f"{component:.9g}" for component in value) + "]'"
    return "'" + str(value).replace("'", "''") + "'"
