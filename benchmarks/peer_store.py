"""The peers' own tables: the same chunks, as their users would store them."""

import asyncpg
from pgvector.asyncpg import register_vector

from streams.bench.world import CHUNKS_PER_DOCUMENT, World

__all__ = ["load"]

_ROWS = 5000
_TABLES = """
    CREATE EXTENSION vector;
    CREATE TABLE documents (id uuid PRIMARY KEY, title text, source_url text);
    CREATE TABLE chunks (
      id uuid PRIMARY KEY, document_id uuid NOT NULL, session_id uuid, topic_ids uuid[], text_content text,
      token_count int, page int, section text, chunk_position int, readers text[], embedding vector(768));
    -- As pgvector's documentation advises where rows are read without an index.
    ALTER TABLE chunks ALTER COLUMN embedding SET STORAGE PLAIN;
    ALTER TABLE chunks ENABLE ROW LEVEL SECURITY;
    CREATE POLICY readers ON chunks FOR SELECT
      USING (readers && (SELECT string_to_array(current_setting('app.principals', true), ',')));
    -- As PGVectorStore creates its table; the columns are its metadata columns.
    CREATE TABLE langchain (
      langchain_id uuid PRIMARY KEY, content text NOT NULL, embedding vector(768) NOT NULL,
      document_id uuid, session_id uuid, topic_id uuid, acl int, title text, source_url text);
    GRANT SELECT ON documents, chunks, langchain TO bench_worker;
"""
_INDEXES = """
    SET maintenance_work_mem = '1GB';
    CREATE INDEX ON chunks (session_id);
    CREATE INDEX ON chunks USING gin (topic_ids);
    CREATE INDEX ON langchain (session_id);
    CREATE INDEX ON langchain (topic_id);
    -- pgvector's and PGVectorStore's default: m 16, ef_construction 64.
    CREATE INDEX ON chunks USING hnsw (embedding vector_cosine_ops);
    CREATE INDEX ON langchain USING hnsw (embedding vector_cosine_ops);
"""


async def load(world: World, dsn: str) -> dict[str, list[int]]:
    """Create and fill the peers' tables; returns which sets of readers contain which principal.

    Args:
        world: the same as the pipeline's store has.
        dsn: of a superuser, to an empty database.
    """
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(_TABLES)
        await register_vector(connection)
        await connection.copy_records_to_table(
            "documents",
            records=[
                (document_id, f"Document {number}", f"https://example.org/{number}")
                for number, document_id in enumerate(world.document_ids)
            ],
        )
        readers = [tuple(sorted(world.readers(number))) for number in range(len(world.document_ids))]
        sets = {each: number for number, each in enumerate(sorted(set(readers)))}
        for first in range(0, world.size, _ROWS):
            await _chunks(connection, world, readers, sets, range(first, min(first + _ROWS, world.size)))
        await connection.execute(_INDEXES)
        await connection.execute("VACUUM ANALYZE")
    finally:
        await connection.close()
    principals: dict[str, list[int]] = {}
    for each, number in sets.items():
        for principal in each:
            principals.setdefault(principal, []).append(number)
    return principals


async def _chunks(
    connection: asyncpg.Connection,
    world: World,
    readers: list[tuple[str, ...]],
    sets: dict[tuple[str, ...], int],
    numbers: range,
) -> None:
    chunks, langchain = [], []
    for number in numbers:
        document = number // CHUNKS_PER_DOCUMENT
        session, topic = int(world.sessions[document]), int(world.topics[number])
        topics = [] if topic < 0 else [world.topic_ids[session][topic]]
        text = world.base.texts[world.origins[number]]
        ids = (world.chunk_ids[number], world.document_ids[document], world.session_ids[session])
        chunks.append(
            (*ids, topics, text, len(text) // 4, None, None, number % CHUNKS_PER_DOCUMENT,
             list(readers[document]), world.vectors[number])
        )  # fmt: skip
        langchain.append(
            (ids[0], text, world.vectors[number], *ids[1:], topics[0] if topics else None,
             sets[readers[document]], f"Document {document}", f"https://example.org/{document}")
        )  # fmt: skip
    await connection.copy_records_to_table("chunks", records=chunks)
    await connection.copy_records_to_table("langchain", records=langchain)
