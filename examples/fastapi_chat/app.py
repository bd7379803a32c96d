"""A chat back end: finds what the user may read, and streams the prompt that a language model would get.

There is no language model in this example: `complete` stands in for one, and streams the assembled prompt itself.

    pip install fastapi uvicorn
    export CHAT_TOKENS='{"secret-of-ada": ["user:ada", "group:staff"]}'
    uvicorn --app-dir examples/fastapi_chat app:app
    curl -N localhost:8000/chat -H 'Authorization: Bearer secret-of-ada' --json '{"question": "Can ripples go up?"}'
"""

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Literal
from uuid import UUID

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field

from streams.client import (
    Client,
    ClientError,
    ConnectionFailed,
    InvalidEvent,
    RetrievalFailed,
    RetrievalResult,
    RetrievalTimeout,
)

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
INSTRUCTIONS = (
    "Answer the question from the passages only, and cite their numbers. If they do not answer it, say so."
)
NOTHING_FOUND = "There are no passages that this user may read."


class Message(BaseModel):
    role: Literal["user", "assistant"]
    text: str = Field(max_length=32_768)


class Turn(BaseModel):
    """A question, and the conversation before it."""

    question: str = Field(min_length=1, max_length=32_768)
    conversation: list[Message] = Field(default=[], max_length=64)
    session_id: UUID | None = None
    topic_id: UUID | None = None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client for all requests. It connects with the first one."""
    app.state.tokens = json.loads(os.environ.get("CHAT_TOKENS", "{}"))
    async with Client.from_environment() as client:
        app.state.client = client
        yield


app = FastAPI(title="Chat with Anabranch", lifespan=lifespan)


def principals_of(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]
) -> list[str]:
    """Whom the user may act as. Replace it by your own authentication; never accept principals from a request."""
    found: list[str] | None = request.app.state.tokens.get(credentials.credentials)
    if found is None:
        raise HTTPException(HTTPStatus.UNAUTHORIZED, "unknown token")
    return found


@app.post("/chat")
async def chat(
    turn: Turn, request: Request, principals: Annotated[list[str], Depends(principals_of)]
) -> StreamingResponse:
    """Server-sent events: ``sources``, then ``text`` piece by piece, then ``end``."""
    client: Client = request.app.state.client
    result = await client.retrieve(
        text=turn.question,
        principals=principals,
        profile="chat",
        session_id=turn.session_id,
        topic_id=turn.topic_id,
        conversation=[message.model_dump() for message in turn.conversation],
        timeout=TIMEOUT_SECONDS,
    )
    return StreamingResponse(answer(turn.question, result), media_type="text/event-stream")


async def answer(question: str, result: RetrievalResult) -> AsyncIterator[str]:
    yield event(
        "sources",
        [
            {
                "number": passage.rank,
                "title": passage.title,
                "url": passage.source_url,
                "score": passage.score,
            }
            for passage in result.results
        ],
    )
    async for piece in complete(prompt_of(question, result)):
        yield event("text", piece)
    yield event("end", {"result_id": str(result.result_id), "warnings": result.warnings})


def prompt_of(question: str, result: RetrievalResult) -> str:
    passages = [f"[{passage.rank}] {passage.prompt_text}" for passage in result.results] or [NOTHING_FOUND]
    return "\n\n".join([INSTRUCTIONS, *passages, f"Question: {question}"])


async def complete(prompt: str) -> AsyncIterator[str]:
    """Stands in for a language model: streams the prompt. Replace it by your model's streaming call."""
    for line in prompt.splitlines(keepends=True):
        yield line


def event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


@app.exception_handler(ClientError)
async def failed(_: Request, error: ClientError) -> JSONResponse:
    """Before the stream began. Other messages name servers and settings: those are for the log."""
    log.warning("no answer: %s", error)
    status = {
        InvalidEvent: HTTPStatus.UNPROCESSABLE_ENTITY,
        RetrievalTimeout: HTTPStatus.GATEWAY_TIMEOUT,
        ConnectionFailed: HTTPStatus.SERVICE_UNAVAILABLE,
    }.get(type(error), HTTPStatus.BAD_GATEWAY)
    caused_by_user = isinstance(error, InvalidEvent | RetrievalFailed)
    return JSONResponse({"detail": str(error) if caused_by_user else status.phrase}, status)
