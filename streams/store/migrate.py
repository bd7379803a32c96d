"""Applies the reference schema (``schemas/postgres/*.sql``), adding only what is missing.

The files are plain SQL. Before a statement that would lock a table, its object is looked up: where it is
there already, and the same, the statement is left out. So a second run does nothing, and a store in use can
be migrated again, after an upgrade or with another setting's name, without waiting for its readers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import asyncpg

from streams import resources

__all__ = ["COLUMN_TYPES", "TABLES", "MigrationError", "check_setting_name", "migrate", "statements"]

#: The tables of the truth, and those derived from it.
TABLES: Final = (
    "documents",
    "document_chunks",
    "document_grants",
    "access_sets",
    "chunk_topics",
    "chunk_metadata",
)

#: What the triggers and searches take for granted about tables that were there before.
COLUMN_TYPES: Final = {
    "documents": {"id": "uuid", "session_id": "uuid", "metadata": "jsonb", "access_set_id": "bigint"},
    "document_chunks": {
        "id": "uuid",
        "document_id": "uuid",
        "session_id": "uuid",
        "parent_chunk_id": "uuid",
        "related_topic_ids": "uuid[]",
        "coordinates": "jsonb",
        "metadata": "jsonb",
        "embedding": "vector(768)",
        "access_set_id": "bigint",
    },
    "document_grants": {"document_id": "uuid", "principal": "text"},
    "access_sets": {"id": "bigint", "principals": "text[]", "digest": "bytea"},
    "chunk_topics": {"topic_id": "uuid", "chunk_id": "uuid", "session_id": "uuid", "access_set_id": "bigint"},
    "chunk_metadata": {"entry": "uuid", "chunk_id": "uuid", "access_set_id": "bigint"},
}

OLDEST_SERVER: Final = 15
OLDEST_PGVECTOR: Final = (0, 8)

_OWNER: Final = "anabranch_owner"
_GROUP_ROLES: Final = ("anabranch_reader", "anabranch_writer")
_SETTING_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)+")
_PLACEHOLDER: Final = ":'principals_setting'"
_ADVISORY_LOCK: Final = 0x616E6162  # "anab"
_LOCK_TIMEOUT_SECONDS: Final = 30


class MigrationError(Exception):
    """The schema could not be applied; the message says what somebody has to do, and the SQL for it."""


def check_setting_name(name: str) -> str:
    """Returns the name of a custom setting that can stand in SQL.

    Raises:
        MigrationError: it is not of the form ``prefix.name``.
    """
    if not _SETTING_NAME.fullmatch(name):
        raise MigrationError(
            f"{name!r} is no name for the principals' setting: lower-case letters, digits and underscores,"
            " with a dot in between, such as anabranch.principals"
        )
    return name


def statements(principals_setting: str) -> list[str]:
    """The reference schema's statements in order, without comments between them."""
    name = check_setting_name(principals_setting)
    files = sorted((file for file in _sql_files()), key=lambda file: file[0])
    return [statement for _, text in files for statement in _split(text.replace(_PLACEHOLDER, f"'{name}'"))]


async def migrate(dsn: str, *, principals_setting: str) -> list[str]:
    """Applies the reference schema in one transaction.

    Run by a superuser, it makes what is missing in the name of the tables' owner: whoever that is, else the
    role ``anabranch_owner``, which nobody can log in as; so the triggers never run with a superuser's rights.
    Run by anybody else, it makes the tables theirs, or goes on in the name of an owner whose member they are.

    Args:
        dsn: the owner's, or a superuser's, connection string.
        principals_setting: the setting that the policies read the asker's principals from.

    Returns:
        What was done, one line each; nothing where there was nothing to do.

    Raises:
        MigrationError: something is missing that this role may not provide; the message holds the SQL for it.
    """
    plan = statements(principals_setting)
    connection = await asyncpg.connect(dsn, timeout=30)
    try:
        async with connection.transaction():
            # Taken before the time limit on locks: another run may be building an index.
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _ADVISORY_LOCK)
            await connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_SECONDS}s'")
            return await _Migration(connection).run(plan)
    except asyncpg.LockNotAvailableError as error:
        raise MigrationError(
            f"a table stayed locked by another transaction for {_LOCK_TIMEOUT_SECONDS} seconds;"
            " nothing was changed: try again when it has ended (pg_stat_activity shows it)"
        ) from error
    finally:
        await connection.close(timeout=5)


# The files


def _sql_files() -> Iterator[tuple[str, str]]:
    folder = resources.schemas() / "postgres"
    for file in folder.iterdir():
        if file.name.endswith(".sql"):
            yield file.name, file.read_text(encoding="utf-8")


def _split(text: str) -> Iterator[str]:
    """Statements end with a semicolon at the end of a line, outside of ``$$ … $$``."""
    lines: list[str] = []
    in_body = False
    for line in text.splitlines():
        if not lines and (not line.strip() or line.lstrip().startswith("--")):
            continue
        lines.append(line)
        in_body ^= line.count("$$") % 2 == 1
        if not in_body and line.rstrip().endswith(";"):
            yield "\n".join(lines).rstrip().removesuffix(";")
            lines = []
    if lines:
        raise MigrationError(f"a statement of the reference schema does not end: {lines[0]}")


# What is there already

#: The valid indexes of a table ($1), each as `USING method (columns)`: a search minds neither parameters,
#: nor that chunks without an embedding are left out.
PRESENT_INDEXES: Final = """
    SELECT regexp_replace(substring(pg_get_indexdef(indexrelid) FROM 'USING .*'), ' (WITH|WHERE) .*', '')
    FROM pg_index
    WHERE indrelid = (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relname = $1)
      AND indisvalid
      AND (indpred IS NULL OR pg_get_expr(indpred, indrelid) = '(embedding IS NOT NULL)')
"""
#: An index as the reference schema has it; parameters are no part of the definition.
INDEX: Final = re.compile(
    r"CREATE INDEX IF NOT EXISTS (?P<name>\w+) ON public\.(?P<table>\w+) "
    r"(?P<definition>USING .+?)(?: WITH \(.+\))?$"
)
QUALIFIERS: Final = re.compile(r"\b\w+\.|\s")

_SPACE_AND_SCHEMA: Final = re.compile(r"\bpublic\.|\s")


@dataclass(frozen=True)
class _Rule:
    """How to see that a statement has nothing to do.

    Args:
        pattern: the statements that it is for.
        present: a query for what is there: true, or the object's definition as PostgreSQL prints it, to be
            compared with the pattern's group ``definition``.
        arguments: the pattern's groups that the query takes.
        done: the line for the terminal.
        before: a statement that makes way for this one.
        ignored: what PostgreSQL prints otherwise than one writes it.
    """

    pattern: re.Pattern[str]
    present: str
    arguments: tuple[str, ...]
    done: str
    before: str | None = None
    ignored: re.Pattern[str] = _SPACE_AND_SCHEMA

    def same(self, found: object, wanted: str | None) -> bool:
        if isinstance(found, str) and wanted is not None:
            return self.ignored.sub("", found) == self.ignored.sub("", wanted)
        return found is True


_RULE_TEXTS: Final = (
    _Rule(
        re.compile(r"CREATE TABLE IF NOT EXISTS public\.(?P<table>\w+) "),
        "SELECT to_regclass('public.' || $1) IS NOT NULL",
        ("table",),
        "created table {table}",
    ),
    _Rule(
        re.compile(r"ALTER TABLE public\.(?P<table>\w+) ADD COLUMN IF NOT EXISTS (?P<column>\w+) "),
        """SELECT true FROM pg_attribute
           WHERE attrelid = to_regclass('public.' || $1) AND attname = $2 AND NOT attisdropped""",
        ("table", "column"),
        "added column {column} to {table}",
    ),
    _Rule(
        re.compile(r"ALTER TABLE public\.(?P<table>\w+) ALTER COLUMN (?P<column>\w+) SET STORAGE PLAIN"),
        """SELECT attstorage = 'p' FROM pg_attribute
           WHERE attrelid = to_regclass('public.' || $1) AND attname = $2""",
        ("table", "column"),
        "set the storage of {column} in {table} to plain",
    ),
    _Rule(
        re.compile(r"ALTER TABLE public\.(?P<table>\w+) ENABLE ROW LEVEL SECURITY"),
        "SELECT relrowsecurity FROM pg_class WHERE oid = to_regclass('public.' || $1)",
        ("table",),
        "enabled row-level security on {table}",
    ),
    _Rule(
        re.compile(r"ALTER TABLE public\.(?P<table>\w+) FORCE ROW LEVEL SECURITY"),
        "SELECT relforcerowsecurity FROM pg_class WHERE oid = to_regclass('public.' || $1)",
        ("table",),
        "forced row-level security on {table}",
    ),
    _Rule(
        INDEX,
        # Any valid index of the same definition will do, whatever its name. A broken one of our name has to
        # go: CREATE INDEX IF NOT EXISTS would take it for the index.
        PRESENT_INDEXES,
        ("table",),
        "created index {name} on {table}",
        before="DROP INDEX IF EXISTS public.{name}",
        # Where the extension has a schema of its own, its operator classes are printed with it.
        ignored=QUALIFIERS,
    ),
    _Rule(
        re.compile(
            r"CREATE OR REPLACE FUNCTION public\.(?P<name>\w+)\((?P<head>.*?)AS \$\$(?P<definition>.*)\$\$",
            re.DOTALL,
        ),
        """SELECT prosrc FROM pg_proc
           WHERE pronamespace = 'public'::regnamespace AND proname = $1
             AND prosecdef = ($2 LIKE '%SECURITY DEFINER%')
             AND proconfig = ARRAY['search_path=pg_catalog, pg_temp']""",
        ("name", "head"),
        "created function {name}",
    ),
    _Rule(
        re.compile(
            r"(?P<definition>CREATE OR REPLACE TRIGGER (?P<name>\w+) .*?ON public\.(?P<table>\w+)\b.*)",
            re.DOTALL,
        ),
        """SELECT replace(pg_get_triggerdef(oid), 'CREATE TRIGGER', 'CREATE OR REPLACE TRIGGER')
           FROM pg_trigger
           WHERE tgrelid = to_regclass('public.' || $1) AND tgname = $2 AND tgenabled IN ('O', 'A')""",
        ("table", "name"),
        "created trigger {name} on {table}",
        # Replacing a disabled trigger would leave it disabled.
        before="DROP TRIGGER IF EXISTS {name} ON public.{table}",
        ignored=re.compile(r"\bpublic\.|[\s()]"),
    ),
    _Rule(
        re.compile(
            r"CREATE POLICY (?P<name>\w+) ON public\.(?P<table>\w+) (?P<definition>FOR .*)", re.DOTALL
        ),
        """SELECT format('FOR %s TO %s USING (%s)',
                         CASE polcmd WHEN '*' THEN 'ALL' WHEN 'r' THEN 'SELECT' END,
                         CASE WHEN polroles = ARRAY[current_user::regrole::oid] THEN 'CURRENT_USER'
                              ELSE (SELECT string_agg(rolname, ', ') FROM pg_roles
                                    WHERE oid = ANY (polroles)) END,
                         pg_get_expr(polqual, polrelid))
                  || coalesce(' WITH CHECK (' || pg_get_expr(polwithcheck, polrelid) || ')', '')
           FROM pg_policy
           WHERE polrelid = to_regclass('public.' || $1) AND polname = $2 AND polpermissive""",
        ("table", "name"),
        "created policy {name} on {table}",
        before="DROP POLICY IF EXISTS {name} ON public.{table}",
    ),
)


class _Migration:
    """One run, inside its transaction."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        self._connection = connection
        self._lines: list[str] = []

    async def run(self, plan: list[str]) -> list[str]:
        await self._check_server()
        await self._become_able()
        granted = await self._granted()
        unprotected = await self._connection.fetchval(
            "SELECT NOT relrowsecurity FROM pg_class WHERE oid = to_regclass('public.documents')"
        )
        await self._check_columns(complete=False)
        checked = False
        for statement in plan:
            if not checked and not statement.startswith(("CREATE TABLE", "ALTER TABLE")):
                await self._check_columns(complete=True)
                checked = True
            try:
                await self._apply(statement)
            except asyncpg.InsufficientPrivilegeError as error:
                raise MigrationError(
                    f"PostgreSQL says: {error}. A superuser can run `anabranch migrate` instead,"
                    f" or this, once:\n{statement};"
                ) from error
            except asyncpg.LockNotAvailableError:
                raise
            except asyncpg.PostgresError as error:
                raise MigrationError(f"PostgreSQL says: {error}, to:\n{statement};") from error
        if await self._granted() != granted:
            self._lines.append("granted what anabranch_reader and anabranch_writer need")
        if unprotected:
            await self._mention_other_roles()
        return self._lines

    async def _apply(self, statement: str) -> None:
        for rule in _RULE_TEXTS:
            match = rule.pattern.match(statement)
            if match is None:
                continue
            if await self._is_present(rule, match):
                return
            names = match.groupdict()
            if rule.before is not None:
                await self._connection.execute(rule.before.format(**names))
            await self._connection.execute(statement)
            self._lines.append(rule.done.format(**names))
            if "STORAGE PLAIN" in statement:
                await self._mention_old_rows()
            return
        await self._apply_always(statement)

    async def _apply_always(self, statement: str) -> None:
        """What locks no table, or is cheap when it has nothing to do."""
        match statement.split(maxsplit=3):
            case ["SELECT", *_]:
                repaired = await self._connection.fetchrow(statement)
                self._lines.extend(
                    f"derived access anew: {rows} {name} were new or wrong"
                    for name, rows in (repaired or {}).items()
                    if rows
                )
            case ["GRANT", "USAGE", *_]:
                await self._grant_usage(statement)
            case ["GRANT" | "REVOKE", *_]:
                await self._connection.execute(statement)
            case ["ANALYZE", *_]:
                if self._lines:
                    await self._connection.execute(statement)
            case _:
                raise MigrationError(f"the schema has an unknown kind of statement: {statement[:60]}")

    async def _grant_usage(self, statement: str) -> None:
        # Everybody has it by default, and an owner of tables may not be allowed to give it.
        if not await self._connection.fetchval(
            "SELECT bool_and(has_schema_privilege(role, 'public', 'USAGE')) FROM unnest($1::text[]) role",
            list(_GROUP_ROLES),
        ):
            await self._connection.execute(statement)

    async def _is_present(self, rule: _Rule, match: re.Match[str]) -> bool:
        names = match.groupdict()
        found = await self._connection.fetch(rule.present, *(names[name] for name in rule.arguments))
        return any(rule.same(value, names.get("definition")) for (value,) in found)

    async def _check_server(self) -> None:
        version = self._connection.get_server_version()
        if version.major < OLDEST_SERVER:
            raise MigrationError(f"PostgreSQL {OLDEST_SERVER} or later is needed; this is {version.major}")

    # Rights

    async def _become_able(self) -> None:
        """Provides the extension, the roles and the rights, and goes on in the name of the tables' owner."""
        todo: list[str] = []
        me = await self._connection.fetchrow(
            "SELECT rolname, rolsuper, rolcreaterole, current_database() AS database"
            " FROM pg_roles WHERE rolname = current_user"
        )
        if me is None:
            raise MigrationError("the role that is logged in does not exist any more")
        todo += await self._provide_extension()
        owner = await self._owner(me["rolname"], is_superuser=me["rolsuper"])
        roles = [*_GROUP_ROLES, *([owner] if owner == _OWNER else [])]
        for role in roles:
            todo += await self._provide_role(role)
        todo += await self._provide_schema_rights(owner)
        if todo:
            raise MigrationError(
                f"role {me['rolname']!r} may not provide all that is needed. A superuser has to run this,"
                f" once, in database {me['database']!r}; then run `anabranch migrate` again:\n"
                + "\n".join(todo)
            )
        if owner != me["rolname"]:
            await self._connection.execute(f"SET LOCAL ROLE {quoted(owner)}")
        await self._connection.execute(
            "SELECT set_config('search_path', format('public, %s', extnamespace::regnamespace), true)"
            " FROM pg_extension WHERE extname = 'vector'"
        )

    async def _provide_extension(self) -> list[str]:
        installed = await self._connection.fetchval(
            "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        )
        shipped = await self._connection.fetchval(
            "SELECT default_version FROM pg_available_extensions WHERE name = 'vector'"
        )
        oldest = ".".join(map(str, OLDEST_PGVECTOR))
        if installed is not None and parse_version(installed) < OLDEST_PGVECTOR:
            if shipped is not None and parse_version(shipped) >= OLDEST_PGVECTOR:
                return await self._try("ALTER EXTENSION vector UPDATE", f"updated pgvector to {shipped}")
            raise MigrationError(
                f"pgvector {oldest} or later is needed; this database has {installed}, and the server no"
                " newer one: install it on the server, then ALTER EXTENSION vector UPDATE;"
            )
        if installed is not None:
            return []
        if shipped is None or parse_version(shipped) < OLDEST_PGVECTOR:
            raise MigrationError(
                f"pgvector {oldest} or later is needed; this server has {shipped or 'none'}:"
                " install it on the server (package postgresql-NN-pgvector, image pgvector/pgvector)"
            )
        return await self._try("CREATE EXTENSION vector", f"created extension vector {shipped}")

    async def _provide_role(self, role: str) -> list[str]:
        if await self._connection.fetchval("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", role):
            return []
        return await self._try(f"CREATE ROLE {quoted(role)} NOLOGIN", f"created role {role}")

    async def _try(self, statement: str, done: str) -> list[str]:
        """Runs a statement; where this role may not, returns it."""
        try:
            async with self._connection.transaction():
                await self._connection.execute(statement)
        except asyncpg.InsufficientPrivilegeError:
            return [f"{statement};"]
        except (asyncpg.DuplicateObjectError, asyncpg.UniqueViolationError):
            return []  # roles belong to the whole server: another database's migration made it just now
        self._lines.append(done)
        return []

    async def _owner(self, me: str, *, is_superuser: bool) -> str:
        owners = await self._connection.fetch(
            "SELECT DISTINCT pg_get_userbyid(relowner)::text AS owner FROM pg_class"
            " WHERE relnamespace = 'public'::regnamespace AND relname = ANY ($1::text[])",
            list(TABLES),
        )
        names = sorted(row["owner"] for row in owners)
        if len(names) > 1:
            raise MigrationError(
                f"the tables belong to several roles ({', '.join(names)}), but their triggers need one owner:"
                f" ALTER TABLE public.… OWNER TO … for {', '.join(TABLES)}"
            )
        if not names:
            return _OWNER if is_superuser else me
        owner: str = names[0]
        if owner != me and not await self._connection.fetchval("SELECT pg_has_role($1, 'MEMBER')", owner):
            raise MigrationError(
                f"the tables belong to {owner!r}: run `anabranch migrate` as that role or as a superuser"
                f" (DATABASE_ADMIN_CONNECTION_STRING); this is {me!r}"
            )
        return owner

    async def _provide_schema_rights(self, owner: str) -> list[str]:
        suffices = (
            "SELECT has_schema_privilege($1, 'public', 'USAGE')"
            "   AND has_schema_privilege($1, 'public', 'CREATE')"
        )
        if await self._connection.fetchval(suffices, owner):
            return []
        statement = f"GRANT USAGE, CREATE ON SCHEMA public TO {quoted(owner)}"
        todo = await self._try(statement, f"granted {owner} the right to create in schema public")
        # Whoever may not grant this much gets a warning, no error.
        return todo if await self._connection.fetchval(suffices, owner) else [f"{statement};"]

    async def _granted(self) -> object:
        return await self._connection.fetch(
            "SELECT attrelid, attnum, attacl::text FROM pg_attribute"
            " WHERE attacl IS NOT NULL AND attrelid = ANY ("
            "   SELECT to_regclass('public.' || name) FROM unnest($1::text[]) name)"
            " UNION ALL SELECT oid, 0, relacl::text FROM pg_class"
            " WHERE oid = ANY (SELECT to_regclass('public.' || name) FROM unnest($1::text[]) name)"
            " ORDER BY 1, 2",
            list(TABLES),
        )

    # Tables that were there before

    async def _check_columns(self, *, complete: bool) -> None:
        rows = await self._connection.fetch(
            "SELECT c.relname::text AS table, a.attname::text AS column,"
            "       regexp_replace(format_type(a.atttypid, a.atttypmod), '^.*[.]', '') AS type"
            " FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
            " WHERE c.relnamespace = 'public'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped"
            "   AND c.relname = ANY ($1::text[])",
            list(COLUMN_TYPES),
        )
        found = {(row["table"], row["column"]): row["type"] for row in rows}
        wrong = []
        for table, columns in COLUMN_TYPES.items():
            if table not in {known for known, _ in found}:
                continue
            for column, wanted in columns.items():
                type_ = found.get((table, column))
                if not fits(type_, wanted) if type_ is not None else complete:
                    wrong.append(f"{table}.{column} is {type_ or 'missing'}, not {wanted}")
        if wrong:
            raise MigrationError("the tables that are there do not fit: " + "; ".join(wrong))

    async def _mention_old_rows(self) -> None:
        if await self._connection.fetchval(
            "SELECT EXISTS (SELECT FROM public.document_chunks WHERE embedding IS NOT NULL)"
        ):
            self._lines.append(
                "note: embeddings that were there before stay outside of their rows, slower to scan, until"
                " VACUUM FULL public.document_chunks; has been run (it locks the table)"
            )

    async def _mention_other_roles(self) -> None:
        """Row-level security has just begun on tables in use: whom does it leave with nothing?"""
        rows = await self._connection.fetch(
            "SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC'"
            "                ELSE pg_get_userbyid(a.grantee)::text END AS role"
            " FROM pg_class c, aclexplode(c.relacl) a"
            " WHERE c.relnamespace = 'public'::regnamespace AND c.relname = ANY ($1::text[])"
            "   AND a.grantee NOT IN (c.relowner, 'anabranch_reader'::regrole)"
            "   AND (a.grantee = 0 OR NOT pg_has_role(a.grantee, 'anabranch_writer', 'MEMBER'))"
            " ORDER BY 1",
            list(TABLES),
        )
        self._lines.extend(
            f"note: {row['role']} has rights on these tables, but sees no row from now on; if it ingests:"
            f" GRANT anabranch_writer TO {row['role']};"
            for row in rows
        )


def fits(found: str, wanted: str) -> bool:
    """Whether a column of one type does for another."""
    return found == wanted or (wanted == "text" and found.startswith("character varying"))


def parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'
