"""Migrates a store to the reference schema while applications use it.

Missing and differing objects are applied in phases that hold locks only briefly: tables and columns; functions and
triggers, in one transaction; derived data, in batches; indexes, concurrently; finally row-level security and rights.
Every statement can be repeated. If a run is killed at any point, the next run completes it. If there is nothing to do,
it takes no table locks.

Requires its own session: connect directly to the server, not through a pooler in transaction mode.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import groupby
from typing import Final

import asyncpg

from streams.store import derivation, indexes, prerequisites
from streams.store.catalog import (
    OBJECT_KINDS,
    UNREADABLE,
    Catalog,
    Index,
    quoted,
    read_catalog,
    vector_schema,
)
from streams.store.locked_out import LockedOutRole, locked_out_roles, requirement
from streams.store.locks import LOCK_TIMEOUT, LockRetries, LockUnavailable, hold_advisory_lock
from streams.store.owner_checks import other_triggers, restrictions
from streams.store.reference import (
    BASE_TABLES,
    DEFAULT_DIMENSIONS,
    SCHEMA_VERSION,
    STEPS,
    VERSION_TABLE,
    InvalidReference,
    Kind,
    Statement,
    reference,
    replaced_functions,
    steps,
)
from streams.store.runner import MigrationError, Runner

__all__ = ["ConsentRequired", "MigrationError", "migrate", "plan"]

_DONE: Final[dict[str, str]] = {
    "table": "created table {table}",
    "column": "added column {name} to {table}",
    "storage": "set the storage of {name} in {table} to {storage}",
    "function": "created function {name}",
    "trigger": "created trigger {name} on {table}",
    "policy": "created policy {name} on {table}",
    "enable": "enabled row-level security on {table}",
    "force": "forced row-level security on {table}",
}
#: The triggers and the rebuilding need the indexes in files up to this one.
_LAST_EARLY_FILE: Final = "003"
_LOCKED_FOR_TRIGGERS: Final = (
    f"LOCK TABLE {', '.join(f'public.{table}' for table in BASE_TABLES)} IN SHARE ROW EXCLUSIVE MODE"
)


class ConsentRequired(MigrationError):
    """Roles would lose access to rows, so nothing was changed. The message lists the roles, and what to do."""


async def migrate(
    dsn: str,
    *,
    principals_setting: str,
    dimensions: int = DEFAULT_DIMENSIONS,
    consent: bool = False,
    prune: bool = False,
    report: Callable[[str], None] | None = None,
) -> list[str]:
    """Migrate the store to the reference schema.

    If a superuser runs it, missing objects are created as the tables' owner or, if there are no tables, as the role
    ``anabranch_owner``, which cannot log in. So the triggers never run with a superuser's rights. If another role runs
    it, that role becomes the owner of new tables, or acts as an existing owner that it is a member of.

    Args:
        dsn: connection string of the owner or a superuser.
        principals_setting: the setting from which the policies read the requesting principals.
        dimensions: of the embeddings.
        consent: continue although roles will see fewer rows, or another role's tables are taken over.
        prune: also remove what only workers of older versions need.
        report: called with each line as soon as the step is done.

    Returns:
        One line per completed step, and notes; empty if there was nothing to do.

    Raises:
        ConsentRequired: ``consent`` is needed; nothing was changed.
        MigrationError: this role may not create something that is missing, or another session blocks the migration;
            the message says what to do. Completed steps are kept.
    """
    async with _session(dsn) as (connection, locks):
        await hold_advisory_lock(connection)
        runner = Runner(connection, locks, dry_run=False, report=report)
        migration = await _migration(runner, principals_setting, dimensions)
        await migration.run(consent=consent, prune=prune)
        return migration.runner.done


async def plan(
    dsn: str, *, principals_setting: str, dimensions: int = DEFAULT_DIMENSIONS, prune: bool = False
) -> list[str]:
    """The SQL that `migrate` would run, with comments. Changes nothing and takes no blocking locks.

    Raises:
        MigrationError: see `migrate`.
    """
    async with _session(dsn) as (connection, locks):
        runner = Runner(connection, locks, dry_run=True, report=None)
        await (await _migration(runner, principals_setting, dimensions)).run(consent=True, prune=prune)
        return runner.script


@asynccontextmanager
async def _session(dsn: str) -> AsyncIterator[tuple["asyncpg.Connection[asyncpg.Record]", LockRetries]]:
    connection = await asyncpg.connect(dsn, timeout=30)
    locks = LockRetries(connection, lambda: asyncpg.connect(dsn, timeout=5))
    try:
        # Unqualified names must not resolve to objects that somebody created in schema public.
        await connection.execute("SET search_path = pg_catalog; SET application_name = 'anabranch migrate'")
        # The role or database may have other defaults; definitions are compared as PostgreSQL prints them.
        await connection.execute(
            "SET quote_all_identifiers = off; SET row_security = on; SET default_transaction_read_only = off"
        )
        # The role or database may have time limits too short for an index on a large table, or another isolation level.
        await connection.execute(
            "SELECT set_config(name, '0', false) FROM pg_settings"
            " WHERE name IN ('statement_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout')"
        )
        await connection.execute("SET default_transaction_isolation = 'read committed'")
        yield connection, locks
    except LockUnavailable as error:
        raise MigrationError(str(error)) from error
    finally:
        await locks.close()
        with suppress(TimeoutError):
            await connection.close(timeout=5)


async def _migration(runner: Runner, principals_setting: str, dimensions: int) -> "_Migration":
    schema = await vector_schema(runner.connection)
    try:
        return _Migration(runner, reference(principals_setting, schema, dimensions), schema, dimensions)
    except InvalidReference as error:
        raise MigrationError(str(error)) from error


class _Migration:
    """One run of the migration."""

    def __init__(
        self, runner: Runner, statements: Sequence[Statement], vector_schema: str, dimensions: int
    ) -> None:
        self.runner = runner
        self._statements = statements
        self._vector_schema = vector_schema
        self._dimensions = dimensions
        self._replaced: set[Statement] = set()  # policies; a dry run finds them different again

    async def run(self, *, consent: bool, prune: bool) -> None:
        prerequisites.check_server(self.runner.connection)
        connection = self.runner.connection
        actor = await prerequisites.find_actor(connection, await self._catalog())
        # As the owner: a member without inherited rights can neither read the version nor count rows.
        async with prerequisites.as_owner(connection, actor):
            catalog = await self._catalog()
            locked_out = await locked_out_roles(connection, catalog, actor.owner)
            required = await requirement(connection, locked_out)
        _refuse_newer(catalog)
        await prerequisites.refuse_foreign(self.runner.connection, catalog, self._statements, actor.owner)
        prerequisites.check_columns(catalog, self._statements, self._dimensions)
        await self._refuse_restrictions(catalog)
        self._ask(catalog, actor, locked_out, required, consent=consent)
        self.runner.phase("extension, roles, rights")
        await prerequisites.ensure_prerequisites(self.runner, actor)
        await self._act_as(actor)
        _require_version(await self._catalog(), actor)
        await self._tables()
        # Before the triggers: without these indexes, each write to a document would scan the chunks.
        self.runner.phase("indexes that the triggers need")
        await self._indexes(early=True)
        await self._functions_and_triggers()
        await self._policies()
        await self._derived_data()
        self.runner.phase("indexes")
        await self._indexes(early=False)
        await self._protection()
        await self._finish()
        if prune:
            await self._prune()
        await self._replace_partitioned_indexes()
        await self._check_complete()
        self.runner.phase("notes")
        await self._note_earlier_indexes()
        await self._note_creators(actor)
        await self._note_other_triggers()

    async def _catalog(self) -> Catalog:
        return await read_catalog(self.runner.connection)

    async def _missing(self, *kinds: Kind) -> list[Statement]:
        catalog = await self._catalog()
        return [
            statement
            for statement in self._statements
            if statement.kind in kinds and not catalog.has(statement)
        ]

    # Whether to start

    def _is_pending(self, catalog: Catalog) -> bool:
        """Whether there are statements to run, other than those that rebuild derived data."""
        return (
            catalog.version < SCHEMA_VERSION
            or any(
                statement.kind in OBJECT_KINDS and not catalog.has(statement)
                for statement in self._statements
            )
            or any(catalog.differs(old) for version in STEPS for old in replaced_functions(version))
        )

    def _ask(
        self,
        catalog: Catalog,
        actor: prerequisites.Actor,
        locked_out: Sequence[LockedOutRole],
        required: str,
        *,
        consent: bool,
    ) -> None:
        reasons: list[str] = []
        # Do not rely on the version: anyone who planted the tables could have planted a version too.
        if actor.owner not in {actor.login, prerequisites.OWNER} and self._is_pending(catalog):
            reasons.append(
                f"the tables belong to {actor.owner}, which would control row-level security, triggers and functions."
                " Anyone who can create objects in schema public could have created these tables."
                " Check that they belong to your application."
            )
        if locked_out:
            reasons.append("row-level security would be enabled on tables that contain rows:")
            if required and not consent:  # with consent, this run provides it
                reasons.append(f"  first run {required}")
            reasons += [f"  {role}" for role in locked_out]
        if self.runner.dry_run:
            for reason in reasons:
                self.runner.note(reason)
        elif reasons and not consent:
            raise ConsentRequired(
                "nothing was changed. Review the following, then run `anabranch migrate --yes`:\n"
                + "\n".join(reasons)
            )
        elif reasons:
            for reason in reasons:
                self.runner.say(f"note: {reason}")

    async def _refuse_restrictions(self, catalog: Catalog) -> None:
        """Such policies would hide stale rows from this run as well."""
        found = await restrictions(self.runner.connection, catalog)
        if found:
            raise MigrationError(
                "nothing was changed: policies would hide rows from the triggers:\n"
                + "\n".join(f"{finding.detail}: {finding.remedy}" for finding in found)
            )

    async def _act_as(self, actor: prerequisites.Actor) -> None:
        connection = self.runner.connection
        set_role = [f"SET ROLE {quoted(actor.owner)}"] if actor.owner != actor.login else []
        set_role.append(f"SET search_path = pg_catalog, {self._vector_schema}")
        self.runner.preamble(set_role)
        if actor.owner == actor.login or await prerequisites.role_exists(connection, actor.owner):
            for statement in set_role:
                await connection.execute(statement)

    # Phases

    async def _tables(self) -> None:
        self.runner.phase("tables and columns")
        missing = await self._missing("table", "column", "storage")
        # All columns of a table together: each ALTER TABLE locks its partitions one after another.
        for _, group in groupby(missing, lambda statement: (statement.file, statement.table)):
            of_table = list(group)
            await self.runner.transaction(
                [statement.sql for statement in of_table], *(_done(statement) for statement in of_table)
            )
            if any(statement.kind == "storage" and statement.definition == "PLAIN" for statement in of_table):
                await self._note_old_rows()

    async def _functions_and_triggers(self) -> None:
        """Replace all at once, with the version.

        So no write fires a mix of old and new triggers, and no worker finds functions of another version than the
        recorded one, which it would refuse.
        """
        self.runner.phase("functions and triggers")
        functions, created = await self._function_statements()
        triggers, changes = await self._trigger_statements()
        if functions or triggers:
            lock = [_LOCKED_FOR_TRIGGERS] if triggers else []
            await self.runner.transaction([*lock, *functions, *triggers], *created, *changes)

    async def _function_statements(self) -> tuple[list[str], list[str]]:
        """The statements that replace functions, and what to report."""
        if not (functions := await self._missing("function", "revoke")):
            return [], []
        # In one transaction with the REVOKE, so that no other role can ever call them. If the tables are protected,
        # with the GRANT too: an older release's workers inspect every function of these names.
        rights = [
            statement
            for statement in self._statements
            if statement.kind == "revoke" or (statement.kind == "grant" and " ON FUNCTION" in statement.sql)
        ]
        if await self._missing("enable", "force"):
            rights = [statement for statement in rights if statement.kind == "revoke"]
        created = [statement for statement in functions if statement.kind == "function"]
        # With the policy that reads the principals: if the functions set another setting than it reads, searches find
        # nothing.
        policies = (await self._catalog()).policies
        self._replaced = {
            statement
            for statement in await self._missing("policy")
            if (statement.table, statement.name) in policies and "current_setting" in statement.definition
        }
        return [
            *(statement.sql for statement in [*created, *rights]),
            *(sql for statement in self._replaced for sql in _replace_policy(statement)),
        ], [_done(statement) for statement in [*created, *self._replaced]]

    async def _trigger_statements(self) -> tuple[list[str], list[str]]:
        """The statements that replace triggers, run the steps and record the version, and what to report."""
        catalog = await self._catalog()
        missing = await self._missing("trigger")
        pending = catalog.version < SCHEMA_VERSION
        # A new store needs no steps: it never had what they change. In any other store, functions that differ from what
        # a step left behind come from the `migrate` of an older release that has run again.
        changed: list[str] = []
        for version in STEPS:
            if 0 < catalog.version < version:
                changed += steps(version)
            else:
                changed += [old.sql for old in replaced_functions(version) if catalog.differs(old)]
        statements = list(changed)
        for statement in missing:
            found = catalog.triggers.get((statement.table, statement.name))
            if found is not None and found.constraint:
                statements.append(f"DROP TRIGGER {statement.name} ON public.{statement.table}")
            statements.append(statement.sql)
            if found is not None and not found.enabled:
                statements.append(f"ALTER TABLE public.{statement.table} ENABLE TRIGGER {statement.name}")
        if pending:
            oldest = max(catalog.oldest_worker, SCHEMA_VERSION - 1) if catalog.version else SCHEMA_VERSION
            statements.append(
                f"INSERT INTO public.{VERSION_TABLE} (version, oldest_worker)"  # noqa: S608  # constant names
                f" VALUES ({SCHEMA_VERSION}, {oldest}) ON CONFLICT DO NOTHING"
            )
        return statements, [
            *(_done(statement) for statement in missing),
            *([f"recorded schema version {SCHEMA_VERSION}"] if pending else []),
            *(["replaced objects that an older release created again"] if changed and not pending else []),
        ]

    async def _indexes(self, *, early: bool) -> None:
        catalog = await self._catalog()
        for statement in self._statements:
            if (
                statement.kind == "index"
                and (statement.file[:3] <= _LAST_EARLY_FILE) == early
                and catalog.index_for(statement) is None
            ):
                await indexes.build(self.runner, catalog, statement, in_use=_in_use(catalog))

    async def _policies(self) -> None:
        self.runner.phase("policies")
        for statement in await self._missing("policy"):
            if statement not in self._replaced:
                await self.runner.transaction(_replace_policy(statement), _done(statement))

    async def _derived_data(self) -> None:
        self.runner.phase("derived data")
        if not self.runner.dry_run:
            await derivation.rebuild(self.runner)
        elif await self._may_be_stale():
            self.runner.note(
                "in batches of about 200 ms, until no row is stale:\n"
                "SELECT public.anabranch_rebuild_documents(ids of public.anabranch_stale_documents());\n"
                "SELECT public.anabranch_rebuild_chunks(ids of …_stale_chunks(), …_topics(), …_metadata());"
            )

    async def _may_be_stale(self) -> bool:
        catalog = await self._catalog()
        if await self._missing("table", "column", "function", "trigger") or catalog.version < SCHEMA_VERSION:
            return _in_use(catalog)
        return bool(await derivation.differences(self.runner.connection))

    async def _protection(self) -> None:
        """Grant rights only after row-level security: no reader may read a table that is not protected yet."""
        self.runner.phase("row-level security")
        missing = await self._missing("enable", "force")
        for table in dict.fromkeys(statement.table for statement in missing):
            of_table = [statement for statement in missing if statement.table == table]
            await self.runner.transaction(
                [statement.sql for statement in of_table], *(_done(statement) for statement in of_table)
            )
        self.runner.phase("rights")
        grants = await self._missing("grant")
        if grants:
            await self.runner.transaction(
                [statement.sql for statement in grants],
                "granted anabranch_reader and anabranch_writer the rights they need",
            )

    async def _finish(self) -> None:
        self.runner.phase("planner statistics")
        for statement in self._statements:
            if statement.kind == "analyze" and self.runner.worked:
                await self.runner.alone(statement.sql)

    async def _prune(self) -> None:
        self.runner.phase("objects that only older workers need")
        catalog = await self._catalog()
        for version in STEPS:
            names = {statement.name for statement in replaced_functions(version)}
            if catalog.oldest_worker >= version and not any(
                found.name in names for found in catalog.functions
            ):
                continue
            # Not lower: an older release's `migrate` may have created again what an earlier run removed.
            record = (
                f"UPDATE public.{VERSION_TABLE} SET oldest_worker = {version}"  # noqa: S608  # constant names
                f" WHERE version = {SCHEMA_VERSION} AND oldest_worker < {version}"
            )
            await self.runner.transaction(
                [*steps(version, prune=True), record],
                f"removed objects that only workers before schema version {version} needed",
            )

    async def _replace_partitioned_indexes(self) -> None:
        """Build what replaces an earlier release's index of a partitioned table, last: it may take hours.

        By hand it would take a statement for each partition; for other tables, a note has the statements.
        """
        self.runner.phase("indexes that replace an earlier release's")
        catalog = await self._catalog()
        for statement in self._statements:
            if (
                statement.kind == "index"
                and _is_partitioned(catalog, statement)
                and (earlier := catalog.earlier_index_for(statement)) is not None
                and catalog.index_for(statement) == earlier
            ):
                await indexes.build(self.runner, catalog, statement, in_use=_in_use(catalog))

    async def _check_complete(self) -> None:
        """Check the result: IF NOT EXISTS, or a GRANT without the right to grant, may do nothing without an error."""
        if self.runner.dry_run:
            return
        missing = await self._missing(*OBJECT_KINDS)
        if missing:
            raise MigrationError(
                "these statements had no effect: another object may have the same name, or only a superuser may run"
                " them:\n" + "\n".join(f"{statement.sql};" for statement in missing)
            )

    # Notes

    async def _note_old_rows(self) -> None:
        if not self.runner.dry_run and await self.runner.connection.fetchval(
            "SELECT EXISTS (SELECT FROM public.document_chunks WHERE embedding IS NOT NULL)"
        ):
            self.runner.say(
                "note: existing embeddings stay out of line, which makes searches slower. To move them into their"
                " rows, run VACUUM FULL public.document_chunks; (locks the table)"
            )

    async def _note_earlier_indexes(self) -> None:
        catalog = await self._catalog()
        for statement in self._statements:
            if statement.kind != "index" or (earlier := catalog.earlier_index_for(statement)) is None:
                continue
            partitioned = _is_partitioned(catalog, statement)
            if catalog.index_for(statement) != earlier:
                self.runner.say(_drop_earlier(earlier, statement, partitioned=partitioned))
            elif not partitioned:
                self.runner.say(_build_newer(earlier, statement, self._vector_schema))

    async def _note_creators(self, actor: prerequisites.Actor) -> None:
        for role in await prerequisites.creators(self.runner.connection, actor.owner):
            self.runner.say(
                f"note: {role} may create objects in schema public. If it does not need to, run"
                f" REVOKE CREATE ON SCHEMA public FROM {role};"
            )

    async def _note_other_triggers(self) -> None:
        for finding in await other_triggers(self.runner.connection, await self._catalog()):
            self.runner.say(f"note: {finding.detail}: {finding.remedy}")


def _refuse_newer(catalog: Catalog) -> None:
    if catalog.version > SCHEMA_VERSION:
        raise MigrationError(
            f"the store has schema version {catalog.version}, but this release has {SCHEMA_VERSION}:"
            " run `anabranch migrate` of the newer release"
        )


def _require_version(catalog: Catalog, actor: prerequisites.Actor) -> None:
    _refuse_newer(catalog)
    if catalog.version == UNREADABLE:
        owner = quoted(actor.owner)
        raise MigrationError(
            f"{actor.owner} may not read the schema version. As a superuser, run"
            f" GRANT USAGE ON SCHEMA public TO {owner}; GRANT SELECT ON public.{VERSION_TABLE} TO {owner};"
        )


def _build_newer(earlier: Index, statement: Statement, vector_schema: str) -> str:
    """A new index may take hours to build, so the operator chooses when."""
    create = statement.sql.replace("CREATE INDEX IF NOT EXISTS", "CREATE INDEX CONCURRENTLY", 1)
    # The DROP: an interrupted build leaves an invalid index.
    return (
        f"note: the index {earlier.name} of {statement.table} still works, but this release's is half as large and"
        " finds more of the nearest rows. Build it, in one session:\n"
        f"SET search_path = pg_catalog, {vector_schema};\n"
        f"DROP INDEX CONCURRENTLY IF EXISTS public.{statement.name};\n"
        f"{create};\n"
        "Then run `anabranch migrate` again: if the new index is complete, it prints how to drop the old one"
    )


def _drop_earlier(earlier: Index, statement: Statement, *, partitioned: bool) -> str:
    name = f"public.{quoted(earlier.name)}"
    # PostgreSQL cannot drop a partitioned table's index concurrently.
    drop = (
        f"SET lock_timeout = '{LOCK_TIMEOUT}';\nDROP INDEX {name};"
        if partitioned
        else f"DROP INDEX CONCURRENTLY {name};"
    )
    return (
        f"note: only workers of an earlier release still need the index {earlier.name} of {statement.table}. When all"
        " of them are upgraded, and the new index has been complete for two minutes, so that every worker has noticed"
        f" it, drop the old one:\n{drop}"
    )


def _replace_policy(statement: Statement) -> list[str]:
    return [f"DROP POLICY IF EXISTS {statement.name} ON public.{statement.table}", statement.sql]


def _done(statement: Statement) -> str:
    storage = statement.definition.lower() if statement.kind == "storage" else ""
    return _DONE[statement.kind].format(table=statement.table, name=statement.name, storage=storage)


def _is_partitioned(catalog: Catalog, statement: Statement) -> bool:
    relation = catalog.relations.get(statement.table)
    return relation is not None and relation.partitioned


def _in_use(catalog: Catalog) -> bool:
    return any(relation.holds_pages for name, relation in catalog.relations.items() if name != VERSION_TABLE)
