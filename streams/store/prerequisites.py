"""Provides what the schema requires: server, extension, roles, rights. Rejects objects that somebody planted."""

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import asyncpg

from streams.store.catalog import Catalog, Connection, quoted
from streams.store.findings import rename_column, set_dimensions
from streams.store.reference import (
    BASE_TABLES,
    INTERNAL_TABLES,
    TABLES,
    Statement,
    column_types,
    is_compatible_type,
    readable_columns,
)
from streams.store.runner import MigrationError, Runner

__all__ = [
    "OLDEST_PGVECTOR",
    "OLDEST_SERVER",
    "OWNER",
    "SOUND_PGVECTOR",
    "Actor",
    "as_owner",
    "check_columns",
    "check_server",
    "creators",
    "ensure_prerequisites",
    "find_actor",
    "parse_version",
    "refuse_foreign",
    "role_exists",
]

OLDEST_SERVER: Final = 15
OLDEST_PGVECTOR: Final = (0, 8)
# 0.8.2 fixes a buffer overflow in parallel HNSW builds; 0.8.3 and 0.8.4 fix corruption and errors in HNSW vacuuming.
SOUND_PGVECTOR: Final = (0, 8, 4)

#: The role that owns the tables if a superuser creates them.
OWNER: Final = "anabranch_owner"
_GROUP_ROLES: Final = ("anabranch_reader", "anabranch_writer")


@dataclass(frozen=True)
class Actor:
    """The roles of a migration.

    Args:
        login: the role that is logged in.
        owner: the role that creates and owns everything: the tables' owner.
    """

    login: str
    owner: str


def check_server(connection: Connection) -> None:
    """Raise MigrationError if the server is too old."""
    major = connection.get_server_version().major
    if major < OLDEST_SERVER:
        raise MigrationError(
            f"PostgreSQL {OLDEST_SERVER} or later is required; this server has version {major}"
        )


async def find_actor(connection: Connection, catalog: Catalog) -> Actor:
    """The logged-in role and the owner: the tables' owner, or ``anabranch_owner`` for a superuser without tables.

    Raises:
        MigrationError: the tables belong to several roles, or to a role that this role is not a member of.
    """
    me = await connection.fetchrow(
        "SELECT rolname::text, rolsuper FROM pg_roles WHERE rolname = current_user"
    )
    if me is None:
        raise MigrationError("the logged-in role no longer exists")
    login: str = me["rolname"]
    owners = sorted({catalog.relations[table].owner for table in BASE_TABLES if table in catalog.relations})
    if len(owners) > 1:
        raise MigrationError(
            f"the tables belong to several roles ({', '.join(owners)}), but the triggers need one owner. Run"
            f" ALTER TABLE public.… OWNER TO …; for {', '.join(BASE_TABLES)}"
        )
    if not owners:
        return Actor(login, OWNER if me["rolsuper"] else login)
    owner = owners[0]
    if owner != login and not await connection.fetchval("SELECT pg_has_role($1, 'MEMBER')", owner):
        raise MigrationError(
            f"the tables belong to {owner!r}: run `anabranch migrate` as that role or as a superuser"
            f" (DATABASE_ADMIN_CONNECTION_STRING); this is {login!r}"
        )
    return Actor(login, owner)


async def role_exists(connection: Connection, role: str) -> bool:
    return bool(await connection.fetchval("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", role))


@asynccontextmanager
async def as_owner(connection: Connection, actor: Actor) -> AsyncIterator[None]:
    """A transaction as the owner, if the owner exists.

    Raises:
        MigrationError: the role is a member of the owner but may not act as it.
    """
    async with connection.transaction():
        if actor.owner != actor.login and await role_exists(connection, actor.owner):
            try:
                await connection.execute(f"SET LOCAL ROLE {quoted(actor.owner)}")
            except asyncpg.InsufficientPrivilegeError as error:
                raise MigrationError(
                    f"{actor.login!r} is a member of {actor.owner!r}, the owner of the tables, but may not act as it."
                    f" Run GRANT {quoted(actor.owner)} TO {quoted(actor.login)} WITH SET TRUE; or run"
                    " `anabranch migrate` as the owner or as a superuser"
                ) from error
        yield


async def ensure_prerequisites(runner: Runner, actor: Actor) -> None:
    """Provide the extension, the roles and the rights.

    Raises:
        MigrationError: this role may not provide everything that is missing; the message has the SQL for the rest.
    """
    todo = await _ensure_extension(runner)
    for role in [*_GROUP_ROLES, *([actor.owner] if actor.owner == OWNER else [])]:
        todo += await _ensure_role(runner, role)
    todo += await _ensure_schema_rights(runner, actor.owner)
    if todo:
        database = await runner.connection.fetchval("SELECT current_database()::text")
        raise MigrationError(
            f"role {actor.login!r} may not create everything that is required. As a superuser, run the following SQL"
            f" once in database {database!r}, then run `anabranch migrate` again:\n" + "\n".join(todo)
        )


async def _ensure_extension(runner: Runner) -> list[str]:
    installed = await runner.connection.fetchval(
        "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    )
    available = await runner.connection.fetchval(
        "SELECT default_version FROM pg_available_extensions WHERE name = 'vector'"
    )
    oldest = ".".join(map(str, OLDEST_PGVECTOR))
    if installed is not None and parse_version(installed) < OLDEST_PGVECTOR:
        if available is not None and parse_version(available) >= OLDEST_PGVECTOR:
            return await _try(runner, "ALTER EXTENSION vector UPDATE", f"updated pgvector to {available}")
        raise MigrationError(
            f"pgvector {oldest} or later is required; this database has {installed}, and the server does not have a"
            " newer version. Install it on the server, then run ALTER EXTENSION vector UPDATE;"
        )
    if installed is not None:
        return []
    if available is None or parse_version(available) < OLDEST_PGVECTOR:
        raise MigrationError(
            f"pgvector {oldest} or later is required; this server has {available or 'none'}."
            " Install it on the server (package postgresql-NN-pgvector, image pgvector/pgvector)"
        )
    return await _try(
        runner, "CREATE EXTENSION vector SCHEMA public", f"created extension vector {available}"
    )


async def _ensure_role(runner: Runner, role: str) -> list[str]:
    if await role_exists(runner.connection, role):
        return []
    return await _try(runner, f"CREATE ROLE {quoted(role)} NOLOGIN", f"created role {role}")


async def _ensure_schema_rights(runner: Runner, owner: str) -> list[str]:
    # False for an owner that does not exist because a dry run has not created it.
    suffices = (
        "SELECT coalesce((SELECT has_schema_privilege(oid, 'public', 'USAGE')"
        "   AND has_schema_privilege(oid, 'public', 'CREATE') FROM pg_roles WHERE rolname = $1), false)"
    )
    if await runner.connection.fetchval(suffices, owner):
        return []
    statement = f"GRANT USAGE, CREATE ON SCHEMA public TO {quoted(owner)}"
    todo = await _try(runner, statement, f"granted {owner} the right to create in schema public")
    if runner.dry_run:
        return []
    # A role without the right to grant this gets a warning, not an error.
    return todo if await runner.connection.fetchval(suffices, owner) else [f"{statement};"]


async def _try(runner: Runner, statement: str, done: str) -> list[str]:
    """Run a statement; return it if this role may not run it."""
    try:
        await runner.transaction([statement], done)
    except MigrationError as error:
        match error.__cause__:
            case asyncpg.InsufficientPrivilegeError():
                return [f"{statement};"]
            case asyncpg.DuplicateObjectError() | asyncpg.UniqueViolationError():
                return []  # roles belong to the whole server: a migration of another database has just created it
            case _:
                raise
    return []


# Planted objects


async def refuse_foreign(
    connection: Connection, catalog: Catalog, plan: Iterable[Statement], owner: str
) -> None:
    """Reject other roles' objects with Anabranch's names: they would be used, or run with the owner's rights.

    Raises:
        MigrationError: there are such objects; the message names each with its owner and the SQL that removes it.
    """
    plan = list(plan)
    tables = {statement.name or statement.table for statement in plan if statement.kind in {"table", "index"}}
    found = [
        f"DROP FUNCTION public.{function.name}({function.signature}); -- of {function.owner}"
        for function in catalog.functions
        if function.owner != owner
    ]
    rows = await connection.fetch(_FOREIGN_RELATIONS, [*TABLES, *INTERNAL_TABLES], sorted(tables), owner)
    found += [f"DROP {row['kind']} public.{row['name']}; -- of {row['owner']}" for row in rows]
    if found:
        raise MigrationError(
            f"schema public has objects with names reserved for Anabranch that do not belong to {owner}. Somebody may"
            " have planted them. Review each, then remove it as its owner or a superuser:\n"
            + "\n".join(found)
        )


_FOREIGN_RELATIONS: Final = """
    SELECT relname::text AS name, pg_get_userbyid(relowner)::text AS owner,
           CASE relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW' WHEN 'S' THEN 'SEQUENCE'
                        WHEN 'f' THEN 'FOREIGN TABLE' WHEN 'c' THEN 'TYPE' WHEN 'i' THEN 'INDEX' WHEN 'I' THEN 'INDEX'
                        ELSE 'TABLE' END AS kind
    FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relname = ANY ($1::text[] || $2::text[])
      AND pg_get_userbyid(relowner) <> $3
    UNION ALL
    SELECT typname::text, pg_get_userbyid(typowner)::text, 'TYPE'
    FROM pg_type
    WHERE typnamespace = 'public'::regnamespace AND typname = ANY ($1::text[]) AND typrelid = 0
    ORDER BY 1
"""


async def creators(connection: Connection, owner: str) -> list[str]:
    """Other roles that may create objects in schema public, as GRANT and REVOKE name them.

    Superusers and the owners of the schema and the database are omitted, because they can do anything anyway.
    """
    rows = await connection.fetch(
        "SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE r.rolname::text END AS role"
        " FROM pg_namespace n CROSS JOIN LATERAL aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a"
        " LEFT JOIN pg_roles r ON r.oid = a.grantee"
        " WHERE n.nspname = 'public' AND a.privilege_type = 'CREATE' AND NOT coalesce(r.rolsuper, false)"
        "   AND a.grantee <> n.nspowner AND r.rolname IS DISTINCT FROM $1"
        "   AND a.grantee <> (SELECT datdba FROM pg_database WHERE datname = current_database())"
        " ORDER BY 1",
        owner,
    )
    return ["PUBLIC" if row["role"] == "PUBLIC" else quoted(row["role"]) for row in rows]


# Existing tables


def check_columns(catalog: Catalog, plan: Iterable[Statement], dimensions: int) -> None:
    """Check that existing tables have the columns that triggers and searches need, or that they can be added.

    Args:
        catalog: the current state of the store.
        plan: the reference schema's statements.
        dimensions: of the embeddings.

    Raises:
        MigrationError: a column has the wrong type, or is missing and cannot be added.
    """
    plan = list(plan)
    readable = readable_columns(plan)
    added = {(statement.table, statement.name) for statement in plan if statement.kind == "column"}
    mismatches = []
    remedies = []
    for table, columns in column_types(dimensions).items():
        if table not in catalog.relations:
            continue
        # Columns that are only granted must exist, with any type.
        for column, expected in {**dict.fromkeys(readable.get(table, ()), ""), **columns}.items():
            found = catalog.columns.get((table, column), (None, ""))[0]
            if found is None and (table, column) not in added:
                mismatches.append(
                    f"{table}.{column} is missing" + (f" (type {expected})" if expected else "")
                )
                remedies.append(rename_column(table, column))
            elif found is not None and expected and not is_compatible_type(found, expected):
                mismatches.append(f"{table}.{column} is {found}, not {expected}")
    if mismatches:
        stored = catalog.dimensions
        if stored is not None and stored != dimensions:
            remedies.append(set_dimensions(stored))
        raise MigrationError("the existing tables are incompatible: " + "; ".join([*mismatches, *remedies]))


def parse_version(text: str) -> tuple[int, ...]:
    """A version as numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", text))
