"""How long others wait while a store in use is migrated: run by a test with few chunks, by hand with many.

    python -m tests.integration.store.waits --chunks 200000

starts an embedded server, fills a back end's own tables (no foreign keys, no indexes but the primary keys), lets a
back end read and write in a loop, runs `migrate` meanwhile, and prints the longest waits. Exit code 1 where one was
longer than a second. 200,000 chunks take 2 GB of disk and some ten minutes.
"""

# a program of its own

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import asyncpg

from streams.embedded.postgres import EmbeddedPostgres
from streams.store import migrate as migrations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: What the requirement says: no SELECT and no write waits longer.
LONGEST_SECONDS: Final = 1.0
_CHUNKS_A_DOCUMENT: Final = 20

TABLES: Final = """
    CREATE TABLE documents (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), title text, metadata jsonb);
    CREATE TABLE document_chunks (
        id uuid PRIMARY KEY DEFAULT gen_random_uuid(), document_id uuid NOT NULL, session_id uuid,
        related_topic_ids uuid[] NOT NULL DEFAULT '{}', text_content text NOT NULL, metadata jsonb DEFAULT '{}',
        embedding vector(768));
    CREATE TABLE document_grants (document_id uuid NOT NULL, principal text NOT NULL);
"""

FILL: Final = """
    INSERT INTO documents (title, metadata)
        SELECT 'document ' || n, jsonb_build_object('year', 2000 + n % 20) FROM generate_series(1, $1) n;
    INSERT INTO document_grants SELECT id, 'user:' || ascii(id::text) FROM documents;
    INSERT INTO document_grants SELECT id, 'group:' || right(id::text, 2) FROM documents;
"""
CHUNKS: Final = f"""
    INSERT INTO document_chunks (document_id, session_id, related_topic_ids, text_content, metadata, embedding)
    SELECT d.id, d.id, ARRAY[d.id], 'text', jsonb_build_object('page', n),
           (SELECT array_agg(sin(i * (d.number + n * 0.1)))::float4[] FROM generate_series(1, 768) i)::vector
    FROM (SELECT id, row_number() OVER () AS number FROM documents) d, generate_series(1, {_CHUNKS_A_DOCUMENT}) n
"""


@dataclass
class Waits:
    """The longest wait of each kind of statement, in seconds."""

    longest: dict[str, float] = field(default_factory=dict)
    statements: int = 0
    errors: list[str] = field(default_factory=list)
    worst: list[tuple[float, float, str]] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def add(self, kind: str, seconds: float, statement: str) -> None:
        self.statements += 1
        self.worst.append((seconds, time.perf_counter() - self.began, statement))
        self.worst = sorted(self.worst, reverse=True)[:10]
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)

    def __str__(self) -> str:
        each = ", ".join(f"{kind} {1000 * seconds:.0f} ms" for kind, seconds in sorted(self.longest.items()))
        return f"{self.statements} statements; longest: {each}"


async def fill(dsn: str, chunks: int) -> None:
    """A back end's own tables with rows."""
    connection = await asyncpg.connect(dsn, timeout=30)
    try:
        await connection.execute(TABLES)
        documents = max(1, chunks // _CHUNKS_A_DOCUMENT)
        for statement in FILL.split(";")[:-1]:
            await connection.execute(statement.replace("$1", str(documents)))
        await connection.execute(CHUNKS, timeout=3600)
    finally:
        await connection.close()


async def measure(dsn: str, work: Callable[[], Awaitable[object]]) -> Waits:
    """Reads and writes in loops, as a back end, while ``work`` runs."""
    waits = Waits()
    stop = asyncio.Event()
    loops = [
        asyncio.create_task(_loop(dsn, waits, stop, kind, statements)) for kind, statements in _KINDS.items()
    ]
    try:
        await work()
    finally:
        stop.set()
        await asyncio.gather(*loops)
    return waits


_KINDS: Final = {
    "select": ["SELECT id, title FROM documents ORDER BY id LIMIT 20",
               "SELECT text_content FROM document_chunks ORDER BY id LIMIT 20",
               "SELECT principal FROM document_grants LIMIT 20"],
    "update document": ["UPDATE documents SET title = title WHERE id = (SELECT id FROM documents ORDER BY id LIMIT 1)"],
    "update chunk": [
        "UPDATE document_chunks SET text_content = 'x' WHERE id = (SELECT id FROM document_chunks ORDER BY id LIMIT 1)"
    ],
    "insert and delete": [
        "INSERT INTO documents (id, title) VALUES ('00000000-0000-0000-0000-000000000001', 'new')",
        "INSERT INTO document_grants VALUES ('00000000-0000-0000-0000-000000000001', 'user:new')",
        "INSERT INTO document_chunks (document_id, text_content) VALUES ('00000000-0000-0000-0000-000000000001', '')",
        "DELETE FROM document_grants WHERE principal = 'user:new'",
        "DELETE FROM document_chunks WHERE document_id = '00000000-0000-0000-0000-000000000001'",
        "DELETE FROM documents WHERE id = '00000000-0000-0000-0000-000000000001'"],
}  # fmt: skip


async def _loop(dsn: str, waits: Waits, stop: asyncio.Event, kind: str, statements: list[str]) -> None:
    # Enough for whoever is blocked for as long as the migration takes: it is to be measured.
    connection = await asyncpg.connect(dsn, timeout=30, command_timeout=3600)
    try:
        while not stop.is_set():
            for statement in statements:
                began = time.perf_counter()
                try:
                    await connection.execute(statement)
                except asyncpg.PostgresError as error:
                    waits.errors.append(f"{kind}: {type(error).__name__}: {error}")
                waits.add(kind, time.perf_counter() - began, statement)
            await asyncio.sleep(0.005)
    finally:
        await connection.close()


async def _main(chunks: int) -> int:
    with EmbeddedPostgres() as server:
        roles = "CREATE ROLE store_owner LOGIN PASSWORD 'o'; CREATE ROLE back_end LOGIN PASSWORD 'b';"
        admin = await asyncpg.connect(server.dsn(), timeout=30)
        await admin.execute(
            f"{roles} CREATE ROLE anabranch_reader; CREATE ROLE anabranch_writer ROLE back_end;"
            " CREATE EXTENSION vector; GRANT CREATE ON SCHEMA public TO store_owner"
        )
        owner, back_end = server.dsn("store_owner", "postgres", "o"), server.dsn("back_end", "postgres", "b")
        # A graph that does not fit into it takes many times as long to build.
        await admin.execute("ALTER ROLE store_owner SET maintenance_work_mem = '1GB'")
        print(f"filling {chunks} chunks …", flush=True)
        await fill(owner, chunks)
        await admin.execute("GRANT ALL ON documents, document_chunks, document_grants TO back_end")
        await admin.execute("VACUUM ANALYZE", timeout=3600)
        await admin.close()
        began = time.perf_counter()

        def report(line: str) -> None:
            print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)

        waits = await measure(
            back_end,
            lambda: migrations.migrate(owner, principals_setting="anabranch.principals", report=report),
        )
        print(f"migrated in {time.perf_counter() - began:.0f} s: {waits}")
        for seconds, at, statement in waits.worst:
            print(f"{1000 * seconds:5.0f} ms, ended at {at:.1f} s: {statement}")
        for error in sorted(set(waits.errors)):
            print(error)
        return 1 if waits.errors or max(waits.longest.values()) > LONGEST_SECONDS else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=200_000)
    sys.exit(asyncio.run(_main(parser.parse_args().chunks)))
