"""From the environment to a vector: what each provider and summarizer is built from. Workers need none of it."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from streams.core.composition import Message, Question
from streams.core.embedding_errors import KeyRejected, WrongDimension
from streams.providers import make_composer, make_embedder
from streams.settings import load_embedding
from tests.embedding.imitation import DIMENSIONS, KEY, Imitation

QUESTION: Final = Question("and why?", conversation=(Message("user", "What moves an estuary?"),))


def environment(server: Imitation, **others: str) -> dict[str, str]:
    return {
        "ANABRANCH_EMBEDDING_PROVIDER": "cohere",
        "ANABRANCH_EMBEDDING_BASE_URL": f"{server.url}/cohere",
        "ANABRANCH_EMBEDDING_MODEL": "embed-english-v3.0",
        "ANABRANCH_EMBEDDING_DIMENSIONS": "1024",
        "ANABRANCH_EMBEDDING_API_KEY": KEY,
        "ANABRANCH_EMBEDDING_SUMMARIZER": "gemini",
        "ANABRANCH_EMBEDDING_SUMMARIZER_BASE_URL": f"{server.url}/gemini/v1beta",
        "ANABRANCH_EMBEDDING_SUMMARIZER_MODEL": "gemini-flash",
        "ANABRANCH_EMBEDDING_SUMMARIZER_API_KEY": KEY,
    } | others


async def test_cohere_at_1024_dimensions_and_gemini(server: Imitation) -> None:
    server.dimensions = 1024
    settings = load_embedding(environment(server))
    composer = make_composer(settings)
    composed = await composer.compose(QUESTION)
    assert composed.text == "tides in an estuary: and why?"
    async with make_embedder(settings) as embedder:
        embedding = await embedder.embed(composed.text)
    assert embedding.vector.shape == (1024,)
    assert server.received[-1].body["texts"] == [composed.text]
    await composer.close()


async def test_a_server_with_openai_s_api_for_both_with_the_key_in_a_file(
    server: Imitation, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(f"{KEY}\n", encoding="utf-8")
    settings = load_embedding(
        {
            "ANABRANCH_EMBEDDING_PROVIDER": "openai",
            "ANABRANCH_EMBEDDING_BASE_URL": f"{server.url}/openai/v1",
            "ANABRANCH_EMBEDDING_MODEL": "some-model",
            "ANABRANCH_EMBEDDING_DIMENSIONS": str(DIMENSIONS),
            "ANABRANCH_EMBEDDING_API_KEY_FILE": str(key),
            "ANABRANCH_EMBEDDING_MAX_TOKENS": "8",
            "ANABRANCH_EMBEDDING_BATCH_SIZE": "2",
            "ANABRANCH_EMBEDDING_CALLS_PER_MINUTE": "60000",
            "ANABRANCH_EMBEDDING_SUMMARIZER": "openai",
            "ANABRANCH_EMBEDDING_SUMMARIZER_BASE_URL": f"{server.url}/openai/v1",
            "ANABRANCH_EMBEDDING_SUMMARIZER_MODEL": "any",
            "ANABRANCH_EMBEDDING_SUMMARIZER_API_KEY_FILE": str(key),
        }
    )
    composer = make_composer(settings)
    assert (await composer.compose(QUESTION)).text == "tides in an estuary: and why?"
    async with make_embedder(settings) as embedder:
        server.received.clear()
        long, short = await asyncio.gather(
            *map(embedder.embed, ("one two three four five six seven eight nine", "a"))
        )
    assert (long.truncated, short.truncated) == (True, False)
    assert [request.body["input"] for request in server.received] == [
        ["one two three four five six seven eight", "a"]
    ]
    await composer.close()


async def test_the_start_refuses_a_wrong_key_and_other_dimensions(server: Imitation) -> None:
    for others, kind in (
        ({"ANABRANCH_EMBEDDING_API_KEY": "other"}, KeyRejected),
        ({"ANABRANCH_EMBEDDING_DIMENSIONS": "768"}, WrongDimension),
    ):
        with pytest.raises(kind):
            await make_embedder(load_embedding(environment(server, **others))).__aenter__()


def test_a_worker_imports_no_package_of_an_extra() -> None:
    extras = {"cohere", "httpx", "onnxruntime", "tokenizers"}
    code = f"import sys, streams.worker.run, streams.cli.main; print(sorted({extras!r} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
