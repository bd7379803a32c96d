"""Plain statements: what a competent user writes, without reading our schema.

One statement per arm with the texts, pgvector's iterative scan, and the principals in the same transaction as the
searches, for a row-level policy on an array of readers. Both arms share a transaction and a connection: with more
events in flight than processors that is faster than two of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import numpy as np
from pgvector.asyncpg import register_vector

__all__ = ["PlainStore", "connect", "search"]

CHAT_ROWS, EXTRACTION_ROWS = 9, 15


@dataclass(frozen=True)
class PlainStore:
    """Which tables the statements read.

    Attributes:
        chunks: the table of chunks.
        documents: the table of documents.
        topics: the column of a chunk's topics.
        nearest: the expression to order by, for an index.
        setting: what the policy reads.
        json: whether that is a JSON array; else a list with commas.
    """

    chunks: str = "chunks"
    documents: str = "documents"
    topics: str = "c.topic_ids"
    nearest: str = "c.embedding <=> $1"
    setting: str = "app.principals"
    json: bool = False

    def statement(self, condition: str, rows: int) -> str:
        """One arm; documents are joined only to the nearest rows."""
        return f"""
            SELECT c.*, d.title, d.source_url FROM (
              SELECT c.id, c.document_id, c.text_content, c.token_count, c.page, c.section, c.chunk_position,
                     c.embedding <=> $1 AS distance
              FROM {self.chunks} c WHERE {condition} ORDER BY {self.nearest} LIMIT {rows}
            ) c JOIN {self.documents} d ON d.id = c.document_id ORDER BY c.distance"""  # noqa: S608  # constants

    def local_arm(self) -> str:
        return self.statement(f"c.session_id = $2 AND {self.topics} @> ARRAY[$3::uuid]", CHAT_ROWS)

    def session_arm(self) -> str:
        return self.statement("c.session_id = $2", CHAT_ROWS)

    def whole(self) -> str:
        return self.statement("true", EXTRACTION_ROWS)

    def principals(self, principals: Sequence[str]) -> str:
        if not self.json:
            return ",".join(principals)
        return "[" + ",".join(f'"{principal}"' for principal in principals) + "]"


async def connect(connection: asyncpg.Connection) -> None:
    """Prepare a connection; the `init` of a pool."""
    await register_vector(connection)


def server_settings(ef_search: int, plan_cache_mode: str = "auto") -> dict[str, str]:
    """Set once for each connection: they are the same for every search."""
    return {
        "hnsw.ef_search": str(ef_search),
        "hnsw.iterative_scan": "strict_order",
        "plan_cache_mode": plan_cache_mode,
        "jit": "off",
    }


async def search(connection: Any, store: PlainStore, event: Mapping[str, Any]) -> list[asyncpg.Record]:
    """Answer one event: its passages in order."""
    vector = np.asarray(event["embedding"], dtype=np.float32)
    session, topic = event["session_id"], event["topic_id"]
    async with connection.transaction(readonly=True):
        await connection.fetchval(
            "SELECT set_config($1, $2, true)", store.setting, store.principals(event["principals"])
        )
        if topic is not None:
            local = await connection.fetch(store.local_arm(), vector, session, topic)
            return interleave(local, await connection.fetch(store.session_arm(), vector, session))
        rows: list[asyncpg.Record] = await connection.fetch(store.whole(), vector)
        return rows


def interleave(local: Sequence[Any], wide: Sequence[Any], rows: int = CHAT_ROWS) -> list[Any]:
    """Two of the topic, one of the session, without repeats."""
    arms = [iter(local), iter(local), iter(wide)]
    arms[1] = arms[0]
    found: dict[Any, Any] = {}
    exhausted: set[int] = set()
    turn = 0
    while len(found) < rows and len(exhausted) < len(arms):
        for row in arms[turn]:
            if row["id"] not in found:
                found[row["id"]] = row
                break
        else:
            exhausted.add(turn)
        turn = (turn + 1) % len(arms)
    return list(found.values())
