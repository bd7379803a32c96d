"""Random writers at the same time, with foreign keys and without: whatever they did, nobody sees a row too many.

Some thousand transactions by default; more with ``ACCESS_TRANSACTIONS=100000 .venv/bin/pytest`` on this file, which
takes about ten minutes for both halves.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import pytest

from tests.integration.access_oracle import (
    METADATA,
    PRINCIPALS,
    assert_derived_is_true_but_for_unused_sets,
    drop_foreign_keys,
)
from tests.integration.connections import connected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.conftest import Database

    Connection = asyncpg.Connection[asyncpg.Record]

pytestmark = pytest.mark.slow

TRANSACTIONS = int(os.environ.get("ACCESS_TRANSACTIONS", "3000"))
WRITERS = 8
PER_ROUND = 40  # of each writer, before everything is compared with the plain rule

# $1, $2 documents · $3 a principal · $4 metadata · $5, $6 chunks · $7 topics · $8 a session · $9 an access set's id
STATEMENTS = {
    "grant": "INSERT INTO document_grants VALUES ($1, $3) ON CONFLICT DO NOTHING",
    "grant everybody": "INSERT INTO document_grants SELECT id, $3 FROM documents ON CONFLICT DO NOTHING",
    "revoke": "DELETE FROM document_grants WHERE document_id = $1 AND principal = $3",
    "revoke a principal": "DELETE FROM document_grants WHERE principal = $3",
    "change a grant": "UPDATE document_grants SET principal = $3 WHERE document_id = $1",
    "move grants": "UPDATE document_grants SET document_id = $2 WHERE document_id = $1",
    "insert a document": "INSERT INTO documents (id, metadata, access_set_id) VALUES ($1, $4, $9)",
    "insert unless there": "INSERT INTO documents (id) VALUES ($1), ($2) ON CONFLICT DO NOTHING",
    "upsert a document": """INSERT INTO documents (id, metadata) VALUES ($1, $4)
        ON CONFLICT (id) DO UPDATE SET metadata = excluded.metadata""",
    "upsert all of a document": """INSERT INTO documents (id, metadata) VALUES ($1, $4) ON CONFLICT (id)
        DO UPDATE SET metadata = excluded.metadata, access_set_id = excluded.access_set_id""",
    "delete a document": "DELETE FROM documents WHERE id = $1",
    "delete two documents": "DELETE FROM documents WHERE id IN ($1, $2)",
    "replace a document": """WITH gone AS (DELETE FROM documents WHERE id = $1 RETURNING metadata)
        INSERT INTO documents (id, metadata) SELECT $2, metadata FROM gone""",
    "rename a document": "UPDATE documents SET id = $2 WHERE id = $1",
    "describe a document": "UPDATE documents SET metadata = $4 WHERE id = $1",
    "tamper with a document": "UPDATE documents SET access_set_id = $9 WHERE id = $1",
    "merge a document": """MERGE INTO documents d USING (SELECT $1::uuid AS id) s ON d.id = s.id
        WHEN MATCHED AND random() < 0.5 THEN DELETE
        WHEN MATCHED THEN UPDATE SET metadata = $4
        WHEN NOT MATCHED THEN INSERT (id) VALUES (s.id)""",
    "insert a chunk": """INSERT INTO document_chunks
        (id, document_id, session_id, text_content, related_topic_ids, metadata, access_set_id)
        VALUES ($5, $1, $8, 'c', $7, $4, $9)""",
    "upsert a chunk": """INSERT INTO document_chunks (id, document_id, text_content, metadata)
        VALUES ($5, $1, 'c', $4) ON CONFLICT (id)
        DO UPDATE SET document_id = excluded.document_id, metadata = excluded.metadata""",
    "upsert all of a chunk": """INSERT INTO document_chunks (id, document_id, text_content) VALUES ($5, $1, 'c')
        ON CONFLICT (id) DO UPDATE SET document_id = excluded.document_id,
        access_set_id = excluded.access_set_id, related_topic_ids = $7""",
    "move a chunk": "UPDATE document_chunks SET document_id = $1 WHERE id = $5",
    "move chunks": "UPDATE document_chunks SET document_id = $2 WHERE document_id = $1",
    "describe a chunk": "UPDATE document_chunks SET metadata = $4 WHERE id = $5",
    "change topics": "UPDATE document_chunks SET related_topic_ids = $7, session_id = $8 WHERE id = $5",
    "rename a chunk": "UPDATE document_chunks SET id = $6 WHERE id = $5",
    "tamper with chunks": "UPDATE document_chunks SET access_set_id = $9 WHERE document_id = $1",
    "delete a chunk": "DELETE FROM document_chunks WHERE id = $5",
    "delete chunks": "DELETE FROM document_chunks WHERE document_id = $1",
    "load in bulk": """WITH loaded AS (
          INSERT INTO documents (id, metadata) SELECT unnest(ARRAY[$1, $2]::uuid[]), $4 ON CONFLICT DO NOTHING
          RETURNING id)
        INSERT INTO document_chunks (document_id, text_content, related_topic_ids)
        SELECT id, 'c', $7 FROM loaded, generate_series(1, 3)""",
    "lose what was loaded": "DELETE FROM document_chunks WHERE id <> ALL ($10::uuid[])",
}
ISOLATIONS = ["read_committed"] * 8 + ["repeatable_read", "serializable"]

# Lost races that PostgreSQL reports; the writer's to retry.
LOST = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
# What the tables' constraints, or this schema, refuse.
REFUSED = (
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.FeatureNotSupportedError,
    asyncpg.CardinalityViolationError,
)


class RandomWriter:
    """One back end that writes at random."""

    def __init__(self, seed: int, world: World, connection: Connection) -> None:
        self._random = random.Random(seed)
        self._world = world
        self._connection = connection
        self.outcomes: Counter[str] = Counter()

    async def write(self, transactions: int) -> None:
        for _ in range(transactions):
            try:
                await self._transaction()
            except LOST:
                self.outcomes["lost"] += 1
            except REFUSED as error:
                self.outcomes[type(error).__name__] += 1
            else:
                self.outcomes["committed"] += 1

    async def _transaction(self) -> None:
        isolation: Any = self._random.choice(ISOLATIONS)
        async with self._connection.transaction(isolation=isolation):
            if isolation != "read_committed":
                await self._connection.fetch("SELECT FROM documents LIMIT 1")  # takes the snapshot
                await asyncio.sleep(self._random.random() / 50)
            for name in self._random.choices(list(STATEMENTS), k=self._random.randint(1, 4)):
                try:
                    async with (
                        self._connection.transaction()
                    ):  # a savepoint: what is refused is rolled back alone
                        await self._connection.execute(_typed(STATEMENTS[name]), *self._values())
                except REFUSED:
                    self.outcomes["refused"] += 1

    def _values(self) -> tuple[Any, ...]:
        one, world = self._random.choice, self._world
        return (
            one(world.documents),
            one(world.documents),
            one(PRINCIPALS),
            one((None, "{}", *METADATA)),
            one(world.chunks),
            one(world.chunks),
            [one(world.topics) for _ in range(self._random.randrange(3))],
            one((None, *world.topics)),
            one((None, 1, 2, 3)),
            world.chunks,
        )


TYPES = ("uuid", "uuid", "text", "jsonb", "uuid", "uuid", "uuid[]", "uuid", "bigint", "uuid[]")


def _typed(statement: str) -> str:
    """The statement with every parameter mentioned and typed, so that one tuple of values fits all."""
    mentioned = " AND ".join(f"${n}::{type_} IS NOT DISTINCT FROM ${n}" for n, type_ in enumerate(TYPES, 1))
    with_ = f"WITH _ AS (SELECT {mentioned})"
    if statement.startswith("WITH "):
        return f"{with_}, {statement.removeprefix('WITH ')}"
    return f"{with_} {statement}"


class World:
    """The few ids that all writers fight over."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.documents = [UUID(int=choose.getrandbits(128)) for _ in range(6)]
        # Two ids share a lock.
        self.documents[1] = UUID(bytes=self.documents[1].bytes[:15] + self.documents[0].bytes[15:])
        self.chunks = [UUID(int=choose.getrandbits(128)) for _ in range(10)]
        self.topics = [UUID(int=choose.getrandbits(128)) for _ in range(2)]


@pytest.mark.parametrize("keys", [True, False], ids=["foreign keys", "no foreign keys"])
async def test_random_writers_leave_the_truth(
    database: Database, figures: Callable[[str], None], *, keys: bool
) -> None:
    """Deadlocks may happen, and are the writer's to retry; wrong access may not."""
    seed = random.randrange(1 << 32)
    world = World(seed)
    async with connected(database.admin) as admin:
        await admin.execute(f"ALTER DATABASE {database.name} SET deadlock_timeout = '10ms'")
    async with connected(database.owner) as owner, connected(database.worker) as worker:
        if not keys:
            await drop_foreign_keys(owner)
        connections = [await asyncpg.connect(database.writer) for _ in range(WRITERS)]
        try:
            writers = [RandomWriter(seed + n, world, connection) for n, connection in enumerate(connections)]
            for _ in range(max(1, TRANSACTIONS // (WRITERS * PER_ROUND))):
                await _together(writer.write(PER_ROUND) for writer in writers)
                try:
                    await assert_derived_is_true_but_for_unused_sets(owner, worker)
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            for connection in connections:
                await connection.close()
    outcomes = sum((writer.outcomes for writer in writers), Counter())
    figures(f"0 wrong rows, seed {seed}: {dict(outcomes)}")
    assert outcomes["committed"] > TRANSACTIONS / 2, "too few transactions committed to mean anything"


async def _together(coroutines: Any) -> None:
    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            _: Awaitable[None] = group.create_task(coroutine)
