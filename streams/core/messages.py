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
from typing import Annotated, Any, Final, Literal, LiteralString, Self, cast
from uuid import NAMESPACE_URL, UUID, uuid5

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from streams.core.composition import Message, Question
from streams.core.errors import (
    ContractViolation,
    DimensionMismatch,
    NonFiniteEmbedding,
    TopicWithoutSession,
    UnsupportedVersion,
    ZeroEmbedding,
)
from streams.core.selection import Scope

__all__ = [
    "CONTRACT_VERSIONS",
    "DIMENSIONS",
    "FLOAT32_MAX",
    "INT32_MAX",
    "INT32_MIN",
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
    "in_oldest_version",
    "oldest_query_version",
    "oldest_result_version",
    "query_hash",
    "result_id",
]

#: The minor versions of query events and results, oldest first. Both contracts have the same ones.
CONTRACT_VERSIONS: Final = ("1.0.0", "1.1.0")
SCHEMA_VERSION: Final = CONTRACT_VERSIONS[-1]
#: The version of the contract of questions in words.
QUERY_TEXT_VERSION: Final = "1.0.0"
#: The number of components that 1.0.0 knows, and the default of a deployment.
DIMENSIONS: Final = 768
MAX_DIMENSIONS: Final = 4000
RESULT_NAMESPACE: Final = NAMESPACE_URL
FLOAT32_MAX: Final = 3.4028234663852886e38
_SMALLEST_NORMAL: Final = 2.0**-126
INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1
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
_UUID = re.compile(r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$")
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


def _rule_error(code: LiteralString, rule: LiteralString) -> PydanticCustomError:
    # A literal without placeholders, so that the offending value cannot get into the message.
    return PydanticCustomError(code, rule)


def _text(value: str) -> str:
    if "\0" in value:
        raise _rule_error("nul", "contains U+0000")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _rule_error("surrogate", "contains an unpaired surrogate") from None
    return value


def _version(value: object) -> object:
    if isinstance(value, str):
        # This exception makes pydantic stop at once. schema_version is the first field, so this error takes
        # precedence over all others.
        if _OTHER_MAJOR.fullmatch(value):
            raise UnsupportedVersion("schema_version has an unsupported major version; supported is 1.x.y")
        if not _VERSION.fullmatch(value):
            raise _rule_error("version", "is not a version of the form 1.x.y")
    return value


def _uuid(value: object) -> object:
    if isinstance(value, str) and _UUID.fullmatch(value):
        return UUID(value)
    if isinstance(value, UUID):
        return value
    raise _rule_error("uuid", "is not a UUID")


def _instant(value: object) -> object:
    if isinstance(value, datetime):
        offset = value.utcoffset()
        if offset is not None:
            try:
                return value.astimezone(UTC)
            except OverflowError:
                raise _rule_error("instant", "is outside the years 0001 to 9999 in UTC") from None
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
            raise _rule_error("instant", "is not a calendar date") from None
    raise _rule_error("instant", "is not an RFC 3339 date-time with an offset")


def _integer(value: object) -> object:
    # In draft-07, 10.0 is an integer and True is not.
    if type(value) is float and value.is_integer():
        return int(value)
    return value


def _clamped(value: object) -> object:
    value = _integer(value)
    if type(value) is int:
        return max(INT32_MIN, min(INT32_MAX, value))
    return value


def _number(value: object) -> object:
    # Also keeps a huge integer from overflowing float(): the bounds are checked on the result.
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return value


def _array(value: object) -> object:
    return tuple(value) if type(value) is list else value


def _principals(value: object) -> object:
    # Checked before the items: a million invalid items would be a million errors.
    value = _array(value)
    if type(value) is tuple and len(value) > MAX_PRINCIPALS:
        raise _rule_error("many", "has too many items")
    return value


def _conversation(value: object) -> object:
    value = _array(value)
    if type(value) is tuple and len(value) > _MAX_MESSAGES:
        raise _rule_error("many", "has too many items")
    return value


def _upstream_warnings(value: object) -> object:
    value = _array(value)
    if type(value) is tuple and len(value) > _MAX_UPSTREAM_WARNINGS:
        raise _rule_error("many", "has too many items")
    return value


def _map(value: object) -> object:
    # As with principals: for each invalid entry pydantic uses a hundred times the entry's own size.
    if type(value) is dict:
        for text in chain(value, value.values()):
            if type(text) is not str:
                raise _rule_error("string", "contains a non-string value")
            _text(text)
    return value


def _values(value: object) -> object:
    """As `_map`, for a map of string to strings."""
    if type(value) is not dict:
        return value
    copied = {}
    for key, texts in value.items():
        if type(key) is not str:
            raise _rule_error("string", "contains a non-string key")
        _text(key)
        if type(texts) is not list and type(texts) is not tuple:
            raise _rule_error("array", "contains a value that is not an array")
        if not 1 <= len(texts) <= _MAX_VALUES:
            raise _rule_error("many", "contains an array that does not have 1 to 64 items")
        for text in texts:
            if type(text) is not str:
                raise _rule_error("string", "contains a non-string value")
            _text(text)
        copied[key] = tuple(texts)
    return copied


def _ranges(value: object) -> object:
    """As `_map`, for a map of string to ranges."""
    if type(value) is not dict:
        return value
    copied = {}
    for key, bounds in value.items():
        if type(key) is not str:
            raise _rule_error("string", "contains a non-string key")
        _text(key)
        try:
            copied[key] = MetadataRange.model_validate(bounds)
        except ValidationError:
            raise _rule_error(
                "range", "contains a value that is not a range: numbers or instants, at least one"
            ) from None
    return copied


def _numbers(value: object) -> object:
    if type(value) is dict:
        for number in value.values():
            if type(number) is not int and type(number) is not float:
                raise _rule_error("number", "contains a non-numeric value")
    return value


def _components(value: object) -> npt.NDArray[np.floating]:
    """Check the types only. The length and the values are checked after the structure of the whole event."""
    if type(value) is memoryview and value.format == "f" and value.ndim == 1:
        return np.asarray(value)
    if type(value) is not tuple and type(value) is not list:
        raise _rule_error("array", "is not an array")
    kinds = set(map(type, value))
    if not kinds <= {float, int}:
        raise _rule_error("number", "contains a non-numeric component")
    if int in kinds:
        value = tuple(map(_component, value))
    return np.array(value, dtype=np.float64)


def _component(value: float) -> float:
    # Compared before the conversion: an integer just outside the float32 range would be rounded into it.
    if -FLOAT32_MAX <= value <= FLOAT32_MAX:
        return float(value)
    return math.inf if value > 0 else -math.inf


def _hash(value: str) -> str:
    if not _HASH.fullmatch(value):
        raise _rule_error("hash", "is not a SHA-256 hash in hexadecimal")
    return value


def _warning(value: str) -> str:
    if not _WARNING.fullmatch(value):
        raise _rule_error("code", "is not a code of lower-case letters, digits and underscores")
    return value


_Text = Annotated[str, AfterValidator(_text)]
_LongText = Annotated[str, Field(max_length=_MAX_TEXT), AfterValidator(_text)]
_Principals = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_text)], ...],
    Field(min_length=1),
    BeforeValidator(_principals),
]
_Map = Annotated[dict[str, str], BeforeValidator(_map)]
_Values = Annotated[dict[str, tuple[str, ...]], BeforeValidator(_values)]
_Uuid = Annotated[UUID, BeforeValidator(_uuid)]
_Instant = Annotated[datetime, BeforeValidator(_instant)]
_Version = Annotated[str, BeforeValidator(_version)]
_UpstreamWarnings = Annotated[
    tuple[Annotated[str, Field(max_length=_MAX_UPSTREAM_WARNING_LENGTH), AfterValidator(_warning)], ...],
    BeforeValidator(_upstream_warnings),
]
_Hash = Annotated[str, AfterValidator(_hash)]
_Int32 = Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX), BeforeValidator(_integer)]
_Count = Annotated[int, Field(ge=0, le=INT32_MAX), BeforeValidator(_integer)]
_Positive = Annotated[int, Field(ge=1, le=INT32_MAX), BeforeValidator(_integer)]
_Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
_Threshold = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_number)]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", hide_input_in_errors=True)

    @classmethod
    def parse(cls, instance: object, *, dimensions: int | None = None) -> Self:
        """Validate a decoded message.

        Args:
            instance: the decoded value: a ``dict`` of JSON types; UUIDs and instants may also be Python's types.
            dimensions: the number of components that an event's embedding must have; None: what the contract allows.

        Raises:
            TerminalError: of the class for the error; the message has the field and the rule, never the value.
        """
        try:
            return cls.model_validate(instance, context=dimensions)
        except ValidationError as error:
            raise ContractViolation(_describe(error)) from None

    @classmethod
    def of_canonical(cls, **values: Any) -> Self:
        """Build a message from a canonical value for each field. Nothing is checked: only for values of our own.

        The same as `model_construct`, which takes as long as validating.
        """
        message = cls.__new__(cls)
        object.__setattr__(message, "__dict__", values)
        object.__setattr__(message, "__pydantic_fields_set__", set(values))
        object.__setattr__(message, "__pydantic_extra__", None)
        object.__setattr__(message, "__pydantic_private__", None)
        return message


class MetadataRange(_Message):
    """Bounds on one metadata value, at least one: of numbers, or of instants."""

    gte: _Number | None = None
    gt: _Number | None = None
    lte: _Number | None = None
    lt: _Number | None = None
    at_or_after: _Instant | None = None
    after: _Instant | None = None
    at_or_before: _Instant | None = None
    before: _Instant | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        # A misspelt bound is an unknown field; without this rule, it would be no condition.
        if all(bound is None for bound in self.__dict__.values()):
            raise _rule_error("range", "does not have a bound")
        return self


# docs/development.md lists what else a filter needs.
class Filters(_Message):
    """Conditions on chunks and documents. ``None`` means no condition; all others must be met."""

    section: _Text | None = None
    source_url_prefix: _Text | None = None
    document_type: _Text | None = None
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


class QueryEmbedding(_Message):
    """One query event.

    ``embedding`` has 1 to 4,000 components, is not all zeros, may have any length, and is in canonical form: a
    read-only buffer of float32 values, whatever the encoding was. ``k`` and ``token_budget`` are clamped to int32.
    Instants are in UTC.
    """

    schema_version: _Version  # first, so that another major version is detected before our rules are applied
    event_id: _Uuid
    occurred_at: _Instant
    principals: _Principals
    embedding: Annotated[Sequence[float], PlainValidator(_components), PlainSerializer(tuple)]
    session_id: _Uuid | None = None
    topic_id: _Uuid | None = None
    profile: _Text | None = None
    k: Annotated[int, BeforeValidator(_clamped)] | None = None
    similarity_threshold: _Threshold | None = None
    token_budget: Annotated[int, Field(ge=1), BeforeValidator(_clamped)] | None = None
    filters: Filters | None = None
    embedding_model: _Text | None = None
    query_hash: _Hash | None = None
    expires_at: _Instant | None = None
    explain: bool | None = None
    upstream_warnings: _UpstreamWarnings | None = None

    @model_validator(mode="after")
    def _check_values(self, info: ValidationInfo) -> Self:
        # These are not ValueErrors, so pydantic does not wrap them.
        embedding = cast("npt.NDArray[np.floating]", self.embedding)  # from `_components`
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


class ConversationMessage(_Message):
    """A message of the conversation before a question."""

    role: Annotated[str, Field(min_length=1, max_length=_MAX_ROLE), AfterValidator(_text)]
    text: _LongText


class QueryText(_Message):
    """One question in words. The fields that a query event also has mean the same, and are in the same form."""

    schema_version: _Version
    event_id: _Uuid
    occurred_at: _Instant
    principals: _Principals
    text: Annotated[_LongText, Field(min_length=1)]
    topic_title: Annotated[str, Field(max_length=_MAX_TITLE), AfterValidator(_text)] | None = None
    conversation: Annotated[tuple[ConversationMessage, ...], BeforeValidator(_conversation)] | None = None
    conversation_summary: _LongText | None = None
    session_id: _Uuid | None = None
    topic_id: _Uuid | None = None
    profile: _Text | None = None
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
    if isinstance(value, str) and _UUID.fullmatch(value):
        return UUID(value)
    return value if isinstance(value, UUID) else None


class Passage(_Message):
    """One passage; ``score`` is a cosine similarity in [-1, 1], ``token_count`` includes the header."""

    rank: _Positive
    chunk_id: _Uuid
    document_id: _Uuid
    matched_chunk_id: _Uuid
    scope: Scope
    score: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False), BeforeValidator(_number)]
    text_content: _Text
    header: _Text | None = None
    token_count: _Count
    page: _Int32 | None = None
    section: _Text | None = None
    coordinates: Annotated[dict[_Text, _Number], BeforeValidator(_numbers)] | None = None
    title: _Text | None = None
    source_url: _Text | None = None
    chunk_position: _Int32 | None = None
    metadata: _Map

    @property
    def prompt_text(self) -> str:
        """The string to put in a prompt."""
        return self.text_content if self.header is None else f"{self.header}\n{self.text_content}"


class ArmExplanation(_Message):
    """What became of the candidates of one arm; ``candidates`` is the sum of the other counts."""

    scope: Scope
    candidates: _Count
    below_threshold: _Count
    duplicates: _Count
    same_parent: _Count
    over_budget: _Count
    missing: _Count
    not_needed: _Count
    returned: _Count


class Explanation(_Message):
    """Why a result has its passages and no more."""

    arms: Annotated[tuple[ArmExplanation, ...], FailFast(), BeforeValidator(_array)]


class RetrievalResult(_Message):
    """The answer to one event. The assembler ensures that ranks have no gaps and that ``k_returned`` is correct."""

    schema_version: _Version
    result_id: _Uuid
    event_id: _Uuid
    query_hash: _Hash | None = None
    embedding_model: _Text | None = None
    profile: _Text
    session_id: _Uuid | None = None
    topic_id: _Uuid | None = None
    query_embedding_dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS), BeforeValidator(_integer)]
    k_requested: _Int32 | None = None
    k_effective: _Count
    k_returned: _Count
    score_type: Literal["cosine_similarity"]
    similarity_threshold: _Threshold | None = None
    token_budget: _Positive | None = None
    tokens_used: _Count
    query_time_ms: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
    warnings: Annotated[
        tuple[Annotated[str, AfterValidator(_warning)], ...], FailFast(), BeforeValidator(_array)
    ]
    results: Annotated[tuple[Passage, ...], FailFast(), BeforeValidator(_array)]
    explanation: Explanation | None = None

    def with_warning(self, code: str) -> Self:
        """The same result with one more warning."""
        return self.model_copy(update={"warnings": tuple(dict.fromkeys([*self.warnings, code]))})


def oldest_query_version(query: QueryEmbedding) -> str:
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


def oldest_result_version(dimensions: int) -> str:
    """The oldest minor version of the contract that can express results for embeddings of this many components."""
    return "1.0.0" if dimensions == DIMENSIONS else "1.1.0"


_RULE_TEXTS: Final[Mapping[str, str]] = {
    "missing": "is required",
    "model_type": "is not an object",
    "dict_type": "is not an object",
    "tuple_type": "is not an array",
    "string_type": "is not a string",
    "string_sub_type": "is not a string",
    "string_unicode": "contains an unpaired surrogate",
    "int_type": "is not an integer",
    "bool_type": "is not true or false",
    "float_type": "is not a number",
    "finite_number": "is not finite",
    "string_too_short": "is too short",
    "string_too_long": "is too long",
    "too_short": "has too few items",
    "too_long": "has too many items",
    "greater_than_equal": "is too small",
    "less_than_equal": "is too large",
    "literal_error": "is not one of the allowed values",
    "extra_forbidden": "is not a known field",
}
_MAPS: Final = frozenset({"metadata", "metadata_contains", "metadata_any", "metadata_range", "coordinates"})
_OWN_ERROR_TYPES: Final = frozenset(
    {
        "nul",
        "surrogate",
        "version",
        "uuid",
        "instant",
        "array",
        "number",
        "string",
        "hash",
        "code",
        "many",
        "range",
    }
)


_MAX_VIOLATIONS_NAMED: Final = 5


def _describe(error: ValidationError) -> str:
    """Name the first few invalid fields and the rules they violate."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # pydantic does not count invalid items, so an array of them also has too few.
    invalid_inside = {details["loc"][:-1] for details in found if len(details["loc"]) > 1}
    found = [details for details in found if details["loc"] not in invalid_inside]
    named = "; ".join(map(_violation, found[:_MAX_VIOLATIONS_NAMED]))
    others = len(found) - _MAX_VIOLATIONS_NAMED
    return named + (f" (and {others} more)" if others > 0 else "")


def _violation(details: ErrorDetails) -> str:
    """One field and its rule. Map keys are content, so they are not named."""
    path = ""
    for step in details["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
            continue
        path += f".{step}" if path else step
        if step in _MAPS:
            path += ".*"
            break
    kind = details["type"]
    rule = details["msg"] if kind in _OWN_ERROR_TYPES else _RULE_TEXTS.get(kind, f"violates the rule {kind}")
    return f"{path or 'message'} {rule}"
