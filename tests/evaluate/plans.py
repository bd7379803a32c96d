"""Plan stability: a statement's thousandth execution is planned as its first was, for every scope and filter.

It looks at plans, not at the clock. A plan's shape is its tree of node types, joins, relations and indexes.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Final
from uuid import UUID

import numpy as np

from streams.store import postgres
from streams.store.postgres import PooledConnection, PostgresStore
from tests.evaluate.outcome import Outcome, table

__all__ = [
    "EXECUTIONS",
    "SEARCHES",
    "Asked",
    "Plans",
    "combinations_of",
    "measure_plans",
    "nodes_of",
    "plan_of",
    "plans_of",
]

EXECUTIONS: Final = (1, 6, 12, 1000)
SEARCHES: Final = ("search_exactly", "search_approximately")
# The planner's own estimate may move with the statistics, if somebody analyzes meanwhile; not by more than this.
MAX_COST: Final = 1.2

_KEPT: Final = (
    "Node Type",
    "Parent Relationship",
    "Subplan Name",
    "Join Type",
    "Strategy",
    "Relation Name",
    "Index Name",
    "Scan Direction",
)
_FILTERS: Final = ("section", "document type", "URL prefix", "metadata")

# Plans a statement so many times without running it, as each execution does.
_PLAN_OFTEN: Final = """
    DO $$
    BEGIN
      FOR i IN 1..{times} LOOP
        EXECUTE {explain};
      END LOOP;
    END $$
"""

Shape = tuple[Any, ...]


@dataclass(frozen=True)
class Asked:
    """A combination of scope and filters, with values of its parameters $2 to $7."""

    scope: str
    filters: tuple[str, ...]
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.scope}, by {' and '.join(self.filters) or 'nothing'}"


@dataclass(frozen=True)
class Plans:
    """Of one statement, at each of the executions.

    Attributes:
        custom: plans made for the values of one execution.
        generic: plans made for any values.
    """

    shapes: Mapping[int, Shape]
    costs: Mapping[int, float]
    custom: int
    generic: int

    @property
    def stable(self) -> bool:
        return (
            len(set(self.shapes.values())) == 1
            and max(self.costs.values()) <= MAX_COST * min(self.costs.values())
            and self.generic == 0
        )


def combinations_of(
    *,
    session: UUID,
    topic: UUID,
    section: str,
    document_type: str,
    prefix: str,
    metadata: Mapping[str, str],
) -> Iterator[Asked]:
    """Every scope with every subset of the filters."""
    values = (section, document_type, prefix, list(chain.from_iterable(metadata.items())))
    subsets = list(chain.from_iterable(combinations(_FILTERS, size) for size in range(len(_FILTERS) + 1)))
    for scope, ids in (
        ("everything", (None, None)),
        ("session", (session, None)),
        ("topic", (session, topic)),
    ):
        for subset in subsets:
            chosen = (value if name in subset else None for name, value in zip(_FILTERS, values, strict=True))
            yield Asked(scope, subset, (*ids, *chosen))


async def plans_of(
    connection: PooledConnection,
    search: str,
    asked: Asked,
    vector: Sequence[float],
    executions: Sequence[int] = EXECUTIONS,
) -> Plans:
    """Prepare a search's statement and plan it as often as the last of the executions says.

    Args:
        connection: in a transaction with the search's settings.
        search: the statement's name.
        asked: what is searched for.
        vector: the query.
        executions: at which the plan is looked at, in ascending order, from 1.
    """
    statement = await connection.prepare(postgres._SQL[search])
    explain = _explanation(statement.get_name(), search, asked, vector, expand_parents=False)
    shapes, costs, done = {}, {}, 0
    for execution in executions:
        if (between := execution - done - 1) > 0:
            await connection.execute(
                _PLAN_OFTEN.format(times=between, explain=f"$explain${explain}$explain$")
            )
        plan = json.loads(await connection.fetchval(explain))[0]["Plan"]
        shapes[execution], costs[execution], done = shape_of(plan), plan["Total Cost"], execution
    [(custom, generic)] = await connection.fetch(
        "SELECT custom_plans, generic_plans FROM pg_prepared_statements WHERE name = $1", statement.get_name()
    )
    return Plans(shapes, costs, custom, generic)


async def plan_of(
    connection: PooledConnection, search: str, asked: Asked, vector: Sequence[float], *, expand_parents: bool
) -> dict[str, Any]:
    """A search's plan, as EXPLAIN prints it in JSON."""
    statement = await connection.prepare(postgres._SQL[search])
    explain = _explanation(statement.get_name(), search, asked, vector, expand_parents=expand_parents)
    plan: dict[str, Any] = json.loads(await connection.fetchval(explain))[0]["Plan"]
    return plan


def _explanation(
    name: str, search: str, asked: Asked, vector: Sequence[float], *, expand_parents: bool
) -> str:
    """The plan of one more execution of a prepared statement."""
    to_read = 1001 if search == "search_exactly" else 60
    values = (vector, *asked.values, 15, expand_parents, to_read)
    return f'EXPLAIN (FORMAT JSON) EXECUTE "{name}" ({", ".join(_literal(value) for value in values)})'


def nodes_of(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A plan's nodes, parents first."""
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes_of(below)


def shape_of(plan: Mapping[str, Any]) -> Shape:
    return (
        *(plan.get(key) for key in _KEPT),
        # An index read in the order of distance, or by a condition.
        "Order By" in plan,
        "Index Cond" in plan,
        *(shape_of(below) for below in plan.get("Plans", ())),
    )


def indexes_in(shape: Shape) -> set[str]:
    """The names of the indexes that a plan reads."""
    found = set() if shape[_KEPT.index("Index Name")] is None else {shape[_KEPT.index("Index Name")]}
    return found.union(*(indexes_in(below) for below in shape[len(_KEPT) + 2 :]))


async def measure_plans(
    store: PostgresStore, principals: Sequence[str], vector: np.ndarray, all_asked: Sequence[Asked]
) -> Outcome:
    """Plan every combination a thousand times, on one connection each, under the search's own settings."""
    shown = table(
        "scope", "statement", "combinations", "the same plan", "custom plans", "generic", "indexes", words=2
    )
    shown.columns[-1].justify = "left"
    missed = []
    for scope in dict.fromkeys(asked.scope for asked in all_asked):
        for search in SEARCHES:
            of_scope = [asked for asked in all_asked if asked.scope == scope]
            plans = []
            for asked in of_scope:
                async with (
                    asyncio.timeout(60) as limit,
                    store._transaction_as(principals, limit) as connection,
                ):
                    plans.append(await plans_of(connection, search, asked, vector.tolist()))
            stable = sum(one.stable for one in plans)
            missed += [
                f"plans, {search}, {asked}: not the same at executions {', '.join(map(str, EXECUTIONS))}"
                for asked, one in zip(of_scope, plans, strict=True)
                if not one.stable
            ]
            shown.add_row(
                scope,
                search,
                str(len(plans)),
                f"[{'green' if stable == len(plans) else 'red'}]{stable}[/]",
                f"{sum(one.custom for one in plans):,}",
                f"{sum(one.generic for one in plans):,}",
                str(len(set().union(*(indexes_in(one.shapes[1]) for one in plans)))),
            )
    return Outcome("Plan stability: executions 1, 6, 12 and 1,000 of one prepared statement", [shown], missed)


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
