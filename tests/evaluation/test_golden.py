"""The golden set's format: what it means, and what is refused."""

import fnmatch
import json
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import sample
from streams.core.messages import QueryEmbedding
from streams.evaluation.golden import Expectation, GoldenError, read_golden
from streams.evaluation.sample import sample_lines
from tests.evaluation.made_up import EMBEDDING, passage

CHUNK = "0b9f2a4e-5a0c-4d4e-8f6e-3c1b7a9d2e10"


def line(**fields: Any) -> str:
    return json.dumps(
        {"embedding": EMBEDDING, "principals": ["user:1"], "expected": [{"chunk_id": CHUNK}]} | fields
    )


def test_an_embedding_a_caller_and_an_expectation_are_enough() -> None:
    (query,) = read_golden([line()])
    assert query.key == "line 1"
    assert query.text is None
    assert query.event.principals == ("user:1",)
    assert query.event.profile is None
    assert list(query.expected) == [Expectation("chunk_id", CHUNK, 1)]


def test_a_whole_event_is_taken_as_it_is_and_asked_again() -> None:
    event_id, session = str(uuid4()), str(uuid4())
    (query,) = read_golden(
        [
            line(
                schema_version="1.2.0",
                event_id=event_id,
                occurred_at="2020-01-01T00:00:00Z",
                expires_at="2020-01-01T00:00:01Z",
                session_id=session,
                k=12,
                filters={"section": "2"},
            )
        ]
    )
    assert query.key == event_id
    first, second = query.fresh_event(), query.fresh_event()
    assert len({first.event_id, second.event_id, UUID(event_id)}) == 3
    assert first.expires_at is None
    assert first.occurred_at.year > 2020
    assert (first.schema_version, first.session_id, first.k) == ("1.0.0", UUID(session), 12)
    assert first.filters is not None
    assert first.filters.section == "2"


def test_blank_lines_count_but_are_no_queries() -> None:
    queries = read_golden(["", line(id="a"), "  \n", line()])
    assert [query.key for query in queries] == ["a", "line 4"]


def test_who_asks_may_be_said_once_for_all() -> None:
    first, second = read_golden([line(principals=None), line()], principals=["group:a", "user:2"])
    assert first.event.principals == ("group:a", "user:2")
    assert second.event.principals == ("user:1",)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ("{", "undecodable"),
        ("[]", "not an object"),
        ('{"id": "a", "id": "b"}', "a duplicate key"),
        (line(profil="chat"), "profil: unknown field"),
        (line(expected=None), "expected is not an array"),
        (line(expected=[]), "expected is not an array"),
        (line(expected=[CHUNK]), "expected[0] is not an object"),
        (line(expected=[{}]), "expected[0] does not have exactly one of chunk_id"),
        (line(expected=[{"chunk_id": CHUNK, "source_url": "x"}]), "expected[0] does not have exactly one of"),
        (line(expected=[{"chunk": CHUNK}]), "expected[0] does not have exactly one of"),
        (line(expected=[{"chunk_id": CHUNK}, {"document_id": "7"}]), "expected[1].document_id is not a UUID"),
        (line(expected=[{"source_url": ""}]), "expected[0].source_url is not a non-empty string"),
        (line(expected=[{"source_url": 7}]), "expected[0].source_url is not a non-empty string"),
        *(
            (
                line(expected=[{"chunk_id": CHUNK, "grade": grade}]),
                "expected[0].grade is not an integer from 1",
            )
            for grade in (0, -1, 1001, 1.5, True, "3", None)
        ),
        (line(text=7), "text is not a non-empty string"),
        (line(id=""), "id is not a non-empty string"),
        (line(embedding=[1.0]), "dimension_mismatch: embedding has 1 components"),
        (line(embedding=None), "contract_violation: embedding"),
        (line(principals=[]), "contract_violation: principals"),
        (line(k="10"), "contract_violation: k"),
        (line(schema_version="2.0.0"), "unsupported_version"),
        (line(topic_id=CHUNK), "topic_without_session"),
        ("\ud800", "undecodable"),
    ],
)
def test_a_malformed_line_is_named_by_number_and_rule(bad: str, rule: str) -> None:
    with pytest.raises(GoldenError) as caught:
        read_golden([line(), "", bad])
    assert str(caught.value).startswith("line 3: ")
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_malformed_line_is_named() -> None:
    with pytest.raises(GoldenError) as caught:
        read_golden(["{", line(id="a"), line(id="a"), line(expected=[])])
    assert [problem.split(":")[0] for problem in str(caught.value).splitlines()] == [
        "line 1",
        "line 3",
        "line 4",
    ]
    assert "line 3: duplicate id, also in line 2" in str(caught.value)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(GoldenError, match="not contain any golden queries"):
        read_golden(["\n"])


# Expectations


def test_a_chunk_is_met_by_itself_or_through_the_parent_that_took_its_place() -> None:
    chunk, parent = uuid4(), uuid4()
    returned = passage(chunk_id=parent, matched_chunk_id=chunk)
    assert Expectation("chunk_id", str(chunk)).is_met_by(returned)
    assert Expectation("chunk_id", str(parent)).is_met_by(returned)
    assert not Expectation("chunk_id", str(returned.document_id)).is_met_by(returned)
    assert Expectation("document_id", str(returned.document_id)).is_met_by(returned)


def test_an_id_may_be_written_in_capitals() -> None:
    (query,) = read_golden([line(expected=[{"chunk_id": CHUNK.upper()}])])
    assert query.expected[0].is_met_by(passage(chunk_id=CHUNK))


@pytest.mark.parametrize(
    ("kind", "value", "url", "met"),
    [
        ("source_url", "https://a/b", "https://a/b", True),
        ("source_url", "https://a/b", "https://a/b/", False),
        ("source_url", "https://a/*", "https://a/b", False),
        ("source_url_prefix", "https://a/", "https://a/b?c", True),
        ("source_url_prefix", "https://a/%", "https://a/b", False),
        ("source_url_glob", "https://a/*/c", "https://a/b/d/c", True),
        ("source_url_glob", "https://a/*/c", "https://a/c", False),
        ("source_url_glob", "*.pdf?v=[1]", "https://a/b.pdf?v=[1]", True),
        ("source_url_glob", "*.pdf?v=[1]", "https://a/b.pdfxv=1", False),
        ("source_url_glob", "a*a", "a", False),
        ("source_url_glob", "https://a/b", "https://a/b", True),
        ("source_url_glob", "*", None, False),
    ],
)
def test_urls(kind: Any, value: str, url: str | None, *, met: bool) -> None:
    assert Expectation(kind, value).is_met_by(passage(source_url=url)) is met


@given(st.text("ab*", max_size=8), st.text("ab", max_size=10))
def test_globs_agree_with_fnmatch_where_it_has_no_other_signs(pattern: str, url: str) -> None:
    met = Expectation("source_url_glob", pattern).is_met_by(passage(source_url=url))
    assert met is fnmatch.fnmatchcase(url, pattern)


# The sample


def test_the_sample_is_a_golden_set_like_any_other() -> None:
    corpus = sample.load()
    queries = read_golden(sample_lines(corpus))
    assert [query.key for query in queries] == [question.key for question in corpus.queries]
    for query, question in zip(queries, corpus.queries, strict=True):
        assert query.text == question.text
        assert {UUID(expectation.value): expectation.grade for expectation in query.expected} == dict(
            question.expected
        )
        asked = query.event
        assert isinstance(asked, QueryEmbedding)
        assert (asked.principals, asked.session_id, asked.topic_id, asked.profile) == (
            question.principals,
            question.session_id,
            question.topic_id,
            question.profile,
        )
        assert list(asked.embedding) == [float(value) for value in corpus.query_embedding(question)]
        assert (asked.filters is None) == (question.filters is None)
