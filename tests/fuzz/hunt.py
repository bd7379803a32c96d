"""Making hostile messages and judging them, until so many or for so long."""

import faulthandler
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tests.fuzz.judge import HANG_SECONDS, Broken, Judge
from tests.fuzz.mutations import hostile
from tests.fuzz.seeds import QUERIES, TEXTS, Subject, codec

__all__ = ["Hunt", "hunt", "our_judge"]

_AT_ONCE = 500


@dataclass(slots=True)
class Hunt:
    """What was found.

    Attributes:
        inputs: messages judged.
        outcomes: how many were accepted, and refused under each code.
        found: number of the message, and what did not hold.
        most: the most memory a message took, in its own sizes; and its number.
    """

    seed: int
    inputs: int = 0
    bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    found: list[tuple[int, str]] = field(default_factory=list)
    most: tuple[float, int] = (0.0, -1)


def our_judge(subject: Subject = QUERIES) -> Judge[Any]:
    """Of the real codec."""
    real = codec()
    if subject is TEXTS:
        return Judge(real.decode_text, real.encode_text, contract=subject.name)
    return Judge(real.decode_query, real.encode_query)


def hunt(
    judge: Judge[Any],
    *,
    subject: Subject = QUERIES,
    seed: int,
    inputs: int | None,
    seconds: float | None = None,
    first: int = 0,
    report: Callable[[Hunt], object] = lambda _: None,
) -> Hunt:
    """Judge messages from a number on; ends after so many, so many seconds, or never."""
    result = Hunt(seed)
    ends = None if seconds is None else monotonic() + seconds
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        while (inputs is None or result.inputs < inputs) and (ends is None or monotonic() < ends):
            if result.inputs % _AT_ONCE == 0:
                # Of a hang within C nothing else would be heard.
                faulthandler.dump_traceback_later(_AT_ONCE * HANG_SECONDS / 10, exit=True)
                report(result)
            number = first + result.inputs
            value = hostile(seed, number, subject)
            result.inputs += 1
            result.bytes += len(value)
            try:
                verdict = judge.judge(value)
            except Broken as broken:
                result.found.append((number, str(broken)))
                continue
            result.outcomes[verdict.outcome] += 1
            result.most = max(result.most, (verdict.times, number))
    finally:
        faulthandler.cancel_dump_traceback_later()
        if not tracing:
            tracemalloc.stop()
    return result
