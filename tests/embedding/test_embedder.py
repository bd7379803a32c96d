"""Single texts through batches: what a neighbour's failure changes, which is nothing, and what the start refuses."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr

from streams.core.embedding_errors import (
    EmbeddingError,
    EmptyText,
    KeyRejected,
    ProviderMisconfigured,
    ProviderUnavailable,
    TextRejected,
    WrongDimension,
)
from streams.embedding.calls import Calls
from streams.embedding.embedder import Embedder, Embedding
from streams.embedding.openai import OpenAIProvider
from tests.embedding.imitation import (
    DIMENSIONS,
    KEY,
    Imitation,
    hang_up,
    slow,
    status,
    vector,
)


def made(server: Imitation, *, model: str = "some-model", **options: Any) -> Embedder:
    provider = OpenAIProvider(
        base_url=f"{server.url}/openai/v1",
        model=model,
        api_key=SecretStr(KEY),
        calls=Calls(timeout_seconds=5, base_seconds=0.01, max_seconds=0.02),
    )
    return Embedder(provider, **({"dimensions": DIMENSIONS, "batch_wait_seconds": 0.02} | options))


@asynccontextmanager
async def started(server: Imitation, **options: Any) -> AsyncIterator[Embedder]:
    """An embedder that has passed its check; the check's request is forgotten."""
    async with made(server, **options) as embedder:
        server.received.clear()
        yield embedder


async def outcomes(embedder: Embedder, *texts: str) -> list[Embedding | BaseException]:
    return await asyncio.gather(*map(embedder.embed, texts), return_exceptions=True)


async def arrival(server: Imitation) -> None:
    """Until the server has a request."""
    async with asyncio.timeout(15):
        while not server.received:  # noqa: ASYNC110  # the server has no event for it
            await asyncio.sleep(0.01)


def is_vector_of(outcome: Embedding | BaseException, text: str) -> bool:
    return isinstance(outcome, Embedding) and np.array_equal(
        outcome.vector, np.array(vector(text), dtype=np.float32)
    )


# Batches


async def test_texts_that_arrive_together_are_one_call(server: Imitation) -> None:
    texts = [f"text {number}" for number in range(10)]
    async with started(server) as embedder:
        found = await outcomes(embedder, *texts)
    assert all(is_vector_of(*pair) for pair in zip(found, texts, strict=True))
    assert [request.body["input"] for request in server.received] == [texts]


async def test_a_full_batch_does_not_wait(server: Imitation) -> None:
    async with started(server, batch_size=4, batch_wait_seconds=30) as embedder:
        async with asyncio.timeout(10):
            await outcomes(embedder, *"abcdefgh")
    assert sorted(request.body["input"] for request in server.received) == [list("abcd"), list("efgh")]


async def test_a_single_text_waits_for_others_only_briefly(server: Imitation) -> None:
    async with started(server, batch_wait_seconds=0.2) as embedder:
        began = time.monotonic()
        await embedder.embed("alone")
        assert 0.2 <= time.monotonic() - began < 10


async def test_the_next_batch_does_not_wait_for_a_slow_one(server: Imitation) -> None:
    async with started(server) as embedder:
        server.script.append(slow(30))
        first = asyncio.create_task(embedder.embed("first"))
        await arrival(server)
        async with asyncio.timeout(15):
            await embedder.embed("second")
        first.cancel()


async def test_a_caller_that_gives_up_leaves_the_batch_alone(server: Imitation) -> None:
    async with started(server, batch_wait_seconds=0.1) as embedder:
        first, second = (asyncio.create_task(embedder.embed(text)) for text in ("first", "second"))
        await asyncio.sleep(0)
        first.cancel()
        assert is_vector_of(await second, "second")
    assert [request.body["input"] for request in server.received] == [["second"]]


async def test_closing_answers_everyone_who_waits(server: Imitation) -> None:
    embedder = made(server, batch_wait_seconds=0.05)
    await embedder.__aenter__()
    server.script.append(slow(30))
    server.received.clear()
    under_way = asyncio.create_task(embedder.embed("under way"))
    await arrival(server)
    waiting = asyncio.create_task(embedder.embed("waiting"))
    await asyncio.sleep(0)
    await embedder.close()
    _, pending = await asyncio.wait({under_way, waiting}, timeout=5)
    assert not pending
    assert under_way.cancelled()
    assert waiting.cancelled()


# Texts


@pytest.mark.parametrize("text", ["", " ", "\n\t\u2003"])
async def test_a_blank_text_is_not_sent(server: Imitation, text: str) -> None:
    async with started(server) as embedder:
        with pytest.raises(EmptyText) as caught:
            await embedder.embed(text)
        assert caught.value.code == "empty_text"
    assert not server.received


@pytest.mark.parametrize(("code", "kind"), [(400, TextRejected), (500, ProviderUnavailable)])
async def test_a_text_that_breaks_the_server_fails_alone(
    server: Imitation, code: int, kind: type[EmbeddingError]
) -> None:
    server.broken["bad"] = code
    async with started(server) as embedder:
        good, bad, fine = await outcomes(embedder, "good", "bad", "fine")
    assert is_vector_of(good, "good")
    assert is_vector_of(fine, "fine")
    assert type(bad) is kind


async def test_a_text_that_is_too_long_is_truncated_and_its_neighbours_are_not(server: Imitation) -> None:
    async with started(server) as embedder:
        short, long = await outcomes(embedder, "short", "long " * 900)
    assert isinstance(short, Embedding)
    assert isinstance(long, Embedding)
    assert not short.truncated
    assert long.truncated


async def test_a_configured_length_is_cut_before_it_is_sent(server: Imitation) -> None:
    async with started(server, shorten=lambda text: text[:5]) as embedder:
        short, exact, long = await outcomes(embedder, "four", "fives", "longer")
    assert [request.body["input"] for request in server.received] == [["four", "fives", "longe"]]
    assert [isinstance(one, Embedding) and one.truncated for one in (short, exact, long)] == [
        False,
        False,
        True,
    ]


async def test_an_embedding_without_direction_blames_its_text(server: Imitation) -> None:
    server.zeros.add("nothing")
    async with started(server) as embedder:
        some, nothing = await outcomes(embedder, "some", "nothing")
    assert is_vector_of(some, "some")
    assert isinstance(nothing, TextRejected)


# Providers


async def test_an_outage_reaches_every_caller_and_ends(server: Imitation) -> None:
    async with started(server) as embedder:
        server.script.extend([hang_up] * 4)
        found = await outcomes(embedder, "a", "b")
        assert [type(one) for one in found] == [ProviderUnavailable] * 2
        assert len(server.received) == 4  # the batch's attempts, not each text's
        assert is_vector_of(await embedder.embed("c"), "c")


async def test_a_key_that_is_revoked_blames_no_text(server: Imitation) -> None:
    async with started(server) as embedder:
        server.key = "another"
        assert [type(one) for one in await outcomes(embedder, "a", "b")] == [KeyRejected] * 2


async def test_a_provider_that_rejects_everything_blames_no_text(server: Imitation) -> None:
    """Otherwise a provider's change would dead-letter every event."""
    async with started(server) as embedder:
        server.max_characters = 0
        assert [type(one) for one in await outcomes(embedder, "a", "b")] == [ProviderMisconfigured] * 2


async def test_a_model_that_answers_only_zeros_blames_no_text(server: Imitation) -> None:
    async with started(server) as embedder:
        server.zeros.update({"a", "What is the capital of France?"})
        [found] = await outcomes(embedder, "a")
        assert type(found) is ProviderMisconfigured


async def test_other_dimensions_later_are_an_error_of_the_settings(server: Imitation) -> None:
    async with started(server) as embedder:
        server.dimensions = 5
        [found] = await outcomes(embedder, "a")
        assert type(found) is WrongDimension
        assert "5 dimensions" in str(found)


# The start


async def test_the_model_s_own_dimensions_are_not_asked_for(server: Imitation) -> None:
    async with made(server, model="text-embedding-3-small") as embedder:
        await embedder.embed("a")
    assert not [request for request in server.received if "dimensions" in request.body]


async def test_other_dimensions_are_asked_for_where_the_model_has_a_choice(server: Imitation) -> None:
    async with made(server, model="text-embedding-3-small", dimensions=5) as embedder:
        assert (await embedder.embed("a")).vector.shape == (5,)
    assert server.received[-1].body["dimensions"] == 5


async def test_a_model_without_that_choice_is_refused_at_the_start(server: Imitation) -> None:
    with pytest.raises(WrongDimension) as caught:
        await made(server, dimensions=5).__aenter__()
    assert caught.value.code == "wrong_dimension"
    assert str(caught.value) == f"the model's embeddings have {DIMENSIONS} dimensions, not 5"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (401, KeyRejected),
        (404, ProviderMisconfigured),
        (400, ProviderMisconfigured),
        (500, ProviderUnavailable),
    ],
)
async def test_what_is_wrong_at_the_start_is_reported_there(
    server: Imitation, code: int, kind: type[EmbeddingError]
) -> None:
    server.script.append(status(code))
    with pytest.raises(EmbeddingError) as caught:
        await made(server).__aenter__()
    assert type(caught.value) is kind
