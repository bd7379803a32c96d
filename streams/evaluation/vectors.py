"""How many vectors there are to search."""

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
        scope: ``store``: all there are; ``askers``: those that the golden set's askers may read between them.
    """

    count: int
    scope: Literal["store", "askers"]


async def count_vectors(
    dsn: str, *, principals_setting: str, askers: Sequence[str] | None
) -> VectorCount | None:
    """Count, or None where that is not possible here: it is a figure to go with the others, not worth a failure.

    Args:
        dsn: as the owner, or as the worker.
        principals_setting: the name of the setting that the row-level policies read.
        askers: whose rows are counted; None: everybody's, which only the owner sees.
    """
    try:
        connection = await asyncpg.connect(dsn, timeout=_TIMEOUT_SECONDS, command_timeout=_TIMEOUT_SECONDS)
        try:
            async with connection.transaction(readonly=True):
                if askers is not None:
                    await connection.fetch(
                        "SELECT set_config($1, $2, true)", principals_setting, json.dumps(list(askers))
                    )
                count = await connection.fetchval(
                    "SELECT count(*) FROM public.document_chunks WHERE embedding IS NOT NULL"
                )
        finally:
            await connection.close(timeout=_TIMEOUT_SECONDS)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return None
    return VectorCount(int(count), "store" if askers is None else "askers")
