"""Attacks on access control, `check` and `migrate`, as an outsider would try them."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
from uuid import uuid4

import asyncpg
import pytest

from streams.store.catalog import read_catalog
from streams.store.locked_out import locked_out_roles
from streams.store.locks import LockRetries, LockUnavailable
from streams.store.migrate import ConsentRequired, MigrationError, migrate
from streams.store.preflight import inspect
from streams.store.runner import Runner
from streams.store.vector_index import read_vector_index
from tests.conftest import SETTING
from tests.integration.access_oracle import (
    chunk,
    document,
    drop_foreign_keys,
    grant,
    revoke,
    seen_by,
    until_blocked,
)
from tests.integration.connections import connected, execute

if TYPE_CHECKING:
    from tests.conftest import Database, PostgresServer

PARTITIONED = """
    CREATE TABLE documents (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), title text) PARTITION BY HASH (id);
    CREATE TABLE document_chunks (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), document_id uuid NOT NULL,
        text_content text) PARTITION BY HASH (id);
    CREATE TABLE document_grants (document_id uuid, principal text, PRIMARY KEY (document_id, principal));
"""


async def partitioned(database: Database, count: int) -> None:
    parts = "".join(
        f"CREATE TABLE {table}_{n} PARTITION OF {table} FOR VALUES WITH (MODULUS {count}, REMAINDER {n});"
        for table in ("documents", "document_chunks")
        for n in range(count)
    )
    await execute(database.owner, PARTITIONED + parts)


async def problems(database: Database) -> list[str]:
    async with connected(database.worker) as worker:
        found = await inspect(worker, principals_setting=SETTING)
    return [f"{f.check}: {f.level}: {f.detail}" for f in found if f.level != "ok"]


# Foreign keys that do not hold every row


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "ALTER TABLE document_grants ADD COLUMN granted_by uuid REFERENCES documents ON DELETE SET NULL",
            "SELECT",
        ),
        (
            "SELECT",
            "ALTER TABLE document_grants ADD FOREIGN KEY (document_id) REFERENCES documents NOT VALID",
        ),
        (
            (
                "ALTER TABLE documents ADD COLUMN tenant int, ADD UNIQUE (id, tenant);"
                "ALTER TABLE document_grants ADD COLUMN tenant int,"
                " ADD FOREIGN KEY (document_id, tenant) REFERENCES documents (id, tenant)"
            ),
            "SELECT",
        ),
    ],
    ids=["another column", "not valid", "two columns, one null"],
)
async def test_a_foreign_key_that_does_not_hold_every_grant(
    database: Database, before: str, after: str
) -> None:
    async with (
        connected(database.owner) as owner,
        connected(database.writer) as one,
        connected(database.writer) as two,
        connected(database.worker) as worker,
    ):
        await drop_foreign_keys(owner)
        await owner.execute(before)
        id_ = uuid4()
        await grant(one, id_, "user:1")
        await owner.execute(after)
        first = one.transaction()
        await first.start()
        await one.execute("INSERT INTO documents (id) VALUES ($1)", id_)
        await chunk(one, id_)
        second = asyncio.create_task(revoke(two, id_, "user:1"))
        await until_blocked(owner, two.get_server_pid())
        await first.commit()
        await second
        assert await owner.fetchval("SELECT count(*) FROM document_grants") == 0
        assert await seen_by(worker, ["user:1"]) == set()


async def test_a_foreign_key_of_another_column_of_the_chunks(database: Database) -> None:
    async with (
        connected(database.owner) as owner,
        connected(database.writer) as one,
        connected(database.writer) as two,
        connected(database.worker) as worker,
    ):
        await drop_foreign_keys(owner)
        await owner.execute(
            "ALTER TABLE document_chunks ADD COLUMN cited uuid REFERENCES documents ON DELETE SET NULL"
        )
        id_ = await document(one, "user:1")
        await document(one, "user:1")  # keeps their set of readers in use
        late = one.transaction(isolation="repeatable_read")
        await late.start()
        await one.fetch("SELECT 1 FROM documents")  # takes the snapshot
        await chunk(two, id_)
        with pytest.raises(asyncpg.FeatureNotSupportedError):
            await one.execute("DELETE FROM documents WHERE id = $1", id_)
        await late.rollback()
        assert await seen_by(worker, ["user:1"]) != set()


# What keeps the triggers from reaching a chunk


async def test_a_restrictive_policy_hides_a_chunk_from_a_revocation(database: Database) -> None:
    async with (
        connected(database.owner) as owner,
        connected(database.writer) as writer,
        connected(database.worker) as worker,
    ):
        id_ = await document(writer, "user:1")
        await document(writer, "user:1")  # keeps their set of readers in use
        await chunk(writer, id_)
        await owner.execute(
            "CREATE POLICY tenants ON document_chunks AS RESTRICTIVE TO PUBLIC"
            " USING (section = current_setting('app.section', true) OR pg_has_role('anabranch_reader', 'USAGE'))"
        )
        await revoke(writer, id_, "user:1")
        assert await seen_by(worker, ["user:1"]) != set()
        (found,) = await problems(database)
        assert found == (
            "policies: refused: restrictive policy tenants on document_chunks applies to the tables' owner store_owner,"
            " so its triggers may miss rows: revoked grants may stay in force"
        )


@pytest.mark.parametrize("write", ["DELETE FROM documents", "UPDATE documents SET id = gen_random_uuid()"])
async def test_a_trigger_that_keeps_a_chunk_from_following_its_document(
    database: Database, write: str
) -> None:
    async with connected(database.owner) as owner, connected(database.worker) as worker:
        await drop_foreign_keys(owner)
        id_ = await document(owner, "user:1")
        await document(owner, "user:1")  # keeps their set of readers in use
        await chunk(owner, id_)
        await owner.execute(
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
            "CREATE TRIGGER a_keep BEFORE UPDATE ON document_chunks FOR EACH ROW EXECUTE FUNCTION keep()"
        )
        with pytest.raises(
            asyncpg.TriggeredActionError, match=f"suppressed the access change of document {id_}"
        ):
            await owner.execute(f"{write} WHERE id = $1", id_)
        assert await seen_by(worker, ["user:1"]) != set()  # as before: the write has failed


# What `check` does not look at


async def test_triggers_that_are_disabled_on_a_partition_are_found(empty_database: Database) -> None:
    await partitioned(empty_database, 1)
    await execute(
        empty_database.owner,
        "ALTER TABLE documents DETACH PARTITION documents_0; DROP TABLE documents_0;"
        "CREATE TABLE documents_0 PARTITION OF documents FOR VALUES WITH (MODULUS 1, REMAINDER 0)"
        " PARTITION BY HASH (id);"
        "CREATE TABLE documents_0_0 PARTITION OF documents_0 FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
    )
    await migrate(empty_database.owner, principals_setting=SETTING)
    assert await problems(empty_database) == []
    await execute(
        empty_database.owner,
        "ALTER TABLE documents_0_0 DISABLE TRIGGER zz_anabranch_document_deleted;"
        "ALTER TABLE document_chunks_0 ENABLE REPLICA TRIGGER zz_anabranch_chunk_updating",
    )
    assert [problem.partition(":")[0] for problem in await problems(empty_database)] == [
        "triggers",
        "triggers",
    ]
    (deleted,) = [problem for problem in await problems(empty_database) if "document_deleted" in problem]
    assert "of documents is disabled on documents_0_0" in deleted
    await migrate(empty_database.owner, principals_setting=SETTING)
    assert await problems(empty_database) == []


async def test_a_worker_that_may_read_a_partition_is_found(empty_database: Database) -> None:
    await partitioned(empty_database, 1)
    await migrate(empty_database.owner, principals_setting=SETTING)
    async with connected(empty_database.owner) as owner, connected(empty_database.worker) as worker:
        await owner.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO anabranch_reader")
        await chunk(owner, await document(owner))
        assert await seen_by(worker, []) == set()
        assert len(await worker.fetch("SELECT FROM document_chunks_0")) == 1
        assert [problem for problem in await problems(empty_database) if "refused" in problem] == [
            f"privileges: refused: role worker may use public.{table}_0 directly (SELECT): the policies of {table}"
            " do not apply there"
            for table in ("document_chunks", "documents")
        ]


@pytest.mark.parametrize(
    ("grant_", "expected"),
    [
        ("UPDATE ON anabranch_schema", "refused: role worker may write to anabranch_schema (UPDATE)"),
        (
            "ALL ON access_locks",
            "refused: role worker may write to access_locks (INSERT, UPDATE, DELETE, TRUNCATE",
        ),
        ("SELECT ON access_sets", "warning: role worker may read access_sets (principals, digest)"),
        ("SELECT (principals) ON access_sets", "warning: role worker may read access_sets (principals)"),
    ],
)
async def test_a_worker_with_rights_that_it_does_not_need_is_found(
    database: Database, grant_: str, expected: str
) -> None:
    await execute(database.owner, f"GRANT {grant_} TO anabranch_reader")
    assert (await problems(database))[0].startswith(f"privileges: {expected}")
    table = grant_.rpartition(" ")[2]
    await execute(database.owner, f"REVOKE ALL ON {table} FROM anabranch_reader")
    await migrate(database.owner, principals_setting=SETTING)
    assert await problems(database) == []


async def test_check_does_not_depend_on_how_identifiers_are_printed(database: Database) -> None:
    await execute(database.admin, f"ALTER DATABASE {database.name} SET quote_all_identifiers = on")
    assert await problems(database) == []
    assert await migrate(database.owner, principals_setting=SETTING) == []
    async with connected(database.worker) as worker:
        assert (await read_vector_index(worker)).by_halfvec


async def test_a_back_end_with_backslashes_in_its_strings_can_write(database: Database) -> None:
    async with connected(database.writer) as writer:
        await writer.execute("SET standard_conforming_strings = off")
        id_ = await document(writer, "user:1")
        await writer.execute(
            "INSERT INTO document_chunks (document_id, text_content, metadata) VALUES ($1, 'c', $2)",
            id_,
            '{"a": 1}',
        )


# Whom `migrate` asks, and whom it lists


async def test_planted_tables_with_a_planted_trigger_need_consent(postgres: PostgresServer) -> None:
    database = postgres.create("template0")
    try:
        await execute(
            database.admin,
            "CREATE EXTENSION vector; CREATE ROLE planter; GRANT CREATE ON SCHEMA public TO planter;"
            "SET ROLE planter;"
            "CREATE TABLE documents (id uuid PRIMARY KEY);"
            "CREATE TABLE document_chunks (id uuid PRIMARY KEY, document_id uuid, text_content text);"
            "CREATE TABLE document_grants (document_id uuid, principal text);"
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';"
            "CREATE TRIGGER anabranch_x BEFORE INSERT ON documents FOR EACH ROW EXECUTE FUNCTION f()",
        )
        with pytest.raises(ConsentRequired, match="belong to planter"):
            await migrate(database.admin, principals_setting=SETTING)
    finally:
        postgres.drop(database)
        await execute(postgres.embedded.dsn(), "DROP ROLE IF EXISTS planter")


async def test_a_member_who_inherits_nothing_does_not_undo_a_newer_schema(
    postgres: PostgresServer, database: Database
) -> None:
    await execute(
        database.admin,
        "CREATE ROLE operator LOGIN NOINHERIT PASSWORD 'test' IN ROLE store_owner;"
        "INSERT INTO anabranch_schema VALUES (4, 4);"
        "ALTER FUNCTION anabranch_keeps_snapshot() VOLATILE",
    )
    try:
        with pytest.raises(MigrationError, match="newer release"):
            await migrate(postgres.login("operator", database), principals_setting=SETTING)
    finally:
        await execute(database.admin, "DROP ROLE operator")


async def test_a_member_who_may_not_set_the_role_gets_a_clear_error(
    postgres: PostgresServer, database: Database
) -> None:
    await execute(
        database.admin,
        "CREATE ROLE operator LOGIN PASSWORD 'test'; GRANT store_owner TO operator WITH SET FALSE",
    )
    try:
        with pytest.raises(MigrationError, match='GRANT "store_owner" TO "operator" WITH SET TRUE'):
            await migrate(postgres.login("operator", database), principals_setting=SETTING)
    finally:
        await execute(database.admin, "DROP OWNED BY operator; DROP ROLE operator")


async def test_a_role_that_only_inserts_is_listed(empty_database: Database) -> None:
    await execute(
        empty_database.admin,
        "CREATE ROLE ingest LOGIN; SET ROLE store_owner;"
        "CREATE TABLE documents (id uuid PRIMARY KEY DEFAULT gen_random_uuid());"
        "GRANT INSERT ON documents TO ingest; INSERT INTO documents DEFAULT VALUES",
    )
    try:
        with pytest.raises(ConsentRequired, match="ingest"):
            await migrate(empty_database.owner, principals_setting=SETTING)
    finally:
        await execute(empty_database.admin, "DROP OWNED BY ingest; DROP ROLE ingest")


async def test_the_remedy_for_a_role_that_reads_gives_it_no_more(
    postgres: PostgresServer, empty_database: Database
) -> None:
    await execute(
        empty_database.admin,
        "CREATE ROLE reporting LOGIN PASSWORD 'test'; SET ROLE store_owner;"
        "CREATE TABLE documents (id uuid PRIMARY KEY DEFAULT gen_random_uuid());"
        "GRANT SELECT ON documents TO reporting; INSERT INTO documents DEFAULT VALUES",
    )
    try:
        async with connected(empty_database.owner) as owner:
            (role,) = await locked_out_roles(owner, await read_catalog(owner), "store_owner")
        await migrate(empty_database.owner, principals_setting=SETTING, consent=True)
        await execute(empty_database.admin, role.remedy)
        async with connected(postgres.login("reporting", empty_database)) as reporting:
            assert await reporting.fetchval("SELECT count(*) FROM documents") == 1
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await reporting.execute("INSERT INTO document_grants SELECT id, 'public' FROM documents")
    finally:
        await execute(empty_database.admin, "DROP OWNED BY reporting; DROP ROLE reporting")


# What a database or a table brings along


@pytest.mark.parametrize("setting", ["row_security = off", "default_transaction_read_only = on"])
async def test_settings_of_the_database_do_not_stop_migrate(database: Database, setting: str) -> None:
    await execute(database.owner, "INSERT INTO documents DEFAULT VALUES; DROP TABLE chunk_topics")
    await execute(database.admin, f"ALTER DATABASE {database.name} SET {setting}")
    await migrate(database.owner, principals_setting=SETTING)
    await execute(
        database.admin,
        f"BEGIN READ WRITE;ALTER DATABASE {database.name} RESET {setting.partition(' ')[0]}; COMMIT",
    )
    assert await problems(database) == []


async def test_a_column_that_cannot_be_added_is_missed_before_anything_is_done(
    empty_database: Database,
) -> None:
    await execute(
        empty_database.owner, "CREATE TABLE document_chunks (id uuid PRIMARY KEY, document_id uuid)"
    )
    with pytest.raises(MigrationError, match=r"document_chunks\.text_content is missing"):
        await migrate(empty_database.owner, principals_setting=SETTING)
    async with connected(empty_database.owner) as owner:
        assert await owner.fetchval("SELECT to_regclass('public.documents')") is None


# Whom `migrate` keeps waiting


@pytest.mark.slow
@pytest.mark.parametrize("locked", ["documents of a batch", "partitions"])
async def test_nobody_waits_while_many_locks_are_taken_one_after_another(
    empty_database: Database, locked: str
) -> None:
    """A back end's transactions of 250 ms, each ending before the migration gives up on its lock."""
    count = 16
    if locked == "partitions":
        await partitioned(empty_database, count)
        await execute(empty_database.owner, "INSERT INTO documents SELECT FROM generate_series(1, 100)")
        statements = [f"LOCK TABLE documents_{n} IN ACCESS SHARE MODE" for n in range(1, count)]
        probe = "SELECT count(*) FROM documents"
    else:
        await migrate(empty_database.owner, principals_setting=SETTING)
        async with connected(empty_database.owner) as owner:
            first, *others = sorted([await document(owner, "user:1") for _ in range(count)])
            await owner.execute(
                "ALTER TABLE document_grants DISABLE TRIGGER USER; UPDATE document_grants SET principal = 'user:2';"
                "ALTER TABLE document_grants ENABLE TRIGGER USER"
            )
        statements = [f"UPDATE documents SET title = 'x' WHERE id = '{id_}'" for id_ in others]
        probe = f"UPDATE documents SET title = 'y' WHERE id = '{first}'"
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    waits: list[float] = []

    async def hold(delay: float, statement: str) -> None:
        async with connected(empty_database.owner) as connection:
            await asyncio.sleep(delay)
            while not stop.is_set():
                async with connection.transaction():
                    await connection.execute(statement)
                    await asyncio.sleep(0.25)

    async def measure() -> None:
        async with connected(empty_database.owner) as connection:
            while not stop.is_set():
                began = loop.time()
                await connection.execute(probe)
                waits.append(loop.time() - began)
                await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        for n, statement in enumerate(statements):
            group.create_task(hold(0.25 * (n * 7 % count) / count, statement))
        group.create_task(measure())
        await asyncio.sleep(1)
        control = max(
            waits, default=0.0
        )  # what this machine takes for the same statement without a migration
        waits.clear()
        for attempt in range(5):
            try:
                await migrate(empty_database.owner, principals_setting=SETTING, consent=True)
                break
            except MigrationError as error:
                # On a busy machine a minute may be too short to get all locks together. What was done stays.
                if attempt == 4 or not isinstance(error.__cause__, LockUnavailable):
                    raise
        stop.set()
    assert max(waits) < 1 + control


async def test_a_statement_that_nobody_blocks_gets_the_time_that_it_needs(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a constraint that is checked on a very large table."""
    monkeypatch.setattr("streams.store.locks.RETRY_SECONDS", 2.0)
    async with connected(database.owner) as owner:
        locks = LockRetries(owner, lambda: asyncpg.connect(database.owner))
        runner = Runner(owner, locks, dry_run=False, report=None)
        await runner.transaction(["SELECT pg_sleep(1)"], "slept")
        await locks.close()
    assert runner.done == ["slept"]


async def test_the_session_that_is_in_the_way_is_named(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not readers, which are in nobody's way: the message says how to end whom it names."""
    monkeypatch.setattr("streams.store.locks.RETRY_SECONDS", 2.0)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            reader = await stack.enter_async_context(connected(database.worker))
            await stack.enter_async_context(reader.transaction())
            await reader.fetch("SELECT id FROM documents")
        writer = await stack.enter_async_context(connected(database.writer))
        await execute(database.owner, "DROP TRIGGER zz_anabranch_grants_deleted ON document_grants")
        await stack.enter_async_context(writer.transaction())
        await writer.execute("DELETE FROM documents")
        with pytest.raises(MigrationError, match=f"process {writer.get_server_pid()}, role back_end"):
            await migrate(database.owner, principals_setting=SETTING)


async def test_an_index_build_that_somebody_cancels_is_not_started_again(database: Database) -> None:
    """It has no time limit of its own, so only another session can have cancelled it."""
    async with connected(database.owner) as owner, connected(database.admin) as admin:
        locks = LockRetries(owner, lambda: asyncpg.connect(database.owner))
        runner = Runner(owner, locks, dry_run=False, report=None)
        build = asyncio.create_task(runner.alone("SELECT pg_sleep(10)", "built"))
        await asyncio.sleep(1.5)  # longer than the limit of a transaction
        await admin.execute("SELECT pg_cancel_backend($1)", owner.get_server_pid())
        with pytest.raises(asyncpg.QueryCanceledError):
            await asyncio.wait_for(build, 8)
        await locks.close()
    assert runner.done == []


async def test_sessions_that_an_index_build_waits_for_are_named_while_it_waits(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.store.locks.RETRY_SECONDS", 2.0)
    monkeypatch.setattr("streams.store.locks._REPORT_SECONDS", 1.0, raising=False)
    monkeypatch.setattr("streams.store.runner._CONCURRENTLY_TIMEOUT", "4s")
    reported: list[str] = []
    async with connected(database.owner) as owner, connected(database.writer) as writer, writer.transaction():
        await writer.execute("UPDATE documents SET title = 'x'")
        named = f"process {writer.get_server_pid()}, role back_end"
        locks = LockRetries(owner, lambda: asyncpg.connect(database.owner))
        runner = Runner(owner, locks, dry_run=False, report=reported.append)
        build = asyncio.create_task(runner.alone("CREATE INDEX CONCURRENTLY waiting ON documents (title)"))
        with pytest.raises(LockUnavailable) as raised:
            await build
        await locks.close()
    assert [line for line in reported if named in line] == reported
    assert len(reported) == 1
    assert named in str(raised.value)
    measured = re.search(r"for (\d+) seconds", str(raised.value))
    assert measured is not None
    assert int(measured[1]) >= 4


async def test_a_trigger_whose_function_belongs_to_somebody_else_is_found(
    postgres: PostgresServer, database: Database
) -> None:
    await execute(
        database.admin,
        "CREATE ROLE intruder LOGIN PASSWORD 'test'; CREATE SCHEMA theirs AUTHORIZATION intruder;"
        "GRANT USAGE ON SCHEMA theirs TO PUBLIC; GRANT TRIGGER ON documents TO intruder",
    )
    try:
        await execute(
            postgres.login("intruder", database),
            "CREATE FUNCTION theirs.f() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN EXECUTE 'GRANT ALL ON public.document_grants TO intruder'; RETURN NEW; END$$;"
            "CREATE TRIGGER a BEFORE UPDATE ON documents FOR EACH ROW EXECUTE FUNCTION theirs.f()",
        )
        found = await problems(database)
        notes = await migrate(database.owner, principals_setting=SETTING)
        async with connected(database.writer) as writer, connected(database.owner) as owner:
            await document(writer, "user:1")  # our trigger on the grant updates the document as the owner
            stolen = await owner.fetchval(
                "SELECT has_table_privilege('intruder', 'document_grants', 'INSERT')"
            )
        assert stolen
        calls, may = found
        assert calls.startswith(
            "triggers: warning: trigger a on public.documents calls theirs.f() (owner intruder)"
        )
        assert may.startswith("triggers: warning: intruder may create triggers on public.documents,")
        assert 'DROP TRIGGER "a" ON public.documents;' in notes[0]
        assert notes[1].endswith("REVOKE TRIGGER ON public.documents FROM intruder;")
        await execute(database.admin, "REVOKE ALL ON documents, document_grants FROM intruder")
        await execute(database.owner, 'DROP TRIGGER "a" ON public.documents')
        assert await problems(database) == []
    finally:
        await execute(database.admin, "DROP OWNED BY intruder CASCADE; DROP ROLE intruder")
