"""Lists the roles that will see fewer rows, or cannot write, after row-level security is enabled on tables in use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from streams.store.catalog import Catalog, Connection, quoted
from streams.store.reference import BASE_TABLES, TABLES

__all__ = ["LockedOutRole", "locked_out_roles", "requirement"]

_EVERYTHING: Final = frozenset({"SELECT", "INSERT", "UPDATE", "DELETE"})


@dataclass(frozen=True)
class LockedOutRole:
    """A role that can read or write rows today, but not after the migration.

    Args:
        role: its name.
        login: whether it can log in.
        privileges: its privileges on each table, of SELECT, INSERT, UPDATE and DELETE.
    """

    role: str
    login: bool
    privileges: Mapping[str, frozenset[str]]

    @property
    def remedy(self) -> str:
        """SQL that lets the role read and write as before, and no more."""
        role = quoted(self.role)
        if all(self.privileges.get(table) == _EVERYTHING for table in BASE_TABLES):
            return f"GRANT anabranch_writer TO {role};"
        # For a role that only reads, the policy allows only reading: a later GRANT alone does not let it write.
        return " ".join(
            f"CREATE POLICY {role} ON public.{table} FOR {'SELECT' if held == {'SELECT'} else 'ALL'} TO {role}"
            " USING (true);"
            for table, held in self.privileges.items()
        )

    def __str__(self) -> str:
        read = ", ".join(table for table, held in self.privileges.items() if "SELECT" in held)
        written = ", ".join(table for table, held in self.privileges.items() if held != {"SELECT"})
        loses = [f"will see no rows of {read}"] if read else []
        loses += [f"will be unable to write to {written}"] if written else []
        return f"{'role' if self.login else 'group'} {self.role} {' and '.join(loses)}: {self.remedy}"


async def locked_out_roles(connection: Connection, catalog: Catalog, owner: str) -> list[LockedOutRole]:
    """Every role that can read or write a table without row-level security. Empty if all such tables are empty.

    Omitted are superusers, roles with BYPASSRLS, and members of the owner, of anabranch_writer (which sees everything)
    and of anabranch_reader (which sees rows by principals); also each privilege that a policy already preserves.
    """
    unprotected = await _unprotected(connection, catalog)
    if not unprotected:
        return []
    rows = await connection.fetch(_LOCKED_OUT_ROLES, unprotected, owner)
    return [
        LockedOutRole(role, login, {row["table"]: frozenset(row["privileges"]) for row in of_role})
        for (role, login), of_role in groupby(rows, lambda row: (row["role"], row["login"]))
    ]


async def requirement(connection: Connection, roles: Sequence[LockedOutRole]) -> str:
    """SQL that has to run before the remedies of these roles; empty if nothing is missing."""
    if not any("GRANT anabranch_writer" in role.remedy for role in roles):
        return ""
    exists = await connection.fetchval(
        "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = 'anabranch_writer')"
    )
    return "" if exists else "CREATE ROLE anabranch_writer NOLOGIN;"


async def _unprotected(connection: Connection, catalog: Catalog) -> Sequence[str]:
    """The tables without row-level security, if at least one of them has rows."""
    found = [table for table in TABLES if table in catalog.relations and not catalog.relations[table].enabled]
    for table in found:
        # The name is a constant; identifiers cannot be bound.
        query = f"SELECT EXISTS (SELECT FROM public.{table})"  # noqa: S608  # constant names
        if catalog.relations[table].holds_pages and await connection.fetchval(query):
            return found
    return []


# A group is listed only if it has the privilege itself: its members that can log in are listed anyway.
_LOCKED_OUT_ROLES: Final = """
    WITH tables AS (
      SELECT oid, relname::text AS name, relacl FROM pg_class
      WHERE relnamespace = 'public'::regnamespace AND relname = ANY ($1::text[])
    ), granted AS (
      SELECT t.oid, a.grantee, a.privilege_type AS privilege FROM tables t, aclexplode(t.relacl) a
      UNION
      SELECT t.oid, a.grantee, a.privilege_type
      FROM tables t JOIN pg_attribute c ON c.attrelid = t.oid AND NOT c.attisdropped, aclexplode(c.attacl) a
    ), exempt AS (
      SELECT oid FROM pg_roles WHERE rolname IN ($2, 'anabranch_writer', 'anabranch_reader')
    )
    SELECT r.rolname::text AS role, r.rolcanlogin AS login, t.name AS table, array_agg(p.privilege) AS privileges
    FROM pg_roles r CROSS JOIN tables t CROSS JOIN unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) p (privilege)
    WHERE NOT r.rolsuper AND NOT r.rolbypassrls AND r.rolname !~ '^pg_'
      AND NOT EXISTS (SELECT FROM exempt e WHERE pg_has_role(r.oid, e.oid, 'USAGE'))
      AND NOT coalesce((
        SELECT bool_and(o.polpermissive)
               AND bool_or(coalesce(pg_get_expr(o.polqual, o.polrelid), 'true') = 'true'
                           AND coalesce(pg_get_expr(o.polwithcheck, o.polrelid), 'true') = 'true')
        FROM pg_policy o
        WHERE o.polrelid = t.oid
          AND o.polcmd IN ('*', CASE p.privilege WHEN 'SELECT' THEN 'r' WHEN 'INSERT' THEN 'a'
                                                 WHEN 'UPDATE' THEN 'w' ELSE 'd' END)
          AND EXISTS (SELECT FROM unnest(o.polroles) m WHERE m = 0 OR pg_has_role(r.oid, m, 'USAGE'))), false)
      AND CASE WHEN r.rolcanlogin
          THEN has_schema_privilege(r.oid, 'public', 'USAGE')
               AND has_database_privilege(r.oid, current_database(), 'CONNECT')
               AND CASE p.privilege WHEN 'DELETE' THEN has_table_privilege(r.oid, t.oid, 'DELETE')
                   ELSE has_any_column_privilege(r.oid, t.oid, p.privilege) END
          ELSE EXISTS (SELECT FROM granted g
                       WHERE g.oid = t.oid AND g.grantee = r.oid AND g.privilege = p.privilege) END
    GROUP BY r.rolname, r.rolcanlogin, t.name
    ORDER BY r.rolname, t.name
"""
