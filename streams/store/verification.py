"""Compares all derived data with its source data, as the tables' owner."""

from typing import Final

from streams.store.catalog import Connection, quoted
from streams.store.derivation import Difference, differences
from streams.store.reference import TABLES, reference

__all__ = ["Difference", "NotVerified", "hidden_tables", "table_owners", "verify"]


class NotVerified(Exception):
    """The comparison is not possible; the message is one line and says why."""


async def verify(connection: Connection) -> list[Difference]:
    """The first difference in each table; empty if all data is correct. Reads every row, takes no locks.

    Args:
        connection: as the tables' owner, a member of it, or a superuser.

    Raises:
        NotVerified: this role does not see every row, or the functions are missing.
    """
    owners = set((await table_owners(connection)).values())
    if len(owners) != 1:
        raise NotVerified("the tables are missing, or have different owners")
    owner = owners.pop()
    async with connection.transaction():
        before = await connection.fetchval("SELECT current_setting('role')")
        role = await connection.fetchval("SELECT current_user::text")
        if role != owner:
            if not await connection.fetchval("SELECT pg_has_role($1, 'MEMBER')", owner):
                raise NotVerified(
                    f"role {role} may not verify derived data;"
                    f" set DATABASE_ADMIN_CONNECTION_STRING to the tables' owner, {owner}"
                )
            # Never run this with a superuser's rights: it is the owner's code.
            await connection.execute(f"SET LOCAL ROLE {quoted(owner)}")
        hidden = await hidden_tables(connection)
        if hidden:
            raise NotVerified(f"row-level security hides rows of {hidden[0]} from its owner {owner}")
        if await connection.fetchval(_MISSING_FUNCTIONS, _FUNCTIONS):
            raise NotVerified("the functions that compare derived data are missing")
        found = await differences(connection)
        await connection.execute("SELECT set_config('role', $1, true)", before)
        return found


async def table_owners(connection: Connection) -> dict[str, str]:
    """The owner of each existing table."""
    rows = await connection.fetch(
        "SELECT relname::text AS name, pg_get_userbyid(relowner)::text AS owner FROM pg_class"
        " WHERE relnamespace = 'public'::regnamespace AND relname = ANY ($1::text[])",
        list(TABLES),
    )
    return {row["name"]: row["owner"] for row in rows}


async def hidden_tables(connection: Connection) -> list[str]:
    """The tables of which row-level security may hide rows from this role, which PostgreSQL does not report."""
    return [row["name"] for row in await connection.fetch(_HIDDEN, list(TABLES))]


_FUNCTIONS: Final = [
    statement.name
    for statement in reference("anabranch.principals")
    if statement.kind == "function" and statement.name.startswith("anabranch_stale_")
]

_MISSING_FUNCTIONS: Final = """
    SELECT count(DISTINCT proname) < cardinality($1::text[]) FROM pg_proc
    WHERE pronamespace = 'public'::regnamespace AND proname = ANY ($1::text[])
"""

_HIDDEN: Final = """
    SELECT c.relname::text AS name
    FROM pg_class c
    WHERE c.relnamespace = 'public'::regnamespace AND c.relname = ANY ($1::text[])
      AND row_security_active(c.oid)
      AND NOT coalesce((
        SELECT bool_and(p.polpermissive) AND bool_or(pg_get_expr(p.polqual, p.polrelid) = 'true')
        FROM pg_policy p
        WHERE p.polrelid = c.oid AND p.polcmd IN ('r', '*')
          AND EXISTS (SELECT FROM unnest(p.polroles) r WHERE r = 0 OR pg_has_role(r, 'USAGE'))), false)
    ORDER BY c.relname
"""
