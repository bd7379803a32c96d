"""Checks that every policy that lets the worker see rows depends on the requesting principals, and tests it.

A back end may have its own policies. Each of them has to depend on the configured setting: directly, through a
function, or through a table that is itself protected this way.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import asyncpg

from streams.store.catalog import qualified_names, quoted
from streams.store.findings import MIGRATE, Finding
from streams.store.owner_checks import restrictions
from streams.store.reference import normalized
from streams.store.view import StoreView

__all__ = ["isolation", "policies"]

_CANARY_TIMEOUT: Final = "5s"


@lru_cache(maxsize=4)
def _reads(setting: str) -> re.Pattern[str]:
    """Matches PostgreSQL's own function reading the setting; a function of that name elsewhere may do anything."""
    return re.compile(
        rf"(?<![\w.\"])(?:pg_catalog\.)?current_setting\s*\(\s*'{re.escape(setting)}'", re.IGNORECASE
    )


@dataclass(frozen=True)
class _Policy:
    table: int
    name: str
    applies: bool
    expression: str
    sources: str  # source code of the functions that it calls
    foreign: bool  # it uses an operator, function or type from outside PostgreSQL's own catalog
    guarded_tables: list[int]  # tables that it uses and that have row-level security


async def policies(view: StoreView) -> list[Finding]:
    found = await _all_policies(view)
    readable = await view.connection.fetch(
        "SELECT t.name FROM unnest($1::oid[], $2::text[]) t (oid, name)"
        " WHERE has_any_column_privilege(t.oid, 'SELECT')",
        list(view.oids.values()),
        list(view.oids),
    )
    findings = []
    for (table,) in readable:
        oid = view.oids[table]
        own = [policy for policy in found if policy.table == oid]
        findings += [finding for policy in own if (finding := _policy_finding(view, table, policy, found))]
        if table in view.readable and not any(policy.applies for policy in own):
            findings.append(
                Finding("policies", "refused", f"{table} has no policy for role {view.role}", MIGRATE)
            )
    findings += await _owner_policies(view)
    return findings + await restrictions(view.connection, view.catalog)


def _policy_finding(view: StoreView, table: str, policy: _Policy, policies: list[_Policy]) -> Finding | None:
    """The problem with a policy that lets this role see rows, if any."""
    if not policy.applies:
        return None
    expected = view.policies.get((table, policy.name))
    if expected is not None and (
        policy.foreign or normalized(f"USING ({policy.expression})") not in expected.definition
    ):
        detail = f"policy {policy.name} on {table} differs from the reference policy for {view.setting}"
        return Finding("policies", "refused", detail, MIGRATE)
    if not _depends_on_setting(view, policy, policies, seen=frozenset()):
        detail = f"policy {policy.name} on {table} shows rows to {view.role} regardless of {view.setting}"
        remedy = f"DROP POLICY {quoted(policy.name)} ON public.{table};"
        return Finding("policies", "refused", detail, MIGRATE if expected is not None else remedy)
    return None


def _depends_on_setting(
    view: StoreView, policy: _Policy, policies: list[_Policy], *, seen: frozenset[int]
) -> bool:
    if _reads(view.setting).search(f"{policy.expression} {policy.sources}"):
        return True
    for table in policy.guarded_tables:
        if table in seen or table == policy.table:
            continue
        guards = [guard for guard in policies if guard.table == table and guard.applies]
        if guards and all(
            _depends_on_setting(view, guard, policies, seen=seen | {table, policy.table}) for guard in guards
        ):
            return True
    return False


async def _all_policies(view: StoreView) -> list[_Policy]:
    """The permissive read policies of every table: a policy may depend on another table's policies."""
    async with qualified_names(view.connection):
        rows = await view.connection.fetch(
            "SELECT p.polrelid::oid AS table, p.polname::text AS name,"
            "       coalesce(pg_get_expr(p.polqual, p.polrelid), 'true') AS expression,"
            "       EXISTS (SELECT FROM unnest(p.polroles) r"
            "               WHERE r = 0 OR pg_has_role(r, 'USAGE')) AS applies,"
            "       coalesce((SELECT string_agg(coalesce(pg_get_function_sqlbody(f.oid), f.prosrc), ' ')"
            "                 FROM pg_depend d JOIN pg_proc f ON f.oid = d.refobjid"
            "                 WHERE d.classid = 'pg_policy'::regclass AND d.objid = p.oid"
            "                   AND d.refclassid = 'pg_proc'::regclass), '') AS sources,"
            "       EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_policy'::regclass AND d.objid = p.oid"
            "               AND d.refclassid IN ('pg_operator'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass,"
            "                                    'pg_collation'::regclass)) AS foreign,"
            "       ARRAY(SELECT DISTINCT c.oid FROM pg_depend d JOIN pg_class c ON c.oid = d.refobjid"
            "             WHERE d.classid = 'pg_policy'::regclass AND d.objid = p.oid"
            "               AND d.refclassid = 'pg_class'::regclass AND c.relrowsecurity) AS guarded_tables"
            " FROM pg_policy p"
            " WHERE p.polpermissive AND p.polcmd IN ('r', '*')"
            " ORDER BY p.polrelid, p.polname"
        )
    return [_Policy(**dict(row)) for row in rows]


async def _owner_policies(view: StoreView) -> list[Finding]:
    """Report tables without a policy for their owner: the triggers run as the owner and must reach all rows."""
    rows = await view.connection.fetch(
        "SELECT c.relname::text AS table, o.rolname::text AS owner"
        " FROM pg_class c JOIN pg_roles o ON o.oid = c.relowner"
        " WHERE c.oid = ANY ($1::oid[]) AND NOT (o.rolsuper OR o.rolbypassrls) AND NOT EXISTS ("
        "   SELECT FROM pg_policy p WHERE p.polrelid = c.oid AND p.polpermissive AND p.polcmd = '*'"
        "   AND pg_get_expr(p.polqual, p.polrelid) = 'true'"
        "   AND coalesce(pg_get_expr(p.polwithcheck, p.polrelid), 'true') = 'true'"
        "   AND EXISTS (SELECT FROM unnest(p.polroles) r"
        "               WHERE r = 0 OR pg_has_role(c.relowner, r, 'USAGE')))"
        " ORDER BY 1",
        list(view.oids.values()),
    )
    return [
        Finding(
            "policies",
            "refused",
            f"{row['table']} has no policy for its owner {row['owner']}: revoked grants would stay in force",
            MIGRATE,
        )
        for row in rows
    ]


async def isolation(view: StoreView) -> list[Finding]:
    """Test it: whatever the policies are, a query without principals must return no rows."""
    findings = []
    for table in view.readable:
        if table not in view.oids:
            continue
        for no_principals in ("", "[]"):
            try:
                visible = await _is_visible(view, table, no_principals)
            except asyncpg.QueryCanceledError:
                detail = f"testing whether {table} shows rows without principals took longer than {_CANARY_TIMEOUT}"
                findings.append(
                    Finding("isolation", "warning", detail, f"{MIGRATE}; ANALYZE public.{table};")
                )
                break
            except asyncpg.PostgresError:
                # No permission to read, or a policy that rejects the value: no rows in either case.
                continue
            if visible:
                detail = f"{table} shows rows although {view.setting} is {no_principals!r}"
                findings.append(Finding("isolation", "refused", detail, MIGRATE))
                break
    return findings


async def _is_visible(view: StoreView, table: str, principals: str) -> bool:
    transaction = view.connection.transaction()
    await transaction.start()
    try:
        await view.connection.execute(
            "SELECT set_config('statement_timeout', $1, true), set_config($2, $3, true)",
            _CANARY_TIMEOUT,
            view.setting,
            principals,
        )
        # The name is a constant; identifiers cannot be bound.
        return bool(await view.connection.fetchval(f"SELECT EXISTS (SELECT FROM public.{table})"))  # noqa: S608  # constant names
    finally:
        await transaction.rollback()
