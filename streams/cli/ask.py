"""`anabranch ask`: sends one question through the pipeline, and shows the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from streams.client import Client, ClientError, ConnectionFailed, InvalidEvent, RetrievalTimeout
from streams.core.composition import UpstreamWarning
from streams.core.embedding_errors import EmbeddingError
from streams.core.errors import TransientError
from streams.core.messages import Filters, RetrievalResult, query_hash
from streams.core.warning_codes import WarningCode
from streams.embedding.provider import Vectors
from streams.providers import make_embedder
from streams.result_view import explanation_table, facts, passages_table, reasons
from streams.settings import Settings, load, load_embedder, load_embedding_if_set
from streams.store.chunk_vector import ChunkNotFound, read_chunk_vector
from streams.terminal import Console, Text, echo, json_text, write
from streams.wire import result_to_json

__all__ = ["Answer", "NotAnswered", "Question", "as_json", "ask", "show", "show_prompt"]


class NotAnswered(Exception):
    """There is no answer; the message says why, and what to do, in one line.

    Args:
        message: the line.
        invalid: whether the question itself is at fault.
    """

    def __init__(self, message: str, *, invalid: bool = False) -> None:
        super().__init__(message)
        self.invalid = invalid


@dataclass(frozen=True, slots=True)
class Question:
    """A question from the command line.

    Attributes:
        text: the question in words; either this or `like`.
        like: the chunk whose embedding is the question's.
        timeout_seconds: how long to wait for the answer.
    """

    text: str | None
    like: UUID | None
    principals: Sequence[str]
    session_id: UUID | None
    topic_id: UUID | None
    profile: str | None
    k: int | None
    filters: Filters | None
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A result, and the warnings of embedding the question."""

    result: RetrievalResult
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Query:
    """What is sent: an embedding, or a text for an embedding stage."""

    embedding: Vectors | None = None
    model: str | None = None
    query_hash: str | None = None
    text: str | None = None
    warnings: Sequence[str] = ()


async def ask(question: Question) -> Answer:
    """Ask with the settings of the environment.

    The question is embedded here if a provider is configured; otherwise by an embedding stage. With `Question.like`,
    nothing is embedded.

    Raises:
        NotAnswered: the question is invalid, dead-lettered or not answered in time, or a server cannot be used.
        SettingsError: a setting is missing or invalid.
    """
    query = await _query(question)
    try:
        async with Client.from_environment() as client:
            with Console(stderr=True).status("waiting for the answer"):  # shown only on a terminal
                result = await client.retrieve(
                    principals=question.principals,
                    embedding=query.embedding,
                    text=query.text,
                    embedding_model=query.model,
                    query_hash=query.query_hash,
                    session_id=question.session_id,
                    topic_id=question.topic_id,
                    profile=question.profile,
                    k=question.k,
                    filters=question.filters,
                    explain=True,  # for the reasons
                    timeout=question.timeout_seconds,
                )
            return Answer(result, query.warnings)
    except ClientError as error:
        invalid = isinstance(error, InvalidEvent)
        raise NotAnswered(f"{error}{_hint(error, query)}", invalid=invalid) from None


def _hint(error: ClientError, query: _Query) -> str:
    """What to do if nothing embeds the question."""
    if query.text is None:
        return ""
    if isinstance(error, RetrievalTimeout):
        commands = "run `anabranch topics --texts` and `anabranch embedder`"
    elif isinstance(error, ConnectionFailed) and load_embedder()[1].anabranch_text_topic in str(error):
        commands = "also run `anabranch embedder`"  # the error names the first command
    else:
        return ""
    return f"; to ask in words, set ANABRANCH_EMBEDDING_PROVIDER, or {commands}"


async def _query(question: Question) -> _Query:
    settings = load()
    if question.like is not None:
        return _Query(await _vector_of(question.like, question, settings), settings.anabranch_embedding_model)
    text = question.text or ""
    embedding = load_embedding_if_set()
    if embedding is None:
        return _Query(text=text)
    try:
        async with make_embedder(embedding) as embedder:
            embedded = await embedder.embed(text)
    except EmbeddingError as error:
        raise NotAnswered(f"{error.code}: {error}") from None
    return _Query(
        embedded.vector,
        embedding.anabranch_embedding_model,
        query_hash(text),
        warnings=[UpstreamWarning.TEXT_TRUNCATED] if embedded.truncated else [],
    )


async def _vector_of(chunk_id: UUID, question: Question, settings: Settings) -> Vectors:
    try:
        return await read_chunk_vector(
            settings.store_dsn,
            chunk_id,
            question.principals,
            statement_cache_size=settings.anabranch_statement_cache_size,
            timeout_seconds=question.timeout_seconds,
        )
    except ChunkNotFound as error:
        raise NotAnswered(str(error)) from None
    except TransientError as error:
        raise NotAnswered(f"the chunk cannot be read: {error}") from None


def as_json(answer: Answer) -> str:
    """The result as one JSON object, in the contract's form."""
    return json_text(result_to_json(answer.result))


def show_prompt(answer: Answer, question: Question) -> None:
    """Print the passages as they belong in a prompt, separated by blank lines; anything else on standard error."""
    write("\n\n".join(passage.prompt_text for passage in answer.result.results))
    for line in _remarks(answer, question):
        echo(line, err=True)


def show(answer: Answer, question: Question, *, explain: bool) -> None:
    """Print the answer for people.

    Args:
        answer: the answer.
        question: its question.
        explain: print the explanation too.
    """
    console, result = Console(), answer.result
    where = "all readable documents"
    if result.topic_id is not None:
        where = f"topic {result.topic_id} and its session"
    elif result.session_id is not None:
        where = f"session {result.session_id}"
    duration = f"{result.query_time_ms:.0f} ms in the worker"
    console.print(facts(result, principals=question.principals, where=where, duration=duration))
    if result.results:
        console.print(passages_table(result.results))
    for line in _remarks(answer, question, explain=explain):
        console.print(Text(line, style="yellow"), soft_wrap=True)
    if explain and result.explanation is not None:
        console.print(explanation_table(result.explanation))


def _remarks(answer: Answer, question: Question, *, explain: bool = False) -> list[str]:
    """Warnings, and why there are no more passages."""
    warnings = [*answer.warnings, *answer.result.warnings]
    if not explain:  # only asked for because of the reasons
        warnings = [code for code in warnings if code != WarningCode.EXPLANATION_UNAVAILABLE]
    why = reasons(answer.result, principals=question.principals, filtered=question.filters is not None)
    return [*why, *(f"warning: {_meaning(code, answer.result)}" for code in dict.fromkeys(warnings))]


def _meaning(code: str, result: RetrievalResult) -> str:
    """A warning's code, and what it means, if it is about what the command line asks for."""
    match code:
        case WarningCode.K_CLAMPED:
            return (
                f"{code}: the profile {result.profile} does not allow {result.k_requested} passages;"
                f" k is {result.k_effective}"
            )
        case UpstreamWarning.TEXT_TRUNCATED:
            return f"{code}: only the beginning of the question was embedded"
    return code
