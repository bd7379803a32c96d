"""Each thing that would make a worker unsafe, useless or slow is provoked, and found, with its remedy."""

# ruff: noqa: E501  # a table of cases is read a case a line

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from streams.store import preflight
from streams.store.migrate import MigrationError, migrate
from streams.store.preflight import Finding, inspect
from tests.conftest import SETTING
from tests.integration.connections import connected, execute

if TYPE_CHECKING:
    from tests.conftest import Database, PostgresServer


CHECKS = {
    "server", "extension", "tables", "columns", "role", "privileges", "row_level_security", "policies",
    "isolation", "schema", "functions", "triggers", "storage", "indexes",
}  # fmt: skip

# The functions that searches call, and those that these call.
SEARCHING = {
    "anabranch_search", "anabranch_search_passages", "anabranch_passages", "anabranch_sizes",
    "anabranch_search_exactly", "anabranch_search_index", "anabranch_scope_size", "anabranch_filtered_scope",
    "anabranch_conditions", "anabranch_condition", "anabranch_written_conditions", "anabranch_further_conditions",
    "anabranch_set_principals", "anabranch_principals_setting", "anabranch_require_row_security",
    "anabranch_metadata_text", "anabranch_merged_metadata", "anabranch_metadata_entry", "anabranch_element_entry",
    "anabranch_range_entry",
}  # fmt: skip


async def findings(dsn: str, *, setting: str = SETTING) -> list[Finding]:
    async with connected(dsn) as connection:
        found = await inspect(connection, principals_setting=setting)
        assert not connection.is_in_transaction()
    for finding in found:
        assert bool(finding.remedy) == (finding.level != "ok"), finding
        assert "\n" not in finding.detail
    return found


async def problems(dsn: str, *, setting: str = SETTING) -> list[Finding]:
    return [finding for finding in await findings(dsn, setting=setting) if finding.level != "ok"]


async def test_a_migrated_store_is_fine(database: Database) -> None:
    found = await findings(database.worker)
    assert {finding.check for finding in found} == CHECKS
    assert {finding.level for finding in found} == {"ok"}


@pytest.mark.parametrize(
    ("damage", "check", "level", "says"),
    [
        # unsafe
        ("ALTER TABLE documents DISABLE ROW LEVEL SECURITY", "row_level_security", "refused", "documents is not enabled"),
        ("ALTER TABLE documents DISABLE ROW LEVEL SECURITY", "isolation", "refused", "documents shows rows"),
        ("ALTER TABLE chunk_topics NO FORCE ROW LEVEL SECURITY", "row_level_security", "refused", "chunk_topics is not forced"),
        ("ALTER TABLE document_grants NO FORCE ROW LEVEL SECURITY", "row_level_security", "refused", "document_grants"),
        ("DROP POLICY anabranch_reader_documents ON documents", "policies", "refused", "documents has no policy"),
        ("ALTER POLICY anabranch_reader_documents ON documents USING (true)", "policies", "refused", "differs from the reference policy for"),
        ("ALTER POLICY anabranch_reader_access_sets ON access_sets USING (principals && '{public}')", "policies", "refused",
         "differs from the reference policy for"),
        ("ALTER POLICY anabranch_reader_access_sets ON access_sets USING (current_setting('anabranch.principals') <> '' OR true)",
         "policies", "refused", "differs from the reference policy for"),
        ("ALTER POLICY anabranch_writer_documents ON documents TO PUBLIC", "policies", "refused", "shows rows to worker regardless"),
        ("CREATE POLICY open ON documents USING (true)", "policies", "refused", "open on documents shows rows to worker regardless"),
        ("CREATE POLICY open ON documents TO anabranch_reader USING (session_id IS NULL)", "policies", "refused", "open on documents"),
        ("CREATE POLICY open ON document_chunks USING (current_setting('other.setting', true) <> '')", "policies", "refused", "open"),
        ("CREATE POLICY open ON documents USING (true)", "isolation", "refused", "documents shows rows although"),
        ("DROP POLICY anabranch_owner_documents ON documents", "policies", "refused", "no policy for its owner store_owner"),
        ("ALTER TABLE document_grants DISABLE TRIGGER zz_anabranch_grants_deleted", "triggers", "refused", "zz_anabranch_grants_deleted of document_grants is disabled on document_grants"),
        ("ALTER TABLE document_chunks ENABLE REPLICA TRIGGER zz_anabranch_chunk_updating", "triggers", "refused", "anabranch_chunk_updating"),
        ("DROP TRIGGER zz_anabranch_document_updated ON documents", "triggers", "refused", "zz_anabranch_document_updated of documents is missing"),
        ("ALTER FUNCTION anabranch_sync_grants() SECURITY INVOKER", "functions", "refused", "anabranch_sync_grants is missing or altered: revoked grants may stay in force"),
        ("DROP FUNCTION anabranch_sync_grants() CASCADE", "functions", "refused", "anabranch_sync_grants is missing or altered: revoked grants may stay in force"),
        ("DROP FUNCTION anabranch_sizes", "functions", "unready", "anabranch_sizes is missing: searches fail"),
        ("ALTER FUNCTION anabranch_search SET hnsw.ef_search = 1", "functions", "refused", "anabranch_search is altered: searches may return wrong rows"),
        ("CREATE OR REPLACE FUNCTION anabranch_require_row_security() RETURNS void LANGUAGE sql AS ''", "functions", "refused",
         "anabranch_require_row_security is altered: searches may return wrong rows"),
        ("ALTER FUNCTION anabranch_sync_grants() OWNER TO back_end", "functions", "refused", "anabranch_sync_grants() belongs to back_end"),
        ("GRANT INSERT ON document_grants TO anabranch_reader", "privileges", "refused", "may write to document_grants (INSERT)"),
        ("GRANT UPDATE (title) ON documents TO worker", "privileges", "refused", "may write to documents (UPDATE)"),
        ("GRANT TRUNCATE, TRIGGER ON documents TO PUBLIC", "privileges", "refused", "(TRUNCATE, TRIGGER)"),
        ("CREATE TABLE archive () INHERITS (document_chunks); GRANT SELECT (text_content) ON archive TO worker", "privileges", "refused",
         "may use public.archive directly (SELECT): the policies of document_chunks do not apply"),
        ("CREATE TABLE part (LIKE document_grants); ALTER TABLE part INHERIT document_grants; GRANT INSERT ON part TO anabranch_reader",
         "privileges", "refused", "public.part directly (INSERT)"),
        # not usable
        ("DROP TABLE chunk_topics", "tables", "unready", "public.chunk_topics is missing"),
        ("ALTER TABLE document_chunks DROP COLUMN page", "columns", "unready", "document_chunks.page is missing"),
        ("ALTER TABLE document_chunks DROP COLUMN embedding; ALTER TABLE document_chunks ADD embedding vector(384)",
         "columns", "unready", "embedding is vector(384), not vector(768)"),
        ("DROP EXTENSION vector CASCADE", "extension", "unready", "pgvector is missing"),
        ("CREATE SCHEMA x; ALTER EXTENSION vector SET SCHEMA x", "extension", "unready", "pgvector is in schema x"),
        ("CREATE SCHEMA worker; GRANT USAGE ON SCHEMA worker TO PUBLIC; CREATE TABLE worker.documents ()", "tables", "unready",
         "resolves documents to worker.documents"),
        ("REVOKE SELECT (title) ON documents FROM anabranch_reader", "privileges", "unready", "may not read documents (title)"),
        ("REVOKE ALL ON SCHEMA public FROM PUBLIC, anabranch_reader", "privileges", "unready", "may not use schema public"),
        *((f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC, anabranch_reader", "privileges", "unready", f"may not execute {function}")
          for function in sorted(SEARCHING)),
        ("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC, anabranch_reader", "privileges", "unready",
         f"may not execute {', '.join(sorted(SEARCHING))}"),
        ("DELETE FROM anabranch_schema; INSERT INTO anabranch_schema VALUES (1, 1)", "schema", "unready", "schema version is 1, older than"),
        ("INSERT INTO anabranch_schema VALUES (4, 4)", "schema", "refused", "supports workers of version 4 and later"),
        ("REVOKE SELECT ON anabranch_schema FROM anabranch_reader", "schema", "unready", "may not read the schema version"),
        ("UPDATE pg_extension SET extversion = '0.7.4' WHERE extname = 'vector'", "extension", "unready", "pgvector 0.7.4 is too old"),
        # slow, or untidy
        ("UPDATE pg_extension SET extversion = '0.8.3' WHERE extname = 'vector'", "extension", "warning",
         "pgvector 0.8.3 may corrupt an HNSW index"),
        ("INSERT INTO anabranch_schema VALUES (4, 3)", "schema", "warning", "newer than"),
        ("CREATE TRIGGER zzz BEFORE UPDATE ON documents FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()", "triggers",
         "warning", "BEFORE trigger zzz on documents runs after"),
        ("CREATE TABLE part (LIKE documents); ALTER TABLE part INHERIT documents; ALTER TABLE part OWNER TO back_end", "triggers",
         "warning", "back_end may create triggers on public.part"),
        ("DROP INDEX document_chunks_embedding_halfvec", "indexes", "warning", "every search scans the table"),
        ("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'document_chunks_embedding_halfvec'::regclass", "indexes", "warning",
         "every search scans the table"),
        ("DROP INDEX document_chunks_embedding_halfvec; CREATE INDEX ON document_chunks USING hnsw (embedding vector_l2_ops)", "indexes",
         "warning", "halfvec_cosine_ops"),
        ("DROP INDEX document_chunks_searchable_session", "indexes", "warning", "(session_id, access_set_id)"),
        ("ALTER TABLE document_chunks ALTER embedding SET STORAGE EXTERNAL", "storage", "warning", "out of line"),
        ("GRANT CREATE ON SCHEMA public TO PUBLIC", "privileges", "warning", "may create objects"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_found(
    database: Database, damage: str, check: str, level: str, says: str
) -> None:
    await execute(database.owner, "INSERT INTO documents (title) VALUES ('t')")
    await execute(database.admin, damage)
    found = await problems(database.worker)
    assert [f for f in found if f.check == check and f.level == level and says in f.detail], found


async def test_the_remedy_for_a_missing_column_is_one_that_adds_it(database: Database) -> None:
    await execute(
        database.admin,
        "ALTER TABLE document_chunks DROP COLUMN page; ALTER TABLE document_chunks RENAME text_content TO content",
    )
    found = {f.detail: f.remedy for f in await problems(database.worker) if f.check == "columns"}
    assert found == {
        "column document_chunks.page is missing": "anabranch migrate",
        "column document_chunks.text_content is missing": (
            "ALTER TABLE public.document_chunks RENAME COLUMN … TO text_content; or add and fill it (migrate does not)"
        ),
    }


@pytest.mark.parametrize(
    ("table", "column", "type_", "expected"),
    [
        *(
            ("document_chunks", column, type_, "integer")
            for column in ("page", "chunk_position", "token_count")
            for type_ in ("text", "numeric", "bigint")
        ),
        *(
            ("document_chunks", column, "jsonb", "text")
            for column in ("section", "chunk_type", "text_content")
        ),
        *(
            ("documents", column, "jsonb", "text")
            for column in ("title", "source_url", "file_description", "document_type")
        ),
    ],
)
async def test_a_column_whose_values_results_cannot_carry_is_found(
    database: Database, table: str, column: str, type_: str, expected: str
) -> None:
    """Else every event that finds such a row fails with `internal_error`."""
    using = f"to_jsonb({column})" if type_ == "jsonb" else f"{column}::{type_}"
    drop_index = f"DROP INDEX IF EXISTS {table}_{column}"
    await execute(
        database.owner, f"{drop_index}; ALTER TABLE {table} ALTER {column} TYPE {type_} USING {using}"
    )
    difference = f"{table}.{column} is {type_}, not {expected}"
    (found,) = [finding for finding in await problems(database.worker) if finding.check == "columns"]
    assert (found.level, found.detail) == ("unready", f"column {difference}")
    with pytest.raises(MigrationError, match=difference):
        await migrate(database.owner, principals_setting=SETTING)


async def test_columns_of_a_narrower_type_are_accepted(database: Database) -> None:
    await execute(
        database.owner,
        "ALTER TABLE document_chunks ALTER page TYPE smallint, ALTER token_count TYPE smallint,"
        " ALTER chunk_type TYPE varchar(20), ALTER text_content TYPE varchar;"
        "ALTER TABLE documents ALTER title TYPE varchar(200), ALTER document_type TYPE varchar(20)",
    )
    assert await problems(database.worker) == []


@pytest.mark.parametrize(
    "damage",
    [
        "ALTER TABLE documents DISABLE ROW LEVEL SECURITY",
        "DROP POLICY anabranch_reader_documents ON documents",
        "ALTER POLICY anabranch_writer_documents ON documents TO PUBLIC",
        "DROP POLICY anabranch_owner_documents ON documents",
        "ALTER TABLE document_grants DISABLE TRIGGER zz_anabranch_grants_deleted",
        "ALTER FUNCTION anabranch_sync_grants() SECURITY INVOKER",
        "DROP TABLE chunk_topics",
        "ALTER TABLE document_chunks DROP COLUMN page",
        "CREATE POLICY open ON documents USING (true)",
        "REVOKE SELECT (title) ON documents FROM anabranch_reader",
        "REVOKE EXECUTE ON FUNCTION anabranch_search_index FROM anabranch_reader",
        "DROP INDEX document_chunks_embedding_halfvec",
        "ALTER TABLE document_chunks ALTER embedding SET STORAGE EXTERNAL",
    ],
)
async def test_the_remedies_help(database: Database, damage: str) -> None:
    await execute(database.admin, damage)
    for finding in await problems(database.worker):
        if "anabranch migrate" in finding.remedy:
            await migrate(database.owner, principals_setting=SETTING)
        elif finding.check != "isolation":
            await execute(database.admin, finding.remedy)
    assert await problems(database.worker) == []


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ("SUPERUSER", "is a superuser"),
        ("BYPASSRLS", "role suspect has BYPASSRLS"),
        ("CREATEROLE", "role suspect has CREATEROLE"),
        ("REPLICATION", "role suspect has REPLICATION"),
        (
            "IN ROLE store_owner",
            "is a member of store_owner, which owns access_sets, chunk_metadata, chunk_topics",
        ),
        ("NOINHERIT IN ROLE store_owner", "is a member of store_owner, which owns"),
        ("IN ROLE anabranch_writer", "is a member of anabranch_writer, which can read every row"),
        ("IN ROLE back_end", "is a member of anabranch_writer"),  # through another
        ("IN ROLE postgres", "is a member of postgres, which is a superuser"),
        ("IN ROLE bypassing", "is a member of bypassing, which has BYPASSRLS"),
        ("IN ROLE pg_execute_server_program", "can access the server's files"),
    ],
)
async def test_a_role_that_the_policies_do_not_hold_is_refused(
    postgres: PostgresServer, database: Database, attributes: str, says: str
) -> None:
    await execute(database.admin, "CREATE ROLE bypassing BYPASSRLS")
    await execute(database.admin, f"CREATE ROLE suspect LOGIN PASSWORD 'test' {attributes}")
    try:
        await execute(database.admin, "GRANT anabranch_reader TO suspect")
        found = await problems(postgres.login("suspect", database))
        assert {finding.level for finding in found} == {"refused"}
        assert [finding for finding in found if finding.check == "role" and says in finding.detail], found
    finally:
        await execute(database.admin, "DROP ROLE suspect; DROP ROLE bypassing")


async def test_an_owner_of_a_single_table_is_refused(database: Database) -> None:
    await execute(database.admin, "ALTER TABLE chunk_topics OWNER TO worker")
    found = await problems(database.worker)
    assert [f for f in found if f.level == "refused" and "owns chunk_topics" in f.detail], found


async def test_a_role_that_was_only_put_on_is_seen_through(database: Database) -> None:
    async with connected(database.admin) as connection:
        await connection.execute("SET ROLE worker")
        found = await inspect(connection, principals_setting=SETTING)
    assert [f for f in found if f.check == "role" and f.level == "refused" and "superuser" in f.detail]


async def test_reading_everything_is_mentioned(postgres: PostgresServer, database: Database) -> None:
    """pg_read_all_data does not lift the policies: it is untidy, not unsafe."""
    await execute(
        database.admin,
        "CREATE ROLE suspect LOGIN PASSWORD 'test' IN ROLE anabranch_reader, pg_read_all_data;",
    )
    try:
        assert [(f.check, f.level) for f in await problems(postgres.login("suspect", database))] == [
            ("role", "warning")
        ]
        await execute(database.admin, "GRANT pg_write_all_data TO suspect")
        found = await problems(postgres.login("suspect", database))
        assert [f for f in found if f.level == "refused" and "may write to document_grants" in f.detail]
    finally:
        await execute(database.admin, "DROP ROLE suspect")


async def test_a_role_without_any_right_learns_what_it_needs(
    postgres: PostgresServer, database: Database
) -> None:
    await execute(database.admin, "CREATE ROLE newcomer LOGIN PASSWORD 'test'")
    try:
        found = await problems(postgres.login("newcomer", database))
        assert {finding.level for finding in found} == {"unready"}
        assert found[0].remedy.startswith('GRANT anabranch_reader TO "newcomer";')
    finally:
        await execute(database.admin, "DROP ROLE newcomer")


async def test_an_empty_database_is_unready(postgres: PostgresServer) -> None:
    bare = postgres.create("template0")
    try:
        found = await problems(bare.worker)
        assert {finding.level for finding in found} == {"unready"}
        assert {finding.check for finding in found} == {"extension", "tables", "schema"}
    finally:
        postgres.drop(bare)


async def test_another_settings_name_is_refused(database: Database) -> None:
    found = await problems(database.worker, setting="app.who")
    assert ("policies", "refused") in {(finding.check, finding.level) for finding in found}


BACK_ENDS_OWN_POLICIES = {
    "directly": """
        CREATE POLICY own ON documents FOR SELECT TO anabranch_reader USING (EXISTS (
            SELECT FROM jsonb_array_elements_text(nullif(current_setting('App.Who', true), '')::jsonb) p
            WHERE p = title));
    """,
    "through a function": """
        CREATE FUNCTION may_read(text) RETURNS boolean LANGUAGE sql STABLE AS
            $$ SELECT nullif(current_setting('app.who', true), '')::jsonb ? $1 $$;
        CREATE POLICY own ON documents FOR SELECT TO anabranch_reader USING (may_read(title));
    """,
    "through a function of the standard's form": """
        CREATE FUNCTION may_read(t text) RETURNS boolean LANGUAGE sql STABLE
            RETURN nullif(current_setting('app.who', true), '')::jsonb ? t;
        CREATE POLICY own ON documents FOR SELECT TO anabranch_reader USING (may_read(title));
    """,
    "through another table": """
        CREATE POLICY own ON documents FOR SELECT TO anabranch_reader USING (
            id IN (SELECT c.document_id FROM document_chunks c));
    """,
}


@pytest.mark.parametrize("policy", BACK_ENDS_OWN_POLICIES.values(), ids=BACK_ENDS_OWN_POLICIES.keys())
async def test_a_back_ends_own_policies_are_relied_on(database: Database, policy: str) -> None:
    await migrate(database.owner, principals_setting="app.who")
    await execute(database.owner, f"DROP POLICY anabranch_reader_documents ON documents; {policy}")
    assert await problems(database.worker, setting="app.who") == []
    assert {f.level for f in await problems(database.worker, setting="app.other")} == {"refused"}


async def test_restrictive_and_foreign_policies_do_no_harm(database: Database) -> None:
    await execute(
        database.owner,
        "CREATE POLICY narrow ON documents AS RESTRICTIVE TO anabranch_reader USING (title <> 'secret');"
        "CREATE POLICY all_of_it ON documents AS RESTRICTIVE USING (true);"
        "CREATE POLICY theirs ON documents TO back_end USING (true);"
        "CREATE POLICY writing ON documents FOR INSERT WITH CHECK (true)",
    )
    assert await problems(database.worker) == []
    await migrate(database.owner, principals_setting=SETTING)


@pytest.mark.parametrize(
    "policy",
    [
        "USING (title <> 'secret')",
        "FOR SELECT TO PUBLIC USING (title <> 'secret')",
        "FOR UPDATE TO store_owner USING (true) WITH CHECK (title <> 'secret')",
        "TO owners_group USING (title <> 'secret')",
    ],
)
async def test_a_restrictive_policy_that_the_owner_is_held_to_is_refused(
    database: Database, policy: str
) -> None:
    """It hides rows from the triggers, which run as the owner, and from `migrate`."""
    await execute(
        database.admin,
        "CREATE ROLE owners_group; GRANT owners_group TO store_owner;"
        f"CREATE POLICY narrow ON documents AS RESTRICTIVE {policy}",
    )
    try:
        (found,) = await problems(database.worker)
        assert (found.check, found.level) == ("policies", "refused")
        assert (
            "restrictive policy narrow on documents applies to the tables' owner store_owner" in found.detail
        )
        with pytest.raises(MigrationError, match="policy narrow on documents"):
            await migrate(database.owner, principals_setting=SETTING)
        await execute(database.admin, found.remedy.partition("TO …;")[0] + "TO anabranch_reader")
        assert await problems(database.worker) == []
        await migrate(database.owner, principals_setting=SETTING)
    finally:
        await execute(database.admin, "DROP OWNED BY owners_group; DROP ROLE owners_group")


async def test_a_policy_that_leans_on_a_table_that_is_open_is_refused(database: Database) -> None:
    """One policy of the other table depends on the asker; a second one lets everybody through."""
    await execute(
        database.owner,
        "CREATE TABLE memberships (title text); GRANT SELECT ON memberships TO anabranch_reader;"
        "ALTER TABLE memberships ENABLE ROW LEVEL SECURITY;"
        f"CREATE POLICY guarded ON memberships USING (title = current_setting('{SETTING}', true));"
        "DROP POLICY anabranch_reader_documents ON documents;"
        "CREATE POLICY own ON documents USING (title IN (SELECT m.title FROM memberships m))",
    )
    assert [f for f in await problems(database.worker) if f.check == "policies"] == []
    await execute(database.owner, "CREATE POLICY open ON memberships USING (true)")
    found = await problems(database.worker)
    assert [f for f in found if f.level == "refused" and "own on documents" in f.detail], found


@pytest.mark.parametrize(
    ("constant", "version", "level"),
    [("OLDEST_SERVER", 99, "unready"), ("NEWEST_SERVER_KNOWN", 9, "warning")],
)
async def test_a_server_of_an_unknown_version(
    database: Database, monkeypatch: pytest.MonkeyPatch, constant: str, version: int, level: str
) -> None:
    monkeypatch.setattr(preflight, constant, version)
    assert [(finding.check, finding.level) for finding in await problems(database.worker)] == [
        ("server", level)
    ]


TOMBSTONE = (
    "CREATE OR REPLACE FUNCTION {} RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER"
    " SET search_path = pg_catalog, pg_temp AS $$ BEGIN RETURN NULL; END $$"
)
PLANTED = {
    "an operator that the policy would resolve to": """
        CREATE FUNCTION always(text[], text[]) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true';
        CREATE OPERATOR public.&& (FUNCTION = always, LEFTARG = text[], RIGHTARG = text[]);
        GRANT EXECUTE ON FUNCTION always TO PUBLIC;
    """,
    "a function that the policy would call": """
        CREATE FUNCTION public.array_append(text[], text) RETURNS text[] LANGUAGE sql IMMUTABLE
            AS $$ SELECT ARRAY['public', 'user:1', 'user:2'] $$;
    """,
}


@pytest.mark.parametrize(
    ("damage", "check", "says"),
    [
        ("DROP TRIGGER {trigger} ON {table}; CREATE TRIGGER {trigger} AFTER INSERT ON {table} REFERENCING NEW TABLE AS new_grants FOR EACH STATEMENT WHEN (false) EXECUTE FUNCTION {function}",
         "triggers", "{trigger}"),
        (TOMBSTONE.format("{function}"), "functions", "{name}"),
        ("ALTER FUNCTION {function} SET search_path = public, pg_catalog", "functions", "{name}"),
        ("ALTER FUNCTION {function} IMMUTABLE", "functions", "{name}"),
    ],
)  # fmt: skip
async def test_definitions_are_compared_whole(database: Database, damage: str, check: str, says: str) -> None:
    async with connected(database.admin) as admin:
        row = await admin.fetchrow(
            "SELECT tgname::text AS trigger, tgrelid::regclass::text AS table, proname::text AS name,"
            " tgfoid::regprocedure::text AS function"
            " FROM pg_trigger t JOIN pg_proc f ON f.oid = t.tgfoid"
            " WHERE tgrelid = 'document_grants'::regclass AND NOT tgisinternal AND tgtype & 4 = 4"
        )
        assert row is not None
        await admin.execute(damage.format(**row))
    found = [f for f in await problems(database.worker) if f.check == check and f.level == "refused"]
    assert [f for f in found if says.format(**row) in f.detail and f.remedy == "anabranch migrate"], found
    await migrate(database.admin, principals_setting=SETTING, consent=True)
    assert await problems(database.worker) == []


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
async def test_what_was_planted_before_migrate_is_not_used(empty_database: Database, planted: str) -> None:
    await execute(empty_database.admin, "GRANT CREATE ON SCHEMA public TO back_end")
    await execute(empty_database.writer, planted)
    await migrate(empty_database.owner, principals_setting=SETTING)
    await execute(
        empty_database.owner,
        "INSERT INTO documents (title) VALUES ('t'); INSERT INTO document_grants SELECT id, 'user:1' FROM documents",
    )
    async with connected(empty_database.worker) as worker, worker.transaction():
        await worker.execute("SELECT set_config($1, $2, true)", SETTING, '["user:2"]')
        assert await worker.fetch("SELECT id FROM documents") == []
    assert [f for f in await problems(empty_database.worker) if f.level != "warning"] == []


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
async def test_a_policy_over_something_planted_is_refused(database: Database, planted: str) -> None:
    """The same text, but for the schema that an operator or a function comes from."""
    await execute(database.admin, planted)
    async with connected(database.admin) as admin:
        text = await admin.fetchval(
            "SELECT pg_get_expr(polqual, polrelid) FROM pg_policy WHERE polname = 'anabranch_reader_access_sets'"
        )
        # Printed with its schema where something of the same name is in the search_path.
        changed = (
            re.sub(r"&&|OPERATOR\(pg_catalog\.&&\)", "OPERATOR(public.&&)", text)
            if "&&" in planted
            else re.sub(r"(pg_catalog\.)?array_append\(", "public.array_append(", text)
        )
        assert changed != text
        text = changed
        await admin.execute(f"ALTER POLICY anabranch_reader_access_sets ON access_sets USING ({text})")
    found = await problems(database.worker)
    assert [f for f in found if f.check == "policies" and f.level == "refused"], found
    await migrate(database.admin, principals_setting=SETTING, consent=True)
    assert [f for f in await problems(database.worker) if f.level == "refused"] == []
