"""Checks the store before a worker serves events, and reports what an operator should know.

The checks run as the worker's own role and use only catalogs that any role may read. The requirements come from the
reference schema itself (``schemas/postgres``), so that the two cannot diverge.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from streams.store.catalog import UNREADABLE, Connection, Trigger, quoted
from streams.store.findings import MIGRATE, Finding, Level, rename_column, set_dimensions
from streams.store.owner_checks import other_triggers
from streams.store.policy_checks import isolation, policies
from streams.store.prerequisites import OLDEST_PGVECTOR, OLDEST_SERVER, SOUND_PGVECTOR, parse_version
from streams.store.reference import (
    DEFAULT_DIMENSIONS,
    INTERNAL_TABLES,
    SCHEMA_VERSION,
    SEARCHES,
    STEPS,
    TABLES,
    Statement,
    column_types,
    is_compatible_type,
    replaced_functions,
)
from streams.store.role_checks import privileges, role_is_harmless
from streams.store.view import StoreView, load_view

__all__ = ["Finding", "Level", "inspect"]

NEWEST_SERVER_KNOWN: Final = 18

_NEED_A_HARMLESS_ROLE: Final = frozenset({"privileges", "policies", "isolation", "schema"})

_Check: TypeAlias = Callable[[StoreView], Awaitable[list[Finding]]]


async def inspect(
    connection: Connection, *, principals_setting: str, dimensions: int = DEFAULT_DIMENSIONS
) -> list[Finding]:
    """Check the store as the worker would use it.

    Args:
        connection: logged in as the worker; its state is restored afterwards.
        principals_setting: the setting in which the worker passes the requesting principals.
        dimensions: of the worker's embeddings.

    Returns:
        At least one finding per check, including ``ok``.
    """
    view = await load_view(connection, principals_setting, dimensions)
    findings: list[Finding] = []
    for name, check, ok_detail in _checks(view):
        if name in _NEED_A_HARMLESS_ROLE and any(
            f.check == "role" and f.level == "refused" for f in findings
        ):
            # Such a role can do anything: report this one finding; the remedy is to use another role.
            continue
        findings += await check(view) or [Finding(name, "ok", ok_detail)]
    return findings


def _checks(view: StoreView) -> list[tuple[str, _Check, str]]:
    """Each check with its name, and the text if it finds no problem."""
    return [
        ("server", _server, "the PostgreSQL version is supported"),
        ("extension", _extension, "pgvector is installed, and new enough"),
        ("tables", _tables, "all tables exist"),
        ("columns", _columns, "all columns exist, with the right types"),
        ("role", role_is_harmless, f"role {view.role} is subject to the policies"),
        ("privileges", privileges, f"role {view.role} can read what it needs, and cannot write"),
        ("row_level_security", _row_level_security, "row-level security is enabled and forced"),
        ("policies", policies, f"every policy depends on {view.setting}"),
        ("isolation", isolation, "without principals, no rows are visible"),
        ("schema", _schema, f"the schema version is {SCHEMA_VERSION}, the same as this release's"),
        ("functions", _functions, "all functions match this release and belong to the tables' owner"),
        ("triggers", _triggers, "derived access follows the grants"),
        ("storage", _storage, f"embeddings are stored {_STORED[_storage_statement(view).definition]}"),
        ("indexes", _indexes, "all indexes exist"),
    ]


# Completeness


async def _server(view: StoreView) -> list[Finding]:
    version = view.connection.get_server_version().major
    if version < OLDEST_SERVER:
        detail = f"PostgreSQL {version} is too old"
        return [Finding("server", "unready", detail, f"upgrade to PostgreSQL {OLDEST_SERVER} or later")]
    if version > NEWEST_SERVER_KNOWN:
        detail = f"PostgreSQL {version} is newer than any version tested with this release"
        return [Finding("server", "warning", detail, "check for a newer release of anabranch")]
    return []


async def _extension(view: StoreView) -> list[Finding]:
    row = await view.connection.fetchrow(
        "SELECT extversion AS version, extnamespace::regnamespace::text AS schema,"
        "       has_schema_privilege(extnamespace, 'USAGE') AS usable"
        " FROM pg_extension WHERE extname = 'vector'"
    )
    oldest = ".".join(map(str, OLDEST_PGVECTOR))
    if row is None:
        return [
            Finding("extension", "unready", "pgvector is missing", "as a superuser: CREATE EXTENSION vector;")
        ]
    if parse_version(row["version"]) < OLDEST_PGVECTOR:
        detail = f"pgvector {row['version']} is too old: before {oldest}, filters would miss rows"
        return [Finding("extension", "unready", detail, "as a superuser: ALTER EXTENSION vector UPDATE;")]
    if not row["usable"]:
        detail = f"pgvector is in schema {row['schema']}, which role {view.role} may not use"
        remedy = f"GRANT USAGE ON SCHEMA {row['schema']} TO anabranch_reader;"
        return [Finding("extension", "unready", detail, remedy)]
    if parse_version(row["version"]) < SOUND_PGVECTOR:
        sound = ".".join(map(str, SOUND_PGVECTOR))
        detail = f"pgvector {row['version']} may corrupt an HNSW index while it is vacuumed: searches would miss rows"
        remedy = (
            f"install pgvector {sound} or later on the server; as a superuser: ALTER EXTENSION vector UPDATE;"
            " then REINDEX the vector index"
        )
        return [Finding("extension", "warning", detail, remedy)]
    return []


async def _tables(view: StoreView) -> list[Finding]:
    missing = [name for name in (*TABLES, *INTERNAL_TABLES) if name not in view.catalog.relations]
    findings = [Finding("tables", "unready", f"table public.{name} is missing", MIGRATE) for name in missing]
    shadowed = await view.connection.fetch(
        "SELECT t.name, relnamespace::regnamespace || '.' || relname AS found"
        " FROM unnest($1::oid[], $2::text[]) t (oid, name)"
        " LEFT JOIN pg_class c ON c.oid = to_regclass(t.name)"
        " WHERE c.oid IS DISTINCT FROM t.oid",
        list(view.oids.values()),
        list(view.oids),
    )
    return findings + [
        Finding(
            "tables",
            "unready",
            f"the role's search_path resolves {row['name']} to {row['found'] or 'nothing'}, not to schema public",
            f"ALTER ROLE {quoted(view.role)} SET search_path = public;",
        )
        for row in shadowed
    ]


async def _columns(view: StoreView) -> list[Finding]:
    findings = []
    types = column_types(view.dimensions)
    stored = view.catalog.dimensions
    added = {(statement.table, statement.name) for statement in view.of_kind("column")}
    for table in view.oids:
        expected = {**dict.fromkeys(view.readable.get(table, ()), ""), **types.get(table, {})}
        for column, type_ in expected.items():
            found, _ = view.catalog.columns.get((table, column), (None, ""))
            if found is None:
                remedy = MIGRATE if (table, column) in added else rename_column(table, column)
                findings.append(Finding("columns", "unready", f"column {table}.{column} is missing", remedy))
            elif type_ and not is_compatible_type(found, type_):
                detail = f"column {table}.{column} is {found}, not {type_}"
                remedy = f"ALTER TABLE public.{table} ALTER COLUMN {column} TYPE {type_} USING …;"
                if column == "embedding" and stored is not None:
                    detail += (
                        f": the store's embeddings have {stored} dimensions, but ANABRANCH_EMBEDDING_DIMENSIONS is"
                        f" {view.dimensions}"
                    )
                    remedy = set_dimensions(stored)
                findings.append(Finding("columns", "unready", detail, remedy))
    return findings


async def _schema(view: StoreView) -> list[Finding]:
    """Compare the schema versions of store and worker."""
    version, oldest = view.catalog.version, view.catalog.oldest_worker
    if version == UNREADABLE:
        detail = f"role {view.role} may not read the schema version"
        return [Finding("schema", "unready", detail, f"GRANT anabranch_reader TO {quoted(view.role)};")]
    if version < SCHEMA_VERSION:
        detail = f"the schema version is {version}, older than this release's {SCHEMA_VERSION}"
        return [Finding("schema", "unready", detail, MIGRATE)]
    if oldest > SCHEMA_VERSION:
        detail = f"the schema supports workers of version {oldest} and later; this one has version {SCHEMA_VERSION}"
        return [Finding("schema", "refused", detail, "upgrade this worker")]
    if version > SCHEMA_VERSION:
        detail = f"the schema version is {version}, newer than this release's {SCHEMA_VERSION}, but still compatible"
        return [Finding("schema", "warning", detail, "upgrade this worker")]
    return []


# Safety


async def _row_level_security(view: StoreView) -> list[Finding]:
    return [
        Finding(
            "row_level_security",
            "refused",
            f"row-level security on {name} is "
            + ("not forced: its owner sees every row" if found.enabled else "not enabled"),
            MIGRATE,
        )
        for name, found in sorted(view.catalog.relations.items())
        if name in TABLES and not (found.enabled and found.forced)
    ]


async def _functions(view: StoreView) -> list[Finding]:
    """Check the code of triggers and searches.

    A newer release may have changed it; an older one is only reported by its version.
    """
    if view.catalog.version != SCHEMA_VERSION:
        return []
    findings = [
        Finding(
            "functions",
            "refused",
            f"function {function.name}({function.signature}) belongs to {function.owner}, not to the tables' owner",
            f"DROP FUNCTION public.{function.name}({function.signature}); then {MIGRATE}",
        )
        for function in view.catalog.functions
        if function.owner != view.catalog.owner
    ]
    findings += [
        Finding(
            "functions",
            "warning",
            f"function {old.name} was created again by an older release's `migrate`: each write does its work twice",
            MIGRATE,
        )
        for version in STEPS
        for old in replaced_functions(version)
        if view.catalog.differs(old)
    ]
    foreign = {function.name for function in view.catalog.functions if function.owner != view.catalog.owner}
    return findings + [
        _wrong_function(view, statement)
        for statement in view.of_kind("function")
        if statement.name not in foreign and not view.catalog.has(statement)
    ]


def _wrong_function(view: StoreView, statement: Statement) -> Finding:
    name = statement.name
    if statement.file != SEARCHES:
        detail = f"function {name} is missing or altered: revoked grants may stay in force"
        return Finding("functions", "refused", detail, MIGRATE)
    if view.catalog.differs(statement):
        detail = f"function {name} is altered: searches may return wrong rows"
        return Finding("functions", "refused", detail, MIGRATE)
    return Finding("functions", "unready", f"function {name} is missing: searches fail", MIGRATE)


async def _triggers(view: StoreView) -> list[Finding]:
    findings = await other_triggers(view.connection, view.catalog)
    if view.catalog.version < SCHEMA_VERSION:
        return findings
    for statement in view.of_kind("trigger"):
        if statement.table not in view.oids:
            continue
        found = view.catalog.triggers.get((statement.table, statement.name))
        problem = (
            "missing"
            if found is None
            else f"disabled on {found.disabled_on}"
            if not found.enabled
            else "altered"
            if not view.newer and not view.catalog.has(statement)
            else None
        )
        if problem is not None:
            detail = (
                f"trigger {statement.name} of {statement.table} is {problem}: revoked grants stay in force"
            )
            findings.append(Finding("triggers", "refused", detail, MIGRATE))
    return findings + [_later(trigger) for trigger in _later_triggers(view)]


def _later_triggers(view: StoreView) -> list[Trigger]:
    """Report other BEFORE triggers that run after Anabranch's and could change what those have set."""
    own_names = {(statement.table, statement.name) for statement in view.of_kind("trigger")}
    last: dict[str, str] = {}
    for table, name in own_names:
        found = view.catalog.triggers.get((table, name))
        if found is not None and found.before_row:
            last[table] = max(last.get(table, ""), name)
    return [
        trigger
        for key, trigger in sorted(view.catalog.triggers.items())
        if key not in own_names
        and trigger.before_row
        and trigger.enabled
        and trigger.name > last.get(key[0], trigger.name)
    ]


def _later(trigger: Trigger) -> Finding:
    return Finding(
        "triggers",
        "warning",
        f"BEFORE trigger {trigger.name} on {trigger.table} runs after the triggers that set the access: if it changes a"
        " row's document or access set, the write fails",
        f"ALTER TRIGGER {quoted(trigger.name)} ON public.{trigger.table} RENAME TO {quoted('a_' + trigger.name)};",
    )


# Speed


async def _storage(view: StoreView) -> list[Finding]:
    statement = _storage_statement(view)
    if ("document_chunks", "embedding") not in view.catalog.columns or view.catalog.has(statement):
        return []
    if statement.definition == "EXTERNAL":
        detail = (
            f"embeddings of {view.catalog.dimensions} dimensions may not fit into their rows: writes fail"
        )
        return [Finding("storage", "warning", detail, MIGRATE)]
    detail = "embeddings are stored out of line (TOAST): searches take 1.7 to 3.5 times as long"
    return [Finding("storage", "warning", detail, f"{MIGRATE}, then VACUUM FULL public.document_chunks;")]


_STORED: Final = {"PLAIN": "in their rows", "EXTERNAL": "out of line, because rows have no room for them"}


def _storage_statement(view: StoreView) -> Statement:
    (statement,) = view.of_kind("storage")
    return statement


async def _indexes(view: StoreView) -> list[Finding]:
    findings = []
    for statement in view.of_kind("index"):
        if statement.table in view.oids and view.catalog.index_for(statement) is None:
            definition = statement.definition
            cost = "every search scans the table" if "hnsw" in definition else "some searches are slower"
            detail = f"{statement.table} has no valid index {definition}: {cost}"
            # Not the CREATE INDEX: an interrupted build leaves an invalid index with that name.
            findings.append(Finding("indexes", "warning", detail, MIGRATE))
    return findings
