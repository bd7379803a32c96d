"""Summaries of conversations: where one is made, what it is asked with, and that its failure costs only itself."""

import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

import pytest
from pydantic import SecretStr

from streams.core.composition import Message, Question, UpstreamWarning
from streams.core.embedding_errors import EmptyText
from streams.embedding.summarizers import Composed, Composer, GeminiSummarizer, OpenAISummarizer, Summarizer
from streams.tokens import count_tokens, first_tokens
from tests.embedding.imitation import KEY, Behaviour, Imitation, content, cut, hang_up, slow, status

CONVERSATION: Final = (Message("user", "What moves an estuary?"), Message("assistant", "Tides."))
SHORT: Final = Question(text="and why?", conversation=CONVERSATION)
LONG_TEXT: Final = "why do tides move the water of an estuary twice a day, and what else moves it " * 2

Make = Callable[[Imitation], Summarizer]


def gemini(server: Imitation, *, key: str = KEY) -> Summarizer:
    return GeminiSummarizer(
        base_url=f"{server.url}/gemini/v1beta", model="gemini-flash", api_key=SecretStr(key)
    )


def openai(server: Imitation, *, key: str = KEY) -> Summarizer:
    return OpenAISummarizer(base_url=f"{server.url}/openai/v1", model="any", api_key=SecretStr(key))


both = pytest.mark.parametrize("make", [gemini, openai])


async def composed(
    summarizer: Summarizer | None, question: Question = SHORT, *, timeout_seconds: float = 5
) -> Composed:
    composer = Composer(
        summarizer, timeout_seconds=timeout_seconds, count_tokens=count_tokens, first_tokens=first_tokens
    )
    try:
        return await composer.compose(question)
    finally:
        await composer.close()


@both
async def test_a_short_question_is_preceded_by_what_the_conversation_is_about(
    server: Imitation, make: Make
) -> None:
    assert await composed(make(server)) == Composed("tides in an estuary: and why?")
    [request] = server.received
    assert "user: What moves an estuary?\\nassistant: Tides." in str(request.body).replace("\n", "\\n")
    assert "and why?" not in str(request.body)


@both
async def test_a_summary_is_one_line_of_limited_length(server: Imitation, make: Make) -> None:
    server.summary = "  tides\n\nand " + "weirs " * 500
    text = (await composed(make(server))).text
    assert text.startswith("tides and weirs weirs")
    assert text.endswith(": and why?")
    assert count_tokens(text) < 110


@both
@pytest.mark.parametrize(
    "question",
    [
        Question(text=LONG_TEXT, conversation=CONVERSATION),
        Question(text="and why?", conversation=CONVERSATION, topic_id=UUID(int=1), topic_title="Tides"),
        Question(text="and why?", conversation=CONVERSATION, topic_id=UUID(int=1)),
        Question(text="and why?", conversation=CONVERSATION, conversation_summary="weirs"),
        Question(text="and why?"),
        Question(text="and why?", conversation=(Message("user", " "),)),
    ],
)
async def test_no_summary_is_made_that_would_not_be_used(
    server: Imitation, make: Make, question: Question
) -> None:
    assert not (await composed(make(server), question)).warnings
    assert not server.received


async def test_without_a_summarizer_the_text_alone_is_embedded_without_a_warning() -> None:
    assert await composed(None) == Composed("and why?")


@both
async def test_a_blank_text_is_an_error_before_any_summary(server: Imitation, make: Make) -> None:
    with pytest.raises(EmptyText):
        await composed(make(server), Question(text=" ", conversation=CONVERSATION))
    assert not server.received


@both
@pytest.mark.parametrize(
    "behaviour",
    [
        status(429),
        status(500),
        status(400),
        status(401),
        cut,
        hang_up,
        slow(30),
        content(b"<html>"),
        content(b"[]"),
        content(b"null"),
        content(b'{"choices": [], "candidates": []}'),
        content(b'{"choices": [{"message": {"content": null}}], "candidates": [{"finishReason": "SAFETY"}]}'),
        content(b'{"choices": [{"message": {"content": " "}}], "candidates": [{"content": {"parts": []}}]}'),
    ],
)
async def test_a_summarizer_that_fails_costs_only_the_summary(
    server: Imitation, make: Make, behaviour: Behaviour
) -> None:
    server.script.append(behaviour)
    began = time.monotonic()
    found = await composed(make(server), timeout_seconds=0.5)
    assert time.monotonic() - began < 15
    assert found.text == "and why?"
    assert found.warnings == (UpstreamWarning.SUMMARY_UNAVAILABLE,)
    assert found.summary_error is not None
    assert KEY not in str(found.summary_error)
    assert len(server.received) == 1


@pytest.mark.parametrize("make", [gemini, openai])
async def test_a_wrong_key_costs_only_the_summary(server: Imitation, make: Callable[..., Summarizer]) -> None:
    found = await composed(make(server, key="another"))
    assert (found.text, found.warnings) == ("and why?", (UpstreamWarning.SUMMARY_UNAVAILABLE,))
