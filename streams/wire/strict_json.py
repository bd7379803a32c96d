"""Strict JSON: parses a JSON object from bytes and rejects the extensions that Python's parser accepts."""

import json
from typing import Any, Final, NoReturn

from streams.core.errors import Undecodable

__all__ = ["loads"]

# Longer integers are out of range for every field, and int() of a long text takes quadratic time (and fails from
# 4,300 digits on). The largest float64 has 309 digits and a sign, so every bound of the contracts still rejects them.
_LONG: Final = 310
_HUGE: Final = 10**_LONG


def loads(value: bytes) -> dict[str, Any]:
    """Parse one JSON object in UTF-8.

    Integers of more than 310 characters become ±10^310. Numbers outside float64 become ±inf, which the contract rejects
    in the field. A duplicate key makes the object ambiguous, above all its principals, so it is rejected. Also
    rejected are ``NaN``, ``Infinity``, a byte order mark and nesting deeper than the interpreter's stack.

    Raises:
        Undecodable: the message does not quote the text.
    """
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        raise Undecodable("neither Avro nor UTF-8") from None
    try:
        instance = _DECODER.decode(text)
    except RecursionError:
        raise Undecodable("JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        if text.lstrip().startswith(("{", "[")):
            raise Undecodable(
                f"starts like JSON, but is invalid or truncated at character {error.pos}"
            ) from None
        raise Undecodable("neither Avro nor JSON") from None
    if type(instance) is not dict:
        raise Undecodable("JSON, but not an object")
    return instance


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    instance = dict(pairs)
    if len(instance) != len(pairs):
        raise Undecodable("a JSON object has a duplicate key")
    return instance


def _integer(digits: str) -> int:
    if len(digits) <= _LONG:
        return int(digits)
    return -_HUGE if digits[0] == "-" else _HUGE


def _constant(_token: str) -> NoReturn:
    raise Undecodable("NaN and Infinity are not valid JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)
