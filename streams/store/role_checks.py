"""Checks that the worker's role is subject to the policies, and can read what it needs and nothing more."""

from typing import Final

from streams.store.catalog import quoted
from streams.store.findings import MIGRATE, Finding
from streams.store.prerequisites import creators
from streams.store.reference import executable_functions
from streams.store.view import StoreView

__all__ = ["privileges", "role_is_harmless"]

_OWN_ROLE: Final = "CREATE ROLE anabranch_worker LOGIN PASSWORD '…' IN ROLE anabranch_reader;"
#: Predefined roles equivalent to a superuser: they can access the server's files or run programs on it.
_SERVER_ROLES: Final = frozenset(
    {"pg_read_server_files", "pg_write_server_files", "pg_execute_server_program"}
)
_ATTRIBUTES: Final = {
    "rolsuper": ("is a superuser", "NOSUPERUSER"),
    "rolbypassrls": ("has BYPASSRLS", "NOBYPASSRLS"),
    "rolcreaterole": ("has CREATEROLE: it could give itself another role", "NOCREATEROLE"),
    "rolreplication": ("has REPLICATION: it could read every row from the log", "NOREPLICATION"),
}


async def role_is_harmless(view: StoreView) -> list[Finding]:
    # SET ROLE allows every role that this role is a member of, inherited or not; and a connection that was opened
    # as another role can return to it.
    rows = await view.connection.fetch(
        "SELECT r.oid, r.rolname::text AS name,"
        "       r.rolsuper, r.rolbypassrls, r.rolcreaterole, r.rolreplication,"
        "       r.rolname IN (current_user, session_user) AS itself"
        " FROM pg_roles r"
        " WHERE r.rolname IN (current_user, session_user)"
        "    OR pg_has_role(current_user, r.oid, 'MEMBER') OR pg_has_role(session_user, r.oid, 'MEMBER')"
        " ORDER BY itself DESC, name"
    )
    if any(row["itself"] and row["rolsuper"] for row in rows):
        # A superuser counts as a member of everything: one finding is enough.
        detail = f"role {view.role} is a superuser: policies do not apply to it"
        return [Finding("role", "refused", detail, _OWN_ROLE)]
    findings = []
    owners = await _owners(view)
    for row in rows:
        name, itself = row["name"], row["itself"]
        who = f"role {name}" if itself else f"role {view.role} is a member of {name}, which"
        revoke_sql = f"REVOKE {quoted(name)} FROM {quoted(view.role)};"
        for attribute, (problem, option) in _ATTRIBUTES.items():
            if row[attribute]:
                remedy = f"ALTER ROLE {quoted(name)} {option};" if itself else revoke_sql
                findings.append(Finding("role", "refused", f"{who} {problem}", remedy))
        owned = sorted(table for table, owner in owners.items() if owner == row["oid"])
        if owned:
            detail = f"{who} owns {', '.join(owned)}: it could remove the policies"
            findings.append(Finding("role", "refused", detail, _OWN_ROLE if itself else revoke_sql))
        if name == "anabranch_writer" or name in _SERVER_ROLES:
            what = "can read every row" if name == "anabranch_writer" else "can access the server's files"
            findings.append(Finding("role", "refused", f"{who} {what}", revoke_sql))
        if name == "pg_read_all_data":
            detail = f"{who} can read every table of this database; the policies still apply to it"
            findings.append(Finding("role", "warning", detail, revoke_sql))
    return findings


async def _owners(view: StoreView) -> dict[str, int]:
    rows = await view.connection.fetch(
        "SELECT relname::text AS table, relowner FROM pg_class WHERE oid = ANY ($1::oid[])",
        list(view.oids.values()),
    )
    return {row["table"]: row["relowner"] for row in rows}


async def privileges(view: StoreView) -> list[Finding]:
    findings = []
    if not await view.connection.fetchval("SELECT has_schema_privilege('public', 'USAGE')"):
        detail = f"role {view.role} may not use schema public"
        remedy = "GRANT USAGE ON SCHEMA public TO anabranch_reader;"
        findings.append(Finding("privileges", "unready", detail, remedy))
    readable = await view.connection.fetch(
        "SELECT t.name AS table, a.attname::text AS column"
        " FROM unnest($1::oid[], $2::text[]) t (oid, name)"
        " JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped"
        " WHERE has_column_privilege(t.oid, a.attnum, 'SELECT')",
        list(view.oids.values()),
        list(view.oids),
    )
    allowed = {(row["table"], row["column"]) for row in readable}
    for table, columns in view.readable.items():
        missing = [column for column in columns if (table, column) not in allowed]
        if table in view.oids and missing:
            what = table if len(missing) == len(columns) else f"{table} ({', '.join(missing)})"
            findings.append(_lacks(view, f"read {what}"))
    called = executable_functions(view.reference)
    # Of all signatures: those that an older release's workers call are granted too.
    forbidden = {function.name for function in view.catalog.functions if not function.executable} & called
    if forbidden:
        findings.append(_lacks(view, f"execute {', '.join(sorted(forbidden))}"))
    findings += [*await _principals(view), *await _writable(view), *await _partitions(view)]
    for creator in await creators(view.connection, view.catalog.owner or ""):
        findings.append(
            Finding(
                "privileges",
                "warning",
                f"{creator} may create objects in schema public, which the next `anabranch migrate` could use",
                f"REVOKE CREATE ON SCHEMA public FROM {creator};",
            )
        )
    return findings


def _lacks(view: StoreView, right: str) -> Finding:
    remedy = f"GRANT anabranch_reader TO {quoted(view.role)}; (if it already has that role, run {MIGRATE})"
    return Finding("privileges", "unready", f"role {view.role} may not {right}", remedy)


async def _principals(view: StoreView) -> list[Finding]:
    """Report that the role can read the sets' principals.

    This is only a warning: the policy shows only the caller's own sets, and workers do not return them. Members of
    pg_read_all_data already have a finding for everything they can read.
    """
    columns = await view.connection.fetchval(
        "SELECT string_agg(attname, ', ' ORDER BY attname DESC) FROM pg_attribute"
        " WHERE attrelid = $1::oid AND attname IN ('principals', 'digest') AND NOT attisdropped"
        "   AND has_column_privilege(attrelid, attnum, 'SELECT') AND NOT pg_has_role('pg_read_all_data', 'USAGE')",
        view.oids.get("access_sets"),
    )
    if not columns:
        return []
    return [
        Finding(
            "privileges",
            "warning",
            f"role {view.role} may read access_sets ({columns}): it shows who else can read the caller's documents",
            _revoke(view, "SELECT", "public.access_sets") + f", then {MIGRATE}",
        )
    ]


#: The privileges that a role has on a table, as REVOKE lists them.
_RIGHTS: Final = """
    array_to_string(ARRAY[
      CASE WHEN has_any_column_privilege({oid}, 'INSERT') THEN 'INSERT' END,
      CASE WHEN has_any_column_privilege({oid}, 'UPDATE') THEN 'UPDATE' END,
      CASE WHEN has_table_privilege({oid}, 'DELETE') THEN 'DELETE' END,
      CASE WHEN has_table_privilege({oid}, 'TRUNCATE') THEN 'TRUNCATE' END,
      CASE WHEN has_table_privilege({oid}, 'TRIGGER') THEN 'TRIGGER' END], ', ')
"""

_PARTITIONS: Final = f"""
    WITH RECURSIVE tree (oid, root) AS (
      SELECT i.inhrelid, t.name
      FROM pg_inherits i JOIN unnest($1::oid[], $2::text[]) t (oid, name) ON i.inhparent = t.oid
      UNION
      SELECT i.inhrelid, tree.root FROM pg_inherits i JOIN tree ON i.inhparent = tree.oid
    ), rights AS (
      SELECT tree.root, format('%s.%I', c.relnamespace::regnamespace, c.relname) AS name,
             concat_ws(', ', CASE WHEN has_any_column_privilege(c.oid, 'SELECT') THEN 'SELECT' END,
                       nullif({_RIGHTS.format(oid="c.oid")}, '')) AS rights
      FROM tree JOIN pg_class c ON c.oid = tree.oid
    )
    SELECT root, rights, string_agg(name, ', ' ORDER BY name) AS names
    FROM rights WHERE rights <> '' GROUP BY root, rights ORDER BY root, rights
"""  # noqa: S608  # constant names


async def _writable(view: StoreView) -> list[Finding]:
    rows = await view.connection.fetch(
        f"SELECT t.name, {_RIGHTS.format(oid='t.oid')} AS rights"  # noqa: S608  # constant names
        " FROM unnest($1::oid[], $2::text[]) t (oid, name)",
        [found.oid for found in view.catalog.relations.values()],
        list(view.catalog.relations),
    )
    return [
        Finding(
            "privileges",
            "refused",
            f"role {view.role} may write to {row['name']} ({row['rights']}), but a worker only reads",
            _revoke(view, row["rights"], f"public.{row['name']}"),
        )
        for row in rows
        if row["rights"]
    ]


async def _partitions(view: StoreView) -> list[Finding]:
    """Report direct access to partitions, to which PostgreSQL does not apply the parent table's policies."""
    rows = await view.connection.fetch(
        _PARTITIONS,
        list(view.oids.values()),
        list(view.oids),
    )
    return [
        Finding(
            "privileges",
            "refused",
            f"role {view.role} may use {row['names']} directly ({row['rights']}):"
            f" the policies of {row['root']} do not apply there",
            _revoke(view, row["rights"], row["names"]),
        )
        for row in rows
    ]


def _revoke(view: StoreView, rights: str, tables: str) -> str:
    return f"REVOKE {rights} ON {tables} FROM …; (from {view.role}, PUBLIC, or the role that grants it)"
