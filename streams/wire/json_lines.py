"""JSON lines: one object a line."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from streams.core.errors import Undecodable
from streams.wire import strict_json

__all__ = ["load_line", "numbered"]

T = TypeVar("T", str, bytes)


def numbered(lines: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Number lines from 1, and skip blank ones."""
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def load_line(line: bytes) -> dict[str, Any]:
    """Decode a line as `strict_json` does.

    Raises:
        Undecodable: the message is about JSON alone; `strict_json`'s are about records, which may also be Avro.
    """
    try:
        return strict_json.loads(line)
    except Undecodable as error:
        raise Undecodable(str(error).replace("neither Avro nor", "not")) from None
