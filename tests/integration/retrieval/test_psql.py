"""What docs/retrieval.md tells a developer to paste into psql is what a worker sends."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streams.store.postgres import _SQL as SENT
from tests.integration.connections import execute

if TYPE_CHECKING:
    from tests.conftest import Database, PostgresServer

PAGE: Final = (Path(__file__).parents[3] / "docs" / "retrieval.md").read_text(encoding="utf-8")
CHUNK: Final = "00000000-0000-0000-0000-000000000001"
ROWS: Final = f"""
    INSERT INTO documents (id, title, metadata) VALUES ('{CHUNK}', 'the title', '{{"year": 2020}}');
    INSERT INTO document_grants VALUES ('{CHUNK}', 'user:1');
    INSERT INTO document_chunks (id, document_id, text_content, embedding)
        VALUES ('{CHUNK}', '{CHUNK}', 'the text', array_fill(1::real, '{{768}}')::vector);
"""


def example() -> str:
    found: list[str] = [
        block for block in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL) if "anabranch_" in block
    ]
    assert len(found) == 1
    return found[0]


def test_the_example_runs_as_a_worker(postgres: PostgresServer, database: Database) -> None:
    asyncio.run(execute(database.writer, ROWS))
    ended = subprocess.run(
        [
            *(postgres.embedded.program("psql"), "--no-psqlrc", "--quiet", "--tuples-only"),
            *("--no-align", "--set=ON_ERROR_STOP=1", database.worker),
        ],
        input=example(),
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"{{{CHUNK}}}|" in ended.stdout, "the search"
    assert "rows=1" in ended.stdout, "the plan"
    assert f"{CHUNK}|{CHUNK}|the text" in ended.stdout, "the passage"


def test_the_example_calls_what_a_worker_calls() -> None:
    called = re.findall(r"public\.(anabranch_\w+)\s*\((.*?)\);", example(), re.DOTALL)
    assert {name for name, _ in called} == {"anabranch_search", "anabranch_passages"}
    for name, arguments in called:
        (sent,) = [sql for sql in SENT.values() if f"public.{name}(" in sql]
        assert _count(arguments) == len(set(re.findall(r"\$\d+", sent)))


def _count(arguments: str) -> int:
    """How many arguments there are, without comments."""
    plain = re.sub(r"--.*|'[^']*'", "", arguments)
    while re.search(r"\([^()]*\)", plain):
        plain = re.sub(r"\([^()]*\)", "", plain)
    return plain.count(",") + 1
