"""Writes the sample corpus to a store."""

import json

import asyncpg
from pgvector.asyncpg import register_vector

from streams.sample import Corpus

__all__ = ["load_corpus"]


async def load_corpus(dsn: str, corpus: Corpus) -> None:
    """Write the corpus as a back end would, as anabranch_writer. Rows that exist are kept.

    Args:
        dsn: connection string of a member of anabranch_writer. Only the tables' owner or a superuser can also collect
            statistics; for others, PostgreSQL skips that with a warning.
        corpus: the corpus to write.

    Raises:
        OSError, asyncpg.PostgresError, asyncpg.InterfaceError: the store cannot be reached or written.
    """
    connection = await asyncpg.connect(dsn)
    try:
        await register_vector(connection)
        await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
        async with connection.transaction():
            await connection.execute("SET LOCAL ROLE anabranch_writer")
            await connection.executemany(
                "INSERT INTO documents (id, session_id, title, source_url, file_description, document_type, metadata)"
                " VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING",
                [
                    (
                        d.id,
                        d.session_id,
                        d.title,
                        d.source_url,
                        d.file_description,
                        d.document_type,
                        d.metadata,
                    )
                    for d in corpus.documents
                ],
            )
            # Grants before chunks, so that each chunk is written only once, with its final access set.
            await connection.executemany(
                "INSERT INTO document_grants (document_id, principal) VALUES ($1, $2) ON CONFLICT DO NOTHING",
                [(grant.document_id, grant.principal) for grant in corpus.grants],
            )
            await connection.executemany(
                "INSERT INTO document_chunks (id, document_id, session_id, parent_chunk_id, related_topic_ids,"
                " chunk_type, chunk_position, text_content, token_count, page, section, coordinates, metadata,"
                " embedding) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)"
                " ON CONFLICT DO NOTHING",
                [
                    (
                        c.id, c.document_id, c.session_id, c.parent_chunk_id, list(c.related_topic_ids),
                        c.chunk_type, c.chunk_position, c.text_content, c.token_count, c.page, c.section,
                        c.coordinates, c.metadata, corpus.chunk_embedding(c),
                    )
                    for c in corpus.chunks
                ],
            )  # fmt: skip
        await connection.execute(
            "ANALYZE documents, document_chunks, access_sets, chunk_topics, chunk_metadata"
        )
    finally:
        await connection.close()
