"""The Python client with questions in words, and the code of its page, run as it stands there.

Once, on the embedded broker: both stages are tested on both.
"""

import asyncio
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from streams.client import Client, ClientClosed, RetrievalFailed, RetrievalResult
from streams.core.messages import query_hash
from tests.conftest import Database
from tests.embedding.imitation import vector
from tests.integration.client.conftest import client_environment, pending
from tests.integration.corpora import Chunk, Corpus, Document, load
from tests.integration.embedder.conftest import MODEL, Stages

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "client.md"
QUESTION = "Can a ripple travel upstream against the current?"
WAIT = {"ANABRANCH_FETCH_MAX_WAIT_SECONDS": "0.02"}
pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)


def corpus() -> Corpus:
    """A chunk whose embedding is the question's."""
    document = Document(UUID(int=1), frozenset({"user:1"}), file_description="Notes", document_type="manual")
    embedding = np.array(vector(QUESTION, 768), dtype=np.float32)
    return Corpus.of([document], [Chunk(UUID(int=2), document.id, "Throw a pebble in.", embedding)])


@pytest.fixture
async def environment(stages: Stages, database: Database) -> dict[str, str]:
    """Both stages run; what a client's environment has to have."""
    await load(database.writer, corpus())
    channel = stages.channel
    worker, embedder = stages.start_worker(database.worker, **WAIT), stages.start_embedder(**WAIT)
    await asyncio.gather(worker.until_ready(), embedder.until_ready())
    return {
        "KAFKA_BOOTSTRAP_SERVERS": channel.bootstrap_servers,
        **client_environment(channel),
        **stages.texts.settings,
        **WAIT,
    }


async def test_texts_are_answered_or_fail_with_the_stage_s_code(environment: dict[str, str]) -> None:
    async with Client.from_environment(environment) as client:
        asked = [QUESTION, *(f"What is said about number {number}?" for number in range(50))]
        calls = [client.retrieve(text=text, principals=["user:1"], timeout=60) for text in asked]
        results = await asyncio.gather(*calls)
        for text, result in zip(asked, results, strict=True):
            assert (result.query_hash, result.embedding_model) == (query_hash(text), MODEL)
        assert results[0].results[0].score > 0.999
        assert results[0].results[0].prompt_text == "[Source: Notes]\nThrow a pebble in."
        for options, code in (
            ({"text": " "}, "empty_text"),
            ({"text": "a", "profile": "none"}, "unknown_profile"),
        ):
            with pytest.raises(RetrievalFailed) as caught:
                await client.retrieve(principals=["user:1"], **options)  # type: ignore[arg-type]  # see above
            assert caught.value.code == code
        assert pending(client) == 0


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


async def test_the_page_s_code_runs(environment: dict[str, str]) -> None:
    first, *others = blocks()
    assert len(others) == 3
    run = partial(
        subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    done = await asyncio.to_thread(run, [sys.executable, "-c", first])
    assert done.stderr == ""
    assert done.stdout == "1 1.000 [Source: Notes]\nThrow a pebble in.\n"
    names: dict[str, Any] = {}
    for block in others:
        exec(block, names)  # what the page tells others to run
    question = vector(QUESTION, 768)
    saved: list[RetrievalResult] = []

    async def save(result: RetrievalResult) -> None:
        saved.append(result)
        if len(saved) == 4:
            await client.close()

    async with Client.from_environment(environment) as client:
        assert await names["ground"](client, question, "1") == "[Source: Notes]\nThrow a pebble in."
        assert await names["ground"](client, question, "2") == "Nothing was found."
        await names["publish_all"](client, [question])
        with pytest.raises(ClientClosed):
            await names["extract"](client, save)
    assert len(saved) == 4
