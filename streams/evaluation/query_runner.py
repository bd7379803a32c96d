"""Asking golden queries, and what comes of each: the part that both ways share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from streams.core.messages import QueryEmbedding, RetrievalResult
from streams.evaluation.golden import GoldenQuery

__all__ = [
    "Answered",
    "QueryClient",
    "DeadLettered",
    "EvaluationError",
    "Outcome",
    "Unanswered",
    "run_queries",
]

# So many without an answer, and none with one: nobody is there.
_ENOUGH = 3


class EvaluationError(Exception):
    """The queries cannot be asked here; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A result, and the milliseconds from asking to having it."""

    result: RetrievalResult
    latency_ms: float


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """The event can never succeed."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Nothing came in time, or the store failed."""

    reason: str


Outcome = Answered | DeadLettered | Unanswered


class QueryClient(Protocol):
    """One of the two ways."""

    async def ask(self, event: QueryEmbedding) -> Outcome: ...


async def run_queries(
    queries: Sequence[GoldenQuery],
    asker: QueryClient,
    *,
    in_flight: int,
    progress: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Ask every query.

    Args:
        queries: in the order in which they are asked.
        asker: how.
        in_flight: most queries asked at a time; with more than one, latencies contain each other's.
        progress: called after each.

    Returns:
        One outcome for each query, in the same order. Where the first few came to nothing, and no other to anything,
        the rest is not asked: a pipeline without a worker would cost a timeout for each.
    """
    outcomes: list[Outcome | None] = [None] * len(queries)
    waiting = iter(range(len(queries)))
    came_back = False
    in_vain = 0

    async def one_after_another() -> None:
        nonlocal came_back, in_vain
        for place in waiting:
            if in_vain >= _ENOUGH and not came_back:
                outcomes[place] = Unanswered("not asked: nothing before it was answered")
            else:
                outcome = await asker.ask(queries[place].fresh_event())
                outcomes[place] = outcome
                if isinstance(outcome, Unanswered):
                    in_vain += 1
                else:
                    came_back = True
            progress()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(queries))):
                group.create_task(one_after_another())
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [outcome for outcome in outcomes if outcome is not None]
