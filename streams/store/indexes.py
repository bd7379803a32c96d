"""Builds indexes on tables in use: concurrently if there are rows, and one partition at a time."""

from streams.store.catalog import INDEX_DEFINITION, Catalog
from streams.store.reference import Statement, normalized_index
from streams.store.runner import Runner

__all__ = ["build"]


async def build(runner: Runner, catalog: Catalog, statement: Statement, *, in_use: bool) -> None:
    """Build one index without blocking readers or writers.

    Args:
        runner: acts as the tables' owner.
        catalog: the current state of the store.
        statement: the index.
        in_use: tables contain rows, so others may be reading and writing.

    An invalid index with the same name, for example from an interrupted build, is dropped first.
    """
    relation = catalog.relations.get(statement.table)
    same_name = [index for index in catalog.indexes if index.name == statement.name]
    done = f"created index {statement.name} on {statement.table}"
    if relation is not None and relation.partitioned:
        await _build_on_partitions(runner, statement, relation.oid, done)
        return
    if not in_use:
        before = [f"DROP INDEX public.{statement.name}"] if same_name else []
        await runner.transaction([*before, statement.sql], done)
        return
    drop = f"DROP INDEX CONCURRENTLY IF EXISTS public.{statement.name}"
    if same_name:
        await runner.alone(drop)
    await runner.alone(_concurrently(statement.sql), done, before_retry=drop)


def _concurrently(sql: str) -> str:
    return sql.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1)


async def _build_on_partitions(runner: Runner, statement: Statement, table: int, done: str) -> None:
    """Build each partition's index, then attach it: a partitioned table does not support concurrent builds."""
    head, definition = statement.sql.split(" ON public.", 1)
    definition = definition.removeprefix(statement.table)
    rows = await runner.fetch(_PARTITIONS, table)
    # Each relation of the tree → name of its index. The parent's index is invalid until all are attached.
    names = {
        row["oid"]: statement.name if row["oid"] == table else f"{statement.name}_{row['oid']}"
        for row in rows
    }
    for row in rows:
        name = names[row["oid"]]
        existing = await runner.fetch(_INDEX, row["schema"], name)
        expected = normalized_index(statement.definition)
        same = existing and normalized_index(existing[0]["definition"]) == expected
        sql = f"{head.replace(statement.name, name, 1)} ON {'' if row['leaf'] else 'ONLY '}{row['name']}{definition}"
        if row["leaf"]:
            if existing and not (same and existing[0]["valid"]):
                await runner.alone(f"DROP INDEX CONCURRENTLY {existing[0]['name']}")
                existing = []
            if not existing:
                rest = f"DROP INDEX CONCURRENTLY IF EXISTS {row['schema_name']}.{name}"
                await runner.alone(_concurrently(sql), before_retry=rest)
        elif not same:
            before = [f"DROP INDEX {existing[0]['name']}"] if existing else []
            await runner.transaction([*before, sql])
    for row in reversed(rows):
        if row["oid"] == table or (await runner.fetch(_ATTACHED, row["schema"], names[row["oid"]])):
            continue
        parent = next(found for found in rows if found["oid"] == row["parent"])
        parent_index = f"{parent['schema_name']}.{names[parent['oid']]}"
        index = f"{row['schema_name']}.{names[row['oid']]}"
        await runner.transaction([f"ALTER INDEX {parent_index} ATTACH PARTITION {index}"])
    if not runner.dry_run:
        runner.say(done)


_PARTITIONS = """
    SELECT c.oid, p.isleaf AS leaf, p.parentrelid::oid AS parent, n.nspname::text AS schema,
           format('%I', n.nspname) AS schema_name, format('%I.%I', n.nspname, c.relname) AS name
    FROM pg_partition_tree($1::oid) p
    JOIN pg_class c ON c.oid = p.relid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    ORDER BY p.level, c.oid
"""

_INDEX = f"""
    SELECT format('%I.%I', n.nspname, c.relname) AS name, i.indisvalid AS valid,
           {INDEX_DEFINITION} AS definition
    FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = $2
"""  # noqa: S608  # constant names

_ATTACHED = """
    SELECT FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid
    WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND c.relname = $2
"""
