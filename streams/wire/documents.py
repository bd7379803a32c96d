"""JSON lines ↔ documents to ingest."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar
from uuid import UUID

from pydantic_core import from_json

from streams.core.documents import Document, DocumentError, Line, Problem, parse_document, parse_id
from streams.core.errors import Undecodable
from streams.wire.json_lines import load_line, numbered

__all__ = ["decode_document", "decode_id", "decode_lines"]

T = TypeVar("T", Document, UUID)

_SPACE_BEFORE_COLON: Final = re.compile(rb'"\s+:')


def decode_lines(lines: Iterable[bytes], decode: Callable[[bytes], T]) -> Iterator[Line]:
    """Decode each line; blank lines are skipped."""
    for number, text in numbered(lines):
        content: T | DocumentError
        try:
            content = decode(text)
        except DocumentError as error:
            content = error
        yield Line(number, len(text), content)


def decode_document(text: bytes, *, dimensions: int) -> Document:
    """Decode a document.

    Args:
        text: one line of JSON.
        dimensions: of the store's embeddings.

    Raises:
        DocumentError: the line is not a JSON object, or not a valid document.
    """
    return parse_document(_object(text), dimensions=dimensions)


def decode_id(text: bytes) -> UUID:
    """Decode a document to delete: a JSON object with its ``id``, or only the id.

    Raises:
        DocumentError: the line is neither.
    """
    text = text.strip()
    if text.startswith(b"{"):
        return parse_id(_object(text))
    return parse_id({"id": text.strip(b'"').decode("utf-8", errors="replace")})


def _object(text: bytes) -> dict[str, Any]:
    # Four times as fast as `strict_json`, which decides about everything that is not plainly right.
    try:
        instance = from_json(text, allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        return _strict_object(text)
    # Each key of the text is one of the object: no key occurs twice. A key is not counted if a space follows it, or if
    # it ends with a backslash.
    counts_all = b'\\\\"' not in text and _SPACE_BEFORE_COLON.search(text) is None
    is_unambiguous = counts_all and _key_count(instance) == text.count(b'":') - text.count(b'\\":')
    return instance if type(instance) is dict and is_unambiguous else _strict_object(text)


def _strict_object(text: bytes) -> dict[str, Any]:
    try:
        return load_line(text)
    except Undecodable as error:
        reason = str(error) if text.lstrip().startswith(b"{") else "is not a JSON object"
        raise DocumentError(Problem.UNDECODABLE, reason) from None


def _key_count(instance: object) -> int:
    """Of the object and all objects in it. Lists that begin with a number or a text are not searched."""
    count = 0
    pending = [instance]
    while pending:
        item = pending.pop()
        if type(item) is dict:
            count += len(item)
            pending.extend(item.values())
        elif type(item) is list and item and type(item[0]) in (dict, list):
            pending.extend(item)
    return count
