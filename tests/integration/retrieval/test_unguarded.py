"""What the benchmarks call "without access control" has none: nothing of it is measured on both sides."""

import json
from uuid import UUID

import asyncpg
from pgvector.asyncpg import register_vector

from benchmarks.unguarded import create_unguarded_functions, unguarded
from streams.store.postgres import _SQL
from tests.conftest import SETTING, Database, PostgresServer
from tests.integration.connections import execute
from tests.integration.corpora import Chunk, Corpus, Document, load, unit_vectors

VECTORS = unit_vectors(30, 1)


async def ids(dsn: str, statement: str, principal: str) -> list[UUID]:
    connection = await asyncpg.connect(dsn)
    try:
        await register_vector(connection)
        # Parameters: everything, 15 rows, no parents, exactly up to 1,000 rows, halfvec, ef_search, milliseconds.
        values = (*[None] * 6, 15, False, 1000, 20_000, True, 100, 10_000)
        found = await connection.fetchrow(statement, json.dumps([principal]), VECTORS[0], *values)
        assert found is not None
        return found["ids"] or []
    finally:
        await connection.close()


async def test_the_copies_read_what_nobody_may_read(postgres: PostgresServer, database: Database) -> None:
    chunks = [
        Chunk(UUID(int=number + 10), UUID(int=1), "text", vector) for number, vector in enumerate(VECTORS)
    ]
    await load(database.writer, Corpus.of([Document(UUID(int=1), frozenset({"user:1"}))], chunks))
    role = f"unguarded_{database.name}"
    await execute(
        database.admin, f"CREATE ROLE {role} LOGIN BYPASSRLS PASSWORD 'test' IN ROLE anabranch_reader"
    )
    try:
        await create_unguarded_functions(database.admin, role, principals_setting=SETTING)
        search = _SQL["search"].format(vector="vector")
        readable = await ids(database.worker, search, "user:1")
        assert len(readable) == 15
        assert await ids(database.worker, search, "user:2") == []
        login = postgres.login(role, database)
        assert await ids(login, unguarded(search), "user:2") == readable
    finally:
        await execute(database.admin, f"DROP OWNED BY {role}; DROP ROLE {role}")
