"""What a worker demands of its store before it answers anybody, and what an operator should know.

Everything is read from catalogs that any role may read, as the worker's own role. What must be there is
taken from the reference schema itself (``schemas/postgres``), so that the two cannot drift apart. A back end
may have policies of its own: each of them then has to depend on the configured setting, directly, through a
function, or through a table that is itself guarded so.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import asyncpg

from streams.store.migrate import (
    COLUMN_TYPES,
    INDEX,
    OLDEST_PGVECTOR,
    OLDEST_SERVER,
    PRESENT_INDEXES,
    QUALIFIERS,
    TABLES,
    fits,
    parse_version,
    quoted,
    statements,
)

__all__ = ["Finding", "Level", "inspect"]

#: ``refused``: unsafe, a worker must not run. ``unready``: it cannot work yet, but nothing leaks; try again.
#: ``warning``: it works, slower or less tidily than it should.
Level = Literal["ok", "warning", "unready", "refused"]

Connection: TypeAlias = (
    "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
)

NEWEST_SERVER_KNOWN: Final = 18

_MIGRATE: Final = "anabranch migrate"
_CANARY_TIMEOUT: Final = "5s"
_OWN_ROLE: Final = "CREATE ROLE anabranch_worker LOGIN PASSWORD '…' IN ROLE anabranch_reader;"
#: Predefined roles that amount to a superuser: they reach the server's files, or run programs on it.
_SERVER_ROLES: Final = frozenset(
    {"pg_read_server_files", "pg_write_server_files", "pg_execute_server_program"}
)
_NEED_A_HARMLESS_ROLE: Final = frozenset({"privileges", "policies", "isolation"})
_ATTRIBUTES: Final = {
    "rolsuper": ("is a superuser", "NOSUPERUSER"),
    "rolbypassrls": ("has BYPASSRLS", "NOBYPASSRLS"),
    "rolcreaterole": ("has CREATEROLE: it could give itself another role", "NOCREATEROLE"),
    "rolreplication": ("has REPLICATION: it could read every row from the log", "NOREPLICATION"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        check: what was looked at; stable, for machines.
        level: what it means for a worker.
        detail: what was found, in one line.
        remedy: a command or SQL; empty where nothing is wrong.
    """

    check: str
    level: Level
    detail: str
    remedy: str = ""


async def inspect(connection: Connection, *, principals_setting: str) -> list[Finding]:
    """Looks at the store as a worker would use it.

    Args:
        connection: logged in as the worker; it is left as it was.
        principals_setting: the setting that the worker puts its askers into.

    Returns:
        At least one finding for each check, good ones included.
    """
    inspection = _Inspection(connection, principals_setting)
    await inspection.look_around()
    findings: list[Finding] = []
    for name, check, fine in inspection.checks():
        if name in _NEED_A_HARMLESS_ROLE and any(
            f.check == "role" and f.level == "refused" for f in findings
        ):
            # Such a role may do what it likes: that is one finding, and its remedy is another role.
            continue
        findings += await check() or [Finding(name, "ok", fine)]
    return findings


class _Reference:
    """What the reference schema demands, read from it."""

    def __init__(self, principals_setting: str) -> None:
        self.policies: dict[tuple[str, str], str] = {}
        self.triggers: list[tuple[str, str]] = []
        self.indexes: list[tuple[str, str, str]] = []
        self.columns: dict[str, list[str]] = {}
        for statement in statements(principals_setting):
            if match := _POLICY.match(statement):
                self.policies[match["table"], match["name"]] = _flat(match["expression"])
            elif match := _TRIGGER.match(statement):
                self.triggers.append((match["table"], match["name"]))
            elif match := INDEX.match(statement):
                self.indexes.append((match["table"], match["definition"], statement))
            elif match := _READ.match(statement):
                self.columns[match["table"]] = re.findall(r"\w+", match["columns"])


_POLICY: Final = re.compile(
    r"CREATE POLICY (?P<name>\w+) ON public\.(?P<table>\w+) "
    r".*?USING \((?P<expression>.*?)\)(?: WITH CHECK .*)?$",
    re.DOTALL,
)
_TRIGGER: Final = re.compile(
    r"CREATE OR REPLACE TRIGGER (?P<name>\w+) .*?ON public\.(?P<table>\w+)", re.DOTALL
)
_READ: Final = re.compile(
    r"GRANT SELECT \((?P<columns>[^)]*)\)\s+ON public\.(?P<table>\w+) TO anabranch_reader"
)


def _flat(expression: str) -> str:
    return re.sub(r"\bpublic\.|\s", "", expression)


@dataclass(frozen=True)
class _Policy:
    table: int
    name: str
    applies: bool
    expression: str
    sources: str  # of the functions that it calls
    guarded_tables: list[int]  # those that it names and that have policies themselves


class _Inspection:
    """One look at a store."""

    def __init__(self, connection: Connection, principals_setting: str) -> None:
        self._connection = connection
        self._setting = principals_setting
        self._reference = _Reference(principals_setting)
        self._mentions_setting = re.compile(
            rf"current_setting\s*\(\s*'{re.escape(principals_setting)}'", re.IGNORECASE
        )
        self._role = ""
        self._oids: dict[str, int] = {}

    async def look_around(self) -> None:
        # Not to_regclass: it fails where the role may not use the schema.
        rows = await self._connection.fetch(
            "SELECT relname::text AS name, oid FROM pg_class"
            " WHERE relnamespace = 'public'::regnamespace AND relname = ANY ($1::text[])",
            list(TABLES),
        )
        self._oids = {row["name"]: row["oid"] for row in rows}
        self._role = await self._connection.fetchval("SELECT current_user::text")

    def checks(self) -> list[tuple[str, Callable[[], Awaitable[list[Finding]]], str]]:
        """Each check with its name, and what to say where it finds nothing."""
        return [
            ("server", self._server, "PostgreSQL is of a version that is known to work"),
            ("extension", self._extension, "pgvector is there, and new enough"),
            ("tables", self._tables, "all tables are there"),
            ("columns", self._columns, "all columns are there, of the right types"),
            ("role", self._role_is_harmless, f"role {self._role} is held to the policies"),
            ("privileges", self._privileges, f"role {self._role} may read what it needs, and write nothing"),
            ("row_level_security", self._row_level_security, "row-level security is enabled and forced"),
            ("policies", self._policies, f"every policy depends on {self._setting}"),
            ("triggers", self._triggers, "derived access follows the grants"),
            ("isolation", self._isolation, "without principals no row is visible"),
            ("storage", self._storage, "embeddings are stored in their rows"),
            ("indexes", self._indexes, "all indexes are there"),
        ]

    # Is it there?

    async def _server(self) -> list[Finding]:
        version = self._connection.get_server_version().major
        if version < OLDEST_SERVER:
            detail = f"PostgreSQL {version} is too old"
            return [Finding("server", "unready", detail, f"upgrade to PostgreSQL {OLDEST_SERVER} or later")]
        if version > NEWEST_SERVER_KNOWN:
            detail = f"PostgreSQL {version} is newer than any that this release was tested with"
            return [Finding("server", "warning", detail, "look for a newer release of anabranch")]
        return []

    async def _extension(self) -> list[Finding]:
        row = await self._connection.fetchrow(
            "SELECT extversion AS version, extnamespace::regnamespace::text AS schema,"
            "       to_regtype('vector') IS NOT NULL AS visible"
            " FROM pg_extension WHERE extname = 'vector'"
        )
        oldest = ".".join(map(str, OLDEST_PGVECTOR))
        if row is None:
            return [
                Finding(
                    "extension", "unready", "pgvector is missing", "as a superuser: CREATE EXTENSION vector;"
                )
            ]
        if parse_version(row["version"]) < OLDEST_PGVECTOR:
            detail = f"pgvector {row['version']} is too old: filters would lose rows before {oldest}"
            return [Finding("extension", "unready", detail, "as a superuser: ALTER EXTENSION vector UPDATE;")]
        if not row["visible"]:
            detail = f"pgvector is in schema {row['schema']}, which the role's search_path does not hold"
            remedy = f"ALTER ROLE {quoted(self._role)} SET search_path = public, {row['schema']};"
            return [Finding("extension", "unready", detail, remedy)]
        return []

    async def _tables(self) -> list[Finding]:
        missing = [name for name in TABLES if name not in self._oids]
        findings = [
            Finding("tables", "unready", f"table public.{name} is missing", _MIGRATE) for name in missing
        ]
        shadowed = await self._connection.fetch(
            "SELECT t.name, relnamespace::regnamespace || '.' || relname AS found"
            " FROM unnest($1::oid[], $2::text[]) t (oid, name)"
            " LEFT JOIN pg_class c ON c.oid = to_regclass(t.name)"
            " WHERE c.oid IS DISTINCT FROM t.oid",
            list(self._oids.values()),
            list(self._oids),
        )
        return findings + [
            Finding(
                "tables",
                "unready",
                f"the role's search_path leads {row['name']} to {row['found'] or 'nothing'}, not to public",
                f"ALTER ROLE {quoted(self._role)} SET search_path = public;",
            )
            for row in shadowed
        ]

    async def _columns(self) -> list[Finding]:
        rows = await self._connection.fetch(
            "SELECT attrelid::oid AS table, attname::text AS name,"
            "       regexp_replace(format_type(atttypid, atttypmod), '^.*[.]', '') AS type"
            " FROM pg_attribute WHERE attrelid = ANY ($1::oid[]) AND attnum > 0 AND NOT attisdropped",
            list(self._oids.values()),
        )
        types = {(row["table"], row["name"]): row["type"] for row in rows}
        findings = []
        for table, oid in self._oids.items():
            wanted = dict.fromkeys(self._reference.columns.get(table, ()), "") | COLUMN_TYPES.get(table, {})
            for column, type_ in wanted.items():
                found = types.get((oid, column))
                if found is None:
                    findings.append(
                        Finding("columns", "unready", f"column {table}.{column} is missing", _MIGRATE)
                    )
                elif type_ and not fits(found, type_):
                    detail = f"column {table}.{column} is {found}, not {type_}"
                    remedy = f"ALTER TABLE public.{table} ALTER COLUMN {column} TYPE {type_} USING …;"
                    findings.append(Finding("columns", "unready", detail, remedy))
        return findings

    # Is it safe?

    async def _role_is_harmless(self) -> list[Finding]:
        # SET ROLE leads to every role whose member one is, whatever is inherited; and a connection that began
        # as another role can go back to it.
        rows = await self._connection.fetch(
            "SELECT r.oid, r.rolname::text AS name,"
            "       r.rolsuper, r.rolbypassrls, r.rolcreaterole, r.rolreplication,"
            "       r.rolname IN (current_user, session_user) AS itself"
            " FROM pg_roles r"
            " WHERE r.rolname IN (current_user, session_user)"
            "    OR pg_has_role(current_user, r.oid, 'MEMBER') OR pg_has_role(session_user, r.oid, 'MEMBER')"
            " ORDER BY itself DESC, name"
        )
        if any(row["itself"] and row["rolsuper"] for row in rows):
            # A superuser counts as a member of everything: one finding says it all.
            detail = f"role {self._role} is a superuser: no policy holds it"
            return [Finding("role", "refused", detail, _OWN_ROLE)]
        findings = []
        owners = await self._owners()
        for row in rows:
            name, itself = row["name"], row["itself"]
            who = f"role {name}" if itself else f"role {self._role} is a member of {name}, which"
            leave = f"REVOKE {quoted(name)} FROM {quoted(self._role)};"
            for attribute, (problem, cure) in _ATTRIBUTES.items():
                if row[attribute]:
                    remedy = f"ALTER ROLE {quoted(name)} {cure};" if itself else leave
                    findings.append(Finding("role", "refused", f"{who} {problem}", remedy))
            owned = sorted(table for table, owner in owners.items() if owner == row["oid"])
            if owned:
                detail = f"{who} owns {', '.join(owned)}: it could lift the policies"
                findings.append(Finding("role", "refused", detail, _OWN_ROLE if itself else leave))
            if name == "anabranch_writer" or name in _SERVER_ROLES:
                what = "reads every row" if name == "anabranch_writer" else "reaches the server's files"
                findings.append(Finding("role", "refused", f"{who} {what}", leave))
            if name == "pg_read_all_data":
                detail = f"{who} reads every table of this database; the policies hold it nevertheless"
                findings.append(Finding("role", "warning", detail, leave))
        return findings

    async def _owners(self) -> dict[str, int]:
        rows = await self._connection.fetch(
            "SELECT relname::text AS table, relowner FROM pg_class WHERE oid = ANY ($1::oid[])",
            list(self._oids.values()),
        )
        return {row["table"]: row["relowner"] for row in rows}

    async def _privileges(self) -> list[Finding]:
        findings = []
        if not await self._connection.fetchval("SELECT has_schema_privilege('public', 'USAGE')"):
            detail = f"role {self._role} may not use schema public"
            remedy = "GRANT USAGE ON SCHEMA public TO anabranch_reader;"
            findings.append(Finding("privileges", "unready", detail, remedy))
        readable = await self._connection.fetch(
            "SELECT t.name AS table, a.attname::text AS column"
            " FROM unnest($1::oid[], $2::text[]) t (oid, name)"
            " JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped"
            " WHERE has_column_privilege(t.oid, a.attnum, 'SELECT')",
            list(self._oids.values()),
            list(self._oids),
        )
        allowed = {(row["table"], row["column"]) for row in readable}
        for table, columns in self._reference.columns.items():
            missing = [column for column in columns if (table, column) not in allowed]
            if table in self._oids and missing:
                what = table if len(missing) == len(columns) else f"{table} ({', '.join(missing)})"
                findings.append(
                    Finding(
                        "privileges",
                        "unready",
                        f"role {self._role} may not read {what}",
                        f"GRANT anabranch_reader TO {quoted(self._role)}; (and {_MIGRATE}, if that was done)",
                    )
                )
        writable = await self._connection.fetch(
            "SELECT t.name, array_to_string(ARRAY["
            "   CASE WHEN has_any_column_privilege(t.oid, 'INSERT') THEN 'INSERT' END,"
            "   CASE WHEN has_any_column_privilege(t.oid, 'UPDATE') THEN 'UPDATE' END,"
            "   CASE WHEN has_table_privilege(t.oid, 'DELETE') THEN 'DELETE' END,"
            "   CASE WHEN has_table_privilege(t.oid, 'TRUNCATE') THEN 'TRUNCATE' END,"
            "   CASE WHEN has_table_privilege(t.oid, 'TRIGGER') THEN 'TRIGGER' END], ', ') AS rights"
            " FROM unnest($1::oid[], $2::text[]) t (oid, name)",
            list(self._oids.values()),
            list(self._oids),
        )
        findings += [
            Finding(
                "privileges",
                "refused",
                f"role {self._role} may write {row['name']} ({row['rights']}): a worker only reads",
                f"REVOKE {row['rights']} ON public.{row['name']} FROM …;"
                f" (from {self._role}, PUBLIC, or the role that it has it from)",
            )
            for row in writable
            if row["rights"]
        ]
        if await self._connection.fetchval("SELECT has_schema_privilege('public', 'CREATE')"):
            findings.append(
                Finding(
                    "privileges",
                    "warning",
                    f"role {self._role} may create objects in schema public",
                    "REVOKE CREATE ON SCHEMA public FROM PUBLIC; (or from the role that it has it from)",
                )
            )
        return findings

    async def _row_level_security(self) -> list[Finding]:
        rows = await self._connection.fetch(
            "SELECT relname::text AS name, relrowsecurity AS enabled, relforcerowsecurity AS forced"
            " FROM pg_class WHERE oid = ANY ($1::oid[]) AND NOT (relrowsecurity AND relforcerowsecurity)"
            " ORDER BY relname",
            list(self._oids.values()),
        )
        return [
            Finding(
                "row_level_security",
                "refused",
                f"row-level security of {row['name']} is "
                + ("not forced: its owner sees every row" if row["enabled"] else "not enabled"),
                _MIGRATE,
            )
            for row in rows
        ]

    async def _policies(self) -> list[Finding]:
        policies = await self._all_policies()
        readable = await self._connection.fetch(
            "SELECT t.name FROM unnest($1::oid[], $2::text[]) t (oid, name)"
            " WHERE has_any_column_privilege(t.oid, 'SELECT')",
            list(self._oids.values()),
            list(self._oids),
        )
        findings = []
        for (table,) in readable:
            oid = self._oids[table]
            mine = [policy for policy in policies if policy.table == oid]
            findings += [finding for policy in mine if (finding := self._judge(table, policy, policies))]
            if table in self._reference.columns and not any(policy.applies for policy in mine):
                findings.append(
                    Finding("policies", "refused", f"{table} has no policy for role {self._role}", _MIGRATE)
                )
        return findings + await self._owner_policies()

    def _judge(self, table: str, policy: _Policy, policies: list[_Policy]) -> Finding | None:
        """What is wrong with a policy that lets this role see rows."""
        if not policy.applies:
            return None
        expected = self._reference.policies.get((table, policy.name))
        if expected is not None and _flat(policy.expression) != expected:
            detail = f"policy {policy.name} on {table} is not the one for {self._setting}"
            return Finding("policies", "refused", detail, _MIGRATE)
        if not self._depends_on_setting(policy, policies, seen=frozenset()):
            detail = f"policy {policy.name} on {table} shows {self._role} rows whatever {self._setting} is"
            remedy = f"DROP POLICY {quoted(policy.name)} ON public.{table};"
            return Finding("policies", "refused", detail, _MIGRATE if expected is not None else remedy)
        return None

    def _depends_on_setting(self, policy: _Policy, policies: list[_Policy], *, seen: frozenset[int]) -> bool:
        if self._mentions_setting.search(f"{policy.expression} {policy.sources}"):
            return True
        for table in policy.guarded_tables:
            if table in seen or table == policy.table:
                continue
            guards = [guard for guard in policies if guard.table == table and guard.applies]
            if guards and all(
                self._depends_on_setting(guard, policies, seen=seen | {table, policy.table})
                for guard in guards
            ):
                return True
        return False

    async def _all_policies(self) -> list[_Policy]:
        """The permissive policies for reading, of every table: a policy may lean on another table's."""
        rows = await self._connection.fetch(
            "SELECT p.polrelid::oid AS table, p.polname::text AS name,"
            "       coalesce(pg_get_expr(p.polqual, p.polrelid), 'true') AS expression,"
            "       EXISTS (SELECT FROM unnest(p.polroles) r"
            "               WHERE r = 0 OR pg_has_role(r, 'USAGE')) AS applies,"
            "       coalesce((SELECT string_agg(coalesce(pg_get_function_sqlbody(f.oid), f.prosrc), ' ')"
            "                 FROM pg_depend d JOIN pg_proc f ON f.oid = d.refobjid"
            "                 WHERE d.classid = 'pg_policy'::regclass AND d.objid = p.oid"
            "                   AND d.refclassid = 'pg_proc'::regclass), '') AS sources,"
            "       ARRAY(SELECT DISTINCT c.oid FROM pg_depend d JOIN pg_class c ON c.oid = d.refobjid"
            "             WHERE d.classid = 'pg_policy'::regclass AND d.objid = p.oid"
            "               AND d.refclassid = 'pg_class'::regclass AND c.relrowsecurity) AS guarded_tables"
            " FROM pg_policy p"
            " WHERE p.polpermissive AND p.polcmd IN ('r', '*')"
            " ORDER BY p.polrelid, p.polname"
        )
        return [_Policy(**dict(row)) for row in rows]

    async def _owner_policies(self) -> list[Finding]:
        """The triggers run as the owner: held to the policies, it has to be let through all of them."""
        rows = await self._connection.fetch(
            "SELECT c.relname::text AS table, o.rolname::text AS owner"
            " FROM pg_class c JOIN pg_roles o ON o.oid = c.relowner"
            " WHERE c.oid = ANY ($1::oid[]) AND NOT (o.rolsuper OR o.rolbypassrls) AND NOT EXISTS ("
            "   SELECT FROM pg_policy p WHERE p.polrelid = c.oid AND p.polpermissive AND p.polcmd = '*'"
            "   AND pg_get_expr(p.polqual, p.polrelid) = 'true'"
            "   AND coalesce(pg_get_expr(p.polwithcheck, p.polrelid), 'true') = 'true'"
            "   AND EXISTS (SELECT FROM unnest(p.polroles) r"
            "               WHERE r = 0 OR pg_has_role(c.relowner, r, 'USAGE')))"
            " ORDER BY 1",
            list(self._oids.values()),
        )
        return [
            Finding(
                "policies",
                "refused",
                f"{row['table']} has no policy for its owner {row['owner']}: revoked grants stay in force",
                _MIGRATE,
            )
            for row in rows
        ]

    async def _triggers(self) -> list[Finding]:
        rows = await self._connection.fetch(
            "SELECT c.relname::text AS table, t.tgname::text AS name"
            " FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_proc f ON f.oid = t.tgfoid"
            " WHERE t.tgrelid = ANY ($1::oid[]) AND t.tgenabled IN ('O', 'A')"
            "   AND f.prosecdef AND f.proowner = c.relowner",
            list(self._oids.values()),
        )
        working = {(row["table"], row["name"]) for row in rows}
        return [
            Finding(
                "triggers",
                "refused",
                f"trigger {name} on {table} is missing, disabled, or not the owner's:"
                " revoked grants stay in force",
                _MIGRATE,
            )
            for table, name in self._reference.triggers
            if table in self._oids and (table, name) not in working
        ]

    async def _isolation(self) -> list[Finding]:
        """Tries it: whatever the policies say, nobody's principals must show nothing."""
        findings = []
        for table in self._reference.columns:
            if table not in self._oids:
                continue
            for nobody in ("", "[]"):
                try:
                    visible = await self._is_visible(table, nobody)
                except asyncpg.QueryCanceledError:
                    detail = (
                        f"whether {table} shows rows without principals took longer than {_CANARY_TIMEOUT}"
                    )
                    findings.append(
                        Finding("isolation", "warning", detail, f"{_MIGRATE}; ANALYZE public.{table};")
                    )
                    break
                except asyncpg.PostgresError:
                    # No right to read, or a policy that rejects the value: either way, no row.
                    continue
                if visible:
                    detail = f"{table} shows rows though {self._setting} is {nobody!r}"
                    findings.append(Finding("isolation", "refused", detail, _MIGRATE))
                    break
        return findings

    async def _is_visible(self, table: str, principals: str) -> bool:
        transaction = self._connection.transaction()
        await transaction.start()
        try:
            await self._connection.execute(
                "SELECT set_config('statement_timeout', $1, true), set_config($2, $3, true)",
                _CANARY_TIMEOUT,
                self._setting,
                principals,
            )
            # The name is one of ours; an identifier cannot be bound.
            return bool(await self._connection.fetchval(f"SELECT EXISTS (SELECT FROM public.{table})"))  # noqa: S608
        finally:
            await transaction.rollback()

    # Is it fast?

    async def _storage(self) -> list[Finding]:
        kind = await self._connection.fetchval(
            "SELECT attstorage::text FROM pg_attribute WHERE attrelid = $1 AND attname = 'embedding'",
            self._oids.get("document_chunks"),
        )
        if kind in (None, "p"):
            return []
        detail = "embeddings are stored outside of their rows: searches take 1.7 to 3.5 times as long"
        return [
            Finding("storage", "warning", detail, f"{_MIGRATE}, then VACUUM FULL public.document_chunks;")
        ]

    async def _indexes(self) -> list[Finding]:
        findings = []
        for table, definition, statement in self._reference.indexes:
            if table not in self._oids:
                continue
            found = await self._connection.fetch(PRESENT_INDEXES, table)
            if QUALIFIERS.sub("", definition) not in {QUALIFIERS.sub("", row[0]) for row in found}:
                cost = "every search scans the table" if "hnsw" in definition else "some searches are slower"
                remedy = statement.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1) + ";"
                detail = f"{table} has no valid index {definition}: {cost}"
                findings.append(Finding("indexes", "warning", detail, remedy))
        return findings
