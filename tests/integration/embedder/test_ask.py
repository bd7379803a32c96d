"""`anabranch ask` as a user runs it: a question embedded by a stage, by the command itself, or by a chunk.

Once, on the embedded broker: what differs between brokers is the client's, which is tested on both.
"""

import asyncio
import json
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from tests.conftest import Database
from tests.embedding.imitation import KEY, vector
from tests.integration.corpora import Chunk, Corpus, Document, load
from tests.integration.embedder.conftest import MODEL, Stages
from tests.integration.harness import anabranch, shown_on_terminal

pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)

TIDES, LOCKS, SECRET, PARENT, NONE = (UUID(int=number) for number in range(1, 6))
SESSION = UUID(int=9)


def corpus() -> Corpus:
    public = Document(UUID(int=11), frozenset({"public"}), title="Tides", metadata={"year": 2020})
    other = Document(UUID(int=12), frozenset({"user:2"}), metadata={"year": 2021})
    texts = {
        TIDES: (public, "tides"),
        LOCKS: (public, "locks"),
        SECRET: (other, "secret"),
        PARENT: (public, None),
    }
    return Corpus.of(
        [public, other],
        [
            Chunk(
                id_, document.id, text or "parent", None if text is None else embedding(text), token_count=1
            )
            for id_, (document, text) in texts.items()
        ],
    )


def embedding(text: str) -> np.ndarray:
    return np.array(vector(text, 768), dtype=np.float32)


class Asked:
    """Runs the command, as the worker's role."""

    def __init__(self, stages: Stages, database: Database) -> None:
        self._stages = stages
        self._dsn = database.worker

    async def __call__(self, *arguments: str, code: int = 0, **settings: str) -> str:
        """Standard output, or if it fails, standard error."""

        done = await asyncio.to_thread(
            partial(
                anabranch,
                "ask",
                *arguments,
                channel=self._stages.channel,
                dsn=self._dsn,
                ANABRANCH_FETCH_MAX_WAIT_SECONDS="0.02",
                COLUMNS="120",
                **{**self._stages.texts.settings, **settings},
            )
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code else done.stdout

    async def json(self, *arguments: str, **settings: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await self(*arguments, "--json", **settings))
        return answer


def chunks(answer: dict[str, Any]) -> list[UUID]:
    return [UUID(passage["chunk_id"]) for passage in answer["results"]]


async def test_a_question_is_answered_however_it_is_embedded(stages: Stages, database: Database) -> None:
    await load(database.writer, corpus())
    ask = Asked(stages, database)
    worker = stages.start_worker(database.worker, ANABRANCH_RESULT_CONTRACT="1.1.0")
    embedder = stages.start_embedder()
    await asyncio.gather(worker.until_ready(), embedder.until_ready())

    by_stage = await ask.json("tides")
    assert chunks(by_stage) == [TIDES, LOCKS]
    assert by_stage["embedding_model"] == MODEL
    provider = {
        "ANABRANCH_EMBEDDING_PROVIDER": "openai",
        "ANABRANCH_EMBEDDING_MODEL": MODEL,
        "ANABRANCH_EMBEDDING_BASE_URL": f"{stages.server.url}/openai/v1",
        "ANABRANCH_EMBEDDING_API_KEY": KEY,
    }
    by_itself = await ask.json("tides", **provider)
    own = {"event_id", "result_id", "query_time_ms"}
    assert {name for name in by_stage if by_stage[name] != by_itself[name]} == own
    by_chunk = await ask.json("--like", str(TIDES))
    assert chunks(by_chunk) == [TIDES, LOCKS]
    assert by_chunk["results"][0]["score"] == pytest.approx(1)

    # Filters, and the reason for a short answer.
    shown = (await ask("tides", "--principal", "user:2", "--filter", "metadata.year>2020")).splitlines()
    assert shown[0].startswith("  user:2 · extraction · all readable documents · 1 passage, 1 token, ")
    assert "secret" in shown[1]
    assert shown[2:] == ["There is only 1 chunk within the filters that user:2 may read."]
    shown = (await ask("tides", "--session", str(SESSION))).splitlines()
    assert shown[0].startswith(f"  public · extraction · session {SESSION} · 0 passages, ")
    assert shown[-1] == "In the session, there are no chunks that public may read."
    assert await ask("tides", "--k", "1", "--profile", "docs", "--prompt") == "tides\n"

    # A chunk that may not be read, and one that is missing.
    for id_ in (SECRET, NONE):
        error = await ask("--like", str(id_), code=1)
        assert error == f"anabranch ask: there is no chunk {id_} that public may read\n"
    assert chunks(await ask.json("--like", str(SECRET), "--principal", "user:2"))[0] == SECRET
    error = await ask("--like", str(PARENT), code=1)
    assert error == f"anabranch ask: chunk {PARENT} has no embedding\n"
    error = await ask("--like", str(TIDES), code=1, DATABASE_CONNECTION_STRING=database.admin)
    assert "row-level security is not active for this role" in error

    # What cannot be answered.
    error = await ask("tides", "--profile", "unknown", code=1)
    assert error.startswith("anabranch ask: unknown_profile: ")
    error = await ask("tides", code=1, **provider | {"ANABRANCH_EMBEDDING_API_KEY": "wrong"})
    assert error == "anabranch ask: key_rejected: the provider rejects the API key (HTTP 401)\n"
    error = await ask("tides", "--principal", "", code=2)
    assert error == "anabranch ask: contract_violation: principals[0] is too short\n"
    error = await ask("tides", code=1, ANABRANCH_TEXT_TOPIC=f"{stages.channel.name}.none")
    assert error == (
        f"anabranch ask: missing topic: {stages.channel.name}.none; run `anabranch topics --texts` to create it;"
        " to ask in words, set ANABRANCH_EMBEDDING_PROVIDER, or also run `anabranch embedder`\n"
    )
    assert (await embedder.terminate(seconds=15))[0] == 0
    error = await ask("tides", "--timeout", "1", code=1)
    [line] = error.splitlines()
    assert line.startswith(
        "anabranch ask: no reply within 1 s; check that an embedding stage and a worker run"
    )
    assert "set ANABRANCH_EMBEDDING_PROVIDER, or run" in line


async def test_a_terminal_shows_that_the_answer_is_waited_for(stages: Stages) -> None:
    shown = await asyncio.to_thread(
        partial(
            shown_on_terminal,
            "ask",
            "tides",
            "--timeout",
            "2",
            channel=stages.channel,
            **stages.texts.settings,
        )
    )
    assert "waiting for the answer" in shown
