"""What the fields of contracts and documents have in common: their types, and the base of their models.

As `streams.core.messages` explains, nothing is coerced, and no error quotes a value.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, LiteralString, Self
from uuid import UUID

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from streams.core.errors import ContractViolation

__all__ = [
    "FLOAT32_MAX",
    "INT32_MAX",
    "INT32_MIN",
    "UUID_PATTERN",
    "ContractModel",
    "Count",
    "Int32",
    "Number",
    "Text",
    "Uuid",
    "as_array",
    "as_components",
    "as_integer",
    "as_number",
    "check_numbers",
    "check_text",
    "rule_error",
]

FLOAT32_MAX: Final = 3.4028234663852886e38
INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1

# The contracts' own, character for character (a test compares them). For `fullmatch`: $ also matches before a final
# newline.
UUID_PATTERN = re.compile(r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$")


def rule_error(code: LiteralString, rule: LiteralString) -> PydanticCustomError:
    # A literal without placeholders, so that the offending value cannot get into the message.
    return PydanticCustomError(code, rule)


def check_text(value: str) -> str:
    if "\0" in value:
        raise rule_error("nul", "contains U+0000")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise rule_error("surrogate", "contains an unpaired surrogate") from None
    return value


def _as_uuid(value: object) -> object:
    if isinstance(value, str) and UUID_PATTERN.fullmatch(value):
        return UUID(value)
    if isinstance(value, UUID):
        return value
    raise rule_error("uuid", "is not a UUID")


def as_integer(value: object) -> object:
    # In draft-07, 10.0 is an integer and True is not.
    if type(value) is float and value.is_integer():
        return int(value)
    return value


def as_number(value: object) -> object:
    # Also keeps a huge integer from overflowing float(): the bounds are checked on the result.
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return value


def as_array(value: object) -> object:
    return tuple(value) if type(value) is list else value


def check_numbers(value: object) -> object:
    if type(value) is dict:
        for number in value.values():
            if type(number) is not int and type(number) is not float:
                raise rule_error("number", "contains a non-numeric value")
    return value


def as_components(value: object) -> npt.NDArray[np.floating]:
    """Check the types only. The length and the values are checked after the structure of the whole event."""
    if type(value) is memoryview and value.format == "f" and value.ndim == 1:
        return np.asarray(value)
    if type(value) is not tuple and type(value) is not list:
        raise rule_error("array", "is not an array")
    kinds = set(map(type, value))
    if not kinds <= {float, int}:
        raise rule_error("number", "contains a non-numeric component")
    if int in kinds:
        value = tuple(map(_as_component, value))
    return np.array(value, dtype=np.float64)


def _as_component(value: float) -> float:
    # Compared before the conversion: an integer just outside the float32 range would be rounded into it.
    if -FLOAT32_MAX <= value <= FLOAT32_MAX:
        return float(value)
    return math.inf if value > 0 else -math.inf


Text = Annotated[str, AfterValidator(check_text)]
Uuid = Annotated[UUID, BeforeValidator(_as_uuid)]
Int32 = Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX), BeforeValidator(as_integer)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX), BeforeValidator(as_integer)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(as_number)]


class ContractModel(BaseModel):
    """The base of the models of contracts and documents."""

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
