"""Golden queries: questions with known answers, one JSON object per line.

A line has the fields of a query event, of which only ``embedding`` and ``principals`` are required, and additionally
``expected`` (what should be found), ``id`` and ``text`` (for people).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, cast
from uuid import UUID, uuid4

from streams.core.errors import TerminalError
from streams.core.messages import DIMENSIONS, SCHEMA_VERSION, Passage, QueryEmbedding, in_oldest_version
from streams.wire.json_lines import load_line, numbered

__all__ = ["Expectation", "GoldenError", "GoldenQuery", "MalformedLine", "read_golden"]

Kind = Literal["chunk_id", "document_id", "source_url", "source_url_prefix", "source_url_glob"]

# From specific to general: if a passage matches two expectations of the same grade, it answers the first one.
KINDS: Final[Sequence[Kind]] = (
    "chunk_id",
    "document_id",
    "source_url",
    "source_url_prefix",
    "source_url_glob",
)
_IDS: Final = frozenset({"chunk_id", "document_id"})
_MAX_GRADE: Final = 1000
_OWN_FIELDS: Final = frozenset({"id", "text", "expected"})


class MalformedLine(Exception):
    """A line is not a golden query; the message is the violated rule."""


class GoldenError(Exception):
    """A golden set is invalid; the message has one line for each malformed line, with its number and the rule."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """One thing that should be found.

    Attributes:
        kind: which field of a passage is compared, and how.
        value: a UUID in lower case, a URL, its beginning, or a glob in which ``*`` matches any characters.
        grade: how relevant it is; the gain of nDCG.
    """

    kind: Kind
    value: str
    grade: int = 1

    def is_met_by(self, passage: Passage) -> bool:
        """Whether the passage matches the expectation.

        A chunk also matches through `matched_chunk_id`: a parent that replaces it contains it.
        """
        if self.kind == "chunk_id":
            return self.value in (str(passage.chunk_id), str(passage.matched_chunk_id))
        if self.kind == "document_id":
            return self.value == str(passage.document_id)
        url = passage.source_url
        if url is None:
            return False
        if self.kind == "source_url":
            return url == self.value
        if self.kind == "source_url_prefix":
            return url.startswith(self.value)
        return _glob(self.value, url)


@dataclass(frozen=True, slots=True)
class GoldenQuery:
    """A question with known answers.

    Attributes:
        key: unique in its set; the line's ``id``, else its ``event_id``, else ``line <number>``.
        text: the question in words, for people; None where the line has none.
        event: the query event. Its id and times are from the file or generated: `fresh_event` replaces them.
        expected: at least one expectation.
    """

    key: str
    text: str | None
    event: QueryEmbedding
    expected: Sequence[Expectation]

    def fresh_event(self) -> QueryEmbedding:
        """The event as if it were sent now: with a new id, and without expiry."""
        return self.event.model_copy(
            update={"event_id": uuid4(), "occurred_at": datetime.now(UTC), "expires_at": None}
        )


def read_golden(
    lines: Iterable[str], *, principals: Sequence[str] = (), dimensions: int = DIMENSIONS
) -> list[GoldenQuery]:
    """Read a golden set; blank lines are skipped.

    Args:
        lines: the lines of a JSONL file.
        principals: the requesting principals for lines without principals.
        dimensions: the number of components that the embeddings must have.

    Raises:
        GoldenError: lines are malformed (the message has their numbers), or there are no queries.
    """
    found: list[GoldenQuery] = []
    faults: list[str] = []
    line_by_key: dict[str, int] = {}
    for number, line in numbered(lines):
        try:
            query = _query(line, number, principals, line_by_key, dimensions)
        except MalformedLine as fault:
            faults.append(f"line {number}: {fault}")
            continue
        line_by_key[query.key] = number
        found.append(query)
    if faults:
        raise GoldenError("\n".join(faults))
    if not found:
        raise GoldenError("it does not contain any golden queries")
    return found


def _query(
    line: str,
    number: int,
    principals: Sequence[str],
    line_by_key: Mapping[str, int],
    dimensions: int,
) -> GoldenQuery:
    try:
        fields = load_line(line.encode("utf-8", "surrogatepass"))
    except TerminalError as error:
        raise MalformedLine(f"{error.code}: {error}") from None
    # The contract ignores unknown fields, but a golden set with the typo "profil" must not measure the default profile.
    unknown = sorted(fields.keys() - QueryEmbedding.model_fields.keys() - _OWN_FIELDS)
    if unknown:
        raise MalformedLine(
            f"{', '.join(unknown)}: unknown field (neither of a query event nor of a golden query)"
        )
    expected = _expectations(fields.get("expected"))
    text = _optional_text(fields, "text")
    key = _optional_text(fields, "id")
    event = {name: value for name, value in fields.items() if name in QueryEmbedding.model_fields}
    if key is None:
        key = str(event["event_id"]) if event.get("event_id") is not None else f"line {number}"
    if key in line_by_key:
        raise MalformedLine(f"duplicate id, also in line {line_by_key[key]}")
    if event.get("principals") is None and principals:
        event["principals"] = list(principals)
    defaults = {
        "schema_version": SCHEMA_VERSION,
        "event_id": str(uuid4()),
        "occurred_at": datetime.now(UTC).isoformat(),
    }
    try:
        query = in_oldest_version(QueryEmbedding.parse(defaults | event, dimensions=dimensions))
        return GoldenQuery(key, text, query, expected)
    except TerminalError as error:
        raise MalformedLine(f"{error.code}: {error}") from None


def _expectations(value: Any) -> tuple[Expectation, ...]:
    if type(value) is not list or not value:
        raise MalformedLine("expected is not an array with at least one item")
    return tuple(_expectation(item, f"expected[{place}]") for place, item in enumerate(value))


def _expectation(item: Any, where: str) -> Expectation:
    if type(item) is not dict:
        raise MalformedLine(f"{where} is not an object")
    kinds = sorted(item.keys() - {"grade"})
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise MalformedLine(f"{where} does not have exactly one of {', '.join(KINDS)}")
    kind = cast("Kind", kinds[0])
    value, grade = item[kind], item.get("grade", 1)
    if type(grade) is not int or not 1 <= grade <= _MAX_GRADE:
        raise MalformedLine(f"{where}.grade is not an integer from 1 to {_MAX_GRADE}")
    if type(value) is not str or not value:
        raise MalformedLine(f"{where}.{kind} is not a non-empty string")
    if kind in _IDS:
        try:
            value = str(UUID(value))
        except ValueError:
            raise MalformedLine(f"{where}.{kind} is not a UUID") from None
    return Expectation(kind, value, grade)


def _optional_text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not str or not value:
        raise MalformedLine(f"{name} is not a non-empty string")
    return value


def _glob(pattern: str, text: str) -> bool:
    """Whether the text matches the pattern, in which ``*`` matches any characters, including ``/``.

    `fnmatch` would interpret ``?`` and ``[``, which are common in URLs.
    """
    first, *middle = pattern.split("*")
    if not middle:
        return text == pattern
    last = middle.pop()
    if len(text) < len(first) + len(last) or not (text.startswith(first) and text.endswith(last)):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
