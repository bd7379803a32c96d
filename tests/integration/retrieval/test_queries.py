"""What a developer pastes from `queries.sql` into psql is what a worker sends."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import pytest

from streams.store.postgres import _SQL as SENT
from streams.store.reference import inline_functions
from tests.integration.connections import execute

if TYPE_CHECKING:
    from tests.conftest import Database, PostgresServer

FILE: Final = (files("streams.store") / "queries.sql").read_text(encoding="utf-8")
HEADER, *PARTS = re.split(r"^-- name: ", FILE, flags=re.MULTILINE)
#: The example in the header, which begins and ends a transaction.
EXAMPLE: Final = re.sub(
    r"^--   ", "", "\n".join(re.findall(r"^--   .*", HEADER, re.MULTILINE)), flags=re.MULTILINE
)
PREPARED: Final = [name for name in SENT if name not in {"begin", "commit"}]
CHUNK: Final = "00000000-0000-0000-0000-000000000001"
ROWS: Final = f"""
    INSERT INTO documents (id, metadata) VALUES ('{CHUNK}', '{{"year": 2020}}');
    INSERT INTO document_grants VALUES ('{CHUNK}', 'user:1');
    INSERT INTO document_chunks (id, document_id, text_content, embedding)
        VALUES ('{CHUNK}', '{CHUNK}', 'text', array_fill(1::real, '{{768}}')::vector);
"""


def pasted(server: PostgresServer, database: Database, text: str) -> str:
    """What psql prints."""
    ended = subprocess.run(
        [
            *(server.embedded.program("psql"), "--no-psqlrc", "--quiet", "--tuples-only"),
            *("--no-align", "--set=ON_ERROR_STOP=1", database.worker),
        ],
        input=text,
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def tokens(sql: str) -> list[str]:
    """Without comments and white space."""
    return re.findall(r"\w+|\S", re.sub(r"--.*", "", sql))


async def test_psql_prepares_what_a_worker_sends(postgres: PostgresServer, database: Database) -> None:
    prepared = "SELECT json_object_agg(name, statement) FROM pg_prepared_statements;\n"
    found = json.loads(pasted(postgres, database, FILE + prepared))
    assert {name: tokens(inline_functions(statement)) for name, statement in found.items()} == {
        name: tokens(f"PREPARE {name} AS {SENT[name]};") for name in PREPARED
    }


async def test_the_example_in_the_file_runs(postgres: PostgresServer, database: Database) -> None:
    await execute(database.writer, ROWS)
    assert re.findall(r"EXECUTE (\w+)", EXAMPLE) == PREPARED
    printed = pasted(postgres, database, FILE + EXAMPLE)
    assert "rows=" in printed, "the plan"
    rows = [row for row in printed.splitlines() if row.startswith(CHUNK)]
    assert len(rows) == 3, "the approximate search, the size and the passage"


@pytest.mark.parametrize("name", PREPARED)
async def test_each_statement_can_be_pasted_alone(
    postgres: PostgresServer, database: Database, name: str
) -> None:
    await execute(database.writer, ROWS)
    fragments = "".join(f"-- name: {part}" for part in PARTS if "$fragment$" in part)
    (statement,) = (f"-- name: {part}" for part in PARTS if part.startswith(f"{name}\n"))
    settings = next(f"-- name: {part}" for part in PARTS if part.startswith("settings\n"))
    examples = {
        of: f"EXECUTE {of}{values};" for of, values in re.findall(r"EXECUTE (\w+)(.*?);", EXAMPLE, re.DOTALL)
    }
    if name == "settings":
        assert pasted(postgres, database, statement + examples[name]).startswith('["user:1"]|10s|')
        return
    printed = pasted(
        postgres,
        database,
        f"{fragments}{statement}{settings}BEGIN;\n{examples['settings']}\n{examples[name]}\nCOMMIT;\n",
    )
    rows = printed.splitlines()[1:]
    assert [row.split("|")[0] for row in rows] == (["0"] if name in ("probe", "replication_lag") else [CHUNK])
