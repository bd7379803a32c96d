"""Checks other policies and triggers that affect the tables' owner, as which Anabranch's triggers run.

Such policies could hide rows from the owner; such triggers would run with its rights.
"""

from typing import Final

from streams.store.catalog import Catalog, Connection, qualified_names, quoted
from streams.store.findings import Finding

__all__ = ["other_triggers", "restrictions"]


async def restrictions(connection: Connection, catalog: Catalog) -> list[Finding]:
    """Report restrictive policies that apply to the owner.

    Row-level security is forced, so these would hide rows from the triggers and from `migrate` without an error: a
    revoked grant would stay in force for those rows.

    Args:
        connection: of any role.
        catalog: the actual state of the store.
    """
    rows = await connection.fetch(_RESTRICTIONS, [found.oid for found in catalog.relations.values()])
    return [
        Finding(
            "policies",
            "refused",
            f"restrictive policy {row['policy']} on {row['table']} applies to the tables' owner {row['owner']}, so its"
            " triggers may miss rows: revoked grants may stay in force",
            f"ALTER POLICY {quoted(row['policy'])} ON public.{row['table']} TO …;"
            f" (the intended roles, but not PUBLIC or a role that {row['owner']} is a member of)",
        )
        for row in rows
    ]


_RESTRICTIONS: Final = """
    SELECT c.relname::text AS table, p.polname::text AS policy, o.rolname::text AS owner
    FROM pg_policy p
    JOIN pg_class c ON c.oid = p.polrelid
    JOIN pg_roles o ON o.oid = c.relowner
    WHERE p.polrelid = ANY ($1::oid[]) AND NOT p.polpermissive AND NOT (o.rolsuper OR o.rolbypassrls)
      AND EXISTS (SELECT FROM unnest(p.polroles) r WHERE r = 0 OR pg_has_role(c.relowner, r, 'USAGE'))
      AND (coalesce(pg_get_expr(p.polqual, p.polrelid), 'true') <> 'true'
           OR coalesce(pg_get_expr(p.polwithcheck, p.polrelid), 'true') <> 'true')
    ORDER BY 1, 2
"""


async def other_triggers(connection: Connection, catalog: Catalog) -> list[Finding]:
    """Report other roles' code that runs with the owner's rights, and roles that could add such code.

    A trigger runs as the role that writes. Anabranch's trigger functions write as the owner, so every other trigger on
    its tables and their partitions then runs as the owner. Roles that can act as the owner anyway are omitted.

    Args:
        connection: of any role.
        catalog: the actual state of the store.
    """
    async with qualified_names(connection):
        oids = [found.oid for found in catalog.relations.values()]
        triggers = await connection.fetch(_OTHERS_TRIGGERS, oids)
        rights = await connection.fetch(_TRIGGER_RIGHTS, oids)
    return [
        Finding(
            "triggers",
            "warning",
            f"trigger {row['trigger']} on {row['table']} calls {row['function']} (owner {row['function_owner']}), which"
            f" may run with the rights of the tables' owner {row['owner']}",
            f"DROP TRIGGER {quoted(row['trigger'])} ON {row['table']}; or review the function and run"
            f" ALTER FUNCTION {row['function']} OWNER TO {quoted(row['owner'])};",
        )
        for row in triggers
    ] + [
        Finding(
            "triggers",
            "warning",
            f"{row['role']} may create triggers on {row['tables']}, which could run with the tables' owner's rights",
            f"REVOKE TRIGGER ON {row['tables']} FROM {row['role']};",
        )
        for row in rights
    ]


_TREE: Final = """
    WITH RECURSIVE tree (oid, owner) AS (
      SELECT oid, relowner FROM pg_class WHERE oid = ANY ($1::oid[])
      UNION
      SELECT i.inhrelid, tree.owner FROM pg_inherits i JOIN tree ON i.inhparent = tree.oid
    )
"""

# A superuser counts as a member of every role. A partition's copy of a trigger is reported with its parent's.
_OTHERS_TRIGGERS: Final = f"""
    {_TREE}
    SELECT t.tgname::text AS trigger, t.tgrelid::regclass::text AS table, t.tgfoid::regprocedure::text AS function,
           pg_get_userbyid(f.proowner)::text AS function_owner, pg_get_userbyid(tree.owner)::text AS owner
    FROM tree
    JOIN pg_trigger t ON t.tgrelid = tree.oid
    JOIN pg_proc f ON f.oid = t.tgfoid
    WHERE t.tgparentid = 0 AND NOT t.tgisinternal AND NOT pg_has_role(f.proowner, tree.owner, 'MEMBER')
    ORDER BY 2, 1
"""  # noqa: S608  # constant names

_TRIGGER_RIGHTS: Final = f"""
    {_TREE}
    SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
           string_agg(DISTINCT c.oid::regclass::text, ', ' ORDER BY c.oid::regclass::text) AS tables
    FROM tree
    JOIN pg_class c USING (oid)
    CROSS JOIN LATERAL aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
    WHERE a.privilege_type = 'TRIGGER'
      AND (a.grantee = 0 OR NOT pg_has_role(a.grantee, tree.owner, 'MEMBER'))
    GROUP BY 1
    ORDER BY 1
"""  # noqa: S608  # constant names
