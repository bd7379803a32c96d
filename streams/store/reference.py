"""The reference schema (``schemas/postgres``) as statements, each with the object it creates.

The files describe the desired state of a store in plain SQL. This is the only module that reads them: ``migrate`` runs
the statements whose object is missing or different, ``check`` reports those, and ``stats`` lists the indexes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from streams import resources
from streams.core.contract import DIMENSIONS

__all__ = [
    "BASE_TABLES",
    "DEFAULT_DIMENSIONS",
    "INTERNAL_TABLES",
    "SCHEMA_VERSION",
    "SEARCHES",
    "STEPS",
    "TABLES",
    "VERSION_TABLE",
    "InvalidReference",
    "Kind",
    "Statement",
    "check_setting_name",
    "column_types",
    "executable_functions",
    "function_definition",
    "function_names",
    "index_definitions",
    "is_compatible_type",
    "normalized",
    "normalized_index",
    "normalized_trigger",
    "readable_columns",
    "reference",
    "replaced_functions",
    "steps",
]

#: The version of the files. Version 1 is the first release, which did not record its version.
SCHEMA_VERSION: Final = 3
#: The file with the functions that workers call; the others are called by triggers and operators.
SEARCHES: Final = "005_search.sql"
#: The versions to which a store can be upgraded.
STEPS: Final = range(2, SCHEMA_VERSION + 1)
VERSION_TABLE: Final = "anabranch_schema"

#: The back end's tables.
BASE_TABLES: Final = ("documents", "document_chunks", "document_grants")
#: The back end's tables, and those derived from them.
TABLES: Final = (*BASE_TABLES, "access_sets", "chunk_topics", "chunk_metadata")

#: The tables that only the owner's functions and operators use.
INTERNAL_TABLES: Final = ("access_locks", VERSION_TABLE)

#: The dimensions of the embeddings in the files.
DEFAULT_DIMENSIONS: Final = DIMENSIONS
# A row with an embedding in it has to fit into a page of 8 KiB. Above, the embedding is stored out of line.
_MAX_PLAIN_DIMENSIONS: Final = 1900

_COLUMN_TYPES: Final = {
    "documents": {
        "id": "uuid",
        "session_id": "uuid",
        "title": "text",
        "source_url": "text",
        "file_description": "text",
        "document_type": "text",
        "metadata": "jsonb",
        "access_set_id": "bigint",
    },
    "document_chunks": {
        "id": "uuid",
        "document_id": "uuid",
        "session_id": "uuid",
        "parent_chunk_id": "uuid",
        "related_topic_ids": "uuid[]",
        "chunk_type": "text",
        "chunk_position": "integer",
        "text_content": "text",
        "token_count": "integer",
        "page": "integer",
        "section": "text",
        "coordinates": "jsonb",
        "metadata": "jsonb",
        "access_set_id": "bigint",
    },
    "document_grants": {"document_id": "uuid", "principal": "text"},
    "access_sets": {"id": "bigint", "principals": "text[]", "digest": "bytea"},
    "chunk_topics": {"topic_id": "uuid", "chunk_id": "uuid", "session_id": "uuid", "access_set_id": "bigint"},
    "chunk_metadata": {
        "entry": "uuid",
        "chunk_id": "uuid",
        "access_set_id": "bigint",
        "number": "double precision",
        "instant": "timestamp with time zone",
    },
}

Kind = Literal[
    "table",
    "column",
    "storage",
    "index",
    "function",
    "revoke",
    "trigger",
    "policy",
    "rebuild",
    "enable",
    "force",
    "grant",
    "analyze",
    "version",
]

_SETTING_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)+")
_SETTING_PLACEHOLDER: Final = ":'principals_setting'"
_SCHEMA_PLACEHOLDER: Final = ":vector_schema"
# Not a placeholder, so that psql can apply the files to a store with the default, also between dollar signs.
_VECTOR_TYPE: Final = re.compile(rf"\b(vector|halfvec)\({DEFAULT_DIMENSIONS}\)")


class InvalidReference(Exception):
    """The setting's name, or a schema file, is invalid; the message says why."""


@dataclass(frozen=True)
class Statement:
    """One statement of the files.

    Args:
        kind: what it creates.
        sql: as written, without the semicolon.
        file: the file that contains it, for example ``002_derived.sql``.
        table: the table that the object belongs to; empty for functions.
        name: the object's name.
        definition: what has to match the catalog, in normalized form.
    """

    kind: Kind
    sql: str
    file: str
    table: str = ""
    name: str = ""
    definition: str = ""


def check_setting_name(name: str) -> str:
    """Return the name of a custom setting if it is safe in SQL.

    Raises:
        InvalidReference: the name does not have the form ``prefix.name``.
    """
    if not _SETTING_NAME.fullmatch(name):
        raise InvalidReference(
            f"{name!r} is not a valid name for the principals setting: use two parts of lower-case letters, digits and"
            " underscores, separated by a dot, for example anabranch.principals"
        )
    return name


def column_types(dimensions: int) -> Mapping[str, Mapping[str, str]]:
    """The columns that the triggers, searches and results need in existing tables: their types, by table and name."""
    chunks = _COLUMN_TYPES["document_chunks"] | {"embedding": f"vector({dimensions})"}
    return _COLUMN_TYPES | {"document_chunks": chunks}


@lru_cache(maxsize=8)
def reference(
    principals_setting: str, vector_schema: str = "public", dimensions: int = DEFAULT_DIMENSIONS
) -> tuple[Statement, ...]:
    """The reference schema's statements, in order.

    Args:
        principals_setting: the setting in which workers pass the requesting principals.
        vector_schema: pgvector's schema, quoted if necessary.
        dimensions: of the embeddings.

    Raises:
        InvalidReference: the setting's name is invalid.
    """
    name = check_setting_name(principals_setting)
    return tuple(
        _parsed(file, sql)
        for file, text in _files()
        for sql in _split(
            _with_dimensions(text, dimensions)
            .replace(_SETTING_PLACEHOLDER, f"'{name}'")
            .replace(_SCHEMA_PLACEHOLDER, vector_schema)
        )
    )


def _with_dimensions(text: str, dimensions: int) -> str:
    text = _VECTOR_TYPE.sub(rf"\1({dimensions})", text)
    return (
        text.replace("SET STORAGE PLAIN", "SET STORAGE EXTERNAL")
        if dimensions > _MAX_PLAIN_DIMENSIONS
        else text
    )


def steps(version: int, *, prune: bool = False) -> list[str]:
    """The statements to run once when upgrading to a version, or to remove what only older workers need."""
    folder = resources.schemas() / "postgres" / "steps"
    file = folder / f"{version:03}{'_prune' if prune else ''}.sql"
    return list(_split(file.read_text(encoding="utf-8"))) if file.is_file() else []


def replaced_functions(version: int) -> list[Statement]:
    """The older versions' functions that the step to a version replaces until they are pruned."""
    return [
        _parsed(f"steps/{version:03}.sql", sql)
        for sql in steps(version)
        if sql.startswith("CREATE OR REPLACE FUNCTION")
    ]


@lru_cache(maxsize=1)
def function_names() -> tuple[str, ...]:
    """The reference's functions, and the older versions' that a step keeps until they are pruned."""
    current = reference("anabranch.principals")  # the names do not depend on the setting's name
    older = (statement for version in STEPS for statement in replaced_functions(version))
    return tuple(statement.name for statement in (*current, *older) if statement.kind == "function")


def readable_columns(statements: Iterable[Statement]) -> dict[str, list[str]]:
    """The columns that a worker reads, by table."""
    found = (_READ.match(statement.sql) for statement in statements if statement.kind == "grant")
    return {match["table"]: re.findall(r"\w+", match["columns"]) for match in found if match}


def executable_functions(statements: Iterable[Statement]) -> set[str]:
    """The functions that a worker calls, and those that these call with its rights."""
    return {
        name
        for statement in statements
        if statement.kind == "grant" and statement.sql.startswith("GRANT EXECUTE ON FUNCTION")
        for name in re.findall(r"public\.(\w+)\(", statement.sql)
    }


_READ: Final = re.compile(
    r"GRANT SELECT \((?P<columns>[^)]*)\)\s+ON public\.(?P<table>\w+) TO anabranch_reader"
)


def is_compatible_type(found: str, expected: str) -> bool:
    """Whether a column of one type can be used as another."""
    return (
        found == expected
        or (expected == "text" and found.startswith("character varying"))
        or (expected == "integer" and found == "smallint")
    )


# Comparison: with the search_path pg_catalog, PostgreSQL prints the schema of everything that is not in pg_catalog.

_CATALOG_OPERATOR: Final = re.compile(r"OPERATOR\(pg_catalog\.([^)\s]+)\)")
_QUALIFIER_OR_SPACE: Final = re.compile(r'(?:\b\w+|"(?:[^"]|"")+")\.|\s')
_SET: Final = re.compile(r"SET (\w+) (?:=|TO) (.+?)(?=\s+(?:SET|AS)\b|\s*$)", re.DOTALL)


def normalized(text: str) -> str:
    """An expression without white space and without the schema name pg_catalog; other schema names are kept."""
    return re.sub(r"\bpg_catalog\.|\s", "", _CATALOG_OPERATOR.sub(r"\1", text))


def normalized_trigger(text: str) -> str:
    """A trigger's definition without parentheses, which PostgreSQL adds: no condition here mixes AND and OR."""
    return re.sub(r"[()]", "", normalized(text.replace("CREATE OR REPLACE TRIGGER", "CREATE TRIGGER")))


def index_definitions(statement: Statement) -> list[str]:
    """An index's definition, and those of earlier releases that searches can use instead; normalized."""
    return [normalized_index(text) for text in (statement.definition, *_EARLIER.get(statement.name, ()))]


_EARLIER: Final = {"document_chunks_embedding_halfvec": ("USING hnsw (embedding vector_cosine_ops)",)}


def normalized_index(text: str) -> str:
    """An index definition without the operator class's schema."""
    return _QUALIFIER_OR_SPACE.sub("", text)


def function_definition(head: str, body: str) -> str:
    """A function's arguments, result, language and attributes, in PostgreSQL's order, and its body."""

    def setting(match: re.Match[str]) -> str:
        # PostgreSQL prints each value as a string literal, here they are identifiers.
        values = (
            re.sub(r'^["\']|["\']$', "", value.strip()).replace('""', '"') for value in match[2].split(",")
        )
        return f"SET {match[1]} TO {','.join(values)}"

    return normalized(_SET.sub(setting, head)) + "$$" + body


# The files


def _files() -> list[tuple[str, str]]:
    folder = resources.schemas() / "postgres"
    return sorted(
        (file.name, file.read_text(encoding="utf-8"))
        for file in folder.iterdir()
        if file.name.endswith(".sql")
    )


def _split(text: str) -> Iterator[str]:
    """Split into statements, which end with a semicolon at the end of a line, outside ``$$ … $$``."""
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
        raise InvalidReference(f"a statement of the reference schema has no end: {lines[0]}")


_PATTERNS: Final[tuple[tuple[Kind, re.Pattern[str]], ...]] = (
    ("table", re.compile(r"CREATE TABLE IF NOT EXISTS public\.(?P<table>\w+) ")),
    (
        "column",
        re.compile(r"ALTER TABLE public\.(?P<table>\w+) ADD COLUMN IF NOT EXISTS (?P<name>\w+) "),
    ),
    (
        "storage",
        re.compile(
            r"ALTER TABLE public\.(?P<table>\w+) ALTER COLUMN (?P<name>\w+)"
            r" SET STORAGE (?P<definition>PLAIN|EXTERNAL)$"
        ),
    ),
    (
        "index",
        re.compile(
            r"CREATE INDEX IF NOT EXISTS (?P<name>\w+) ON public\.(?P<table>\w+) "
            r"(?P<definition>USING .+?)(?: (?:WITH|WHERE) \(.+\))?$"
        ),
    ),
    (
        "function",
        re.compile(
            r"CREATE OR REPLACE FUNCTION public\.(?P<name>\w+)(?P<definition>\(.*?)(?:AS \$\$(?P<body>.*)\$\$)?$",
            re.DOTALL,
        ),
    ),
    ("revoke", re.compile(r"REVOKE ALL ON FUNCTION\s.*\sFROM PUBLIC$", re.DOTALL)),
    (
        "trigger",
        re.compile(
            r"(?P<definition>CREATE OR REPLACE TRIGGER (?P<name>\w+) .*?ON public\.(?P<table>\w+)\b.*)$",
            re.DOTALL,
        ),
    ),
    (
        "policy",
        re.compile(
            r"CREATE POLICY (?P<name>\w+) ON public\.(?P<table>\w+) (?P<definition>FOR .*)$", re.DOTALL
        ),
    ),
    ("rebuild", re.compile(r"SELECT .*public\.anabranch_\w+\(\)$", re.DOTALL)),
    ("enable", re.compile(r"ALTER TABLE public\.(?P<table>\w+) ENABLE ROW LEVEL SECURITY$")),
    ("force", re.compile(r"ALTER TABLE public\.(?P<table>\w+) FORCE ROW LEVEL SECURITY$")),
    ("grant", re.compile(r"GRANT ")),
    ("analyze", re.compile(r"ANALYZE ")),
    ("version", re.compile(rf"INSERT INTO public\.{VERSION_TABLE} ")),
)


def _parsed(file: str, sql: str) -> Statement:
    for kind, pattern in _PATTERNS:
        if match := pattern.match(sql):
            parts = match.groupdict()
            definition = parts.get("definition") or ""
            match kind:
                case "function":
                    definition = function_definition(definition, parts["body"] or "")
                case "trigger":
                    definition = normalized_trigger(definition)
                case "index":
                    definition = definition.strip()
                case "policy":
                    definition = normalized(definition)
                case _:
                    pass
            return Statement(kind, sql, file, parts.get("table") or "", parts.get("name") or "", definition)
    raise InvalidReference(f"the schema has an unknown kind of statement: {sql[:60]}")
