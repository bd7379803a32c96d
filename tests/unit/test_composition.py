"""What is embedded for a question: the table in `streams.core.composition`, and texts cut at a number of tokens."""

from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streams.core.composition import Message, Question, compose, lacks_summary
from streams.core.embedding_errors import EmptyText
from streams.tokens import count_tokens, first_tokens

# What a contract lets through: no U+0000, no unpaired surrogates.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200)
SPACES = st.text(" \t\n\u2003", max_size=5)
OPTIONAL = st.none() | SPACES | TEXTS
QUESTIONS = st.builds(
    Question,
    text=TEXTS | SPACES,
    topic_id=st.none() | st.uuids(),
    topic_title=OPTIONAL,
    conversation=st.lists(
        st.builds(Message, role=st.sampled_from(["user", "assistant"]), text=TEXTS), max_size=3
    ),
    conversation_summary=OPTIONAL,
)
TOPIC = UUID(int=7)


def words(text: str) -> int:
    """A tokenizer that shows where the limit is."""
    return len(text.split())


@pytest.mark.parametrize(
    ("question", "made", "text"),
    [
        (Question("why?"), None, "why?"),
        (Question("why?", topic_id=TOPIC, topic_title="Tides"), None, "Tides: why?"),
        (Question("why " * 50, topic_id=TOPIC, topic_title="Tides"), None, "Tides: " + "why " * 50),
        (Question("why?", topic_id=TOPIC), "weirs", "why?"),
        (
            Question("why?", topic_id=TOPIC, topic_title="Tides", conversation_summary="weirs"),
            None,
            "Tides: why?",
        ),
        (Question("why?", topic_id=TOPIC, conversation_summary="weirs"), None, "why?"),
        (Question("why?", topic_title="Tides"), None, "why?"),
        (Question("why?", topic_title="Tides", conversation_summary="weirs"), None, "weirs: why?"),
        (Question("why?", conversation_summary="weirs"), "locks", "weirs: why?"),
        (Question("why?"), "locks", "locks: why?"),
        (Question("why?", conversation_summary=" \n"), "locks", "locks: why?"),
        (Question("why?", topic_id=TOPIC, topic_title=" "), None, "why?"),
        (Question(" why? ", conversation_summary=" weirs\n"), None, " weirs\n:  why? "),
        (Question(" ".join(["why"] * 19)), "locks", "locks: " + " ".join(["why"] * 19)),
        (Question(" ".join(["why"] * 20)), "locks", " ".join(["why"] * 20)),
    ],
)
def test_the_composition_is_exactly_this(question: Question, made: str | None, text: str) -> None:
    assert compose(question, made, words) == text


def test_the_limit_counts_tokens_of_cl100k_base() -> None:
    nineteen = "a b c d e f g h i j k l m n o p q r s"
    assert count_tokens(nineteen) == 19
    assert compose(Question(nineteen), "weirs", count_tokens) == f"weirs: {nineteen}"
    assert compose(Question(f"{nineteen} t"), "weirs", count_tokens) == f"{nineteen} t"


@given(QUESTIONS, OPTIONAL)
def test_the_text_is_at_the_end_and_only_one_of_its_parts_before_it(
    question: Question, made: str | None
) -> None:
    if not question.text.strip():
        with pytest.raises(EmptyText):
            compose(question, made, count_tokens)
        return
    text = compose(question, made, count_tokens)
    own = question.conversation_summary
    summary = own if own is not None and own.strip() else made
    part = summary if question.topic_id is None else question.topic_title
    assert text in {question.text, f"{part}: {question.text}"}
    if text != question.text:
        assert part is not None
        assert part.strip()
        assert question.topic_id is not None or count_tokens(question.text) < 20


@given(QUESTIONS, TEXTS.filter(str.strip))
def test_a_summary_is_lacking_only_where_one_would_be_used(question: Question, made: str) -> None:
    if lacks_summary(question, count_tokens):
        assert question.conversation
        assert compose(question, None, count_tokens) == question.text
        assert compose(question, made, count_tokens) == f"{made}: {question.text}"
    elif (
        question.conversation
        and question.text.strip()
        and any(one.text.strip() for one in question.conversation)
    ):
        assert compose(question, made, count_tokens) == compose(question, None, count_tokens)


def test_a_summary_is_lacking_below_20_tokens() -> None:
    conversation = (Message("user", "tides"),)
    assert lacks_summary(Question(" ".join(["why"] * 19), conversation=conversation), words)
    assert not lacks_summary(Question(" ".join(["why"] * 20), conversation=conversation), words)


# Cut at a number of tokens


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=400), st.integers(1, 60))
@example("   \n\n   x" * 20, 3)
@example("\U0001f469\u200d\U0001f680" * 20, 5)
@example("ἀ" * 30, 1)
@example(" 실퀀", 1)  # a token that ends inside a character; what is complete of it needs two tokens
def test_the_first_tokens_are_a_beginning_that_fits(text: str, limit: int) -> None:
    beginning = first_tokens(text, limit)
    assert text.startswith(beginning)
    assert count_tokens(beginning) <= limit
    assert (beginning == text) == (count_tokens(text) <= limit)


def test_as_much_is_kept_as_fits() -> None:
    text = "one two three four five"
    assert first_tokens(text, 3) == "one two three"
    assert first_tokens(text, 5) == text
