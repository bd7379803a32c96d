"""The search functions without access control: what it costs is what the others take longer.

Row-level security is not the whole of it. The functions repeat the policies' condition, to lead the planner, and check
that the policies are active. A role that bypasses row-level security would pay for the first and fail the second.
"""

import re
from typing import Final

import asyncpg

from streams.store.reference import SEARCHES, reference

__all__ = ["create_unguarded_functions", "unguarded"]

SCHEMA: Final = "unguarded"
_CONDITION: Final = re.compile(
    r"\w+\.access_set_id = ANY \(ARRAY\(SELECT \w+\.id FROM public\.access_sets \w+\)\)"
)
_CHECK: Final = "anabranch_require_row_security"


async def create_unguarded_functions(dsn: str, role: str, *, principals_setting: str) -> None:
    """Copies of a store's search functions, in a schema of their own, without the condition and the check.

    Args:
        dsn: of the store's superuser.
        role: may call them; it has to bypass row-level security.
        principals_setting: of the store.

    Raises:
        ValueError: a function is not as expected, so that its copy would still have access control.
    """
    names = [
        statement.name
        for statement in reference(principals_setting)
        if statement.kind == "function" and statement.file == SEARCHES
    ]
    ours = re.compile(rf"\bpublic\.({'|'.join(names)})\b")
    replaced = 0
    connection = await asyncpg.connect(dsn, server_settings={"search_path": "pg_catalog"})
    try:
        await connection.execute(f"CREATE SCHEMA {SCHEMA}; GRANT USAGE ON SCHEMA {SCHEMA} TO {role}")
        for row in await connection.fetch(
            "SELECT proname, pg_get_functiondef(oid) AS source FROM pg_proc"
            " WHERE pronamespace = 'public'::regnamespace AND proname = ANY ($1)",
            names,
        ):
            if row["proname"] == _CHECK:
                await connection.execute(
                    f"CREATE FUNCTION {SCHEMA}.{_CHECK}() RETURNS void LANGUAGE plpgsql STABLE AS 'BEGIN END'"
                )
                continue
            source, number = _CONDITION.subn("true", ours.sub(rf"{SCHEMA}.\1", row["source"]))
            if "access_sets" in source:
                raise ValueError(f"{row['proname']} still reads the access sets")
            await connection.execute(source)
            replaced += number
    finally:
        await connection.close()
    if replaced == 0:
        raise ValueError("no function repeats the policies' condition")


def unguarded(sql: str) -> str:
    """The statement, with the copies for the functions that it calls."""
    return sql.replace("public.anabranch_", f"{SCHEMA}.anabranch_")
