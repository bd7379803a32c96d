"""Counts the searchable vectors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import asyncpg

__all__ = ["VectorCount", "count_vectors"]

_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class VectorCount:
    """Chunks with an embedding.

    Attributes:
        scope: ``store``: all in the store; ``askers``: those that at least one of the golden set's principals may read.
    """

    count: int
    scope: Literal["store", "askers"]


async def count_vectors(
    dsn: str, *, principals_setting: str, principals: Sequence[str] | None
) -> VectorCount | None:
    """Count the vectors; None if that is not possible. This figure is optional, so there is no error.

    Args:
        dsn: connection string of the owner or the worker.
        principals_setting: the name of the setting that the row-level policies read.
        principals: count only rows that these may read; None: all rows, which only the owner sees.
    """
    try:
        connection = await asyncpg.connect(
            dsn,
            timeout=_TIMEOUT_SECONDS,
            command_timeout=_TIMEOUT_SECONDS,
            statement_cache_size=0,  # each statement runs once, perhaps through a pooler
        )
        try:
            async with connection.transaction(readonly=True):
                if principals is not None:
                    await connection.fetch(
                        "SELECT set_config($1, $2, true)", principals_setting, json.dumps(list(principals))
                    )
                count = await connection.fetchval(
                    "SELECT count(*) FROM public.document_chunks WHERE embedding IS NOT NULL"
                )
        finally:
            await connection.close(timeout=_TIMEOUT_SECONDS)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return None
    return VectorCount(int(count), "store" if principals is None else "askers")
