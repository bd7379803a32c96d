"""A local HTTP server that answers as Cohere, OpenAI and Gemini do, and fails as any of them may."""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

from aiohttp import web

KEY: Final = "canary-key-7f3a"
DIMENSIONS: Final = 8
# As many numbers as one wants of these models; the others have one size.
CHOICE_OF_DIMENSIONS: Final = frozenset({"embed-v4.0", "text-embedding-3-small"})
INPUT_TYPES: Final = frozenset({"search_query", "search_document"})
MODELS: Final = frozenset({"embed-english-v3.0", "some-model", *CHOICE_OF_DIMENSIONS})

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Received:
    at: float
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Imitation:
    """The server's state, which tests read and change.

    Attributes:
        script: what the next requests get instead of an answer, in order.
        failing: what all requests get instead of an answer, as long as it is set.
        delay_seconds: how long an answer takes.
        max_characters: a longer text is rejected, unless the request says how to truncate it.
        broken: a text at which the server fails with this status.
        zeros: texts whose embedding is all zeros.
        summary: what conversations are summarized as.
    """

    url: str = ""
    received: list[Received] = field(default_factory=list)
    script: deque[Behaviour] = field(default_factory=deque)
    failing: Behaviour | None = None
    delay_seconds: float = 0
    max_characters: int = 2000
    broken: dict[str, int] = field(default_factory=dict)
    zeros: set[str] = field(default_factory=set)
    dimensions: int = DIMENSIONS
    key: str = KEY
    summary: str = "tides in an estuary"

    def gaps(self) -> list[float]:
        """Seconds between the requests."""
        times = [request.at for request in self.received]
        return [later - earlier for earlier, later in pairwise(times)]


def vector(text: str, dimensions: int = DIMENSIONS) -> list[float]:
    """A text's embedding: any, but always the same."""
    digest = hashlib.sha256(text.encode()).digest()
    return [digest[index % 32] / 256 + 0.001 * (index + 1) for index in range(dimensions)]


# What can go wrong


def status(code: int, retry_after: str | None = None) -> Behaviour:
    async def answer(_: web.Request) -> web.Response:
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        # Providers quote the request, and parts of the key.
        return web.json_response({"message": f"no: {KEY} secret text"}, status=code, headers=headers)

    return answer


def slow(seconds: float) -> Behaviour:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(seconds)
        return web.json_response({})

    return answer


def trickle(seconds: float) -> Behaviour:
    """Something every few milliseconds, and never all of it."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(int(seconds / 0.01)):
            await response.write(b" ")
            await asyncio.sleep(0.01)
        return response

    return answer


async def cut(request: web.Request) -> web.StreamResponse:
    """Half a response, and the connection closed."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"data": [{"index": 0, "embedding": [0.1,')
    assert request.transport is not None
    request.transport.close()
    return response


async def hang_up(request: web.Request) -> web.StreamResponse:
    """No response at all."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def content(body: bytes) -> Behaviour:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    return answer


def redirect(to: str) -> Behaviour:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": to})

    return answer


# The three APIs


def _error(code: int, message: str) -> web.Response:
    return web.json_response({"message": message, "error": {"message": message}}, status=code)


def _vectors(state: Imitation, texts: list[str], asked: int | None) -> list[list[float]]:
    size = state.dimensions if asked is None else asked
    return [[0.0] * size if text in state.zeros else vector(text, size) for text in texts]


def _rejection(
    state: Imitation,
    request: web.Request,
    model: str,
    texts: list[str],
    asked: int | None,
    *,
    truncates: bool,
) -> web.Response | None:
    """What both embedding APIs reject."""
    if request.headers.get("Authorization") != f"Bearer {state.key}":
        return _error(401, f"invalid api key {KEY[:9]}")
    if model not in MODELS:
        return _error(404, "no such model")
    if asked is not None and model not in CHOICE_OF_DIMENSIONS:
        return _error(400, "this model has no choice of dimensions")
    for text in texts:
        if text in state.broken:
            return _error(state.broken[text], "cannot embed this")
    if not truncates and any(len(text) > state.max_characters for text in texts):
        return _error(400, "too long")
    return None


async def _openai(state: Imitation, request: web.Request) -> web.Response:
    body = await request.json()
    texts, asked = body["input"], body.get("dimensions")
    if (rejection := _rejection(state, request, body["model"], texts, asked, truncates=False)) is not None:
        return rejection
    data = [
        {"object": "embedding", "index": index, "embedding": row}
        for index, row in enumerate(_vectors(state, texts, asked))
    ]
    # The order is the index's, whatever the list's is.
    return web.json_response({"object": "list", "data": data[::-1], "model": body["model"], "usage": {}})


async def _cohere(state: Imitation, request: web.Request) -> web.Response:
    body = await request.json()
    texts, asked = body["texts"], body.get("output_dimension")
    if body["embedding_types"] != ["float"] or body["input_type"] not in INPUT_TYPES or len(texts) > 96:
        return _error(400, "invalid request")
    truncates = body["truncate"] != "NONE"
    if (
        rejection := _rejection(state, request, body["model"], texts, asked, truncates=truncates)
    ) is not None:
        return rejection
    texts = [text[: state.max_characters] for text in texts]
    return web.json_response(
        {
            "id": "0d0f8a56-4f5c-4a0c-8c76-6b9c5a1d1f6a",
            "embeddings": {"float": _vectors(state, texts, asked)},
            "texts": texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 3}},
            "response_type": "embeddings_by_type",
        }
    )


async def _chat(state: Imitation, request: web.Request) -> web.Response:
    if request.headers.get("Authorization") != f"Bearer {state.key}":
        return _error(401, "invalid api key")
    message = {"role": "assistant", "content": state.summary}
    return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


async def _gemini(state: Imitation, request: web.Request) -> web.Response:
    if request.headers.get("x-goog-api-key") != state.key:
        return _error(400, "API key not valid")
    if request.match_info["model"] != "gemini-flash":
        return _error(404, "no such model")
    parts = [{"text": "let me think", "thought": True}, {"text": state.summary}]
    return web.json_response({"candidates": [{"content": {"role": "model", "parts": parts}}]})


_ROUTES: Final = {
    "/openai/v1/embeddings": _openai,
    "/openai/v1/chat/completions": _chat,
    "/cohere/v2/embed": _cohere,
    "/gemini/v1beta/models/{model}:generateContent": _gemini,
}


@asynccontextmanager
async def imitation() -> AsyncIterator[Imitation]:
    """A server on a port of its own."""
    state = Imitation()

    @web.middleware
    async def scripted(request: web.Request, handler: Behaviour) -> web.StreamResponse:
        state.received.append(
            Received(time.monotonic(), request.path, dict(request.headers), await request.json())
        )
        if state.script:
            return await state.script.popleft()(request)
        if state.failing is not None:
            return await state.failing(request)
        await asyncio.sleep(state.delay_seconds)
        return await handler(request)

    application = web.Application(middlewares=[scripted])
    application.add_routes([web.post(path, partial(answer, state)) for path, answer in _ROUTES.items()])
    runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield state
    finally:
        await runner.cleanup()
