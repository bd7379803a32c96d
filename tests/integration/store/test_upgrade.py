"""An application that is in use is upgraded: nobody waits, nothing is half done, nobody is locked out unasked."""

# ruff: noqa: ASYNC221, E501  # nothing else runs while a program does; SQL is read a statement a line

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from contextlib import suppress
from datetime import UTC, datetime
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import numpy as np
import pytest

from streams.core.messages import Filters, MetadataRange
from streams.embedded.postgres import EmbeddedPostgres
from streams.retrieval import Search
from streams.store import locks
from streams.store.migrate import ConsentRequired, MigrationError, migrate, plan
from streams.store.runner import Runner
from streams.store.vector_index import VectorIndex, read_vector_index
from streams.store.verification import verify
from tests.conftest import SETTING
from tests.integration.connections import connected, execute, opened_store, problems
from tests.integration.harness import until
from tests.integration.store.waits import LONGEST_SECONDS, fill, measure
from tests.left_out import unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Database, PostgresServer

pytestmark = pytest.mark.slow

#: The last commits of versions 1 and 2.
FIRST_RELEASE, SECOND_VERSION = "b3b3472", "4eca13e"
VERSION_1 = Path(__file__).with_name("schema_version_1.sql")


# Who holds the lock


async def test_another_session_that_holds_the_advisory_lock_is_named(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any login can take it; `migrate` must not wait for it indefinitely."""
    monkeypatch.setattr(locks, "ADVISORY_WAIT_SECONDS", 0.5)
    async with connected(database.worker, application_name="nosy") as worker:
        await worker.execute("SELECT pg_advisory_lock($1)", 0x616E6162)
        pid = worker.get_server_pid()
        with pytest.raises(MigrationError, match=rf"process {pid}, role worker, application nosy"):
            await asyncio.wait_for(migrate(database.owner, principals_setting=SETTING), 20)


# Something foreign

FOREIGN = {
    "CREATE FUNCTION public.anabranch_access_set(document uuid) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'":
        "DROP FUNCTION public.anabranch_access_set(document uuid)",
    "CREATE FUNCTION public.anabranch_access_set(text, boolean DEFAULT true) RETURNS bigint LANGUAGE sql"
    " AS 'SELECT 1::bigint'":
        "DROP FUNCTION public.anabranch_access_set(text, boolean)",
    "CREATE TABLE public.anabranch_schema (version int)": "DROP TABLE public.anabranch_schema",
    "CREATE VIEW public.chunk_topics AS SELECT 1 AS topic_id": "DROP VIEW public.chunk_topics",
}  # fmt: skip


@pytest.mark.parametrize(("planted", "remedy"), FOREIGN.items())
async def test_a_foreign_object_of_one_of_our_names_is_refused(
    empty_database: Database, planted: str, remedy: str
) -> None:
    await execute(empty_database.admin, "GRANT CREATE ON SCHEMA public TO back_end")
    await execute(empty_database.writer, planted)
    await execute(empty_database.owner, "CREATE TABLE documents (id uuid PRIMARY KEY)")
    with pytest.raises(MigrationError) as raised:
        await migrate(empty_database.owner, principals_setting=SETTING)
    assert remedy in str(raised.value)
    assert "back_end" in str(raised.value)


async def test_others_who_may_create_are_mentioned_with_the_revoke(empty_database: Database) -> None:
    await execute(empty_database.admin, "GRANT CREATE ON SCHEMA public TO back_end")
    done = await migrate(empty_database.owner, principals_setting=SETTING)
    assert [line for line in done if 'REVOKE CREATE ON SCHEMA public FROM "back_end";' in line], done
    assert [problem for problem in await problems(empty_database) if "back_end" in problem]


# Nobody waits


async def test_nobody_waits_longer_than_a_second(
    empty_database: Database, record_property: Callable[[str, object], None]
) -> None:
    """With 200,000 chunks: ``python -m tests.integration.store.waits``."""
    await fill(empty_database.owner, 6_000)
    await execute(
        empty_database.owner,
        "GRANT SELECT, INSERT, UPDATE, DELETE ON documents, document_chunks, document_grants TO back_end",
    )
    # What this machine takes for the same statements while it builds such an index on a copy, which locks nothing.
    await execute(
        empty_database.owner, "CREATE TABLE copied AS SELECT embedding FROM document_chunks LIMIT 2000"
    )
    build = "CREATE INDEX ON copied USING hnsw (embedding vector_cosine_ops) WITH (ef_construction = 200)"
    control = await measure(empty_database.writer, lambda: execute(empty_database.owner, build))
    await execute(empty_database.owner, "DROP TABLE copied")
    waits = await measure(
        empty_database.writer, lambda: migrate(empty_database.owner, principals_setting=SETTING)
    )
    record_property("figure", f"beside a back end, 6,000 chunks: migrate {waits}; one index build {control}")
    assert waits.errors == control.errors == []
    assert max(waits.longest.values()) < LONGEST_SECONDS + max(control.longest.values()), (waits, control)
    assert await problems(empty_database) == []


# From version 1, which was released without a record of its version. No value is a number, a date or an array: these
# have further rows since version 3.

ROWS = """
    INSERT INTO documents (id, title, metadata) SELECT
        ('00000000-0000-0000-0000-0000000000' || lpad(n::text, 2, '0'))::uuid, 'd' || n, jsonb_build_object('n', 'v' || n)
        FROM generate_series(1, 20) n;
    INSERT INTO document_grants SELECT id, 'user:' || n % 3 FROM documents, generate_series(1, 20) n WHERE title = 'd' || n;
    INSERT INTO document_grants SELECT id, 'public' FROM documents WHERE title IN ('d4', 'd5');
    INSERT INTO document_chunks (document_id, text_content, related_topic_ids, metadata, embedding)
        SELECT id, 'c', ARRAY[id], '{"page": "i"}', array_fill(1.0, ARRAY[768])::vector
        FROM documents, generate_series(1, 5);
"""
PRINCIPALS = ("user:0", "user:1", "user:2", "user:3")


async def seen(database: Database) -> dict[str, set[object]]:
    """What each principal sees, in every table that workers read."""
    async with connected(database.worker) as worker:
        found: dict[str, set[object]] = {}
        for principal in PRINCIPALS:
            async with worker.transaction():
                await worker.execute("SELECT set_config($1, $2, true)", SETTING, f'["{principal}"]')
                found[principal] = {
                    tuple(row)
                    for query in (
                        "SELECT id FROM documents",
                        "SELECT id FROM document_chunks",
                        "SELECT chunk_id, topic_id FROM chunk_topics",
                        "SELECT chunk_id, entry FROM chunk_metadata",
                    )
                    for row in await worker.fetch(query)
                }
        return found


async def stale(database: Database) -> list[object]:
    async with connected(database.owner) as owner:
        return list(await verify(owner))


@pytest.fixture
async def version_1(empty_database: Database) -> Database:
    """A store of the first release, with rows."""
    await execute(
        empty_database.owner, VERSION_1.read_text().replace(":'principals_setting'", f"'{SETTING}'")
    )
    await execute(empty_database.writer, ROWS)
    return empty_database


def package_at(commit: str, folder: Path) -> Path:
    """The package at a commit of this repository's history."""
    root = Path(__file__).parents[3]
    archive = subprocess.run(
        ["git", "-C", str(root), "archive", commit], check=False, capture_output=True, timeout=60
    )
    if archive.returncode != 0:
        unavailable(
            f"the history lacks {commit}: {archive.stderr.decode().strip()}",
            enable="git fetch --unshallow",
        )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def old_problems(folder: Path, database: Database) -> list[str]:
    """What a worker of the first release refuses or warns about."""
    ended = subprocess.run(
        [sys.executable, "-m", "streams", "check", "--json"],
        env={"PATH": os.environ["PATH"], "DATABASE_CONNECTION_STRING": database.worker,
             "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"},
        cwd=folder, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    findings = json.loads(ended.stdout)
    assert len(findings) > 10
    return [f"{f['check']}: {f['detail']}" for f in findings if f["level"] != "ok" and f["check"] != "broker"]


#: What `migrate` says about a vector index of an earlier release, until there is a newer one.
NEWER_INDEX = "note: the index document_chunks_embedding of document_chunks still works"


def besides_the_index(done: list[str]) -> list[str]:
    """Without that note, which has to be there."""
    others = [line for line in done if not line.startswith(NEWER_INDEX)]
    assert len(done) == len(others) + 1, done
    return others


#: The same when there is a newer one.
OLD_INDEX = "note: only workers of an earlier release still need the index document_chunks_embedding"


async def follow(dsn: str, done: list[str], beginning: str) -> None:
    """Run the statements of a note."""
    (note,) = [line for line in done if line.startswith(beginning)]
    async with connected(dsn) as session:
        for line in note.splitlines():
            if line.endswith(";"):
                await session.execute(line)


async def replace_index(dsn: str, done: list[str]) -> None:
    """Run what the notes say."""
    await follow(dsn, done, NEWER_INDEX)
    done = await migrate(dsn, principals_setting=SETTING)
    assert len(done) == 1
    await follow(dsn, done, OLD_INDEX)


# A search by the first release's own code; prints the ids, from the first to the last.
OLD_SEARCH = """
import asyncio, json, sys
import numpy as np
from streams.retrieval import Search
from streams.store.postgres import PostgresStore

async def search():
    store = PostgresStore(sys.argv[1], connections=1, search_timeout_seconds=20, exact_scan_rows=20_000,
                          principals_setting="anabranch.principals", small_scope_rows=int(sys.argv[3]))
    await store.open()
    vector = np.full(768, 768**-0.5, np.float32)
    found = await store.search(Search(vector, [sys.argv[2]], None, None, None, expand_parents=False, limit=15))
    texts = await store.passages([sys.argv[2]], [one.chunk_id for one in found.candidates])
    await store.close(timeout_seconds=3)
    print(json.dumps([str(one.chunk_id) for one in found.candidates if one.chunk_id in texts]))

asyncio.run(search())
"""


def old_search(folder: Path, database: Database, principal: str, small_scope_rows: int) -> list[str]:
    """The ids that a worker of the first release finds."""
    ended = subprocess.run(
        [sys.executable, "-c", OLD_SEARCH, database.worker, principal, str(small_scope_rows)],
        env={"PATH": os.environ["PATH"]},
        cwd=folder, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return list(json.loads(ended.stdout))


async def new_search(database: Database, principal: str, small_scope_rows: int) -> list[str]:
    """The ids that this release's worker finds."""
    async with opened_store(database.worker, small_scope_rows=small_scope_rows) as store:
        vector = np.full(768, 768**-0.5, np.float32)
        search = Search(vector, [principal], None, None, None, expand_parents=False, limit=15)
        return [str(candidate.chunk_id) for candidate in (await store.search(search)).candidates]


async def test_an_upgrade_serves_workers_of_both_releases_until_it_is_pruned(
    version_1: Database, tmp_path: Path
) -> None:
    old = package_at(FIRST_RELEASE, tmp_path)
    assert old_problems(old, version_1) == []
    before = await seen(version_1)
    assert sum(map(len, before.values())) > 100
    assert [problem for problem in await problems(version_1) if "schema version is 1, older" in problem]

    checking = asyncio.create_task(asyncio.to_thread(old_problems, old, version_1))
    migrating = asyncio.create_task(migrate(version_1.owner, principals_setting=SETTING))
    while not (migrating.done() and checking.done()):
        assert await seen(version_1) == before
    assert await checking == []  # in the middle of it
    done = await migrating
    assert "recorded schema version 3" in done
    assert [line for line in done if line.startswith(("created policy", "enabled", "rebuilt"))] == []
    assert await seen(version_1) == before
    assert await stale(version_1) == []
    assert await problems(version_1) == []
    assert old_problems(old, version_1) == []
    assert besides_the_index(await migrate(version_1.owner, principals_setting=SETTING)) == []
    for principal in PRINCIPALS:
        for small_scope_rows in (1000, 0):
            of_old = await asyncio.to_thread(old_search, old, version_1, principal, small_scope_rows)
            assert len(of_old) in (10, 15)
            assert of_old == await new_search(version_1, principal, small_scope_rows)

    await execute(version_1.writer, "DELETE FROM document_grants WHERE principal = 'user:1'")
    after = await seen(version_1)
    assert after == before | {"user:1": after["user:3"]}

    assert besides_the_index(await migrate(version_1.owner, principals_setting=SETTING, prune=True)) == [
        "removed objects that only workers before schema version 2 needed",
        "removed objects that only workers before schema version 3 needed",
    ]
    assert besides_the_index(await migrate(version_1.owner, principals_setting=SETTING, prune=True)) == []
    assert await seen(version_1) == after
    assert await problems(version_1) == []
    assert [problem for problem in old_problems(old, version_1) if "anabranch_grants_deleted" in problem]
    fresh = await names(version_1)
    async with connected(version_1.owner) as owner:
        assert tuple(await owner.fetchrow("SELECT version, oldest_worker FROM anabranch_schema") or ()) == (
            3,
            3,
        )
    assert not [name for name in fresh if "described" in name or "derive_anew" in name]


async def test_an_older_releases_migrate_is_undone_by_the_next_run(version_1: Database) -> None:
    """As after a rollback: its functions do everything a second time, until they are replaced again."""
    await migrate(version_1.owner, principals_setting=SETTING)
    upgraded = await definitions(version_1)
    text = VERSION_1.read_text()
    functions = text[text.index("CREATE OR REPLACE FUNCTION") : text.index("REVOKE ALL ON FUNCTION")]
    await execute(version_1.owner, functions)
    assert [problem for problem in await problems(version_1) if "by an older release's `migrate`" in problem]
    assert [
        problem
        for problem in await problems(version_1)
        if "anabranch_access_set is missing or altered" in problem
    ]
    assert "replaced objects that an older release created again" in await migrate(
        version_1.owner, principals_setting=SETTING
    )
    assert await definitions(version_1) == upgraded
    await migrate(version_1.owner, principals_setting=SETTING, prune=True)
    await execute(version_1.owner, functions)
    await migrate(version_1.owner, principals_setting=SETTING, prune=True)
    assert not [name for name in await names(version_1) if "grants_changed" in name]
    assert await problems(version_1) == []
    async with connected(version_1.owner) as owner:
        # It was pruned before: workers of version 2 cannot use it any more.
        assert await owner.fetchval("SELECT oldest_worker FROM anabranch_schema WHERE version = 3") == 3


# From version 2, whose searches take other parameters, and whose metadata has fewer rows

ROWS_OF_VERSION_2 = """
    INSERT INTO documents (id, metadata) SELECT
        ('00000000-0000-0000-0000-0000000000' || lpad(n::text, 2, '0'))::uuid,
        jsonb_build_object('year', 2000 + n, 'tags', ARRAY['all', 'n' || n % 2], 'day', '2024-05-' || lpad(n::text, 2, '0'))
        FROM generate_series(1, 20) n;
    INSERT INTO document_grants SELECT id, 'user:1' FROM documents;
    INSERT INTO document_chunks (document_id, text_content, embedding)
        SELECT id, 'c', array_fill(1.0, ARRAY[768])::vector FROM documents, generate_series(1, 5);
"""
SEARCH_OF_VERSION_2 = """
    SELECT cardinality(ids) FROM public.anabranch_search('["user:1"]'::text, array_fill(1, '{768}')::vector, NULL::uuid,
      NULL::uuid, NULL::text, NULL::text, NULL::text, '{year,2007,tags,"[\\"all\\", \\"n1\\"]",day,2024-05-07}'::text[], 15,
      false, $1::int, $1::int, true, 400, 20000)
"""


async def test_workers_of_version_2_are_served_until_the_store_is_pruned(
    empty_database: Database, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = package_at(SECOND_VERSION, tmp_path)
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "streams", "migrate"],
        env={"PATH": os.environ["PATH"], "DATABASE_ADMIN_CONNECTION_STRING": empty_database.owner},
        cwd=second, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "recorded schema version 2" in ended.stdout, ended.stderr
    await execute(empty_database.writer, ROWS_OF_VERSION_2)

    after_each: list[list[str]] = []
    transaction = Runner.transaction

    async def and_check(self: Runner, *arguments: Any) -> None:
        await transaction(self, *arguments)
        after_each.append(await asyncio.to_thread(old_problems, second, empty_database))

    monkeypatch.setattr(Runner, "transaction", and_check)
    migrating = asyncio.create_task(migrate(empty_database.owner, principals_setting=SETTING))
    async with connected(empty_database.worker) as worker:
        searches = 0
        while not migrating.done() or not searches:
            for small in (1000, 0):
                assert await worker.fetchval(SEARCH_OF_VERSION_2, small) == 5
            searches += 1
            await asyncio.sleep(0.01)
    monkeypatch.undo()
    assert "rebuilt the derived data of 100 chunks" in await migrating
    newer = "schema: the schema version is 3, newer than this release's 2, but still compatible"
    not_verified = "derived: derived data was not verified: only its owner sees all rows"
    # Columns, functions with triggers, and rights.
    assert after_each == [[not_verified], [newer, not_verified], [newer, not_verified]]

    assert await stale(empty_database) == []
    assert await problems(empty_database) == []
    assert await migrate(empty_database.owner, principals_setting=SETTING) == []
    filters = Filters(
        metadata_contains={"tags": ("n1",)},
        metadata_range={
            "year": MetadataRange(gte=2003, lt=2009),
            "day": MetadataRange(after=datetime(2024, 5, 3, tzinfo=UTC)),
        },
    )
    for small_scope_rows in (1000, 0):
        async with opened_store(empty_database.worker, small_scope_rows=small_scope_rows) as store:
            vector = np.full(768, 768**-0.5, np.float32)
            search = Search(vector, ["user:1"], None, None, filters, expand_parents=False, limit=15)
            assert len((await store.search(search)).candidates) == 2 * 5  # 2005 and 2007

    assert await migrate(empty_database.owner, principals_setting=SETTING, prune=True) == [
        "removed objects that only workers before schema version 3 needed"
    ]
    assert await problems(empty_database) == []
    assert await names(empty_database) == await names(database)
    assert await definitions(empty_database) == await definitions(database)
    assert [
        problem
        for problem in old_problems(second, empty_database)
        if "refused" in problem or "version 3" in problem
    ]


async def test_limits_of_the_role_do_not_stop_a_migration(empty_database: Database) -> None:
    await fill(empty_database.owner, 2_000)  # its index takes longer than half a second on any machine
    await execute(
        empty_database.admin,
        f"ALTER ROLE store_owner IN DATABASE {empty_database.name} SET statement_timeout = '500ms';"
        f"ALTER ROLE store_owner IN DATABASE {empty_database.name} SET default_transaction_isolation = 'serializable'",
    )
    await migrate(empty_database.owner, principals_setting=SETTING)
    assert await problems(empty_database) == []


async def names(database: Database) -> set[str]:
    """Of all functions and triggers of ours."""
    async with connected(database.owner) as owner:
        rows = await owner.fetch(
            "SELECT proname::text FROM pg_proc WHERE proname LIKE '%anabranch%'"
            " UNION ALL SELECT tgname::text FROM pg_trigger WHERE tgname LIKE '%anabranch%'"
        )
    return {row[0] for row in rows}


async def test_an_upgraded_and_pruned_store_is_like_a_new_one(
    version_1: Database, database: Database
) -> None:
    await replace_index(
        version_1.owner, await migrate(version_1.owner, principals_setting=SETTING, prune=True)
    )
    assert await migrate(version_1.owner, principals_setting=SETTING) == []
    assert await names(version_1) == await names(database)
    assert await definitions(version_1) == await definitions(database)


async def test_pruning_keeps_a_back_ends_own_indexes(version_1: Database) -> None:
    await execute(
        version_1.owner,
        "DROP INDEX document_chunks_session_id, document_chunks_access_set_id;"
        "CREATE INDEX document_chunks_session_id ON document_chunks (session_id) WHERE page IS NULL;"
        "CREATE INDEX document_chunks_access_set_id ON document_chunks (access_set_id, page)",
    )
    await migrate(version_1.owner, principals_setting=SETTING, prune=True)
    async with connected(version_1.owner) as owner:
        assert (
            await owner.fetchval(
                "SELECT count(*) FROM pg_indexes"
                " WHERE indexname IN ('document_chunks_session_id', 'document_chunks_access_set_id')"
            )
            == 2
        )


async def test_an_old_vector_index_serves_searches_until_it_is_replaced(version_1: Database) -> None:
    old_index, new_index = "document_chunks_embedding", "document_chunks_embedding_halfvec"

    async def scans() -> dict[str, int]:
        """So far, of each vector index that there is."""
        async with connected(version_1.admin) as admin:
            rows = await admin.fetch(
                "SELECT indexrelname::text, idx_scan FROM pg_stat_user_indexes WHERE indexrelname = ANY ($1)",
                [old_index, new_index],
            )
            return {row[0]: row[1] for row in rows}

    async def used() -> set[str]:
        """Which were scanned; the statistics come with the end of a session."""
        async with asyncio.timeout(20):
            while not any((counted := await scans()).values()):  # noqa: ASYNC110  # another process reports it
                await asyncio.sleep(0.05)
        return {name for name, number in counted.items() if number}

    async def index_of() -> VectorIndex:
        async with connected(version_1.worker) as worker:
            return await read_vector_index(worker)

    done = await migrate(version_1.owner, principals_setting=SETTING)
    assert await problems(version_1) == []
    assert not (await index_of()).by_halfvec
    found = await new_search(version_1, "user:1", 0)
    assert len(found) == 15
    assert await used() == {old_index}

    await replace_index(version_1.owner, done)
    assert await migrate(version_1.owner, principals_setting=SETTING) == []
    assert await problems(version_1) == []
    assert (await index_of()).by_halfvec
    assert sorted(await new_search(version_1, "user:1", 0)) == sorted(found)
    assert await used() == {new_index}


@pytest.mark.parametrize("ef_construction", [64, 500])
async def test_searches_use_the_newer_of_two_vector_indexes(
    version_1: Database, ef_construction: int
) -> None:
    """Between the two notes, while workers of an earlier release run; however the old one was built."""
    await execute(
        version_1.owner,
        f"ALTER INDEX public.document_chunks_embedding SET (ef_construction = {ef_construction})",
    )
    await follow(version_1.owner, await migrate(version_1.owner, principals_setting=SETTING), NEWER_INDEX)
    async with connected(version_1.worker) as worker:
        assert (await read_vector_index(worker)).by_halfvec
    assert await problems(version_1) == []
    assert len(await new_search(version_1, "user:1", 0)) == 15
    (note,) = await migrate(version_1.owner, principals_setting=SETTING)
    assert "When all of them are upgraded" in note
    await follow(version_1.owner, [note], OLD_INDEX)
    assert await migrate(version_1.owner, principals_setting=SETTING) == []


async def test_the_note_replaces_an_index_that_an_interrupted_build_left(version_1: Database) -> None:
    """Also if pgvector is in a schema that is not on the search path."""
    await execute(
        version_1.admin,
        "CREATE SCHEMA extensions; GRANT USAGE ON SCHEMA extensions TO PUBLIC;"
        "ALTER EXTENSION vector SET SCHEMA extensions",
    )
    done = await migrate(version_1.owner, principals_setting=SETTING)
    await execute(
        version_1.admin,
        "SET search_path = public, extensions;"
        f"CREATE INDEX document_chunks_embedding_halfvec ON document_chunks {HALFVEC};"
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'document_chunks_embedding_halfvec'::regclass",
    )
    assert await migrate(version_1.owner, principals_setting=SETTING) == done[-1:]
    await replace_index(version_1.owner, done)
    async with connected(version_1.worker) as worker:
        assert (await read_vector_index(worker)).by_halfvec
    assert await migrate(version_1.owner, principals_setting=SETTING) == []


async def test_the_note_on_an_old_vector_index_is_all_that_migrate_repeats(version_1: Database) -> None:
    """It runs nothing: an ANALYZE reads thousands of rows."""
    await migrate(version_1.owner, principals_setting=SETTING)
    (note,) = await migrate(version_1.owner, principals_setting=SETTING)
    assert note.startswith(NEWER_INDEX)
    script = await plan(version_1.owner, principals_setting=SETTING)
    assert [line for line in script if not line.strip().startswith("--")] == []


async def definitions(database: Database) -> set[tuple[object, ...]]:
    async with connected(database.owner) as owner:
        return {tuple(row) for row in await owner.fetch(DEFINITIONS)}


DEFINITIONS = """
    SELECT 'column', attrelid::regclass::text, attname::text, concat_ws(' ', format_type(atttypid, atttypmod), attnotnull, attstorage, attacl)
    FROM pg_attribute WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r')
                        AND attnum > 0 AND NOT attisdropped
    UNION ALL SELECT 'table', relname::text, relkind::text, concat_ws(' ', relrowsecurity, relforcerowsecurity, relacl)
    FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'i')
    UNION ALL SELECT 'index', '', '', pg_get_indexdef(indexrelid) || indisvalid::text
    FROM pg_index WHERE indrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace)
    UNION ALL SELECT 'function', proname::text, proacl::text, pg_get_functiondef(oid)
    FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proname LIKE 'anabranch%'
    UNION ALL SELECT 'trigger', tgname::text, tgenabled::text, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL SELECT 'policy', polname::text, polroles::regrole[]::text, concat(pg_get_expr(polqual, polrelid), pg_get_expr(polwithcheck, polrelid))
    FROM pg_policy
"""


async def test_writes_of_all_kinds_during_an_upgrade_leave_nothing_wrong(version_1: Database) -> None:
    """Old triggers fire until the new ones do, in one transaction: no write meets none of them, or both."""
    stop = asyncio.Event()

    counts = [0, 0, 0]

    async def write(number: int) -> None:
        async with connected(version_1.writer) as writer:
            while not stop.is_set():
                for statement in WRITES:
                    count = counts[number]
                    with suppress(asyncpg.DeadlockDetectedError, asyncpg.UniqueViolationError):
                        await writer.execute(statement.format(n=(7 * count + number) % 20 + 1, p=count % 4))
                    counts[number] += 1

    async def each_writes_more() -> None:
        before = list(counts)
        await until(lambda: min(map(sub, counts, before)) > 20, lambda: f"{before}, {counts}", seconds=60)

    async with asyncio.TaskGroup() as writers:
        for number in range(3):
            writers.create_task(write(number))
        await each_writes_more()
        done = await migrate(version_1.owner, principals_setting=SETTING)
        await each_writes_more()
        stop.set()
    # What a gap between the old and the new triggers had missed would have been rebuilt.
    assert [line for line in done if line.startswith("rebuilt")] == []
    assert await stale(version_1) == []
    assert await problems(version_1) == []


WRITES = (
    "INSERT INTO document_grants SELECT id, 'user:{p}' FROM documents WHERE title = 'd{n}' ON CONFLICT DO NOTHING",
    "DELETE FROM document_grants USING documents d WHERE d.id = document_id AND title = 'd{n}' AND principal = 'user:{p}'",
    "INSERT INTO document_chunks (document_id, text_content, related_topic_ids) SELECT id, 'new', ARRAY[id] FROM documents WHERE title = 'd{n}'",
    "UPDATE documents SET metadata = '{{\"n\": \"v{p}\"}}' WHERE title = 'd{n}'",
    "UPDATE document_chunks SET metadata = '{{\"page\": \"v{p}\"}}' WHERE document_id = (SELECT id FROM documents WHERE title = 'd{n}')",
    "DELETE FROM document_chunks WHERE text_content = 'new' AND document_id = (SELECT id FROM documents WHERE title = 'd{n}')",
)


# Killed


class Killed(Exception):
    pass


async def test_killed_after_each_step_the_next_run_completes(
    empty_database: Database, database: Database
) -> None:
    await fill(empty_database.owner, 60)
    runs = 0

    def die(line: str) -> None:
        raise Killed(line)

    while True:
        runs += 1
        try:
            await migrate(empty_database.owner, principals_setting=SETTING, report=die)
        except Killed:
            continue
        break
    assert runs > 50
    assert await stale(empty_database) == []
    assert await problems(empty_database) == []
    assert await names(empty_database) == await names(database)


async def test_killed_while_an_index_is_built_the_invalid_index_is_replaced(empty_database: Database) -> None:
    """The server's process is ended in the middle, as when it runs out of memory."""
    await fill(empty_database.owner, 2_000)
    running = asyncio.create_task(migrate(empty_database.owner, principals_setting=SETTING))
    async with connected(empty_database.admin) as admin:
        while not await admin.fetchval(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_progress_create_index"
            " WHERE datname = current_database() AND command LIKE '%CONCURRENTLY' AND blocks_done > 0"
            "   AND (SELECT amname FROM pg_class c JOIN pg_am a ON a.oid = relam WHERE c.oid = index_relid) = 'hnsw'"
        ):
            assert not running.done()
            await asyncio.sleep(0.005)
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, MigrationError)):
            await running
        assert await admin.fetchval("SELECT count(*) FROM pg_index WHERE NOT indisvalid") == 1
        done = await migrate(empty_database.owner, principals_setting=SETTING)
        assert "created index document_chunks_embedding_halfvec on document_chunks" in done
        assert await admin.fetchval("SELECT count(*) FROM pg_index WHERE NOT indisvalid") == 0
    assert await problems(empty_database) == []


async def test_what_had_no_effect_is_an_error(empty_database: Database) -> None:
    """CREATE INDEX IF NOT EXISTS is content with anything of that name."""
    await execute(empty_database.owner, "CREATE TABLE documents_session_id ()")
    with pytest.raises(MigrationError, match=r"had no effect.*\n.*documents_session_id ON public.documents"):
        await migrate(empty_database.owner, principals_setting=SETTING)


# Dry run


async def test_the_sql_of_a_dry_run_does_what_migrate_does(
    postgres: PostgresServer, empty_database: Database, database: Database
) -> None:
    before = await definitions(empty_database)
    script = await plan(empty_database.owner, principals_setting=SETTING)
    assert await definitions(empty_database) == before
    assert any(line.startswith("CREATE TABLE IF NOT EXISTS public.access_sets") for line in script)
    subprocess.run(
        [postgres.embedded.program("psql"), empty_database.owner, "-v", "ON_ERROR_STOP=1", "-qX", "-f", "-"],
        input="\n".join(script), text=True, check=True, stdout=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    assert await plan(empty_database.owner, principals_setting=SETTING) == []
    assert await migrate(empty_database.owner, principals_setting=SETTING) == []
    assert await definitions(empty_database) == await definitions(database)


async def test_a_dry_run_over_tables_in_use_waits_for_nobody_and_shows_what_is_concurrent(
    empty_database: Database,
) -> None:
    await fill(empty_database.owner, 60)
    async with connected(empty_database.owner) as owner, owner.transaction():
        await owner.execute("LOCK TABLE documents, document_chunks, document_grants IN ROW EXCLUSIVE MODE")
        script = await asyncio.wait_for(plan(empty_database.owner, principals_setting=SETTING), 10)
    text = "\n".join(script)
    assert "CREATE INDEX CONCURRENTLY IF NOT EXISTS document_chunks_embedding_halfvec" in text
    assert "REFERENCES public.access_sets" in text  # the keys that are added
    assert text.count("FOREIGN KEY") == 0
    assert "-- in batches of about 200 ms" in text
    assert (
        text.index("GRANT SELECT")
        > text.index("ENABLE ROW LEVEL SECURITY")
        > text.index("document_chunks_embedding_halfvec")
    )


# Who would see fewer rows


async def test_roles_that_would_see_fewer_rows_are_listed_and_nothing_is_done_without_consent(
    postgres: PostgresServer, empty_database: Database
) -> None:
    await fill(empty_database.owner, 60)
    await execute(
        empty_database.admin,
        """CREATE ROLE analysts; CREATE ROLE ann LOGIN PASSWORD 'test' IN ROLE analysts; CREATE ROLE bob LOGIN;
           CREATE ROLE "Col Umn" LOGIN; CREATE ROLE nobody LOGIN; CREATE ROLE dba LOGIN BYPASSRLS;
               CREATE ROLE editor LOGIN; GRANT ALL ON documents, document_chunks, document_grants TO editor;
           GRANT SELECT ON documents, document_chunks TO analysts, dba; GRANT ALL ON document_grants TO bob;
           GRANT SELECT (id) ON documents TO "Col Umn"; GRANT SELECT ON documents TO back_end, worker""",
    )
    try:
        before = await definitions(empty_database)
        with pytest.raises(ConsentRequired) as raised:
            await migrate(empty_database.owner, principals_setting=SETTING)
        listed = [line.strip() for line in str(raised.value).splitlines() if "will see no rows of" in line]
        assert listed == [
            (
                "role Col Umn will see no rows of documents:"
                ' CREATE POLICY "Col Umn" ON public.documents FOR SELECT TO "Col Umn" USING (true);'
            ),
            *(
                f"{kind} {role} will see no rows of document_chunks, documents:"
                f' CREATE POLICY "{role}" ON public.document_chunks FOR SELECT TO "{role}" USING (true);'
                f' CREATE POLICY "{role}" ON public.documents FOR SELECT TO "{role}" USING (true);'
                for kind, role in (("group", "analysts"), ("role", "ann"))
            ),
            (
                "role bob will see no rows of document_grants and will be unable to write to document_grants:"
                ' CREATE POLICY "bob" ON public.document_grants FOR ALL TO "bob" USING (true);'
            ),
            (
                "role editor will see no rows of document_chunks, document_grants, documents"
                ' and will be unable to write to document_chunks, document_grants, documents: GRANT anabranch_writer TO "editor";'
            ),
        ]
        assert await definitions(empty_database) == before
        environment = {"PATH": os.environ["PATH"], "DATABASE_ADMIN_CONNECTION_STRING": empty_database.owner}
        for arguments, code in (([], 3), (["--dry-run"], 0), (["--yes"], 0), ([], 0)):
            ended = subprocess.run(
                [sys.executable, "-m", "streams", "migrate", *arguments],
                env=environment, check=False, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert ended.returncode == code, ended.stderr
            assert ("ann will see no rows" in ended.stdout + ended.stderr) == (arguments != [] or code == 3)
        async with connected(postgres.login("ann", empty_database)) as ann:
            assert await ann.fetch("SELECT id FROM documents") == []
        await execute(empty_database.admin, "GRANT anabranch_writer TO ann")
        async with connected(postgres.login("ann", empty_database)) as ann:
            assert len(await ann.fetch("SELECT id FROM documents")) == 3
    finally:
        await execute(
            empty_database.admin,
            'DROP OWNED BY analysts, ann, bob, "Col Umn", nobody, dba, editor;'
            'DROP ROLE analysts, ann, bob, "Col Umn", nobody, dba, editor',
        )


async def test_roles_that_would_lose_access_keep_it_once_the_sql_has_run() -> None:
    """On a server of its own, which has no roles of ours yet."""
    with EmbeddedPostgres() as server:
        admin, owner = server.dsn(), server.dsn("store_owner", "postgres", "o")
        await execute(
            admin,
            "CREATE EXTENSION vector; CREATE ROLE store_owner LOGIN CREATEROLE PASSWORD 'o';"
            "GRANT CREATE ON SCHEMA public TO store_owner",
        )
        await fill(owner, 60)
        await execute(
            admin,
            "CREATE ROLE editor LOGIN PASSWORD 'e'; GRANT ALL ON documents, document_chunks, document_grants TO editor;"
            "CREATE ROLE importer LOGIN PASSWORD 'i'; GRANT ALL ON documents, document_chunks, document_grants TO importer;"
            "CREATE ROLE ann LOGIN PASSWORD 'a'; GRANT SELECT ON documents TO ann; GRANT INSERT ON document_grants TO ann",
        )
        with pytest.raises(ConsentRequired) as raised:
            await migrate(owner, principals_setting=SETTING)
        sql = re.findall(r"(?:CREATE|GRANT) [^;]*;", str(raised.value))
        await execute(admin, "".join(sql))
        await migrate(owner, principals_setting=SETTING)
        for role, password in (("editor", "e"), ("importer", "i"), ("ann", "a")):
            async with connected(server.dsn(role, "postgres", password)) as connection:
                assert await connection.fetchval("SELECT count(*) FROM documents") == 3
                await connection.execute("INSERT INTO document_grants VALUES (gen_random_uuid(), 'user:1')")


async def test_tables_of_somebody_else_are_not_taken_over_without_consent(empty_database: Database) -> None:
    """A superuser's run acts in the name of whoever owns the tables."""
    await execute(empty_database.owner, "CREATE TABLE documents (id uuid PRIMARY KEY)")
    with pytest.raises(ConsentRequired, match="the tables belong to store_owner"):
        await migrate(empty_database.admin, principals_setting=SETTING)
    await migrate(empty_database.admin, principals_setting=SETTING, consent=True)
    assert await problems(empty_database) == []


async def test_an_older_release_does_not_undo_a_newer_ones_schema(database: Database) -> None:
    await execute(database.owner, "INSERT INTO anabranch_schema VALUES (4, 3)")
    with pytest.raises(MigrationError, match="the store has schema version 4"):
        await migrate(database.owner, principals_setting=SETTING)


async def test_a_session_that_keeps_a_table_locked_is_named(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "RETRY_SECONDS", 1.0)
    await execute(database.owner, "ALTER TABLE documents NO FORCE ROW LEVEL SECURITY")
    async with connected(database.writer, application_name="reports") as writer, writer.transaction():
        await writer.execute("SELECT FROM documents")
        pid = writer.get_server_pid()
        with pytest.raises(MigrationError, match=rf"process {pid}, role back_end, application reports"):
            await asyncio.wait_for(migrate(database.owner, principals_setting=SETTING), 20)
    assert await migrate(database.owner, principals_setting=SETTING) == [
        "forced row-level security on documents"
    ]


# Partitions


async def test_partitioned_tables_get_their_indexes_partition_by_partition(empty_database: Database) -> None:
    await execute(empty_database.owner, PARTITIONED)
    await migrate(empty_database.owner, principals_setting=SETTING)
    assert await problems(empty_database) == []
    assert await stale(empty_database) == []
    assert await migrate(empty_database.owner, principals_setting=SETTING) == []
    # An interrupted build: one partition's index is invalid.
    async with connected(empty_database.admin) as admin:
        await admin.execute("DROP INDEX document_chunks_embedding_halfvec")
        await admin.execute(
            f"CREATE INDEX document_chunks_embedding_halfvec ON ONLY document_chunks {HALFVEC}"
        )
        oid = await admin.fetchval("SELECT 'chunks_old'::regclass::oid")
        await admin.execute(f"CREATE INDEX document_chunks_embedding_halfvec_{oid} ON chunks_old {HALFVEC}")
        await admin.execute(
            f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'document_chunks_embedding_halfvec_{oid}'::regclass"
        )
    assert await migrate(empty_database.owner, principals_setting=SETTING) == [
        "created index document_chunks_embedding_halfvec on document_chunks"
    ]
    assert await problems(empty_database) == []


async def test_an_old_vector_index_of_a_partitioned_table_is_replaced(empty_database: Database) -> None:
    await execute(empty_database.owner, PARTITIONED)
    await migrate(empty_database.owner, principals_setting=SETTING)
    await execute(
        empty_database.owner,
        "DROP INDEX document_chunks_embedding_halfvec;"
        "CREATE INDEX document_chunks_embedding ON document_chunks USING hnsw (embedding vector_cosine_ops)",
    )
    assert await problems(empty_database) == []
    created, note = await migrate(empty_database.owner, principals_setting=SETTING)
    assert created == "created index document_chunks_embedding_halfvec on document_chunks"
    await follow(empty_database.owner, [note], OLD_INDEX)
    assert await problems(empty_database) == []
    assert await migrate(empty_database.owner, principals_setting=SETTING) == []


HALFVEC = "USING hnsw ((l2_normalize(embedding)::halfvec(768)) halfvec_cosine_ops)"
PARTITIONED = """
    CREATE TABLE documents (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), title text) PARTITION BY HASH (id);
    CREATE TABLE documents_0 PARTITION OF documents FOR VALUES WITH (MODULUS 2, REMAINDER 0);
    CREATE TABLE documents_1 PARTITION OF documents FOR VALUES WITH (MODULUS 2, REMAINDER 1);
    CREATE TABLE document_chunks (
        id uuid NOT NULL DEFAULT gen_random_uuid(), document_id uuid, page int NOT NULL DEFAULT 1, text_content text,
        embedding vector(768)) PARTITION BY RANGE (page);
    CREATE TABLE chunks_old PARTITION OF document_chunks FOR VALUES FROM (0) TO (10);
    CREATE TABLE "Chunks New" PARTITION OF document_chunks FOR VALUES FROM (10) TO (20) PARTITION BY LIST (page);
    CREATE TABLE chunks_10 PARTITION OF "Chunks New" DEFAULT;
    CREATE TABLE document_grants (document_id uuid, principal text);
    INSERT INTO documents (title) SELECT 'd' || n FROM generate_series(1, 10) n;
    INSERT INTO document_grants SELECT id, 'user:1' FROM documents;
    INSERT INTO document_chunks (document_id, page, embedding)
        SELECT id, n, array_fill(1.0, ARRAY[768])::vector FROM documents, generate_series(8, 12) n;
"""
