"""Reads the embedding of one chunk, as the worker's role and for requesting principals."""

import json
from collections.abc import Sequence
from uuid import UUID

import asyncpg
import numpy as np
import numpy.typing as npt

from streams.store.error_translation import translate

__all__ = ["ChunkNotFound", "read_chunk_vector"]


class ChunkNotFound(Exception):
    """The store has no such chunk, the principals may not read it, or it has no embedding; the message is one line."""


async def read_chunk_vector(
    dsn: str,
    chunk_id: UUID,
    principals: Sequence[str],
    *,
    statement_cache_size: int = 100,
    timeout_seconds: float,
) -> npt.NDArray[np.float32]:
    """The chunk's embedding, shape (dimensions,).

    Args:
        dsn: connection string of the worker's role.
        chunk_id: the chunk's id.
        principals: the requesting principals.
        statement_cache_size: 0 for a pooler that does not support prepared statements.
        timeout_seconds: of connecting, and of each statement.

    Raises:
        ChunkNotFound: with the same message for a chunk that is missing and one that the principals may not read.
        TransientError: the store cannot be reached, or is set up incorrectly.
    """
    try:
        connection = await asyncpg.connect(
            dsn,
            timeout=timeout_seconds,
            command_timeout=timeout_seconds,
            statement_cache_size=statement_cache_size,
        )
        try:
            async with connection.transaction(readonly=True):
                await connection.execute(
                    "SELECT public.anabranch_set_principals($1::text, $2::int)",
                    json.dumps(list(principals)),
                    round(timeout_seconds * 1000),
                )
                row = await connection.fetchrow(
                    "SELECT embedding::real[] AS embedding FROM public.document_chunks WHERE id = $1::uuid",
                    chunk_id,
                )
                await connection.execute("SELECT public.anabranch_require_row_security()")
        finally:
            await connection.close(timeout=timeout_seconds)
    except Exception as error:
        if (translated := translate(error)) is None:
            raise
        raise translated from None
    if row is None:
        raise ChunkNotFound(f"there is no chunk {chunk_id} that {' or '.join(principals)} may read")
    if row["embedding"] is None:
        raise ChunkNotFound(f"chunk {chunk_id} has no embedding")
    return np.array(row["embedding"], dtype=np.float32)
