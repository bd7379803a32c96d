"""Many queries: their order, how many at a time, and when the rest is given up."""

import asyncio
from collections.abc import Callable

import pytest

from streams.core.messages import QueryEmbedding
from streams.evaluation.golden import Expectation
from streams.evaluation.query_runner import Answered, DeadLettered, Outcome, Unanswered, run_queries
from tests.evaluation.made_up import golden, result

EXPECTED = [Expectation("source_url", "https://a")]
QUERIES = [golden(str(number), EXPECTED) for number in range(20)]
ANSWER = Answered(result([]), 1.0)
NOTHING = Unanswered("no answer within 1 s")


class Scripted:
    """Answers the n-th question as told, and watches how many are asked at a time."""

    def __init__(self, outcome: Callable[[int], Outcome]) -> None:
        self.outcome = outcome
        self.asked: list[QueryEmbedding] = []
        self.now = self.most = 0

    async def ask(self, event: QueryEmbedding) -> Outcome:
        number = len(self.asked)
        self.asked.append(event)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001 * (3 - number % 3))  # answers overtake each other
        self.now -= 1
        return self.outcome(number)


@pytest.mark.parametrize("in_flight", [1, 4, 100])
async def test_each_is_asked_once_and_its_outcome_stands_in_its_place(in_flight: int) -> None:
    client = Scripted(lambda number: DeadLettered(str(number), "") if number % 2 else ANSWER)
    advanced = []
    outcomes = await run_queries(
        QUERIES, client, in_flight=in_flight, progress=lambda: advanced.append(client.now)
    )
    assert [outcome.code for outcome in outcomes if isinstance(outcome, DeadLettered)] == [
        str(number) for number in range(1, 20, 2)
    ]
    assert client.most == min(in_flight, 20)
    assert len({event.event_id for event in client.asked}) == len(advanced) == 20


async def test_where_nobody_answers_the_rest_is_not_asked() -> None:
    client = Scripted(lambda _: NOTHING)
    outcomes = await run_queries(QUERIES, client, in_flight=1)
    assert len(client.asked) == 3
    assert len(outcomes) == 20
    assert [isinstance(outcome, Unanswered) for outcome in outcomes] == [True] * 20
    assert outcomes[3] == Unanswered("not run: none of the queries before it was answered")


@pytest.mark.parametrize("first", [ANSWER, DeadLettered("expired", "")])
async def test_where_somebody_answers_every_query_is_asked(first: Outcome) -> None:
    client = Scripted(lambda number: first if number == 2 else NOTHING)
    await run_queries(QUERIES, client, in_flight=1)
    assert len(client.asked) == 20


async def test_a_failure_of_the_client_is_raised_as_it_is() -> None:
    def fail(number: int) -> Outcome:
        if number == 5:
            raise OSError("the broker is gone")
        return ANSWER

    with pytest.raises(OSError, match="the broker is gone"):
        await run_queries(QUERIES, Scripted(fail), in_flight=4)
