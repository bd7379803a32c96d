"""``anabranch ingest`` as an operator runs it: summary, rejected lines, embedding, interruptions."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pytest
from click.testing import CliRunner

from streams.cli.main import commands
from streams.wire.documents import decode_document
from tests.embedding import imitation as imitated
from tests.embedding.imitation import Imitation, imitation
from tests.integration.connections import connected, execute
from tests.integration.ingest.worlds import Model, contents, vector

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    import asyncpg

    from tests.conftest import Database

DIMENSIONS = 768
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def counts(self) -> dict[str, int]:
        """What is not zero in the summary as JSON."""
        return {name: count for name, count in json.loads(self.out).items() if count}


def start(
    database: Database, *arguments: str, terminal: int = subprocess.PIPE, **environment: str
) -> subprocess.Popen[bytes]:
    """In a process of its own; its standard error may be a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "streams", "ingest", *arguments],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "DATABASE_INGESTION_CONNECTION_STRING": database.writer,
            **environment,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=terminal,
    )


async def ingest(database: Database, lines: Iterable[Any], *options: str, **environment: str) -> Ended:
    """In this process, from a file; a line is an object, or bytes as they are."""
    with NamedTemporaryFile(suffix=".jsonl") as file:
        file.writelines(line if isinstance(line, bytes) else as_line(line) for line in lines)
        file.flush()
        variables = {"DATABASE_INGESTION_CONNECTION_STRING": database.writer} | environment
        result = await asyncio.to_thread(
            CliRunner().invoke, commands, ["ingest", *options, file.name], env=variables
        )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def as_line(line: Any) -> bytes:
    return json.dumps(line).encode() + b"\n"


def document(number: int, *texts: str, embedded: bool = True, **fields: Any) -> dict[str, Any]:
    """With a chunk for each text."""
    chunks = [
        {"text_content": text} | ({"embedding": vector(number).tolist()} if embedded else {})
        for text in texts
    ]
    return {"id": str(UUID(int=number)), "grants": ["public"], "chunks": chunks} | fields


async def found_in(database: Database) -> Model:
    async with connected(database.owner) as owner:
        return await contents(owner)


async def texts_in(database: Database) -> list[str]:
    return sorted(row[6] for row in (await found_in(database)).chunks.values())


async def test_good_lines_are_written_and_bad_ones_reported(database: Database) -> None:
    lines = [
        as_line(document(1, "a", "b", title="t")),
        b"\n",
        b'{"id": "canary-5e0f"\n',
        as_line(document(2, "c") | {"chunks": [{"text_content": "canary-5e0f", "embedding": [1, 2]}]}),
        as_line(document(3, "d", grants=None)),
        as_line(document(4, "e", title=7)),
    ]
    ended = await ingest(database, lines)
    assert ended.code == 1
    assert ended.out.splitlines() == [
        "documents: 2 new, 0 changed, 0 unchanged",
        "chunks: 3 new, 0 changed, 0 unchanged, 0 deleted",
        "nobody can read 1 of these documents: they have no grants",
        "rejected lines: 3",
    ]
    assert ended.err.splitlines() == [
        "line 3: undecodable: starts like JSON, but is invalid or truncated at character 21",
        "line 4: dimension_mismatch: chunks[0].embedding has 2 components, the store's have 768",
        "line 6: invalid_document: title is not a string",
    ]
    assert await texts_in(database) == ["a", "b", "d"]

    again = await ingest(database, lines, "--json")
    assert again.counts == {
        "documents_unchanged": 2, "chunks_unchanged": 3, "unreadable": 1, "lines_rejected": 3
    }  # fmt: skip


async def test_the_command_reads_standard_input_and_ends_with_an_exit_code(database: Database) -> None:
    process = start(database, "-")
    given = as_line(document(1, "a")) + b"x\n" + as_line(document(2, "b"))
    out, err = await asyncio.to_thread(process.communicate, given, timeout=60)
    assert (process.returncode, err) == (1, b"line 2: undecodable: is not a JSON object\n")
    assert out.splitlines()[0] == b"documents: 2 new, 0 changed, 0 unchanged"
    assert await texts_in(database) == ["a", "b"]


async def test_a_dry_run_writes_nothing(database: Database) -> None:
    ended = await ingest(database, [document(1, "a"), document(2, "b", embedded=False), b"x\n"], "--dry-run")
    assert ended.code == 1
    assert ended.out.splitlines() == ["valid documents: 2, with 2 chunks, 1 to embed", "rejected lines: 1"]
    assert await found_in(database) == Model()


async def test_documents_are_deleted_by_id(database: Database) -> None:
    lines = [document(number, "a", "b") for number in (1, 2, 3)]
    await ingest(database, lines)
    some = [as_line(lines[0]), f"{UUID(int=3)}\n".encode(), f'"{UUID(int=9)}"\n'.encode(), b"x\n"]
    ended = await ingest(database, some, "--delete")
    assert ended.code == 1
    assert ended.out.splitlines() == [
        "documents: 2 deleted, 1 not in the store", "chunks: 4 deleted", "rejected lines: 1"
    ]  # fmt: skip
    assert ended.err == "line 4: invalid_document: id is not a UUID\n"
    assert set((await found_in(database)).documents) == {UUID(int=2)}
    assert (await ingest(database, lines, "--delete", "--json")).counts == {
        "documents_deleted": 1, "documents_missing": 2, "chunks_deleted": 2
    }  # fmt: skip


async def test_lines_are_applied_in_order(database: Database) -> None:
    """The same document three times: the last line wins, also against what is written in the same run."""
    lines = [document(1, "first", "other"), document(2, "a"), document(1, "second"), document(1, "third")]
    assert (await ingest(database, lines, "--json")).counts == {
        "documents_new": 2, "documents_unchanged": 2, "chunks_new": 3, "chunks_changed": 2, "chunks_deleted": 1
    }  # fmt: skip
    assert await texts_in(database) == ["a", "third"]


DSN = "DATABASE_INGESTION_CONNECTION_STRING"
EXAMPLE = "e.g. postgresql://user@host:5432/database"
WRONG: dict[str, tuple[dict[str, str], list[str], int, str]] = {
    "no connection string": (
        {DSN: ""},
        [],
        2,
        f"{DSN} is not set: set it to the connection string of a member of anabranch_writer, {EXAMPLE}",
    ),
    "an unreadable one": (
        {DSN: "postgresql://me:12Sec/ret@db/app"},
        [],
        1,
        f"{DSN} is invalid: it cannot be parsed; percent-encode every special character of the password",
    ),
    "a driver in the scheme": (
        {DSN: "postgresql+asyncpg://me:12Secret@db/app"},
        [],
        1,
        f"{DSN} is invalid: it must start with postgresql:// or postgres://, without a driver as in postgresql+asyncpg://",
    ),
    "a port that does not exist": (
        {DSN: "postgresql://me:12Secret@127.0.0.1:99999/app"},
        [],
        2,
        f"{DSN}: the port must be between 1 and 65535",
    ),
    "no server": (
        {DSN: "postgresql://me:12Secret@127.0.0.1:1/app"},
        [],
        1,
        f"PostgreSQL: cannot connect (connection refused); check {DSN}, and that the server is running",
    ),
    "an unknown host": (
        {DSN: "postgresql://me:12Secret@db.invalid/app"},
        [],
        1,
        f"PostgreSQL: cannot connect (the host name cannot be resolved); check {DSN}, and that the server is running",
    ),
    "a provider without a model": (
        {"ANABRANCH_EMBEDDING_PROVIDER": "cohere"},
        [],
        2,
        "ANABRANCH_EMBEDDING_MODEL, ANABRANCH_EMBEDDING_API_KEY must be set",
    ),
    "an unknown setting": (
        {"ANABRANCH_EMBEDING_PROVIDER": "cohere"},
        [],
        2,
        "unknown setting ANABRANCH_EMBEDING_PROVIDER (did you mean ANABRANCH_EMBEDDING_PROVIDER?); rename or unset it",
    ),
    "options that exclude each other": (
        {},
        ["--delete", "--dry-run"],
        2,
        "--delete cannot be combined with --dry-run or --embed-again; see `anabranch ingest --help`",
    ),
}


@pytest.mark.parametrize(("environment", "options", "code", "message"), WRONG.values(), ids=WRONG.keys())
async def test_what_is_wrong_is_one_line(
    database: Database, environment: dict[str, str], options: list[str], code: int, message: str
) -> None:
    ended = await ingest(database, [], *options, **environment)
    assert (ended.code, ended.out, ended.err.strip()) == (code, "", f"anabranch ingest: {message}")


async def test_a_wrong_database_is_named(database: Database) -> None:
    dsn = database.writer.replace(f"/{database.name}", "/nix")
    ended = await ingest(database, [], **{DSN: dsn})
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        "anabranch ingest: PostgreSQL: the server has no database of this name; check the name at the end of"
        f" {DSN}, or create the database\n"
    )


# Embedding


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Imitation]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with imitation() as started:
        started.dimensions = DIMENSIONS
        yield started


def settings_of(server: Imitation, provider: str = "openai") -> dict[str, str]:
    path, model = {"openai": ("/openai/v1", "some-model"), "cohere": ("/cohere", "embed-v4.0")}[provider]
    return {
        "ANABRANCH_EMBEDDING_PROVIDER": provider,
        "ANABRANCH_EMBEDDING_MODEL": model,
        "ANABRANCH_EMBEDDING_BASE_URL": server.url + path,
        "ANABRANCH_EMBEDDING_API_KEY": server.key,
    }


def texts_sent(server: Imitation) -> list[str]:
    """Without those of the provider's check."""
    sent = [text for each in server.received for text in each.body.get("input") or each.body.get("texts")]
    return sorted(text for text in sent if not text.startswith("What is"))


@pytest.mark.parametrize("provider", ["openai", "cohere"])
async def test_what_lacks_an_embedding_is_embedded_once(
    database: Database, server: Imitation, provider: str
) -> None:
    if provider == "cohere":
        server.dimensions = 256  # the model's default; the store's are asked for
    lines = [
        document(1, "a", "b", embedded=False),
        document(2, "c"),
        document(3, embedded=False) | {"chunks": [{"text_content": "parent", "searchable": False}]},
    ]
    settings = settings_of(server, provider)
    ended = await ingest(database, lines, "--json", **settings)
    assert (ended.code, ended.err) == (0, "")
    assert ended.counts == {"documents_new": 3, "chunks_new": 4}
    assert texts_sent(server) == ["a", "b"]
    if provider == "cohere":
        assert {each.body["input_type"] for each in server.received} == {"search_document"}
    embeddings = {row[6]: row[-1] for row in (await found_in(database)).chunks.values()}
    assert embeddings["parent"] is None
    for text in ("a", "b"):
        expected = np.array(imitated.vector(text, DIMENSIONS), dtype=np.float32)
        assert embeddings[text] == expected.tolist()

    # A chunk with the same text keeps its embedding, and the provider is not even asked for a test sentence.
    server.received.clear()
    lines[0] |= {"title": "another"}
    assert (await ingest(database, lines, "--json", **settings)).counts == {
        "documents_changed": 1, "documents_unchanged": 2, "chunks_unchanged": 4
    }  # fmt: skip
    assert not server.received
    # So no provider is needed either.
    assert (await ingest(database, lines)).code == 0
    lines[0]["chunks"][1]["text_content"] = "changed"
    assert (await ingest(database, lines, "--json", **settings)).counts["chunks_changed"] == 1
    assert texts_sent(server) == ["changed"]
    server.received.clear()
    assert (await ingest(database, lines, "--json", "--embed-again", **settings)).code == 0
    assert texts_sent(server) == ["a", "changed"]


async def test_without_a_provider_an_embedding_is_required(database: Database) -> None:
    ended = await ingest(database, [document(1, "a", embedded=False), document(2, "b")])
    assert ended.code == 1
    assert ended.err == (
        "line 1: embedding_missing: chunks[0]: has no embedding, and ANABRANCH_EMBEDDING_PROVIDER is not set\n"
    )
    assert await texts_in(database) == ["b"]


async def test_a_text_that_cannot_be_embedded_rejects_only_its_document(
    database: Database, server: Imitation
) -> None:
    server.zeros.add("zero")
    long = "long " * 1000
    lines = [document(number, *texts, embedded=False) for number, texts in enumerate(
        [("a", "zero"), ("b", " \n"), ("c", long), ("d",)], start=1
    )]  # fmt: skip
    ended = await ingest(database, lines, **settings_of(server))
    assert ended.code == 1
    assert ended.err.splitlines() == [
        "line 3: warning: only the beginning of chunks[1] was embedded",
        "line 1: text_rejected: chunks[1]: the embedding is all zeros or not finite",
        "line 2: empty_text: chunks[1]: the text is empty or only white space",
    ]
    assert "only the beginning of 1 chunks was embedded: they are too long for the model" in ended.out
    assert await texts_in(database) == ["c", "d", long]


def until_closed(terminal: int) -> bytes:
    """What is written to a terminal until nobody has it open."""
    written = b""
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # Linux reports the end so
            return written
        if not read:
            return written
        written += read


async def test_on_a_terminal_each_rejected_line_begins_a_line(database: Database, tmp_path: Path) -> None:
    """The progress bar is below it, not before it."""
    file = tmp_path / "documents.jsonl"
    file.write_bytes(b"".join([as_line(document(1, "a")), b"{\n", as_line(document(2, "b", title=7))]))
    screen, terminal = pty.openpty()
    try:
        process = start(database, "--dry-run", str(file), TERM="xterm", COLUMNS="200", terminal=terminal)
    finally:
        os.close(terminal)
    try:
        shown = await asyncio.to_thread(until_closed, screen)
    finally:
        os.close(screen)
    await asyncio.to_thread(process.communicate)
    assert process.returncode == 1
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()))
    assert any(line.startswith("validating ") for line in lines)
    assert [line.split(":")[:2] for line in lines if "line " in line] == [
        ["line 2", " undecodable"],
        ["line 3", " invalid_document"],
    ]


async def test_a_provider_that_fails_stops_the_run_and_the_next_one_continues(
    database: Database, server: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.ingest._MAX_CHUNKS", 8)
    lines = [
        document(number, *[f"{number} {each}" for each in range(5)], embedded=False) for number in (1, 2, 3)
    ]
    server.broken["3 4"] = 500
    ended = await ingest(database, lines, **settings_of(server))
    assert ended.code == 1
    assert ended.err == (
        "anabranch ingest: provider_unavailable: the provider fails (HTTP 500); to continue, run the same command"
        " again\n"
    )
    assert set((await found_in(database)).documents) == {UUID(int=1), UUID(int=2)}
    server.broken.clear()
    server.received.clear()
    assert (await ingest(database, lines, "--json", **settings_of(server))).counts == {
        "documents_unchanged": 2, "documents_new": 1, "chunks_unchanged": 10, "chunks_new": 5
    }  # fmt: skip
    assert texts_sent(server) == [f"3 {each}" for each in range(5)]


async def test_a_wrong_key_stops_the_run(database: Database, server: Imitation) -> None:
    settings = settings_of(server) | {"ANABRANCH_EMBEDDING_API_KEY": "canary-5e0f"}
    ended = await ingest(database, [document(1, "a", embedded=False)], **settings)
    assert ended.code == 1
    assert ended.err == (
        "anabranch ingest: key_rejected: the provider rejects the API key (HTTP 401); to continue, run the same"
        " command again\n"
    )


# Interruptions


def many(documents: int) -> tuple[list[bytes], Model]:
    """Lines, and what a store holds after them."""
    rng, model = random.Random(1), Model()
    lines = []
    for number in range(1, documents + 1):
        texts = [f"{number} {each}" for each in range(rng.randint(1, 40))]
        lines.append(as_line(document(number, *texts, grants=[f"user:{number}", "group:law"])))
        assert model.ingest(decode_document(lines[-1], dimensions=DIMENSIONS))
    return lines, model


def assert_whole(found: Model, complete: Model) -> None:
    """Some of the documents, each with all of its rows."""
    for id_, row in found.documents.items():
        assert row == complete.documents[id_]
        assert found.grants[id_] == complete.grants[id_]
    assert found.chunks == {id_: row for id_, row in complete.chunks.items() if row[0] in found.documents}


async def more_documents(
    owner: asyncpg.Connection[asyncpg.Record], before: int, process: subprocess.Popen[bytes]
) -> None:
    """Wait until a run has written more than the one before it, or has ended."""
    for _ in range(6000):
        if process.poll() is not None or await owner.fetchval("SELECT count(*) FROM documents") > before:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing was written within half a minute")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
async def test_an_interrupted_run_leaves_whole_documents_and_can_be_repeated(
    database: Database, tmp_path: Path, how: signal.Signals
) -> None:
    await execute(database.owner, "DROP INDEX document_chunks_embedding_halfvec")
    lines, complete = many(400)
    file = tmp_path / "documents.jsonl"
    file.write_bytes(b"".join(lines))
    counts = [0]
    rng = random.Random(2)
    async with connected(database.owner) as owner:
        for _ in range(2):
            process = start(database, str(file))
            try:
                await more_documents(owner, counts[-1], process)
                await asyncio.sleep(rng.uniform(0, 0.2))
                process.send_signal(how)
                _, err = await asyncio.to_thread(process.communicate, timeout=30)
            finally:
                process.kill()
            found = await found_in(database)
            assert_whole(found, complete)
            counts.append(len(found.documents))
            if how == signal.SIGINT and process.returncode:
                assert err == b"anabranch ingest: interrupted; to continue, run the same command again\n"
    assert 0 < counts[1] < 400, "the first run was not interrupted in the middle"
    ended = await ingest(database, lines, "--json")
    assert (ended.code, ended.err) == (0, "")
    assert ended.counts["documents_new"] + ended.counts["documents_unchanged"] == 400
    assert await found_in(database) == complete


async def test_ctrl_c_ends_a_run_that_waits_for_a_pipe(database: Database) -> None:
    process = start(database, "-")
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        # Once the first batch is written, the rest has been read.
        lines = (as_line(document(number)) for number in range(1, 510))
        await asyncio.to_thread(process.stdin.write, b"".join(lines))
        await asyncio.to_thread(process.stdin.flush)
        async with connected(database.owner) as owner:
            await more_documents(owner, 0, process)
        process.send_signal(signal.SIGINT)
        code = await asyncio.to_thread(process.wait, timeout=60)
        err = await asyncio.to_thread(process.stderr.read)
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
    assert (code, err) == (130, b"anabranch ingest: interrupted; to continue, run the same command again\n")


@pytest.mark.slow
async def test_a_lost_connection_is_one_line_and_the_next_run_continues(
    database: Database, tmp_path: Path
) -> None:
    await execute(database.owner, "DROP INDEX document_chunks_embedding_halfvec")
    lines, complete = many(400)
    file = tmp_path / "documents.jsonl"
    file.write_bytes(b"".join(lines))
    process = start(database, str(file))
    async with connected(database.admin) as admin:
        await more_documents(admin, 0, process)
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'anabranch ingest'"
        )
    out, err = await asyncio.to_thread(process.communicate, timeout=30)
    assert (process.returncode, out) == (1, b"")
    # Lost during a statement, or between two of them.
    cause = rb"ConnectionDoesNotExistError: .*|InterfaceError: connection is closed"
    assert re.fullmatch(rb"anabranch ingest: PostgreSQL: (%b)\n" % cause, err), err
    assert_whole(await found_in(database), complete)
    assert (await ingest(database, lines)).code == 0
    assert await found_in(database) == complete
