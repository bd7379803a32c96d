"""Lines of JSON to documents: what is accepted, what is filled in, and the code of everything else."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.documents import (
    Chunk,
    Document,
    DocumentError,
    Line,
    Problem,
    batches,
)
from streams.core.errors import Undecodable
from streams.wire import strict_json
from streams.wire.documents import _object, decode_document, decode_id, decode_lines

PAGE = Path(__file__).resolve().parents[2] / "docs/ingest.md"
ID = UUID("0b8d7c1a-55e4-4c2f-8f7e-9a1b2c3d4e5f")
OTHER = UUID("c0ffee00-1234-4abc-8def-0123456789ab")
SECRET = "canary-5e0f"


def decode(line: Any, dimensions: int = 3) -> Document:
    text = line if isinstance(line, bytes) else json.dumps(line).encode()
    return decode_document(text, dimensions=dimensions)


def with_chunk(**fields: Any) -> dict[str, Any]:
    return {"id": str(ID), "chunks": [{"text_content": "a"} | fields]}


def error_of(line: Any) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        decode(line)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    return caught.value


def test_what_is_absent_is_filled_in() -> None:
    document = decode(
        {"id": str(ID).upper(), "session_id": str(OTHER), "chunks": [{"text_content": "a"}] * 2}
    )
    assert (document.id, document.session_id, document.title, document.metadata) == (ID, OTHER, None, {})
    assert document.grants is None
    assert [chunk.id for chunk in document.chunks] == [uuid5(ID, "1"), uuid5(ID, "2")]
    assert [chunk.chunk_position for chunk in document.chunks] == [1, 2]
    assert {chunk.session_id for chunk in document.chunks} == {OTHER}
    assert all(chunk.searchable and chunk.embedding is None for chunk in document.chunks)


def test_null_means_absent() -> None:
    fields = set(Chunk.__slots__) - {"text_content"}
    absent, null = decode(with_chunk()), decode(with_chunk(**dict.fromkeys(fields)) | {"grants": None})
    for name in Chunk.__slots__:
        assert getattr(absent.chunks[0], name) == getattr(null.chunks[0], name), name
    assert null.grants is None


def test_what_is_given_is_kept() -> None:
    chunk = {
        "id": str(OTHER), "text_content": "a\u2028b", "embedding": [1, 0.5, -2e-9], "session_id": str(OTHER),
        "parent_chunk_id": str(ID), "related_topic_ids": [str(OTHER)], "chunk_type": "problem",
        "chunk_position": 7, "token_count": 0, "page": -1, "section": "", "coordinates": {"x0": 1},
        "metadata": {"tags": ["a", {"b": None}], "year": 2020, "large": 10**300, "π": 1.5},
    }  # fmt: skip
    line = {
        "id": str(ID), "grants": ["user:1", "public", "user:1"], "session_id": str(ID), "title": "t",
        "source_url": "u", "file_description": "f", "document_type": "d", "metadata": {"a": True}, "chunks": [chunk],
    }  # fmt: skip
    document = decode(line)
    assert document.grants == frozenset({"user:1", "public"})
    for name in ("title", "source_url", "file_description", "document_type", "metadata"):
        assert getattr(document, name) == line[name]
    [found] = document.chunks
    assert (found.id, found.session_id, found.parent_chunk_id, found.related_topic_ids) == (
        OTHER,
        OTHER,
        ID,
        (OTHER,),
    )
    for name in (
        "text_content",
        "chunk_type",
        "chunk_position",
        "token_count",
        "page",
        "section",
        "coordinates",
        "metadata",
    ):
        assert getattr(found, name) == chunk[name]
    assert found.embedding is not None
    assert found.embedding.dtype == np.float32
    assert found.embedding.tolist() == np.array([1, 0.5, -2e-9], dtype=np.float32).tolist()


INVALID: dict[str, tuple[Any, Problem, str]] = {
    "no JSON": (b"id: 1", Problem.UNDECODABLE, "is not a JSON object"),
    "an array": (b"[]", Problem.UNDECODABLE, "is not a JSON object"),
    "truncated": (b'{"id": "' + SECRET.encode(), Problem.UNDECODABLE, "invalid or truncated at character 7"),
    "not UTF-8": (b'{"\xff": 1}', Problem.UNDECODABLE, "not UTF-8"),
    "NaN": (b'{"id": NaN}', Problem.UNDECODABLE, "NaN"),
    "twice the same key": (b'{"id": 1, "id": 2}', Problem.UNDECODABLE, "duplicate key"),
    "no id": ({"chunks": []}, Problem.INVALID_DOCUMENT, "id is required"),
    "no UUID": ({"id": SECRET, "chunks": []}, Problem.INVALID_DOCUMENT, "id is not a UUID"),
    "no chunks": ({"id": str(ID)}, Problem.INVALID_DOCUMENT, "chunks is required"),
    "chunks that are an object": (
        {"id": str(ID), "chunks": {}},
        Problem.INVALID_DOCUMENT,
        "chunks is not an array",
    ),
    "a misspelt field": (
        {"id": str(ID), "chunks": [], "grant": ["a"]},
        Problem.INVALID_DOCUMENT,
        "grant is not a known field",
    ),
    "a misspelt field of a chunk": (
        with_chunk(embeding=[1]),
        Problem.INVALID_DOCUMENT,
        "chunks[0].embeding is not a known field",
    ),
    "a grant to a number": (
        {"id": str(ID), "chunks": [], "grants": [1]},
        Problem.INVALID_DOCUMENT,
        "grants[0] is not a string",
    ),
    "a grant to nobody": (
        {"id": str(ID), "chunks": [], "grants": [""]},
        Problem.INVALID_DOCUMENT,
        "grants[0] is too short",
    ),
    "grants that are one string": (
        {"id": str(ID), "chunks": [], "grants": "public"},
        Problem.INVALID_DOCUMENT,
        "grants is not an array",
    ),
    "no text": (
        {"id": str(ID), "chunks": [{}]},
        Problem.INVALID_DOCUMENT,
        "chunks[0].text_content is required",
    ),
    "U+0000": (
        with_chunk(text_content=f"{SECRET}\0"),
        Problem.INVALID_DOCUMENT,
        "chunks[0].text_content contains U+0000",
    ),
    "half a surrogate pair": (with_chunk(section="\ud800"), Problem.INVALID_DOCUMENT, "unpaired surrogate"),
    "U+0000 in metadata": (
        with_chunk(metadata={"a": [{"b\0": 1}]}),
        Problem.INVALID_DOCUMENT,
        "metadata.* contains U+0000",
    ),
    "an endless number": (
        b'{"id": "%s", "chunks": [], "metadata": {"a": 1e999}}' % str(ID).encode(),
        Problem.INVALID_DOCUMENT,
        "metadata.* contains a number that is too large",
    ),
    "a long integer": (
        {"id": str(ID), "chunks": [], "metadata": {"a": 10**400}},
        Problem.INVALID_DOCUMENT,
        "too large",
    ),
    "a page beyond int32": (with_chunk(page=2**31), Problem.INVALID_DOCUMENT, "chunks[0].page is too large"),
    "a page as text": (with_chunk(page="1"), Problem.INVALID_DOCUMENT, "chunks[0].page is not an integer"),
    "a negative count": (
        with_chunk(token_count=-1),
        Problem.INVALID_DOCUMENT,
        "chunks[0].token_count is too small",
    ),
    "coordinates as text": (with_chunk(coordinates={"x0": "1"}), Problem.INVALID_DOCUMENT, "non-numeric"),
    "both": (
        with_chunk(embedding=[1, 2, 3], searchable=False),
        Problem.INVALID_DOCUMENT,
        "its searchable is false",
    ),
    "an embedding of text": (
        with_chunk(embedding=[SECRET]),
        Problem.INVALID_DOCUMENT,
        "non-numeric component",
    ),
    "a short embedding": (
        with_chunk(embedding=[1.0, 2.0]),
        Problem.DIMENSION_MISMATCH,
        "chunks[0].embedding has 2 components, the store's have 3",
    ),
    "an empty embedding": (with_chunk(embedding=[]), Problem.DIMENSION_MISMATCH, "has 0 components"),
    "an embedding beyond float32": (
        with_chunk(embedding=[1e39, 0, 0]),
        Problem.NON_FINITE_EMBEDDING,
        "float32",
    ),
    "an embedding of zeros": (with_chunk(embedding=[0, 0.0, -0.0]), Problem.ZERO_EMBEDDING, "is all zeros"),
    "a chunk twice": (
        {"id": str(ID), "chunks": [{"id": str(OTHER), "text_content": "a"}] * 2},
        Problem.DUPLICATE_CHUNK,
        "chunks[1].id occurs twice",
    ),
}


@pytest.mark.parametrize(("line", "code", "message"), INVALID.values(), ids=INVALID.keys())
def test_an_invalid_line_has_a_code_and_a_reason(line: Any, code: Problem, message: str) -> None:
    error = error_of(line)
    assert error.code == code
    assert message in str(error)


def test_the_page_lists_every_code_and_no_other() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Rejected lines\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `([a-z_]+)`", section, re.MULTILINE)) == sorted(Problem)


def test_the_page_lists_every_field_and_no_other() -> None:
    from streams.core.documents import _ChunkLine, _DocumentLine  # noqa: PLC0415  # only this test reads them

    text = PAGE.read_text(encoding="utf-8")
    for heading, model in (
        ("### Fields of a document", _DocumentLine),
        ("### Fields of a chunk", _ChunkLine),
    ):
        section = text.split(f"{heading}\n")[1].split("\n#")[0]
        cells = [
            cell for line in section.splitlines() if line.startswith("| `") for cell in [line.split("|")[1]]
        ]
        assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(model.model_fields)


tricky = st.text(st.sampled_from('":,\\ a{'), max_size=4)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | tricky
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tricky, inner, max_size=3),
    max_leaves=8,
)


@given(
    value=st.dictionaries(st.text(max_size=3), json_values, max_size=3),
    ascii_only=st.booleans(),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
)
def test_any_json_is_read_as_the_strict_parser_reads_it(
    *, value: dict[str, Any], ascii_only: bool, separators: tuple[str, str]
) -> None:
    """Whatever looks like a key in a text, and however it is written."""
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode("utf-8", "surrogatepass")
    try:
        expected: object = strict_json.loads(text)
    except Undecodable:
        expected = None
    try:
        found: object = _object(text)
    except DocumentError:
        found = None
    assert found == expected


@pytest.mark.parametrize(
    "twice",
    [
        '"grants": ["a"], "grants": ["public"]',
        '"grants" : ["a"],"grants" :["public"]',
        '"grants" : ["a"],"grants":["public"]',
        '"grants"\t:["a"],"grants":["public"]',
        r'"metadata":{"a\\":1},"grants":["a"],"grants":["public"]',
        r'"\u0067rants": ["a"], "grants": ["public"]',
        r'"title": "\": ", "metadata": {"a": [1, {"b": 1, "b": 2}]}',
        r'"title": ":", "grants": ["a"], "grants": ["public"]',
    ],
)
def test_a_key_that_occurs_twice_is_an_error(twice: str) -> None:
    error = error_of(f'{{"id": "{ID}", "chunks": [], {twice}}}'.encode())
    assert (error.code, str(error)) == (Problem.UNDECODABLE, "a JSON object has a duplicate key")


@given(
    st.lists(st.floats(min_value=-1, max_value=1, width=32), min_size=3, max_size=3).filter(any),
    st.integers(min_value=-100, max_value=100),
)
def test_an_embedding_of_any_length_keeps_its_direction(components: list[float], exponent: int) -> None:
    """In float32, as pgvector computes: the squares of its components neither overflow nor vanish."""
    largest = max(map(abs, components))
    scaled = [math.ldexp(component / largest, exponent) for component in components]
    [chunk] = decode(with_chunk(embedding=scaled)).chunks
    assert chunk.embedding is not None
    norm = np.linalg.norm(chunk.embedding)
    assert 2.0**-31 < norm < 2.0**31
    given_unit = np.array(scaled) / np.linalg.norm(scaled)
    assert np.allclose(chunk.embedding / norm, given_unit, atol=1e-6)


@pytest.mark.parametrize(
    "text", [f'{{"id": "{ID}", "title": 1}}', f'"{ID}"', f"  {ID}\n", str(ID).upper()], ids=repr
)
def test_a_document_to_delete_is_an_object_with_an_id_or_an_id(text: str) -> None:
    assert decode_id(text.encode()) == ID


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{}", Problem.INVALID_DOCUMENT),
        (b'{"id": 1}', Problem.INVALID_DOCUMENT),
        (b"\xff", Problem.INVALID_DOCUMENT),
        (b'{"id": ', Problem.UNDECODABLE),
        (SECRET.encode(), Problem.INVALID_DOCUMENT),
    ],
)
def test_anything_else_to_delete_is_an_error(text: bytes, code: Problem) -> None:
    with pytest.raises(DocumentError) as caught:
        decode_id(text)
    assert caught.value.code == code
    assert SECRET not in str(caught.value)


def test_lines_have_the_numbers_of_the_file() -> None:
    lines = list(decode_lines([b"\n", str(ID).encode(), b"  \r\n", b"x\n"], decode_id))
    assert [(line.number, line.size) for line in lines] == [(2, 36), (4, 2)]
    assert lines[0].content == ID
    assert isinstance(lines[1].content, DocumentError)


def numbered(contents: Iterator[Document | UUID | DocumentError]) -> list[Line]:
    return [Line(number, 1, content) for number, content in enumerate(contents, start=1)]


ids = st.integers(min_value=0, max_value=9).map(lambda number: UUID(int=number))
documents = st.builds(
    lambda id_, chunks: Document(id=id_, chunks=[Chunk(id=each, text_content="") for each in chunks]),
    ids,
    st.lists(ids, unique=True, max_size=4),
)
errors = st.just(DocumentError(Problem.UNDECODABLE, ""))


@given(st.lists(documents | ids | errors, max_size=20).map(lambda contents: numbered(iter(contents))))
def test_batches_have_every_line_in_order_and_no_document_or_chunk_twice(lines: list[Line]) -> None:
    found = list(batches(iter(lines), max_chunks=6, max_lines=5))
    assert [line for batch in found for line in batch.lines] == lines
    for batch in found:
        assert 1 <= len(batch.lines) <= 5
        assert len({*batch.ids}) == len(batch.ids)
        assert len({document.id for document in batch.documents}) == len(batch.documents)
        chunks = [chunk.id for document in batch.documents for chunk in document.chunks]
        assert len(set(chunks)) == len(chunks)
        before = [chunk for document in batch.documents[:-1] for chunk in document.chunks]
        assert len(before) < 6
