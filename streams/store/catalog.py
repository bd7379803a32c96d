"""Reads a store's catalogs in a form that can be compared with the reference schema.

Only catalogs that any role may read are used. PostgreSQL prints definitions with the search_path ``pg_catalog``, so
that everything from another schema has that schema's name as a prefix. This reveals operators, functions or types that
somebody planted.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, TypeAlias

import asyncpg

from streams.store.reference import (
    INTERNAL_TABLES,
    TABLES,
    VERSION_TABLE,
    Kind,
    Statement,
    function_definition,
    function_names,
    index_definitions,
    normalized,
    normalized_index,
    normalized_trigger,
)

__all__ = [
    "INDEX_DEFINITION",
    "OBJECT_KINDS",
    "UNREADABLE",
    "USABLE_INDEX",
    "Catalog",
    "Connection",
    "Function",
    "Index",
    "Relation",
    "Trigger",
    "qualified_names",
    "quoted",
    "read_catalog",
    "read_versions",
    "vector_schema",
]

Connection: TypeAlias = (
    "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
)

#: The version if this role may not read it.
UNREADABLE: Final = -1


@dataclass(frozen=True)
class Relation:
    """A table, or another object with its name."""

    oid: int
    kind: str  # pg_class.relkind
    owner: str
    enabled: bool  # row-level security
    forced: bool
    holds_pages: bool  # false: the table is empty; true: it may have rows

    @property
    def partitioned(self) -> bool:
        return self.kind == "p"


@dataclass(frozen=True)
class Index:
    """An index on one of the tables."""

    table: str
    name: str
    valid: bool
    definition: str
    usable: bool  # not partial, or partial only by excluding rows that its searches never need


@dataclass(frozen=True)
class Function:
    """A function with one of Anabranch's names."""

    name: str
    signature: str
    owner: str
    definition: str
    public: bool  # PUBLIC may execute it
    executable: bool  # this role may execute it


@dataclass(frozen=True)
class Trigger:
    """A trigger on one of the tables, except those of foreign keys."""

    table: str
    name: str
    definition: str
    disabled_on: str  # the table and partitions where it does not fire; empty: it fires everywhere
    foreign: bool  # its condition uses something from outside PostgreSQL's own catalog
    before_row: bool
    constraint: bool

    @property
    def enabled(self) -> bool:
        return not self.disabled_on


@dataclass(frozen=True)
class Catalog:
    """The actual state of a store, and how it compares with the reference."""

    relations: Mapping[str, Relation]
    columns: Mapping[tuple[str, str], tuple[str, str]]  # type and storage
    indexes: Sequence[Index]
    functions: Sequence[Function]
    triggers: Mapping[tuple[str, str], Trigger]
    policies: Mapping[tuple[str, str], str]
    rights: frozenset[tuple[str, str, str, str]]  # table or function(types), column or '', role, privilege
    schema_usage: frozenset[str]
    version: int
    oldest_worker: int

    @property
    def owner(self) -> str | None:
        """The owner of the tables, if all have the same one."""
        owners = {relation.owner for name, relation in self.relations.items() if name in TABLES}
        return owners.pop() if len(owners) == 1 else None

    @property
    def dimensions(self) -> int | None:
        """The dimensions of the stored embeddings; None if the column is missing or of another type."""
        found = re.fullmatch(
            r"vector\((\d+)\)", self.columns.get(("document_chunks", "embedding"), ("", ""))[0]
        )
        return int(found[1]) if found else None

    def has(self, statement: Statement) -> bool:
        """Whether the object that a reference statement creates already exists as defined.

        Always false for statements that do not create an object: rebuilding, ANALYZE, the version.
        """
        test = _HAS.get(statement.kind)
        return test is not None and test(self, statement)

    def differs(self, statement: Statement) -> bool:
        """Whether a function exists but differs from the statement."""
        return any(found.name == statement.name for found in self.functions) and not self.has(statement)

    def index_for(self, statement: Statement) -> Index | None:
        """A valid index with the same definition, or that of an earlier release; its name and parameters may differ."""
        return self._index(statement, index_definitions(statement))

    def earlier_index_for(self, statement: Statement) -> Index | None:
        """A valid index that only an earlier release would build."""
        return self._index(statement, index_definitions(statement)[1:])

    def _index(self, statement: Statement, definitions: Sequence[str]) -> Index | None:
        for definition in definitions:
            for index in self.indexes:
                if (
                    index.table == statement.table
                    and index.valid
                    and index.usable
                    and index.definition == definition
                ):
                    return index
        return None


def _has_column(catalog: Catalog, statement: Statement) -> bool:
    return (statement.table, statement.name) in catalog.columns


def _has_storage(catalog: Catalog, statement: Statement) -> bool:
    return (
        catalog.columns.get((statement.table, statement.name), ("", ""))[1] == statement.definition[0].lower()
    )


def _is_enabled(catalog: Catalog, statement: Statement) -> bool:
    relation = catalog.relations.get(statement.table)
    return relation is not None and (relation.enabled if statement.kind == "enable" else relation.forced)


def _has_function(catalog: Catalog, statement: Statement) -> bool:
    return any(
        found.definition == statement.definition and found.owner == catalog.owner
        for found in catalog.functions
        if found.name == statement.name
    )


def _has_trigger(catalog: Catalog, statement: Statement) -> bool:
    found = catalog.triggers.get((statement.table, statement.name))
    return (
        found is not None and found.enabled and not found.foreign and found.definition == statement.definition
    )


def _is_revoked(catalog: Catalog, statement: Statement) -> bool:
    own_names = set(re.findall(r"public\.(\w+)\(", statement.sql))
    return not any(function.public for function in catalog.functions if function.name in own_names)


def _is_granted(catalog: Catalog, statement: Statement) -> bool:
    match = _GRANT.match(statement.sql)
    if match is None:
        return False
    roles = re.findall(r"\w+", match["roles"])
    if match["schema"]:
        return catalog.schema_usage >= set(roles)
    return all(
        (table, column, role, privilege) in catalog.rights or (table, "", role, privilege) in catalog.rights
        for table in (
            map(_signature, re.findall(r"public\.(\w+\([^)]*\))", match["tables"]))
            if match["functions"]
            else re.findall(r"public\.(\w+)", match["tables"])
        )
        for column in re.findall(r"\w+", match["columns"] or "") or [""]
        for role in roles
        for privilege in re.findall(r"\w+", match["privileges"])
    )


def _signature(function: str) -> str:
    """A function's name and argument types, as PostgreSQL names these; without white space."""
    return re.sub(r"\bint\b", "integer", re.sub(r"\s", "", function))


_HAS: Final[dict[Kind, Callable[[Catalog, Statement], bool]]] = {
    "table": lambda catalog, statement: statement.table in catalog.relations,
    "column": _has_column,
    "storage": _has_storage,
    "enable": _is_enabled,
    "force": _is_enabled,
    "index": lambda catalog, statement: catalog.index_for(statement) is not None,
    "function": _has_function,
    "revoke": _is_revoked,
    "trigger": _has_trigger,
    "policy": lambda catalog, statement: (
        catalog.policies.get((statement.table, statement.name)) == statement.definition
    ),
    "grant": _is_granted,
}

#: The kinds of statements that create an object.
OBJECT_KINDS: Final = tuple(_HAS)

_GRANT: Final = re.compile(
    r"GRANT (?P<privileges>[\w, ]+?)\s*(?:\((?P<columns>[^)]*)\))?"
    r"\s+ON (?:(?P<schema>SCHEMA public)|(?P<functions>FUNCTION)?(?P<tables>.+?))"
    r"\s+TO (?P<roles>[\w, ]+)$",
    re.DOTALL,
)


async def read_catalog(connection: Connection) -> Catalog:
    """Read the store's catalogs, as any role; settings are restored afterwards."""
    async with qualified_names(connection):
        relations = {
            row["name"]: Relation(
                row["oid"], row["kind"], row["owner"], row["rls"], row["forced"], row["pages"]
            )
            for row in await connection.fetch(_RELATIONS, [*TABLES, *INTERNAL_TABLES])
        }
        oids = [relation.oid for relation in relations.values()]
        triggers = {
            (row["table"], row["name"]): Trigger(
                **dict(row) | {"definition": normalized_trigger(row["definition"])}
            )
            for row in await connection.fetch(_TRIGGERS, oids)
        }
        version, oldest_worker = await _version(connection, relations, triggers)
        return Catalog(
            relations=relations,
            columns={
                (row["table"], row["name"]): (row["type"], row["storage"])
                for row in await connection.fetch(_COLUMNS, oids)
            },
            indexes=[
                Index(**dict(row) | {"definition": normalized_index(row["definition"])})
                for row in await connection.fetch(_INDEXES, oids)
            ],
            functions=[_function(row) for row in await connection.fetch(_FUNCTIONS, function_names())],
            triggers=triggers,
            policies={
                (row["table"], row["name"]): normalized(row["definition"])
                for row in await connection.fetch(_POLICIES, oids)
            },
            rights=frozenset(
                (_signature(row["name"]), row["column"], row["role"], row["privilege"])
                for row in await connection.fetch(_RIGHTS, oids, _ROLES, function_names())
            ),
            schema_usage=frozenset(row["role"] for row in await connection.fetch(_SCHEMA_USAGE, _ROLES)),
            version=version,
            oldest_worker=oldest_worker,
        )


_ROLES: Final = ("anabranch_reader", "anabranch_writer")

#: The settings that affect how PostgreSQL prints definitions.
_PRINTING: Final = {"search_path": "pg_catalog", "quote_all_identifiers": "off"}


@asynccontextmanager
async def qualified_names(connection: Connection) -> AsyncIterator[None]:
    """Make PostgreSQL print the schema of everything outside pg_catalog; settings are restored afterwards."""
    # No savepoint: each has a name of its own, which would be one more statement in the server's statistics.
    async with nullcontext() if connection.is_in_transaction() else connection.transaction():
        rows = await connection.fetch(
            "SELECT name, current_setting(name) AS value FROM unnest($1::text[]) AS n (name)", list(_PRINTING)
        )
        await connection.executemany("SELECT set_config($1, $2, true)", _PRINTING.items())
        yield
        await connection.executemany(
            "SELECT set_config($1, $2, true)", [(row["name"], row["value"]) for row in rows]
        )


async def read_versions(connection: Connection) -> Mapping[str, str]:
    """The versions of ``postgresql`` and, if it is installed, ``pgvector``."""
    row = await connection.fetchrow(
        "SELECT split_part(current_setting('server_version'), ' ', 1) AS postgresql,"
        "       (SELECT extversion FROM pg_extension WHERE extname = 'vector') AS pgvector"
    )
    return {name: version for name, version in (row or {}).items() if version is not None}


async def vector_schema(connection: Connection, *, for_sql: bool = True) -> str:
    """The schema of pgvector; ``public`` if the extension is missing.

    Args:
        connection: any connection to the database.
        for_sql: whether to quote it if necessary.
    """
    row = await connection.fetchrow(_VECTOR_SCHEMA)
    return "public" if row is None else str(row["quoted" if for_sql else "name"])


# Not quote_ident: it obeys quote_all_identifiers.
_VECTOR_SCHEMA: Final = """
    SELECT n.nspname::text AS name,
           CASE WHEN n.nspname ~ '^[a-z_][a-z0-9_]*$'
                     AND NOT EXISTS (SELECT FROM pg_get_keywords() k WHERE k.word = n.nspname AND k.catcode <> 'U')
                THEN n.nspname::text ELSE '"' || replace(n.nspname, '"', '""') || '"' END AS quoted
    FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
    WHERE e.extname = 'vector'
"""


def quoted(identifier: str) -> str:
    """An identifier, quoted for SQL if necessary."""
    return '"' + identifier.replace('"', '""') + '"'


def _function(row: asyncpg.Record) -> Function:
    printed = row["definition"] or ""
    head = printed.partition("\nAS $")[0].removeprefix(f"CREATE OR REPLACE FUNCTION public.{row['name']}")
    definition = function_definition(head, row["body"])
    return Function(row["name"], row["signature"], row["owner"], definition, row["public"], row["executable"])


async def _version(
    connection: Connection, relations: Mapping[str, Relation], triggers: Mapping[tuple[str, str], Trigger]
) -> tuple[int, int]:
    """The store's version and the oldest version whose workers it supports; 0 if nothing is recorded."""
    known = relations.get(VERSION_TABLE)
    # Ignore a table of this name that belongs to another role.
    if (
        known is not None
        and known.kind == "r"
        and known.owner in {relation.owner for name, relation in relations.items() if name in TABLES}
    ):
        if not await connection.fetchval(
            "SELECT has_schema_privilege('public', 'USAGE') AND has_table_privilege($1::oid, 'SELECT')",
            known.oid,
        ):
            return UNREADABLE, UNREADABLE
        row = await connection.fetchrow(
            f"SELECT version, oldest_worker FROM public.{VERSION_TABLE} ORDER BY version DESC LIMIT 1"  # noqa: S608  # constant names
        )
        if row is not None:
            return row["version"], row["oldest_worker"]
    if any(name.startswith("anabranch_") for _, name in triggers):
        return 1, 1
    return 0, 0


_RELATIONS: Final = """
    SELECT relname::text AS name, oid, relkind::text AS kind, pg_get_userbyid(relowner)::text AS owner,
           relrowsecurity AS rls, relforcerowsecurity AS forced,
           CASE relkind
             WHEN 'r' THEN pg_relation_size(oid) > 0
             WHEN 'p' THEN EXISTS (SELECT FROM pg_partition_tree(oid) p WHERE pg_relation_size(p.relid) > 0)
             ELSE false END AS pages
    FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relname = ANY ($1::text[])
      AND relkind NOT IN ('i', 'I', 'S', 'c', 't')
"""

# A type of the extension is printed with the extension's schema, which may have any name.
_COLUMNS: Final = """
    SELECT c.relname::text AS table, a.attname::text AS name, a.attstorage::text AS storage,
           CASE WHEN EXISTS (
             SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
             WHERE d.classid = 'pg_type'::regclass AND d.objid = a.atttypid AND d.deptype = 'e'
               AND d.refclassid = 'pg_extension'::regclass AND e.extname = 'vector')
           THEN regexp_replace(format_type(a.atttypid, a.atttypmod), '^.*[.]', '')
           ELSE format_type(a.atttypid, a.atttypmod) END AS type
    FROM pg_attribute a
    JOIN pg_class c ON c.oid = a.attrelid
    WHERE a.attrelid = ANY ($1::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
"""

#: The method and columns of the index `c`, in SQL; without its name and parameters, and without a predicate.
INDEX_DEFINITION: Final = (
    "regexp_replace(substring(pg_get_indexdef(c.oid) FROM 'USING .*'), ' (WITH|WHERE) .*', '')"
)

#: Whether the index `i` is not partial, or partial only by excluding rows that its searches never need, in SQL.
USABLE_INDEX: Final = (
    "(i.indpred IS NULL OR pg_get_expr(i.indpred, i.indrelid)"
    " IN ('(embedding IS NOT NULL)', '(number IS NOT NULL)', '(instant IS NOT NULL)'))"
)

_INDEXES: Final = f"""
    SELECT t.relname::text AS table, c.relname::text AS name, i.indisvalid AS valid,
           {INDEX_DEFINITION} AS definition,
           {USABLE_INDEX} AS usable
    FROM pg_index i
    JOIN pg_class c ON c.oid = i.indexrelid
    JOIN pg_class t ON t.oid = i.indrelid
    WHERE i.indrelid = ANY ($1::oid[])
    ORDER BY c.relname
"""  # noqa: S608  # constant names

_FUNCTIONS: Final = """
    SELECT f.proname::text AS name, pg_get_function_identity_arguments(f.oid) AS signature,
           pg_get_userbyid(f.proowner)::text AS owner, f.prosrc AS body,
           CASE f.prokind WHEN 'f' THEN pg_get_functiondef(f.oid) END AS definition,
           EXISTS (SELECT FROM aclexplode(coalesce(f.proacl, acldefault('f', f.proowner))) a
                   WHERE a.grantee = 0) AS public,
           has_function_privilege(f.oid, 'EXECUTE') AS executable
    FROM pg_proc f
    WHERE f.pronamespace = 'public'::regnamespace AND f.proname = ANY ($1::text[])
    ORDER BY f.proname, signature
"""

_FOREIGN: Final = """
    EXISTS (SELECT FROM pg_depend d
            WHERE d.classid = '{catalog}'::regclass AND d.objid = {oid}
              AND d.refclassid IN ('pg_operator'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass,
                                   'pg_collation'::regclass)
              AND NOT (d.refclassid = 'pg_proc'::regclass AND d.refobjid = {except_function}))
"""

# Each partition has a copy of its parent's row trigger, which can be disabled separately.
_TRIGGERS: Final = f"""
    WITH RECURSIVE copies (root, oid) AS (
      SELECT oid, oid FROM pg_trigger WHERE tgrelid = ANY ($1::oid[]) AND NOT tgisinternal
      UNION ALL
      SELECT copies.root, t.oid FROM pg_trigger t JOIN copies ON t.tgparentid = copies.oid
    ), disabled AS (
      SELECT copies.root, string_agg(c.relname, ', ' ORDER BY c.relname) AS tables
      FROM copies JOIN pg_trigger t USING (oid) JOIN pg_class c ON c.oid = t.tgrelid
      WHERE t.tgenabled NOT IN ('O', 'A')
      GROUP BY copies.root
    )
    SELECT c.relname::text AS table, t.tgname::text AS name, pg_get_triggerdef(t.oid) AS definition,
           coalesce(disabled.tables, '') AS disabled_on, t.tgtype & 3 = 3 AS before_row,
           t.tgconstraint <> 0 AS constraint,
           {_FOREIGN.format(catalog="pg_trigger", oid="t.oid", except_function="t.tgfoid")} AS foreign
    FROM pg_trigger t
    JOIN pg_class c ON c.oid = t.tgrelid
    LEFT JOIN disabled ON disabled.root = t.oid
    WHERE t.tgrelid = ANY ($1::oid[]) AND NOT t.tgisinternal
"""  # noqa: S608  # constant names

_POLICIES: Final = f"""
    SELECT c.relname::text AS table, p.polname::text AS name,
           CASE WHEN NOT p.polpermissive THEN 'RESTRICTIVE ' ELSE '' END
           || CASE WHEN {_FOREIGN.format(catalog="pg_policy", oid="p.oid", except_function="0")}
              THEN 'FOREIGN ' ELSE '' END
           || format('FOR %s TO %s USING (%s)',
                     CASE p.polcmd WHEN '*' THEN 'ALL' WHEN 'r' THEN 'SELECT' ELSE p.polcmd::text END,
                     CASE WHEN p.polroles = ARRAY[c.relowner] THEN 'CURRENT_USER'
                          ELSE (SELECT string_agg(coalesce(r.rolname, 'PUBLIC'), ', ' ORDER BY r.rolname)
                                FROM unnest(p.polroles) o LEFT JOIN pg_roles r ON r.oid = o) END,
                     pg_get_expr(p.polqual, p.polrelid))
           || coalesce(' WITH CHECK (' || pg_get_expr(p.polwithcheck, p.polrelid) || ')', '') AS definition
    FROM pg_policy p
    JOIN pg_class c ON c.oid = p.polrelid
    WHERE p.polrelid = ANY ($1::oid[])
"""  # noqa: S608  # constant names

_RIGHTS: Final = """
    SELECT c.relname::text AS name, '' AS column, r.rolname::text AS role, a.privilege_type AS privilege
    FROM pg_class c, aclexplode(c.relacl) a, pg_roles r
    WHERE c.oid = ANY ($1::oid[]) AND r.oid = a.grantee AND r.rolname = ANY ($2::text[])
    UNION ALL
    SELECT c.relname::text, t.attname::text, r.rolname::text, a.privilege_type
    FROM pg_class c, pg_attribute t, aclexplode(t.attacl) a, pg_roles r
    WHERE c.oid = ANY ($1::oid[]) AND t.attrelid = c.oid AND NOT t.attisdropped
      AND r.oid = a.grantee AND r.rolname = ANY ($2::text[])
    UNION ALL
    SELECT format('%s(%s)', f.proname, oidvectortypes(f.proargtypes)), '', r.rolname::text, a.privilege_type
    FROM pg_proc f, aclexplode(f.proacl) a, pg_roles r
    WHERE f.pronamespace = 'public'::regnamespace AND f.proname = ANY ($3::text[])
      AND r.oid = a.grantee AND r.rolname = ANY ($2::text[])
"""

_SCHEMA_USAGE: Final = """
    SELECT rolname::text AS role FROM pg_roles
    WHERE rolname = ANY ($1::text[]) AND has_schema_privilege(oid, 'public', 'USAGE')
"""
