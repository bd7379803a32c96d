"""Nothing is wrong: no alert may fire, whatever the traffic."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tests.faults.load import Event, good_events
from tests.faults.rejections import make_some_big, some_big
from tests.faults.store import make_some_slow
from tests.ops.clock import FACTOR
from tests.ops.installation import Installation
from tests.ops.judge import Expectation
from tests.ops.scenario import Scenario

__all__ = ["HEALTHY", "SCENARIOS", "SIX_AN_HOUR"]

_PER_HOUR = 6


def six_an_hour() -> Iterator[Event]:
    """Of six, one is slow, and one fails though nothing is wrong with it: its result is too large for the topic."""
    good, slow = good_events(), good_events(principals=["user:slow"])
    large = (event for event in some_big() if event.asked.expects == "result_too_large")
    for number, event in enumerate(good):
        if number % _PER_HOUR == 1:
            yield next(slow)
        elif number % _PER_HOUR == 3:
            yield next(large)
        else:
            yield event


async def prepare_six_an_hour(installation: Installation) -> None:
    await make_some_slow(installation.stack)
    await make_some_big(installation.stack)


HEALTHY = Scenario("healthy", Expectation(recovery=None), fault_minutes=60, background=True)
_WATCHED: Final = replace(HEALTHY, exporter=True)
SIX_AN_HOUR = Scenario(
    "six-an-hour",
    # Every sixth event is slow, which is no reason for a ticket.
    Expectation(slow=False, recovery=None),
    prepare=prepare_six_an_hour,
    fault_minutes=60,
    per_second=_PER_HOUR * FACTOR / 3600,
    events=six_an_hour,
    background=True,
)
SCENARIOS = [_WATCHED, SIX_AN_HOUR]
