"""A JSON object from bytes, without the liberties that Python's parser takes."""

import json
from typing import Any, Final, NoReturn

from streams.core.errors import Undecodable

__all__ = ["loads"]

# No field can tell integers of this size apart, and int() of a long text takes quadratic time (and is refused
# from 4,300 digits on). 64 digits are beyond int64 and float32, so each bound of the contracts still sees
# what it must.
_LONG: Final = 64
_HUGE: Final = 10**_LONG


def loads(value: bytes) -> dict[str, Any]:
    """Parse one JSON object in UTF-8.

    Integers of more than 64 characters become ±10^64. Numbers beyond float64 become ±inf, and the contract
    refuses them where they stand. A key that occurs twice makes the object ambiguous, above all in whose name
    it is asked, so it is refused; so are ``NaN``, ``Infinity``, a byte order mark and nesting deeper than the
    interpreter's stack.

    Raises:
        Undecodable: without the text.
    """
    try:
        instance = _DECODER.decode(value.decode("utf-8"))
    except UnicodeDecodeError:
        raise Undecodable("neither Avro nor UTF-8") from None
    except RecursionError:
        raise Undecodable("JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise Undecodable(f"neither Avro nor JSON (at character {error.pos})") from None
    if type(instance) is not dict:
        raise Undecodable("JSON, but no object")
    return instance


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    instance = dict(pairs)
    if len(instance) != len(pairs):
        raise Undecodable("a JSON object has a key twice")
    return instance


def _integer(digits: str) -> int:
    if len(digits) <= _LONG:
        return int(digits)
    return -_HUGE if digits[0] == "-" else _HUGE


def _constant(_token: str) -> NoReturn:
    raise Undecodable("NaN and Infinity are no JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)
