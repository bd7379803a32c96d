"""The reference schema is applied by whoever may, adds what is missing, and does nothing the second time."""

from __future__ import annotations

import asyncio
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from streams.embedded.postgres import EmbeddedPostgres
from streams.store.migrate import MigrationError, migrate
from streams.store.preflight import inspect
from streams.store.reference import InvalidReference, check_setting_name, reference
from streams.store.vector_index import read_vector_index
from tests.conftest import SETTING
from tests.integration.connections import connected, execute, problems

if TYPE_CHECKING:
    from tests.conftest import Database, PostgresServer

SQL = Path(__file__).parents[3] / "schemas" / "postgres"
VECTOR = "[" + ",".join(["1"] * 768) + "]"

CATALOG = """
    SELECT 'column', attrelid::regclass::text, attname::text,
           concat_ws(' ', format_type(atttypid, atttypmod), attnotnull, attstorage, attacl::text)
    FROM pg_attribute WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace)
                        AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT 'relation', relname::text, relkind::text,
           concat_ws(' ', oid, relfilenode, relowner, relrowsecurity, relforcerowsecurity, relacl::text)
    FROM pg_class WHERE relnamespace = 'public'::regnamespace
    UNION ALL
    SELECT 'function', oid::text, proname::text,
           concat_ws(' ', proowner, prosecdef, proconfig::text, proacl::text, prosrc)
    FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proname LIKE 'anabranch%'
    UNION ALL
    SELECT 'trigger', oid::text, tgname::text, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL
    SELECT 'policy', oid::text, polname::text,
           concat_ws(' ', polroles::text, pg_get_expr(polqual, polrelid), pg_get_expr(polwithcheck, polrelid))
    FROM pg_policy
    UNION ALL
    SELECT 'constraint', conrelid::regclass::text, conname::text, pg_get_constraintdef(oid)
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace
    ORDER BY 1, 2, 3, 4
"""

# What a back end may have made for itself: fewer columns, another type of text, no foreign keys, rows.
BACK_ENDS_OWN = """
    CREATE TABLE documents (id uuid PRIMARY KEY, title varchar(200), source_url text, owner_name text);
    CREATE TABLE document_chunks (
        id uuid PRIMARY KEY, document_id uuid, session_id uuid, related_topic_ids uuid[],
        text_content text, embedding vector(768));
    CREATE TABLE document_grants (document_id uuid, principal varchar(300));
    CREATE INDEX the_back_ends_own ON document_chunks (document_id);
    CREATE INDEX its_vectors ON document_chunks USING hnsw (embedding vector_cosine_ops) WITH (m = 8)
        WHERE embedding IS NOT NULL;
    INSERT INTO documents (id, title)
        SELECT gen_random_uuid(), 'd' || n FROM generate_series(1, 9) n;
    INSERT INTO document_grants
        SELECT id, p FROM documents, unnest('{user:1,group:law}'::text[]) p WHERE title < 'd5';
    INSERT INTO document_grants SELECT id, 'user:1' FROM documents WHERE title = 'd1'; -- twice the same
    INSERT INTO document_chunks (id, document_id, related_topic_ids, text_content, embedding)
        SELECT gen_random_uuid(), d.id, CASE WHEN n = 1 THEN NULL ELSE ARRAY[d.id] END, 'c', $VECTOR$::vector
        FROM documents d, generate_series(1, 3) n;
""".replace("$VECTOR$", f"'{VECTOR}'")


async def catalog(dsn: str) -> list[tuple[Any, ...]]:
    async with connected(dsn) as connection:
        return [tuple(row) for row in await connection.fetch(CATALOG)]


async def definitions(dsn: str) -> set[tuple[Any, ...]]:
    """The catalog without what changes when something is made anew."""
    kinds = ("column", "trigger", "policy", "constraint")
    return {row[2:] for row in await catalog(dsn) if row[0] in kinds}


async def count_seen(database: Database, principals: str, *, setting: str = SETTING) -> int:
    async with connected(database.worker) as worker, worker.transaction():
        await worker.execute("SELECT set_config($1, $2, true)", setting, principals)
        return len(await worker.fetch("SELECT id FROM document_chunks"))


# Whoever runs it


async def test_by_an_owner_who_is_no_superuser(empty_database: Database) -> None:
    done = await migrate(empty_database.owner, principals_setting=SETTING)
    assert "created table documents" in done
    assert await problems(empty_database) == []


async def test_by_a_superuser_who_owns_nothing_of_it(postgres: PostgresServer) -> None:
    database = postgres.create("template0")
    try:
        done = await migrate(database.admin, principals_setting=SETTING)
        assert done[0] == "created extension vector 0.8.5"
        assert await problems(database) == []
        async with connected(database.admin) as admin:
            owners = await admin.fetch(
                "SELECT DISTINCT pg_get_userbyid(relowner)::text AS owner, rolcanlogin, rolsuper"
                " FROM pg_class JOIN pg_roles r ON r.oid = relowner"
                " WHERE relnamespace = 'public'::regnamespace"
                " UNION SELECT pg_get_userbyid(proowner)::text, rolcanlogin, rolsuper"
                " FROM pg_proc JOIN pg_roles r ON r.oid = proowner WHERE proname LIKE 'anabranch%'"
            )
        assert [tuple(row) for row in owners] == [("anabranch_owner", False, False)]
        assert await migrate(database.admin, principals_setting=SETTING) == []
    finally:
        postgres.drop(database)


async def test_by_a_superuser_for_the_owner_of_the_tables(database: Database) -> None:
    await execute(
        database.admin, "DROP TRIGGER zz_anabranch_chunk_updating ON document_chunks; DROP TABLE chunk_topics"
    )
    done = await migrate(database.admin, principals_setting=SETTING, consent=True)
    assert "created trigger zz_anabranch_chunk_updating on document_chunks" in done
    assert await problems(database) == []
    async with connected(database.admin) as admin:
        assert (
            await admin.fetchval("SELECT tableowner::text FROM pg_tables WHERE tablename = 'chunk_topics'")
            == "store_owner"
        )


async def test_by_a_member_of_the_owner(postgres: PostgresServer, empty_database: Database) -> None:
    await migrate(empty_database.owner, principals_setting=SETTING)
    await execute(empty_database.owner, "DROP TABLE chunk_topics")
    await execute(empty_database.admin, "CREATE ROLE deployer LOGIN PASSWORD 'test' IN ROLE store_owner")
    try:
        deployer = postgres.login("deployer", empty_database)
        done = await migrate(deployer, principals_setting=SETTING, consent=True)
        assert "created table chunk_topics" in done
        assert await problems(empty_database) == []
    finally:
        await execute(empty_database.admin, "DROP ROLE deployer")


async def test_by_somebody_else(database: Database) -> None:
    with pytest.raises(MigrationError, match=r"belong to 'store_owner'.*as that role or as a superuser"):
        await migrate(database.writer, principals_setting=SETTING)


async def test_what_a_superuser_has_to_run_is_all_said_at_once_and_suffices() -> None:
    """On a server of its own, where neither the extension nor the roles are there."""
    with EmbeddedPostgres() as server:
        await execute(server.dsn(), "CREATE ROLE plain LOGIN PASSWORD 'p'")
        await execute(server.dsn(), "CREATE DATABASE bare")
        with pytest.raises(MigrationError) as raised:
            await migrate(server.dsn("plain", "bare", "p"), principals_setting=SETTING)
        head, *remedy = str(raised.value).splitlines()
        assert "'plain'" in head
        assert "'bare'" in head
        assert remedy == [
            "CREATE EXTENSION vector SCHEMA public;",
            'CREATE ROLE "anabranch_reader" NOLOGIN;',
            'CREATE ROLE "anabranch_writer" NOLOGIN;',
            'GRANT USAGE, CREATE ON SCHEMA public TO "plain";',
        ]
        async with connected(server.dsn("plain", "bare", "p")) as plain:
            assert (
                await plain.fetchval(
                    "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace"
                )
                == 0
            )
        await execute(server.dsn(database="bare"), "\n".join(remedy))
        assert "created table documents" in await migrate(
            server.dsn("plain", "bare", "p"), principals_setting=SETTING
        )


async def test_by_a_role_that_may_create_roles() -> None:
    with EmbeddedPostgres() as server:
        await execute(server.dsn(), "CREATE ROLE plain LOGIN CREATEROLE PASSWORD 'p'")
        await execute(server.dsn(), "CREATE DATABASE bare OWNER plain")
        await execute(server.dsn(database="bare"), "CREATE EXTENSION vector")
        done = await migrate(server.dsn("plain", "bare", "p"), principals_setting=SETTING)
        assert done[:2] == ["created role anabranch_reader", "created role anabranch_writer"]


# The second time


async def test_twice_is_once(database: Database) -> None:
    await execute(database.owner, "INSERT INTO documents (title) VALUES ('t')")
    before = await catalog(database.owner)
    assert await migrate(database.owner, principals_setting=SETTING) == []
    assert await migrate(database.admin, principals_setting=SETTING) == []
    assert await catalog(database.owner) == before


async def test_a_second_run_waits_for_nobody(database: Database) -> None:
    """A search that is running, and a back end's open transaction, are no reason to wait."""
    async with (
        connected(database.writer) as writer,
        connected(database.worker) as worker,
        writer.transaction(),
        worker.transaction(),
    ):
        await writer.execute("INSERT INTO documents (title) VALUES ('t')")
        await worker.fetch("SELECT id FROM document_chunks")
        assert await asyncio.wait_for(migrate(database.owner, principals_setting=SETTING), 5) == []


async def test_two_at_the_same_time(empty_database: Database) -> None:
    one, two = await asyncio.gather(
        migrate(empty_database.owner, principals_setting=SETTING),
        migrate(empty_database.owner, principals_setting=SETTING),
    )
    assert [] in (one, two)
    assert one != two
    assert await problems(empty_database) == []


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        ("DROP INDEX document_chunks_embedding_halfvec",
         "created index document_chunks_embedding_halfvec on document_chunks"),
        ("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'document_chunks_embedding_halfvec'::regclass",
         "created index document_chunks_embedding_halfvec on document_chunks"),
        ("ALTER TABLE documents NO FORCE ROW LEVEL SECURITY", "forced row-level security on documents"),
        ("ALTER TABLE documents DISABLE ROW LEVEL SECURITY", "enabled row-level security on documents"),
        ("ALTER TABLE documents DISABLE TRIGGER ALL",
         "created trigger zz_anabranch_document_updated on documents"),
        ("DROP POLICY anabranch_owner_documents ON documents",
         "created policy anabranch_owner_documents on documents"),
        ("ALTER POLICY anabranch_reader_documents ON documents USING (true)",
         "created policy anabranch_reader_documents on documents"),
        ("ALTER POLICY anabranch_reader_documents ON documents TO PUBLIC",
         "created policy anabranch_reader_documents on documents"),
        ("REVOKE SELECT (id) ON access_sets FROM anabranch_reader",
         "granted anabranch_reader and anabranch_writer the rights they need"),
        ("REVOKE EXECUTE ON FUNCTION anabranch_merged_metadata FROM anabranch_reader",
         "granted anabranch_reader and anabranch_writer the rights they need"),
        ("DROP FUNCTION anabranch_metadata_entry", "created function anabranch_metadata_entry"),
        ("ALTER TABLE document_chunks ALTER embedding SET STORAGE EXTERNAL",
         "set the storage of embedding in document_chunks to plain"),
        ("ALTER FUNCTION anabranch_set_chunk_access() SECURITY INVOKER",
         "created function anabranch_set_chunk_access"),
        ("ALTER FUNCTION anabranch_set_chunk_access() RESET ALL", "created function anabranch_set_chunk_access"),
        ("ALTER TABLE documents DROP COLUMN file_description", "added column file_description to documents"),
        ("ALTER TABLE documents DROP COLUMN access_set_id CASCADE",
         "added column access_set_id to documents"),
        ("DROP TABLE chunk_topics", "created table chunk_topics"),
        ("SET session_replication_role = replica; DELETE FROM document_grants",
         "rebuilt the derived data of 1 documents"),
    ],
)  # fmt: skip
async def test_what_was_damaged_is_fixed(database: Database, damage: str, line: str) -> None:
    await execute(
        database.owner,
        "INSERT INTO documents (title) VALUES ('t');"
        "INSERT INTO document_grants SELECT id, 'u' FROM documents",
    )
    before = await definitions(database.owner)
    await execute(database.admin, damage)
    assert line in await migrate(database.owner, principals_setting=SETTING)
    assert await definitions(database.owner) >= before
    assert await problems(database) == []


async def test_another_settings_name_changes_one_function_and_one_policy(database: Database) -> None:
    await execute(
        database.owner,
        "INSERT INTO documents (title) VALUES ('t');"
        "INSERT INTO document_grants SELECT id, 'u' FROM documents;"
        "INSERT INTO document_chunks (document_id, text_content) SELECT id, 'c' FROM documents",
    )
    assert await migrate(database.owner, principals_setting="app.who.asks") == [
        "created function anabranch_principals_setting",
        "created policy anabranch_reader_access_sets on access_sets",
    ]
    assert await problems(database, setting="app.who.asks") == []
    assert await count_seen(database, '["u"]', setting="app.who.asks") == 1
    assert await count_seen(database, '["u"]') == 0
    assert any(
        "differs from the reference policy for anabranch.principals" in problem
        for problem in await problems(database)
    )


@pytest.mark.parametrize(
    "name", ["principals", "", ".", "a.", ".b", "A.b", "a.b'c", "a.b; DROP", "a b.c", "a.1", "ä.b", "a.b\n"]
)
def test_a_settings_name_is_checked(name: str) -> None:
    with pytest.raises(InvalidReference, match="valid name for the principals setting"):
        check_setting_name(name)


# Over a back end's own tables


async def test_tables_that_were_there_get_what_is_missing(empty_database: Database) -> None:
    await execute(empty_database.owner, BACK_ENDS_OWN)
    done = await migrate(empty_database.owner, principals_setting=SETTING)
    assert "added column metadata to documents" in done
    assert "rebuilt the derived data of 4 documents" in done
    assert "rebuilt the derived data of 18 chunks" in done
    assert not [
        line
        for line in done
        if line.startswith(
            ("created index document_chunks_document_id", "created index document_chunks_embedding_halfvec")
        )
    ]
    assert [line for line in done if line.startswith("note: existing embeddings")]
    assert await problems(empty_database) == []
    assert await count_seen(empty_database, '["user:1"]') == 12
    assert await count_seen(empty_database, '["user:2"]') == 0
    async with connected(empty_database.owner) as owner:
        assert await owner.fetchval("SELECT count(*) FROM chunk_topics WHERE access_set_id IS NOT NULL") == 8
        assert await owner.fetchval("SELECT owner_name IS NULL AND metadata = '{}' FROM documents LIMIT 1")
    (note,) = await migrate(empty_database.owner, principals_setting=SETTING)
    assert note.startswith("note: the index its_vectors of document_chunks still works")
    # and follow their grants from now on
    await execute(empty_database.writer, "DELETE FROM document_grants WHERE principal = 'user:1'")
    assert await count_seen(empty_database, '["user:1"]') == 0


async def test_old_embeddings_are_brought_into_their_rows_by_what_the_note_says(
    empty_database: Database,
) -> None:
    await execute(empty_database.owner, BACK_ENDS_OWN)
    await migrate(empty_database.owner, principals_setting=SETTING)
    outside = "SELECT count(*) FROM document_chunks WHERE pg_column_toast_chunk_id(embedding) IS NOT NULL"
    async with connected(empty_database.owner) as owner:
        await owner.execute("VACUUM FULL public.document_chunks")
        assert await owner.fetchval(outside) == 0


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("CREATE TABLE documents (id bigint PRIMARY KEY)", "documents.id is bigint, not uuid"),
        ("CREATE TABLE document_chunks (id uuid PRIMARY KEY, document_id uuid, embedding vector(1536))",
         r"document_chunks.embedding is vector\(1536\), not vector\(768\)"),
        ("CREATE TABLE documents (id uuid PRIMARY KEY); CREATE TABLE document_grants (document_id uuid)",
         "document_grants.principal is missing"),
        ("CREATE TABLE document_chunks (id uuid PRIMARY KEY, document_id uuid, content text)",
         "text_content is missing.*; ALTER TABLE public.document_chunks RENAME COLUMN … TO text_content; or add"),
        ("CREATE VIEW documents AS SELECT gen_random_uuid() AS id", "PostgreSQL reports"),
    ],
)  # fmt: skip
async def test_tables_that_do_not_fit_are_left_alone(empty_database: Database, sql: str, says: str) -> None:
    await execute(empty_database.owner, sql)
    before = await catalog(empty_database.owner)
    with pytest.raises(MigrationError, match=says):
        await migrate(empty_database.owner, principals_setting=SETTING)
    assert await catalog(empty_database.owner) == before


@pytest.mark.parametrize("schema", ["extensions", '"My ""Ext"""'])
async def test_an_extension_in_a_schema_of_its_own(empty_database: Database, schema: str) -> None:
    await execute(
        empty_database.admin,
        f"CREATE SCHEMA {schema}; GRANT USAGE ON SCHEMA {schema} TO store_owner;"
        f"ALTER EXTENSION vector SET SCHEMA {schema}",
    )
    await migrate(empty_database.owner, principals_setting=SETTING)
    assert await migrate(empty_database.owner, principals_setting=SETTING) == []
    assert await problems(empty_database) == [
        f"extension: pgvector is in schema {schema}, which role worker may not use"
    ]
    await execute(empty_database.admin, f"GRANT USAGE ON SCHEMA {schema} TO anabranch_reader")
    assert await problems(empty_database) == []
    async with connected(empty_database.worker) as worker:
        assert (await read_vector_index(worker)).by_halfvec


async def test_a_back_end_writes_through_its_role(database: Database) -> None:
    async with connected(database.writer) as writer:
        id_ = await writer.fetchval("INSERT INTO documents (title) VALUES ('t') RETURNING id")
        await writer.execute("INSERT INTO document_grants VALUES ($1, 'user:1')", id_)
        chunk = await writer.fetchval(
            "INSERT INTO document_chunks (document_id, text_content, related_topic_ids)"
            " VALUES ($1, 'text', $2) RETURNING id",
            id_,
            [UUID(int=1)],
        )
        assert await count_seen(database, '["user:1"]') == 1
        await writer.execute("UPDATE document_chunks SET text_content = 'other' WHERE id = $1", chunk)
        assert await writer.fetchval("SELECT text_content FROM document_chunks") == "other"
        await writer.execute("DELETE FROM document_grants WHERE document_id = $1", id_)
        assert await count_seen(database, '["user:1"]') == 0
        await writer.execute("DELETE FROM documents")
        assert await writer.fetchval("SELECT count(*) FROM chunk_topics") == 0


async def test_another_setting_takes_effect_at_once(database: Database) -> None:
    """Workers would find nothing if the functions set another setting than the policies read."""
    async with connected(database.writer) as writer:
        id_ = await writer.fetchval("INSERT INTO documents (title) VALUES ('t') RETURNING id")
        await writer.execute("INSERT INTO document_grants VALUES ($1, 'user:1')", id_)
        chunk = await writer.fetchval(
            "INSERT INTO document_chunks (document_id, text_content) VALUES ($1, 'text') RETURNING id", id_
        )

    async def visible() -> int:
        async with connected(database.worker) as worker:
            return len(
                await worker.fetch("SELECT * FROM anabranch_sizes($1, $2, 20000)", '["user:1"]', [chunk])
            )

    assert await visible() == 1
    after_each_step: list[int] = []
    with ThreadPoolExecutor(1) as thread:
        done = await migrate(
            database.owner,
            principals_setting="app.who",
            report=lambda _: after_each_step.append(thread.submit(asyncio.run, visible()).result()),
        )
    assert "created function anabranch_principals_setting" in done
    assert "created policy anabranch_reader_access_sets on access_sets" in done
    assert set(after_each_step) == {1}


async def test_an_overloads_right_is_not_the_functions(database: Database) -> None:
    await execute(
        database.owner,
        "REVOKE EXECUTE ON FUNCTION anabranch_sizes(text, uuid[], int) FROM anabranch_reader;"
        "CREATE FUNCTION anabranch_sizes(text) RETURNS int LANGUAGE sql AS 'SELECT 1';"
        "REVOKE EXECUTE ON FUNCTION anabranch_sizes(text) FROM PUBLIC;"
        "GRANT EXECUTE ON FUNCTION anabranch_sizes(text) TO anabranch_reader",
    )
    assert await migrate(database.owner, principals_setting=SETTING) == [
        "granted anabranch_reader and anabranch_writer the rights they need"
    ]
    assert await migrate(database.owner, principals_setting=SETTING) == []


# Other servers, other tools


@pytest.mark.slow
async def test_on_an_older_server_the_policies_read_the_same() -> None:
    with EmbeddedPostgres(version=16) as server:
        await migrate(server.dsn(), principals_setting=SETTING)
        await execute(server.dsn(), "CREATE ROLE worker LOGIN PASSWORD 'w' IN ROLE anabranch_reader")
        assert await migrate(server.dsn(), principals_setting=SETTING) == []
        async with connected(server.dsn("worker", "postgres", "w")) as worker:
            findings = await inspect(worker, principals_setting=SETTING)
        assert {finding.level for finding in findings} == {"ok"}


def test_the_files_can_be_applied_by_hand(postgres: PostgresServer, empty_database: Database) -> None:
    psql = postgres.embedded.program("psql")
    files = [part for file in sorted(SQL.glob("*.sql")) for part in ("-f", str(file))]
    subprocess.run(
        [psql, empty_database.owner, "-v", "ON_ERROR_STOP=1", "-v", f"principals_setting={SETTING}",
         "-v", "vector_schema=public", "--single-transaction", "--quiet", "-X", *files],
        check=True, stdout=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    assert asyncio.run(problems(empty_database)) == []
    assert asyncio.run(migrate(empty_database.owner, principals_setting=SETTING)) == []


def test_every_statement_is_of_a_known_kind() -> None:
    text = "".join(file.read_text() for file in sorted(SQL.glob("*.sql")))
    found = [statement.sql for statement in reference(SETTING)]
    assert sum(statement.startswith("CREATE POLICY") for statement in found) == text.count("\nCREATE POLICY")
    assert sum(statement.startswith("CREATE OR REPLACE TRIGGER") for statement in found) == text.count(
        "\nCREATE OR REPLACE TRIGGER"
    )
    assert ":'" not in "".join(found)


def test_no_trigger_mixes_and_with_or() -> None:
    """Their conditions are compared without parentheses."""
    triggers = [statement for statement in reference(SETTING) if statement.kind == "trigger"]
    assert len(triggers) > 10
    for trigger in triggers:
        condition = trigger.sql.partition(" WHEN ")[2]
        assert not (" AND " in condition and " OR " in condition), trigger.name
