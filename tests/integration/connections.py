"""Connections to a test's database."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["connected", "execute"]


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
