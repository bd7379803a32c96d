"""Tokens, counted offline."""

import socket
from time import perf_counter

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from streams.tokens import _encoding, count_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("hello world", 2),
        # As in OpenAI's own examples of cl100k_base.
        ("tiktoken is great!", 6),
        ("antidisestablishmentarianism", 6),
        ("2 + 2 = 4", 7),
        ("お誕生日おめでとう", 9),
    ],
)
def test_known_counts(text: str, tokens: int) -> None:
    assert count_tokens(text) == tokens


def test_special_tokens_are_ordinary_text() -> None:
    specials = _encoding().special_tokens_set
    assert "<|endoftext|>" in specials
    for special in specials:
        assert count_tokens(f"before {special} after") > 3
    with pytest.raises(ValueError, match="disallowed special token"):
        _encoding().encode("<|endoftext|>")  # what a chunk of a manual on tokenizers would do otherwise


@given(st.text(max_size=200))
def test_every_text_has_a_count(text: str) -> None:
    tokens = count_tokens(text)
    assert 0 <= tokens <= 4 * len(text)  # a token is a byte at least
    assert bool(tokens) == bool(text)


@given(st.text(max_size=80))
def test_the_tokens_make_the_text_again(text: str) -> None:
    assert _encoding().decode(_encoding().encode_ordinary(text)) == text


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    _encoding.cache_clear()
    tiktoken.registry.ENCODINGS.clear()
    assert count_tokens("offline") > 0


@pytest.mark.parametrize("letter", ["a", "^", " ", "\n", "日", "'"])
def test_a_long_run_of_one_character_takes_neither_the_stack_nor_all_day(letter: str) -> None:
    began = perf_counter()
    assert count_tokens(letter * 50_000) > 0
    assert perf_counter() - began < 5
