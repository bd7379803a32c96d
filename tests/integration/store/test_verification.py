"""Writes that bypass the triggers are noticed by `check` and `stats`, and repaired by `migrate`."""

# ruff: noqa: ASYNC221  # nothing else runs while a program does

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from streams.store.migrate import migrate
from streams.store.verification import Difference, verify
from tests.conftest import SETTING
from tests.integration.connections import connected, execute

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Database, PostgresServer

pytestmark = pytest.mark.slow

DOCUMENT = "00000000-0000-0000-0000-000000000001"
ROWS = """
    INSERT INTO documents (id, title, metadata)
        SELECT ('00000000-0000-0000-0000-00000000000' || n)::uuid, 'd' || n, '{"year": 2020}'
        FROM generate_series(1, 3) n;
    INSERT INTO document_grants SELECT id, 'user:1' FROM documents;
    INSERT INTO document_chunks (document_id, text_content, related_topic_ids, metadata)
        SELECT id, 'c', ARRAY[id], '{"page": 1}' FROM documents;
"""
BYPASSES = {
    "a replica's session": (
        "documents",
        "SET session_replication_role = replica; DELETE FROM document_grants WHERE document_id::text LIKE '%2'",
    ),
    "a restore with triggers disabled": (
        "document_chunks",
        """ALTER TABLE document_chunks DISABLE TRIGGER USER;
           INSERT INTO document_chunks (document_id, text_content, access_set_id)
               SELECT NULL, 'c', max(id) FROM access_sets;
           ALTER TABLE document_chunks ENABLE TRIGGER USER""",
    ),
    "a chunk's topics": (
        "chunk_topics",
        "UPDATE chunk_topics SET access_set_id = NULL WHERE topic_id::text LIKE '%3'",
    ),
    "a chunk's metadata": (
        "chunk_metadata",
        "DELETE FROM chunk_metadata WHERE ctid = (SELECT min(ctid) FROM chunk_metadata)",
    ),
}


def anabranch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "streams", *arguments],
        env={**os.environ, "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


async def stale(database: Database) -> list[Difference]:
    async with connected(database.owner) as owner:
        return await verify(owner)


def derived(database: Database, *, admin: str | None) -> list[dict[str, Any]]:
    environment = {"DATABASE_CONNECTION_STRING": database.worker}
    if admin is not None:
        environment["DATABASE_ADMIN_CONNECTION_STRING"] = admin
    ended = anabranch("check", "--json", **environment)
    return [finding for finding in json.loads(ended.stdout) if finding["check"] == "derived"]


@pytest.mark.parametrize(("table", "bypass"), BYPASSES.values(), ids=BYPASSES.keys())
async def test_what_bypassed_the_triggers_is_found_and_repaired(
    database: Database, table: str, bypass: str
) -> None:
    await execute(database.writer, ROWS)
    assert [finding["level"] for finding in derived(database, admin=database.owner)] == ["ok"]
    await execute(database.owner, "ALTER TABLE document_chunks ALTER document_id DROP NOT NULL")
    await execute(database.admin, bypass)

    found = derived(database, admin=database.owner)
    assert {(finding["level"], finding["remedy"]) for finding in found} == {("refused", "anabranch migrate")}
    assert [finding for finding in found if finding["detail"].startswith(f"{table}: ")], found
    stats = anabranch("stats", "--json", DATABASE_ADMIN_CONNECTION_STRING=database.owner)
    assert stats.returncode == 1
    assert table in {difference["table"] for difference in json.loads(stats.stdout)["differences"]}

    await migrate(database.owner, principals_setting=SETTING)
    assert [finding["level"] for finding in derived(database, admin=database.owner)] == ["ok"]
    assert anabranch("stats", DATABASE_ADMIN_CONNECTION_STRING=database.owner).returncode == 0


async def test_a_repair_holds_no_row_of_every_key_in_memory(database: Database) -> None:
    """200,000 chunks with seven keys each took as much memory as the Kubernetes Job has."""
    chunks, keys = 2_000, 30
    await execute(
        database.admin,
        f"""SET session_replication_role = replica;
            INSERT INTO documents (id) VALUES ('{DOCUMENT}');
            INSERT INTO document_chunks (document_id, text_content, metadata)
                SELECT '{DOCUMENT}', 'c', (SELECT jsonb_object_agg('key ' || k, n) FROM generate_series(1, {keys}) k)
                FROM generate_series(1, {chunks}) n""",
    )
    tracemalloc.start()
    try:
        done = await migrate(database.owner, principals_setting=SETTING)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert f"rebuilt the derived data of {chunks} chunks" in done
    assert await stale(database) == []
    assert peak < 100 * chunks * keys


async def test_a_repair_continues_after_the_first_slice_of_stale_rows(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.store.derivation._SLICE_ROWS", 2)
    await execute(database.writer, ROWS)
    await execute(
        database.admin,
        "SET session_replication_role = replica; DELETE FROM document_grants; DELETE FROM chunk_metadata",
    )
    done = await migrate(database.owner, principals_setting=SETTING)
    assert done == ["rebuilt the derived data of 3 documents", "rebuilt the derived data of 3 chunks"]
    assert await stale(database) == []


async def test_without_the_owners_connection_it_says_that_it_was_not_verified(database: Database) -> None:
    (finding,) = derived(database, admin=None)
    assert finding["level"] == "warning"
    assert "not verified" in finding["detail"]
    assert "DATABASE_ADMIN_CONNECTION_STRING" in finding["remedy"]


async def test_a_connection_that_does_not_see_every_row_is_not_taken_for_a_verification(
    database: Database,
) -> None:
    (finding,) = derived(database, admin=database.writer)
    assert finding["level"] == "unready"
    assert "store_owner" in finding["detail"]


def test_an_invalid_connection_string_of_the_owner_is_reported_without_any_part_of_it() -> None:
    """asyncpg takes a part of a password with a slash for the port, and quotes it."""
    ended = anabranch(
        "check",
        "--json",
        DATABASE_CONNECTION_STRING="postgresql://worker@127.0.0.1:1/app",
        DATABASE_ADMIN_CONNECTION_STRING="postgresql://owner:12Sec/ret@db/app",
    )
    assert not [part for part in ("12Sec", "ret@db") if part in ended.stdout + ended.stderr]
    assert ended.returncode == 1
    (finding,) = [finding for finding in json.loads(ended.stdout) if finding["check"] == "derived"]
    assert finding["level"] == "unready"
    assert finding["detail"].startswith("DATABASE_ADMIN_CONNECTION_STRING is invalid: it cannot be parsed")


async def test_a_comparison_that_the_server_ends_is_not_reported_as_a_connection_error(
    database: Database,
) -> None:
    await execute(database.writer, "INSERT INTO documents SELECT FROM generate_series(1, 5000)")
    await execute(
        database.admin, f"ALTER ROLE store_owner IN DATABASE {database.name} SET statement_timeout = '1ms'"
    )
    (finding,) = derived(database, admin=database.owner)
    assert finding["level"] == "unready"
    assert "cannot connect" not in finding["detail"]
    assert "QueryCanceledError" in finding["detail"]
    assert "statement_timeout" in finding["remedy"]


async def test_a_whole_dump_restores_to_a_store_that_needs_nothing(
    postgres: PostgresServer, database: Database, tmp_path: Path
) -> None:
    await execute(database.writer, ROWS)
    dump, program = tmp_path / "dump", postgres.embedded.program
    as_owner = [program("pg_dump"), "--format=custom", f"--file={dump}", database.owner]
    refused = subprocess.run(as_owner, check=False, capture_output=True, text=True, timeout=60)
    assert "row-level security policy" in refused.stderr
    restored = postgres.create("template0")
    try:
        subprocess.run([*as_owner[:-1], database.admin], check=True, timeout=60)
        subprocess.run(
            [program("pg_restore"), "--exit-on-error", f"--dbname={restored.admin}", str(dump)],
            check=True,
            timeout=60,
        )
        assert [finding["level"] for finding in derived(restored, admin=restored.owner)] == ["ok"]
        assert await migrate(restored.owner, principals_setting=SETTING) == []
        async with connected(restored.worker) as worker, worker.transaction():
            assert await worker.fetch("SELECT id FROM documents") == []
            await worker.execute("SELECT set_config($1, $2, true)", SETTING, '["user:1"]')
            assert len(await worker.fetch("SELECT id FROM documents")) == 3
    finally:
        postgres.drop(restored)
