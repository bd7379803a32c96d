"""Runs golden queries and collects the outcomes: the part that both modes share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from streams.core.messages import QueryEmbedding, RetrievalResult
from streams.evaluation.golden import GoldenQuery

__all__ = [
    "Answered",
    "DeadLettered",
    "EvaluationError",
    "Outcome",
    "QueryClient",
    "Unanswered",
    "run_queries",
]

# If this many queries, and no others, have failed, there is no worker.
_MAX_UNANSWERED = 3


class EvaluationError(Exception):
    """The queries cannot be run here; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A result, and the milliseconds from sending the query to receiving it."""

    result: RetrievalResult
    latency_ms: float


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """The event can never succeed."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """There was no answer in time, or the store failed."""

    reason: str


Outcome = Answered | DeadLettered | Unanswered


class QueryClient(Protocol):
    """The interface of the two modes."""

    async def ask(self, event: QueryEmbedding) -> Outcome: ...


async def run_queries(
    queries: Sequence[GoldenQuery],
    client: QueryClient,
    *,
    in_flight: int,
    progress: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Run all queries.

    Args:
        queries: in the order in which to run them.
        client: the mode.
        in_flight: maximum number of concurrent queries; with more than one, latencies affect each other.
        progress: called after each query.

    Returns:
        One outcome for each query, in the same order. If the first few queries and all others so far are unanswered,
        the rest is not run: without a worker, each would take a full timeout.
    """
    outcomes: list[Outcome | None] = [None] * len(queries)
    waiting = iter(range(len(queries)))
    any_answered = False
    unanswered_count = 0

    async def run_worker() -> None:
        nonlocal any_answered, unanswered_count
        for place in waiting:
            if unanswered_count >= _MAX_UNANSWERED and not any_answered:
                outcomes[place] = Unanswered("not run: none of the queries before it was answered")
            else:
                outcome = await client.ask(queries[place].fresh_event())
                outcomes[place] = outcome
                if isinstance(outcome, Unanswered):
                    unanswered_count += 1
                else:
                    any_answered = True
            progress()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(queries))):
                group.create_task(run_worker())
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [outcome for outcome in outcomes if outcome is not None]
