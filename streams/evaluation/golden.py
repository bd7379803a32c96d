"""Golden queries: questions whose answers are known, one JSON object a line.

A line has the fields of a query event, of which only ``embedding`` and ``principals`` must be there, and beside them
``expected`` (what should be found), ``id`` and ``text`` (for people).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, cast
from uuid import UUID, uuid4

from streams.core.errors import TerminalError
from streams.core.messages import SCHEMA_VERSION, Passage, QueryEmbedding
from streams.wire import strict_json

__all__ = ["Expectation", "GoldenError", "GoldenQuery", "MalformedLine", "read_golden"]

Kind = Literal["chunk_id", "document_id", "source_url", "source_url_prefix", "source_url_glob"]

# From the particular to the general: where a passage meets two expectations of one grade, it answers the first.
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
    """A line that is no golden query; the message is the rule that it breaks."""


class GoldenError(Exception):
    """A golden set that cannot be used; the message has one line for each malformed one, with number and rule."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """One thing that should be found.

    Attributes:
        kind: which field of a passage is looked at, and how.
        value: a UUID in lower case, a URL, its beginning, or a glob in which ``*`` stands for any characters.
        grade: how much it is worth finding; the gain of nDCG.
    """

    kind: Kind
    value: str
    grade: int = 1

    def is_met_by(self, passage: Passage) -> bool:
        """Whether the passage is what was expected.

        A chunk is also met through `matched_chunk_id`: a parent that was returned in its stead contains it.
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
        event: what is asked. Its id and times are the file's, or made up: `fresh_event` gives it new ones.
        expected: at least one.
    """

    key: str
    text: str | None
    event: QueryEmbedding
    expected: Sequence[Expectation]

    def fresh_event(self) -> QueryEmbedding:
        """The event as if it were asked now: an id that no other run has, and no expiry."""
        return self.event.model_copy(
            update={"event_id": uuid4(), "occurred_at": datetime.now(UTC), "expires_at": None}
        )


def read_golden(lines: Iterable[str], *, principals: Sequence[str] = ()) -> list[GoldenQuery]:
    """Read a golden set; blank lines are skipped.

    Args:
        lines: of JSONL.
        principals: who asks, where a line does not say.

    Raises:
        GoldenError: every malformed line by number, or that there is no query at all.
    """
    found: list[GoldenQuery] = []
    faults: list[str] = []
    taken: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            query = _query(line, number, principals, taken)
        except MalformedLine as fault:
            faults.append(f"line {number}: {fault}")
            continue
        taken[query.key] = number
        found.append(query)
    if faults:
        raise GoldenError("\n".join(faults))
    if not found:
        raise GoldenError("there is no golden query in it")
    return found


def _query(line: str, number: int, principals: Sequence[str], taken: Mapping[str, int]) -> GoldenQuery:
    try:
        fields = strict_json.loads(line.encode("utf-8", "surrogatepass"))
    except TerminalError as error:
        raise MalformedLine(f"{error.code}: {error}") from None
    # The contract ignores what it does not know; a golden set that says "profil" should not measure the default.
    unknown = sorted(fields.keys() - QueryEmbedding.model_fields.keys() - _OWN_FIELDS)
    if unknown:
        raise MalformedLine(
            f"{', '.join(unknown)}: neither a field of a query event nor one of a golden query"
        )
    expected = _expectations(fields.get("expected"))
    text = _optional_text(fields, "text")
    key = _optional_text(fields, "id")
    event = {name: value for name, value in fields.items() if name in QueryEmbedding.model_fields}
    if key is None:
        key = str(event["event_id"]) if event.get("event_id") is not None else f"line {number}"
    if key in taken:
        raise MalformedLine(f"id is that of line {taken[key]}")
    if event.get("principals") is None and principals:
        event["principals"] = list(principals)
    made_up = {
        "schema_version": SCHEMA_VERSION,
        "event_id": str(uuid4()),
        "occurred_at": datetime.now(UTC).isoformat(),
    }
    try:
        return GoldenQuery(key, text, QueryEmbedding.parse(made_up | event), expected)
    except TerminalError as error:
        raise MalformedLine(f"{error.code}: {error}") from None


def _expectations(value: Any) -> tuple[Expectation, ...]:
    if type(value) is not list or not value:
        raise MalformedLine("expected is no array with at least one item")
    return tuple(_expectation(item, f"expected[{place}]") for place, item in enumerate(value))


def _expectation(item: Any, where: str) -> Expectation:
    if type(item) is not dict:
        raise MalformedLine(f"{where} is no object")
    kinds = sorted(item.keys() - {"grade"})
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise MalformedLine(f"{where} has not exactly one of {', '.join(KINDS)}")
    kind = cast("Kind", kinds[0])
    value, grade = item[kind], item.get("grade", 1)
    if type(grade) is not int or not 1 <= grade <= _MAX_GRADE:
        raise MalformedLine(f"{where}.grade is no integer from 1 to {_MAX_GRADE}")
    if type(value) is not str or not value:
        raise MalformedLine(f"{where}.{kind} is no text")
    if kind in _IDS:
        try:
            value = str(UUID(value))
        except ValueError:
            raise MalformedLine(f"{where}.{kind} is no UUID") from None
    return Expectation(kind, value, grade)


def _optional_text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not str or not value:
        raise MalformedLine(f"{name} is no text")
    return value


def _glob(pattern: str, text: str) -> bool:
    """Whether the text is the pattern's: ``*`` stands for any characters, ``/`` among them, and all else for itself.

    URLs are full of ``?`` and ``[``, which `fnmatch` would take for its own.
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
