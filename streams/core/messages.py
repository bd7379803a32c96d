"""The messages of the contracts as immutable values.

A model accepts exactly the instances that its JSON Schema accepts (a test compares the two on thousands of
valid and mutated instances), in the types of either wire format: a UUID or its text, a timezone-aware ``datetime``
or RFC 3339 text. Nothing is coerced. The values a model stores are canonical: lower-case UUIDs, UTC with
microsecond precision, integers clamped to int32.

An instance with an invalid structure is a :class:`ContractViolation`. Its values are checked only if the structure
is valid, so that each kind of error has one code. Messages never quote the event.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from hashlib import sha256
from itertools import chain
from typing import Annotated, Final, Literal, Self, cast
from uuid import NAMESPACE_URL, UUID, uuid5

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from streams.core.composition import Message, Question
from streams.core.contract import CONTRACT_VERSIONS, DIMENSIONS, MAX_DIMENSIONS, ContractVersion
from streams.core.errors import (
    DimensionMismatch,
    NonFiniteEmbedding,
    TopicWithoutSession,
    UnsupportedVersion,
    ZeroEmbedding,
)
from streams.core.fields import (
    FLOAT32_MAX,
    INT32_MAX,
    INT32_MIN,
    UUID_PATTERN,
    ContractModel,
    Count,
    Int32,
    Number,
    Text,
    Uuid,
    as_array,
    as_components,
    as_integer,
    as_number,
    check_numbers,
    check_text,
    rule_error,
)
from streams.core.selection import Scope

__all__ = [
    "CONTRACT_VERSIONS",
    "DIMENSIONS",
    "MAX_DIMENSIONS",
    "MAX_PRINCIPALS",
    "QUERY_TEXT_VERSION",
    "RESULT_NAMESPACE",
    "SCHEMA_VERSION",
    "ArmExplanation",
    "ConversationMessage",
    "Explanation",
    "Filters",
    "MetadataRange",
    "Passage",
    "QueryEmbedding",
    "QueryText",
    "RetrievalResult",
    "event_id_of",
    "expires_at_of",
    "in_oldest_version",
    "oldest_query_version",
    "oldest_result_version",
    "query_hash",
    "result_id",
]

SCHEMA_VERSION: Final = CONTRACT_VERSIONS[-1]
#: The version of the contract of questions in words.
QUERY_TEXT_VERSION: Final = "1.0.0"
RESULT_NAMESPACE: Final = NAMESPACE_URL
_SMALLEST_NORMAL: Final = 2.0**-126
MAX_PRINCIPALS: Final = 64
_MAX_VALUES: Final = 64
_MAX_UPSTREAM_WARNINGS: Final = 16
_MAX_UPSTREAM_WARNING_LENGTH: Final = 64
_MAX_TEXT: Final = 32_768
_MAX_TITLE: Final = 1024
_MAX_MESSAGES: Final = 64
_MAX_ROLE: Final = 64

# The contracts' own patterns, character for character (a test compares them). They are used with fullmatch, because
# Python's $ also matches before a final newline.
_VERSION = re.compile(r"^1\.(?:0|[1-9][0-9]*)\.(?:0|[1-9][0-9]*)$")
_HASH = re.compile(r"^[0-9a-fA-F]{64}$")
_WARNING = re.compile(r"^[a-z][a-z0-9_]*$")
_INSTANT = re.compile(
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt](?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])$"
)
# Year 0000, and the two days on which an offset could move the instant out of datetime's range.
_INVALID_INSTANT = re.compile(r"^0000|^0001-01-01.*\+.*[1-9]|^9999-12-31.*-.*[1-9]|\n")
_OTHER_MAJOR = re.compile(
    r"(?!1\.)(?:0|[1-9][0-9]*)\.(?:0|[1-9][0-9]*)\.(?:0|[1-9][0-9]*)(?:-[0-9A-Za-z.-]+)?(?:\+[0-9A-Za-z.-]+)?"
)


def result_id(event_id: UUID) -> UUID:
    """The id of an event's result. It is the same on every attempt, and anyone can compute it."""
    return uuid5(RESULT_NAMESPACE, f"urn:anabranch:result:{event_id}")


def _version(value: object) -> object:
    if isinstance(value, str):
        # This exception makes pydantic stop at once. schema_version is the first field, so this error takes
        # precedence over all others.
        if _OTHER_MAJOR.fullmatch(value):
            raise UnsupportedVersion("schema_version has an unsupported major version; supported is 1.x.y")
        if not _VERSION.fullmatch(value):
            raise rule_error("version", "is not a version of the form 1.x.y")
    return value


def _instant(value: object) -> object:
    if isinstance(value, datetime):
        offset = value.utcoffset()
        if offset is not None:
            try:
                return value.astimezone(UTC)
            except OverflowError:
                raise rule_error("instant", "is outside the years 0001 to 9999 in UTC") from None
    elif isinstance(value, str) and _INSTANT.fullmatch(value) and not _INVALID_INSTANT.search(value):
        zone, end = UTC, -1
        if value[-1] not in "Zz":
            end = -6
            sign = -1 if value[-6] == "-" else 1
            zone = timezone(sign * timedelta(hours=int(value[-5:-3]), minutes=int(value[-2:])))
        fraction = value[20:end][:6].ljust(6, "0")
        try:
            local = datetime(
                int(value[:4]), int(value[5:7]), int(value[8:10]),
                int(value[11:13]), int(value[14:16]), int(value[17:19]), int(fraction), zone,
            )  # fmt: skip
            return local.astimezone(UTC)
        except (ValueError, OverflowError):
            raise rule_error("instant", "is not a calendar date") from None
    raise rule_error("instant", "is not an RFC 3339 date-time with an offset")


def _clamped(value: object) -> object:
    value = as_integer(value)
    if type(value) is int:
        return max(INT32_MIN, min(INT32_MAX, value))
    return value


def _principals(value: object) -> object:
    # Checked before the items: a million invalid items would be a million errors.
    value = as_array(value)
    if type(value) is tuple and len(value) > MAX_PRINCIPALS:
        raise rule_error("many", "has too many items")
    return value


def _conversation(value: object) -> object:
    value = as_array(value)
    if type(value) is tuple and len(value) > _MAX_MESSAGES:
        raise rule_error("many", "has too many items")
    return value


def _upstream_warnings(value: object) -> object:
    value = as_array(value)
    if type(value) is tuple and len(value) > _MAX_UPSTREAM_WARNINGS:
        raise rule_error("many", "has too many items")
    return value


def _map(value: object) -> object:
    # As with principals: for each invalid entry pydantic uses a hundred times the entry's own size.
    if type(value) is dict:
        for text in chain(value, value.values()):
            if type(text) is not str:
                raise rule_error("string", "contains a non-string value")
            check_text(text)
    return value


def _values(value: object) -> object:
    """As `_map`, for a map of string to strings."""
    if type(value) is not dict:
        return value
    copied = {}
    for key, texts in value.items():
        if type(key) is not str:
            raise rule_error("string", "contains a non-string key")
        check_text(key)
        if type(texts) is not list and type(texts) is not tuple:
            raise rule_error("array", "contains a value that is not an array")
        if not 1 <= len(texts) <= _MAX_VALUES:
            raise rule_error("many", "contains an array that does not have 1 to 64 items")
        for text in texts:
            if type(text) is not str:
                raise rule_error("string", "contains a non-string value")
            check_text(text)
        copied[key] = tuple(texts)
    return copied


def _ranges(value: object) -> object:
    """As `_map`, for a map of string to ranges."""
    if type(value) is not dict:
        return value
    copied = {}
    for key, bounds in value.items():
        if type(key) is not str:
            raise rule_error("string", "contains a non-string key")
        check_text(key)
        try:
            copied[key] = MetadataRange.model_validate(bounds)
        except ValidationError:
            raise rule_error(
                "range", "contains a value that is not a range: numbers or instants, at least one"
            ) from None
    return copied


def _hash(value: str) -> str:
    if not _HASH.fullmatch(value):
        raise rule_error("hash", "is not a SHA-256 hash in hexadecimal")
    return value


def _warning(value: str) -> str:
    if not _WARNING.fullmatch(value):
        raise rule_error("code", "is not a code of lower-case letters, digits and underscores")
    return value


_LongText = Annotated[str, Field(max_length=_MAX_TEXT), AfterValidator(check_text)]
_Principals = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=256), AfterValidator(check_text)], ...],
    Field(min_length=1),
    BeforeValidator(_principals),
]
_Map = Annotated[dict[str, str], BeforeValidator(_map)]
_Values = Annotated[dict[str, tuple[str, ...]], BeforeValidator(_values)]
_Instant = Annotated[datetime, BeforeValidator(_instant)]
_EXPIRY: Final[TypeAdapter[datetime]] = TypeAdapter(_Instant)
_Version = Annotated[str, BeforeValidator(_version)]
_UpstreamWarnings = Annotated[
    tuple[Annotated[str, Field(max_length=_MAX_UPSTREAM_WARNING_LENGTH), AfterValidator(_warning)], ...],
    BeforeValidator(_upstream_warnings),
]
_Hash = Annotated[str, AfterValidator(_hash)]
_Positive = Annotated[int, Field(ge=1, le=INT32_MAX), BeforeValidator(as_integer)]
_Threshold = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(as_number)]


class MetadataRange(ContractModel):
    """Bounds on one metadata value, at least one: of numbers, or of instants."""

    gte: Number | None = None
    gt: Number | None = None
    lte: Number | None = None
    lt: Number | None = None
    at_or_after: _Instant | None = None
    after: _Instant | None = None
    at_or_before: _Instant | None = None
    before: _Instant | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        # A misspelt bound is an unknown field; without this rule, it would be no condition.
        if all(bound is None for bound in self.__dict__.values()):
            raise rule_error("range", "does not have a bound")
        return self


# docs/development.md lists what else a filter needs.
class Filters(ContractModel):
    """Conditions on chunks and documents. ``None`` means no condition; all others must be met."""

    section: Text | None = None
    source_url_prefix: Text | None = None
    document_type: Text | None = None
    metadata: _Map | None = None
    metadata_contains: _Values | None = None
    metadata_any: _Values | None = None
    metadata_range: Annotated[dict[str, MetadataRange], BeforeValidator(_ranges)] | None = None


def _float32(embedding: npt.NDArray[np.floating], largest: float) -> npt.NDArray[np.float32]:
    """An embedding as float32 values, the canonical form.

    If it is so short that rounding to float32 would change its direction or make it zero, it is first multiplied by
    the power of two that brings its largest component into [0.5, 1). This keeps the direction, which is all that
    cosine similarity depends on.
    """
    if largest < _SMALLEST_NORMAL:
        _, exponent = math.frexp(largest)
        embedding = np.ldexp(embedding.astype(np.float64), -exponent)
    return embedding.astype(np.float32, copy=False)


class QueryEmbedding(ContractModel):
    """One query event.

    ``embedding`` has 1 to 4,000 components, is not all zeros, may have any length, and is in canonical form: a
    read-only buffer of float32 values, whatever the encoding was. ``k`` and ``token_budget`` are clamped to int32.
    Instants are in UTC.
    """

    schema_version: _Version  # first, so that another major version is detected before our rules are applied
    event_id: Uuid
    occurred_at: _Instant
    principals: _Principals
    embedding: Annotated[Sequence[float], PlainValidator(as_components), PlainSerializer(tuple)]
    session_id: Uuid | None = None
    topic_id: Uuid | None = None
    profile: Text | None = None
    k: Annotated[int, BeforeValidator(_clamped)] | None = None
    similarity_threshold: _Threshold | None = None
    token_budget: Annotated[int, Field(ge=1), BeforeValidator(_clamped)] | None = None
    filters: Filters | None = None
    embedding_model: Text | None = None
    query_hash: _Hash | None = None
    expires_at: _Instant | None = None
    explain: bool | None = None
    upstream_warnings: _UpstreamWarnings | None = None

    @model_validator(mode="after")
    def _check_values(self, info: ValidationInfo) -> Self:
        # These are not ValueErrors, so pydantic does not wrap them.
        embedding = cast("npt.NDArray[np.floating]", self.embedding)  # from `as_components`
        expected = info.context
        if len(embedding) != expected if expected is not None else not 1 <= len(embedding) <= MAX_DIMENSIONS:
            raise DimensionMismatch(
                f"embedding has {len(embedding)} components, expected {expected or f'1 to {MAX_DIMENSIONS}'}"
            )
        largest = float(np.abs(embedding).max())
        if not largest <= FLOAT32_MAX:  # NaN if a component is NaN
            raise NonFiniteEmbedding(
                "embedding contains a component that is NaN, infinite or outside the float32 range"
            )
        if largest == 0:
            raise ZeroEmbedding("embedding is all zeros")
        if self.topic_id is not None and self.session_id is None:
            raise TopicWithoutSession("topic_id is given without session_id")
        # JSON has float64, Avro float32: without this, the same event would get different scores. The model is frozen;
        # its fields were validated as received.
        object.__setattr__(self, "embedding", _float32(embedding, largest).data.toreadonly())
        return self


class ConversationMessage(ContractModel):
    """A message of the conversation before a question."""

    role: Annotated[str, Field(min_length=1, max_length=_MAX_ROLE), AfterValidator(check_text)]
    text: _LongText


class QueryText(ContractModel):
    """One question in words. The fields that a query event also has mean the same, and are in the same form."""

    schema_version: _Version
    event_id: Uuid
    occurred_at: _Instant
    principals: _Principals
    text: Annotated[_LongText, Field(min_length=1)]
    topic_title: Annotated[str, Field(max_length=_MAX_TITLE), AfterValidator(check_text)] | None = None
    conversation: Annotated[tuple[ConversationMessage, ...], BeforeValidator(_conversation)] | None = None
    conversation_summary: _LongText | None = None
    session_id: Uuid | None = None
    topic_id: Uuid | None = None
    profile: Text | None = None
    k: Annotated[int, BeforeValidator(_clamped)] | None = None
    similarity_threshold: _Threshold | None = None
    token_budget: Annotated[int, Field(ge=1), BeforeValidator(_clamped)] | None = None
    filters: Filters | None = None
    expires_at: _Instant | None = None
    explain: bool | None = None

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.topic_id is not None and self.session_id is None:
            raise TopicWithoutSession("topic_id is given without session_id")
        return self

    @property
    def question(self) -> Question:
        """The parts that decide what is embedded."""
        return Question(
            self.text,
            topic_id=self.topic_id,
            topic_title=self.topic_title,
            conversation=[Message(message.role, message.text) for message in self.conversation or ()],
            conversation_summary=self.conversation_summary,
        )

    def with_embedding(
        self, embedding: npt.NDArray[np.float32], *, model: str | None, warnings: Sequence[str] = ()
    ) -> QueryEmbedding:
        """The query event, in the oldest minor version that can express it.

        Args:
            embedding: shape (dimensions,), of any length.
            model: the embedding's.
            warnings: what the answer has to report.

        Raises:
            NonFiniteEmbedding, ZeroEmbedding: the embedding is unusable.
        """
        carried = {name: getattr(self, name) for name in _CARRIED}
        query = QueryEmbedding.parse(
            {
                **carried,
                "schema_version": SCHEMA_VERSION,
                "embedding": np.ascontiguousarray(embedding, dtype=np.float32).data,
                "embedding_model": model,
                "query_hash": query_hash(self.text),
                "upstream_warnings": tuple(warnings) or None,
            }
        )
        return in_oldest_version(query)


_CARRIED: Final = QueryEmbedding.model_fields.keys() & QueryText.model_fields.keys() - {"schema_version"}


def query_hash(text: str) -> str:
    """The SHA-256 of a question in UTF-8, in hexadecimal."""
    return sha256(text.encode()).hexdigest()


def event_id_of(instance: Mapping[str, object]) -> UUID | None:
    """The id of a decoded event that may violate its contract elsewhere; None if it does not have a valid one."""
    value = instance.get("event_id")
    if isinstance(value, str) and UUID_PATTERN.fullmatch(value):
        return UUID(value)
    return value if isinstance(value, UUID) else None


def expires_at_of(instance: Mapping[str, object]) -> datetime | None:
    """Likewise, until when its answer is needed."""
    try:
        return _EXPIRY.validate_python(instance.get("expires_at"))
    except ValidationError:
        return None


class Passage(ContractModel):
    """One passage; ``score`` is a cosine similarity in [-1, 1], ``token_count`` includes the header."""

    rank: _Positive
    chunk_id: Uuid
    document_id: Uuid
    matched_chunk_id: Uuid
    scope: Scope
    score: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False), BeforeValidator(as_number)]
    text_content: Text
    header: Text | None = None
    token_count: Count
    page: Int32 | None = None
    section: Text | None = None
    coordinates: Annotated[dict[Text, Number], BeforeValidator(check_numbers)] | None = None
    title: Text | None = None
    source_url: Text | None = None
    chunk_position: Int32 | None = None
    metadata: _Map

    @property
    def prompt_text(self) -> str:
        """The string to put in a prompt."""
        return self.text_content if self.header is None else f"{self.header}\n{self.text_content}"


class ArmExplanation(ContractModel):
    """What became of the candidates of one arm; ``candidates`` is the sum of the other counts."""

    scope: Scope
    candidates: Count
    below_threshold: Count
    duplicates: Count
    same_parent: Count
    over_budget: Count
    missing: Count
    not_needed: Count
    returned: Count


class Explanation(ContractModel):
    """Why a result has its passages and no more."""

    arms: Annotated[tuple[ArmExplanation, ...], FailFast(), BeforeValidator(as_array)]


class RetrievalResult(ContractModel):
    """The answer to one event. The assembler ensures that ranks have no gaps and that ``k_returned`` is correct."""

    schema_version: _Version
    result_id: Uuid
    event_id: Uuid
    query_hash: _Hash | None = None
    embedding_model: Text | None = None
    profile: Text
    session_id: Uuid | None = None
    topic_id: Uuid | None = None
    query_embedding_dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS), BeforeValidator(as_integer)]
    k_requested: Int32 | None = None
    k_effective: Count
    k_returned: Count
    score_type: Literal["cosine_similarity"]
    similarity_threshold: _Threshold | None = None
    token_budget: _Positive | None = None
    tokens_used: Count
    query_time_ms: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(as_number)]
    warnings: Annotated[
        tuple[Annotated[str, AfterValidator(_warning)], ...], FailFast(), BeforeValidator(as_array)
    ]
    results: Annotated[tuple[Passage, ...], FailFast(), BeforeValidator(as_array)]
    explanation: Explanation | None = None

    def with_warning(self, code: str) -> Self:
        """The same result with one more warning."""
        return self.model_copy(update={"warnings": tuple(dict.fromkeys([*self.warnings, code]))})


def oldest_query_version(query: QueryEmbedding) -> ContractVersion:
    """The oldest minor version of the contract that can express an event."""
    filters = query.filters
    added: list[object] = [query.explain, query.upstream_warnings]
    if filters is not None:
        added += [filters.metadata_contains, filters.metadata_any, filters.metadata_range]
    if len(query.embedding) == DIMENSIONS and all(value is None for value in added):
        return "1.0.0"
    return "1.1.0"


def in_oldest_version(query: QueryEmbedding) -> QueryEmbedding:
    """The same event, with the oldest minor version that can express it as its ``schema_version``."""
    return query.model_copy(update={"schema_version": oldest_query_version(query)})


def oldest_result_version(dimensions: int) -> ContractVersion:
    """The oldest minor version of the contract that can express results for embeddings of this many components."""
    return "1.0.0" if dimensions == DIMENSIONS else "1.1.0"
