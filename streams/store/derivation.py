"""Rebuilds stale derived data, in batches that hold locks only briefly.

The functions `anabranch_stale_…` of the reference schema list rows that differ from the defining rule, and
`anabranch_rebuild_…` repair a given set of rows. Only the tables' owner may call them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import asyncpg

from streams.store.catalog import Connection
from streams.store.locks import LOCK_TIMEOUT, STATEMENT_SECONDS
from streams.store.runner import MigrationError, Runner

__all__ = ["Difference", "differences", "rebuild"]

#: Target duration of a batch, in seconds: a writer of one of its rows waits that long.
BATCH_SECONDS: Final = 0.2
_FIRST_BATCH: Final = 50
_MAX_BATCH: Final = 10_000
#: After a batch that took too long, in seconds.
_PAUSE: Final = 0.1
# Even with a running back end, the second pass finds nothing: the back end's writes fire the triggers.
_MAX_PASSES: Final = 5

#: Table → query for its stale rows.
_STALE: Final = {
    "documents": "SELECT id FROM public.anabranch_stale_documents()",
    "document_chunks": "SELECT id FROM public.anabranch_stale_chunks()",
    "chunk_topics": "SELECT chunk_id AS id FROM public.anabranch_stale_topics()",
    "chunk_metadata": "SELECT chunk_id AS id FROM public.anabranch_stale_metadata()",
}
_DISCARD_SETS: Final = """
    SELECT public.anabranch_discard_access_set(s.id)
    FROM public.access_sets s
    WHERE NOT EXISTS (SELECT FROM public.documents d WHERE d.access_set_id = s.id)
"""
# Each stale row with its weight. A document's chunks are updated in the same transaction.
_STALE_DOCUMENTS: Final = f"""
    SELECT d.id, 1 + count(c.id) AS weight
    FROM ({_STALE["documents"]}) d LEFT JOIN public.document_chunks c ON c.document_id = d.id
    GROUP BY d.id
    ORDER BY d.id
"""  # noqa: S608  # constant names
_STALE_CHUNKS: Final = f"""
    SELECT id, 1::bigint AS weight
    FROM ({_STALE["document_chunks"]} UNION {_STALE["chunk_topics"]} UNION {_STALE["chunk_metadata"]}) s
    ORDER BY id
"""  # noqa: S608  # constant names
# How many stale rows to hold in memory.
_SLICE_ROWS: Final = 20_000


@dataclass(frozen=True)
class Difference:
    """A row whose derived data differs from the defining rule.

    Args:
        table: the table with the wrong data.
        id: of the document or chunk.
    """

    table: str
    id: UUID


async def differences(connection: Connection) -> list[Difference]:
    """The first stale row of each table. Reads all rows once.

    Args:
        connection: as the tables' owner.
    """
    found = []
    for table, query in _STALE.items():
        row = await connection.fetchrow(f"{query} LIMIT 1")
        if row is not None:
            found.append(Difference(table, row["id"]))
    return found


async def rebuild(runner: Runner) -> None:
    """Rebuild all stale rows.

    Raises:
        LockUnavailable: another transaction keeps a row locked.
        MigrationError: rows are still stale after several passes.
    """
    documents = chunks = 0
    for _ in range(_MAX_PASSES):
        stale_documents = await _rebuild_stale(
            runner, _STALE_DOCUMENTS, "SELECT public.anabranch_rebuild_documents($1)"
        )
        stale_chunks = await _rebuild_stale(
            runner, _STALE_CHUNKS, "SELECT public.anabranch_rebuild_chunks($1)"
        )
        documents += stale_documents
        chunks += stale_chunks
        if not stale_documents and not stale_chunks:
            break
    else:
        raise MigrationError(
            f"derived data is still stale after {_MAX_PASSES} passes: something may be writing without firing the"
            " triggers. Stop it, then run `anabranch migrate` again"
        )
    # Unused sets: a write that bypassed the triggers may leave some behind.
    await runner.fetch(_DISCARD_SETS)
    for name, count in (("documents", documents), ("chunks", chunks)):
        if count:
            runner.say(f"rebuilt the derived data of {count} {name}")


async def _rebuild_stale(runner: Runner, stale: str, rebuild_ids: str) -> int:
    """Rebuild the rows that a query finds now; return their number."""
    # WITH HOLD: the server keeps the rows after the transaction, but not the snapshot, which would block index builds.
    await runner.connection.execute(f"DECLARE anabranch_stale NO SCROLL CURSOR WITH HOLD FOR {stale}")
    count = 0
    while rows := await runner.fetch(f"FETCH {_SLICE_ROWS} FROM anabranch_stale"):
        count += len(rows)
        await _rebuild(runner, rebuild_ids, [(row["id"], row["weight"]) for row in rows])
    await runner.connection.execute("CLOSE anabranch_stale")
    return count


async def _rebuild(runner: Runner, query: str, weighted: Sequence[tuple[UUID, int]]) -> None:
    connection = runner.connection

    async def run_batch(ids: Sequence[UUID]) -> bool:
        """Rebuild the ids; return whether all were done in time."""
        try:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
                # One document's chunks change together, regardless of their number.
                limit = f"{STATEMENT_SECONDS * 1000:.0f}ms" if len(ids) > 1 else "0"
                await connection.execute(f"SET LOCAL statement_timeout = '{limit}'")
                await connection.execute(query, list(ids))
        except asyncpg.QueryCanceledError:
            if len(ids) == 1:
                raise
            return False
        return True

    batches = _Batches(weighted)
    while ids := batches.next():
        began = time.monotonic()
        if await runner.locks.run(lambda _: run_batch(ids), limited=False):
            batches.record_duration(time.monotonic() - began)
        else:
            batches.halve()
            # Sessions that wait for one of these rows go first: they have to wake up before they can lock the row.
            await asyncio.sleep(_PAUSE)


class _Batches:
    """Batches whose size adapts to the duration of the previous one."""

    def __init__(self, weighted: Sequence[tuple[UUID, int]]) -> None:
        self._weighted = weighted
        self._limit = _FIRST_BATCH
        self._start = self._end = 0

    def next(self) -> list[UUID]:
        """The next batch of at least one id; empty at the end."""
        self._start = self._end
        weight = 0
        for _, of_one in self._weighted[self._start : self._start + self._limit]:
            if self._end > self._start and weight + of_one > self._limit:
                break
            self._end += 1
            weight += of_one
        return [id_ for id_, _ in self._weighted[self._start : self._end]]

    def record_duration(self, seconds: float) -> None:
        """Adapt the size: at most twice the last batch."""
        fitting = self._weight * min(2.0, BATCH_SECONDS / max(seconds, 0.001))
        self._limit = max(1, min(_MAX_BATCH, int(fitting)))

    def halve(self) -> None:
        """The last batch was too large: halve the next one."""
        self._limit = max(1, self._weight // 2)
        self._end = self._start

    @property
    def _weight(self) -> int:
        return sum(weight for _, weight in self._weighted[self._start : self._end])
