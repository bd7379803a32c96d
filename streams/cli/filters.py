"""Filters as people write them on a command line, in the contract's form."""

import csv
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from streams.core.errors import ContractViolation
from streams.core.messages import Filters, MetadataRange
from streams.terminal import printable

__all__ = ["FilterError", "parse_filters"]

_FORMS: Final = (
    "section=…, document_type=…, source_url_prefix=…, metadata.KEY=…, 'metadata.KEY in A, B',"
    " 'metadata.KEY has A, B', 'metadata.KEY>=2020' (or >, <=, <), or the contract's JSON object"
)
_TEXTS: Final = ("section", "document_type", "source_url_prefix")
_TEXT: Final = re.compile(rf"({'|'.join(_TEXTS)})\s*==?\s*(.*)", re.DOTALL)
_METADATA: Final = re.compile(
    r"metadata\.(?P<key>.+?)\s*(?P<operator>==?|[<>]=?|\s(?:in|has)\s)\s*(?P<value>.*)", re.DOTALL
)
# The bound of a number, and of a date.
_BOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    ">=": ("gte", "at_or_after"),
    ">": ("gt", "after"),
    "<=": ("lte", "at_or_before"),
    "<": ("lt", "before"),
}
_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")
_OFFSET: Final = re.compile(r"([Zz]|[+-]\d\d:\d\d)$")


class FilterError(ValueError):
    """A condition cannot be read, or contradicts another one; the message is one line."""


def parse_filters(conditions: Iterable[str]) -> Filters | None:
    """The filters that meet all conditions; None if there are none.

    Args:
        conditions: each in one of the forms that an error lists. White space around an operator does not count.

    Raises:
        FilterError: see there.
    """
    found: dict[str, Any] = {}
    for condition in conditions:
        try:
            part = _parsed(condition.strip())
            Filters.parse(part)
            _add(found, part)
        except (FilterError, ContractViolation) as error:
            raise FilterError(f"{printable(condition)}: {error}") from None
    try:
        return Filters.parse(found) if found else None
    except ContractViolation as error:  # of all together, for example too many values
        raise FilterError(str(error)) from None


def _parsed(condition: str) -> dict[str, Any]:
    if condition.startswith("{"):
        return _from_json(condition)
    if match := _TEXT.fullmatch(condition):
        return {match[1]: match[2]}
    match = _METADATA.fullmatch(condition)
    if match is None:
        raise FilterError(f"is not a condition; conditions are {_FORMS}")
    key, operator, value = match["key"], match["operator"].strip(), match["value"]
    if key.endswith("!"):
        raise FilterError("there is no filter for values that differ")
    if operator in _BOUNDS:
        return {"metadata_range": {key: _bound(operator, value)}}
    if operator == "in":
        return {"metadata_any": {key: _values(value)}}
    if operator == "has":
        return {"metadata_contains": {key: _values(value)}}
    return {"metadata": {key: value}}


def _from_json(condition: str) -> dict[str, Any]:
    try:
        part = json.loads(condition)
    except ValueError:
        raise FilterError("is not valid JSON") from None
    # The contract ignores unknown fields, so a misspelt one would have no effect.
    if unknown := sorted(part.keys() - Filters.model_fields.keys()):
        raise FilterError(f"unknown filter {', '.join(unknown)}; there are {', '.join(Filters.model_fields)}")
    return {field: value for field, value in part.items() if value is not None}


def _bound(operator: str, value: str) -> dict[str, Any]:
    of_number, of_date = _BOUNDS[operator]
    if _NUMBER.fullmatch(value):
        return {of_number: float(value)}
    if _DATE.fullmatch(value):
        value += "T00:00:00Z"
    elif not _OFFSET.search(value):
        value += "Z"
    bound = {of_date: value}
    try:
        MetadataRange.parse(bound)
    except ContractViolation:
        raise FilterError(
            "the bound is not a number, a date (2024-05-01), or a date and time (2024-05-01T12:00:00)"
        ) from None
    return bound


def _values(text: str) -> list[str]:
    try:
        [values] = csv.reader([text], skipinitialspace=True)
    except csv.Error:
        raise FilterError("a line end in a list must be in quotes") from None
    found = [value.strip() for value in values]
    if not all(found):
        raise FilterError('a value is empty; write A, B, or "A, B" for one value with a comma')
    return found


def _add(found: dict[str, Any], part: Mapping[str, Any]) -> None:
    for field, value in part.items():
        if field not in found:
            found[field] = value
            continue
        if not isinstance(value, dict):
            raise FilterError(f"{field} is given twice")
        for key, of_key in value.items():
            _add_to_key(found[field], field, key, of_key)


def _add_to_key(found: dict[str, Any], field: str, key: str, value: Any) -> None:
    if key not in found:
        found[key] = value
    elif field == "metadata_contains":
        found[key] = [*found[key], *value]
    elif field == "metadata_range" and not found[key].keys() & value.keys():
        found[key] |= value
    else:
        raise FilterError(
            "this key already has such a condition; for one of several values: metadata.KEY in A, B"
        )
