"""What must hold for any message: one of our errors or a sound event, in bounded memory, as the contract says."""

import copy
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, TypeVar

from jsonschema import Draft7Validator

from streams import resources
from streams.core.errors import TerminalError, dead_letter_codes

__all__ = ["Broken", "Judge", "Verdict"]

T = TypeVar("T")

# Decoded, a message is larger than its bytes: `{},` is 3 bytes, and 72 as a dictionary in a list. Beside that, each
# message may take what is there for small ones.
MAX_TIMES = 40
FREE_BYTES = 192 * 1024
# No speed is asserted: this is what a hang looks like, on any machine.
HANG_SECONDS = 20.0

_LONGEST_REASON = 500
_LONGEST_COMPARED = 20_000  # the validator takes its time over maps
_DEEP = 900


class Broken(AssertionError):
    """Something does not hold; the message says what, not the input."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one message.

    Attributes:
        outcome: ``accepted``, or the error's code.
        times: peak of memory beyond what is free, in sizes of the message.
    """

    outcome: str
    times: float


class Judge(Generic[T]):
    """Decodes messages and looks at what comes out.

    Args:
        decode: what is judged.
        encode: its inverse; what was accepted must survive it.
        contract: the messages'.
    """

    def __init__(
        self,
        decode: Callable[[bytes], T],
        encode: Callable[[T], bytes] | None = None,
        *,
        contract: str = "query_embedding",
    ) -> None:
        self._decode = decode
        self._encode = encode
        self._codes = dead_letter_codes()
        schema = json.loads(
            (resources.contracts() / f"{contract}/v1/{contract}.schema.json").read_text(encoding="utf-8")
        )
        formats = Draft7Validator.FORMAT_CHECKER
        self._contract = Draft7Validator(schema, format_checker=formats)
        # 768 components take the validator 10 ms: each embedding is judged once, apart from the rest.
        self._embeddings: dict[int, bool] = {}
        self._embedding = Draft7Validator(
            {
                **schema,
                "required": ["embedding"],
                "properties": {"embedding": schema["properties"].get("embedding", True)},
            },
            format_checker=formats,
        )
        light = copy.deepcopy(schema)
        light["properties"]["embedding"] = {}
        self._rest = Draft7Validator(light, format_checker=formats)

    def judge(self, value: bytes) -> Verdict:
        """Decode one message.

        Raises:
            Broken: what must hold does not.
        """
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        began = perf_counter()
        event, outcome = self._outcome(value)
        seconds = perf_counter() - began
        _, peak = tracemalloc.get_traced_memory()
        if seconds > HANG_SECONDS:
            raise Broken(f"{seconds:.0f} s for {len(value)} bytes")
        times = max(0, peak - before - FREE_BYTES) / max(1, len(value))
        if times > MAX_TIMES:
            raise Broken(f"{peak - before} bytes of memory for a message of {len(value)}: {outcome}")
        if value[:1] == b"{" and len(value) <= _LONGEST_COMPARED:
            self._compare(value, outcome)
        if event is not None and self._encode is not None:
            again = self._encode(event)
            if self._encode(self._decode(again)) != again:
                raise Broken("what was accepted is not what comes back")
        return Verdict(outcome, times)

    def _outcome(self, value: bytes) -> tuple[T | None, str]:
        try:
            return self._decode(value), "accepted"
        except TerminalError as error:
            if error.code not in self._codes:
                raise Broken(f"{error.code} is no stable code") from None
            if len(str(error)) > _LONGEST_REASON:
                raise Broken(f"a reason of {len(str(error))} characters") from None
            return None, error.code
        except Exception as error:
            raise Broken(f"{type(error).__name__} came out of the decoder") from error

    def _compare(self, value: bytes, outcome: str) -> None:
        # Where the stack ends depends on who asks.
        if outcome == "undecodable" and value.count(b"[") + value.count(b"{") > _DEEP:
            return
        try:
            # From text: of bytes, Python's parser also takes surrogates and other encodings.
            instance = json.loads(
                value.decode(), object_pairs_hook=_no_key_twice, parse_constant=_no_constant
            )
        except (ValueError, RecursionError):
            return  # an integer of 4,300 digits, too, which ours clamps
        try:
            valid = self._valid(instance)
        except (RecursionError, OverflowError):
            return
        if valid != (outcome == "accepted"):
            raise Broken(f"{outcome}, but {'valid' if valid else 'invalid'} by the contract")

    def _valid(self, instance: Any) -> bool:
        if not self._rest.is_valid(instance):
            return False
        components = instance.get("embedding")
        if not isinstance(components, list) or len(components) != 768:  # the contract's
            return bool(self._contract.is_valid(instance))
        key = hash(json.dumps(components))
        if key not in self._embeddings:
            self._embeddings[key] = self._embedding.is_valid({"embedding": components})
        return self._embeddings[key]


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    instance = dict(pairs)
    if len(instance) < len(pairs):
        raise ValueError("a key twice")
    return instance


def _no_constant(token: str) -> None:
    raise ValueError(token)
