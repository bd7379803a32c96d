"""A search runs the steps in the table of `PostgresStore._search`, in its transactions, with its bounds."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pytest

from streams.retrieval import ArmResult, Search
from streams.store import postgres
from streams.store.postgres import PostgresStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ANYTHING = Search(
    vector=np.ones(1, np.float32),
    principals=["user:1"],
    session_id=None,
    topic_id=None,
    filters=None,
    limit=15,
    expand_parents=False,
)
NAMES = {postgres._SQL[name]: name for name in ("search_exactly", "search_approximately")}
EXACT, INDEX = "search_exactly", "search_approximately"


class Row(dict[str, Any]):
    """A record: columns by name, and the first four by position."""

    def __missing__(self, position: object) -> object:
        return (UUID(int=1), 0.5, None, False)[position] if isinstance(position, int) else None


async def steps_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    scope: int,
    found: tuple[int, ...] = (0, 0),
    limit: int = 15,
    exact_scan_rows: int = 20_000,
) -> tuple[list[tuple[int, str, int]], ArmResult]:
    """A search's statements, each with its transaction and its bound, and its result.

    Args:
        monkeypatch: replaces the connection.
        scope: how many rows the scope has.
        found: how many rows the two index scans find.
        limit: the search's.
        exact_scan_rows: the store's.
    """
    store = PostgresStore("", connections=1, search_timeout_seconds=1, exact_scan_rows=exact_scan_rows)
    transactions: list[dict[str, Any]] = []
    steps: list[tuple[int, str, int]] = []
    index_finds = iter(found)

    @asynccontextmanager
    async def transaction_as(*_: object, **options: Any) -> AsyncIterator[None]:
        transactions.append(options)
        yield

    async def protected(connection: None, statement: str, *values: Any) -> list[Row]:
        del connection
        steps.append((len(transactions), NAMES[statement], values[-1]))
        rows = min(scope, values[-1]) if NAMES[statement] == EXACT else next(index_finds)
        return [Row(rows_scanned=rows)] * min(rows, 1)

    monkeypatch.setattr(store, "_transaction_as", transaction_as)
    monkeypatch.setattr(postgres, "_protected", protected)
    result = await store._search(replace(ANYTHING, limit=limit), asyncio.timeout(None))
    assert [options.get("limited_scan", False) for options in transactions] == [True, False, False][
        : len(transactions)
    ]
    return steps, result


STEPS = [(1, EXACT, 1001), (1, INDEX, 60), (2, EXACT, 5001), (2, INDEX, 60), (3, EXACT, 20_001)]


@pytest.mark.parametrize(
    ("scope", "found", "steps", "truncated"),
    [
        (0, (), 1, False),
        (1000, (), 1, False),
        (1001, (60,), 2, False),
        (1001, (59,), 3, False),
        (5000, (0,), 3, False),
        (5001, (59, 60), 4, False),
        (5001, (59, 59), 5, False),
        (20_000, (0, 0), 5, False),
        (20_001, (0, 59), 5, True),
    ],
)
async def test_it_tries_the_steps_in_order(
    monkeypatch: pytest.MonkeyPatch, scope: int, found: tuple[int, ...], steps: int, *, truncated: bool
) -> None:
    tried, result = await steps_of(monkeypatch, scope=scope, found=found)
    assert tried == STEPS[:steps]
    assert result.truncated == truncated
    assert not result.complete or scope <= 15


@pytest.mark.parametrize(("scope", "complete"), [(0, True), (15, True), (16, False)])
async def test_a_result_is_complete_if_the_scope_has_no_more_rows(
    monkeypatch: pytest.MonkeyPatch, scope: int, *, complete: bool
) -> None:
    _, result = await steps_of(monkeypatch, scope=scope)
    assert result.complete == complete


@pytest.mark.parametrize(("exact_scan_rows", "bounds"), [(100, [100, 100, 100]), (2000, [1000, 1000, 2000])])
async def test_no_exact_search_reads_more_than_allowed(
    monkeypatch: pytest.MonkeyPatch, exact_scan_rows: int, bounds: list[int]
) -> None:
    tried, _ = await steps_of(monkeypatch, scope=10**6, exact_scan_rows=exact_scan_rows)
    assert [bound - 1 for _, name, bound in tried if name == EXACT] == bounds


@pytest.mark.parametrize(("limit", "wanted"), [(1, 4), (333, 1332), (334, 1334), (1000, 2000)])
async def test_the_index_has_to_find_more_rows_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit: int, wanted: int
) -> None:
    tried, _ = await steps_of(monkeypatch, scope=10**6, limit=limit)
    assert {bound for _, name, bound in tried if name == INDEX} == {wanted}
