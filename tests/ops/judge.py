"""Whether the alerts of a scenario are those that it requires. Pure: everything is an argument."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.ops.top_row import STATES, TopRow

__all__ = ["Expectation", "Fired", "Moment", "Observation", "judge"]

_SLOW: Final = "DurationBurn (ticket)"
_SLOW_BUDGET: Final = 0.01
# A busy machine delays events for seconds, which count six times: the overview may say so.
_BUSY_SHARE: Final = 0.15


@dataclass(frozen=True)
class Expectation:
    """What an operator relies on. All times are uncompressed minutes from the fault's start.

    Attributes:
        within: the alerts that must fire, and when at the latest.
        allowed: alerts that may fire as well.
        lasting: tickets that may fire as well, and that look back too far to resolve in a run.
        state: what the overview's state must be at least while the fault lasts; in health, exactly 0.
        state_within: when at the latest.
        slow: whether the ticket for durations may fire where the events really were slow.
        recovery: when at the latest, after the fix, all alerts are silent and the state is WELL; None: there
            was nothing to fix, or alerts look back too far.
    """

    within: Mapping[str, float] = field(default_factory=dict)
    allowed: frozenset[str] = frozenset()
    lasting: frozenset[str] = frozenset()
    state: int = 0
    state_within: float = 3
    slow: bool = True
    recovery: float | None = 15


@dataclass(frozen=True)
class Fired:
    """An alert that fired, in uncompressed minutes.

    Attributes:
        name: without prefix.
        namespace: "" if it has none.
        after: from the fault's start.
        resolved: from the fix on; 0 or less: before it; None: it still fires.
    """

    name: str
    severity: str
    namespace: str
    after: float
    resolved: float | None


@dataclass(frozen=True)
class Moment:
    """What the overview showed, in uncompressed minutes from the fault's start."""

    after: float
    row: TopRow


@dataclass(frozen=True)
class Observation:
    """What came of a scenario.

    Attributes:
        namespace: the installation with the fault.
        beside: installations that are well.
        fired: by any of these, or without namespace.
        moments: while the fault lasted.
        healthy: the same of the installations that are well.
        recovered: uncompressed minutes from the fix until all alerts were silent and the state was WELL.
        problems: what the scenario itself checked, such as lost events.
        slow: the share of events that took longer than 250 ms, by the clock of who sent them.
        start: of the fault, in seconds since the epoch.
    """

    namespace: str
    beside: Collection[str]
    fired: Sequence[Fired]
    moments: Sequence[Moment]
    healthy: Sequence[Moment]
    recovered: float | None
    problems: Sequence[str]
    slow: float = 0.0
    start: float = 0.0


def judge(
    expected: Expectation, observed: Observation, listed: Collection[str] | None = None
) -> Iterator[str]:
    """Yield what is wrong.

    Args:
        expected: what must be.
        observed: what was.
        listed: the alerts that the runbook lists for the fault; None: it is not in the runbook.
    """
    yield from observed.problems
    yield from _alerts(expected, observed)
    if listed is not None and set(listed) != set(expected.within):
        names = ", ".join(sorted(set(listed) ^ set(expected.within)))
        yield f"the runbook's row for this fault and the scenario differ in {names}"
    yield from _states(expected, observed)
    if expected.recovery is None:
        return
    if observed.recovered is None:
        yield "alerts still fire, or the state is not WELL, after the fix"
    elif observed.recovered > expected.recovery:
        yield f"recovered after {observed.recovered:.1f} min, {expected.recovery:g} are allowed"


def _alerts(expected: Expectation, observed: Observation) -> Iterator[str]:
    own = {alert.name: alert for alert in observed.fired if alert.namespace == observed.namespace}
    for name, limit in expected.within.items():
        if name not in own:
            yield f"{name} did not fire"
        elif own[name].after > limit:
            yield f"{name} fired after {own[name].after:.1f} min, {limit:g} are allowed"
    for alert in observed.fired:
        if alert.namespace != observed.namespace:
            yield f"{alert.name} fired for {alert.namespace or 'no namespace'}, which is well"
        elif alert.name == _SLOW and expected.slow and observed.slow > _SLOW_BUDGET:
            continue  # it is right: events that waited, or a busy machine
        elif alert.name not in {*expected.within, *expected.allowed, *expected.lasting}:
            yield f"{alert.name} fired unexpectedly after {alert.after:.1f} min"


def _states(expected: Expectation, observed: Observation) -> Iterator[str]:
    if expected.state:
        late = [moment for moment in observed.moments if moment.after >= expected.state_within]
        if not late:
            yield f"nobody looked at the overview after {expected.state_within:g} min"
        for moment in late:
            if moment.row.state is None or moment.row.state < expected.state:
                wanted = STATES[expected.state]
                yield f"the overview showed {moment.row} after {moment.after:.1f} min; it must be {wanted}"
                break
    for calm in (observed.healthy, () if expected.state else observed.moments):
        bad = [moment for moment in calm if moment.row.state != 0]
        if any(moment.row.state != 1 for moment in bad) or len(bad) > _BUSY_SHARE * len(calm):
            yield (
                f"the overview of an installation without fault was not WELL in {len(bad)} of {len(calm)} moments:"
                f" {bad[0].row} after {bad[0].after:.1f} min"
            )
