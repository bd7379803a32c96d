"""Connections to a test's database."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from streams.store.postgres import PostgresStore
from streams.store.preflight import inspect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.conftest import Database

__all__ = ["connected", "execute", "opened_store", "problems"]


@asynccontextmanager
async def connected(dsn: str, **settings: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection, with settings of the session."""
    connection = await asyncpg.connect(dsn, server_settings=settings)
    try:
        yield connection
    finally:
        await connection.close()


async def execute(dsn: str, sql: str) -> None:
    """Run statements in a connection of their own."""
    async with connected(dsn) as connection:
        await connection.execute(sql)


@asynccontextmanager
async def opened_store(dsn: str, *, warm: bool = False, **options: Any) -> AsyncIterator[PostgresStore]:
    """A store with a worker's defaults, two connections, and options over them; warm: all connections are open."""
    store = PostgresStore(
        dsn, **{"connections": 2, "search_timeout_seconds": 20, "exact_scan_rows": 20_000} | options
    )
    await store.open()
    try:
        if warm:
            await store.warm_up()
        yield store
    finally:
        await store.close(timeout_seconds=3)


async def problems(
    database: Database, *, setting: str = "anabranch.principals", dimensions: int = 768
) -> list[str]:
    """What a worker's preflight finds wrong."""
    async with connected(database.worker) as connection:
        findings = await inspect(connection, principals_setting=setting, dimensions=dimensions)
    return [f"{finding.check}: {finding.detail}" for finding in findings if finding.level != "ok"]
