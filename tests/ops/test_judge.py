"""The verdict on a scenario: alone, without servers."""

from dataclasses import replace

import pytest

from tests.ops.judge import Expectation, Fired, Moment, Observation, judge
from tests.ops.recall import shuffled_share
from tests.ops.runbook import alerts_of
from tests.ops.top_row import TopRow, first_row

WELL = TopRow(state=0, oldest=0.3, pages=0, tickets=0, ready=2, wanted=2)
OUT = replace(WELL, state=2, pages=1, ready=0)
DEGRADED = replace(WELL, state=1)
NONE_READY = Fired("NoneReady", "page", "one", after=2.1, resolved=0.5)
OUTAGE = Expectation({"NoneReady": 3}, frozenset({"AvailabilityBurn"}), state=2, state_within=3, recovery=15)
OUTAGE_SEEN = Observation(
    namespace="one",
    beside=("two",),
    fired=(NONE_READY,),
    moments=(Moment(0.1, WELL), Moment(1.5, OUT), Moment(3.5, OUT)),
    healthy=(Moment(1.0, WELL),),
    recovered=2.0,
    problems=(),
)
SLOW = replace(NONE_READY, name="DurationBurn (ticket)", severity="ticket")
HEALTH = Expectation()
HEALTH_SEEN = Observation("one", (), (), (Moment(1.0, WELL),), (), 0.0, ())


@pytest.mark.parametrize(
    ("expected", "observed"),
    [
        (OUTAGE, OUTAGE_SEEN),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, fired=[NONE_READY, replace(NONE_READY, name="AvailabilityBurn", after=9)]),
        ),
        (HEALTH, HEALTH_SEEN),
        (HEALTH, replace(HEALTH_SEEN, fired=[SLOW], slow=0.011)),
        (HEALTH, replace(HEALTH_SEEN, moments=[Moment(1.0, DEGRADED), *[Moment(2.0, WELL)] * 9])),
        (replace(OUTAGE, recovery=None), replace(OUTAGE_SEEN, recovered=None)),
    ],
)
def test_what_is_expected_is_accepted(expected: Expectation, observed: Observation) -> None:
    assert list(judge(expected, observed)) == []


@pytest.mark.parametrize(
    ("expected", "observed", "problem"),
    [
        (OUTAGE, replace(OUTAGE_SEEN, fired=()), "NoneReady did not fire"),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, fired=[replace(NONE_READY, after=3.1)]),
            "NoneReady fired after 3.1 min, 3 are allowed",
        ),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, fired=[NONE_READY, replace(NONE_READY, name="CrashLoop", after=4)]),
            "CrashLoop fired unexpectedly after 4.0 min",
        ),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, fired=[NONE_READY, replace(NONE_READY, namespace="two")]),
            "NoneReady fired for two, which is well",
        ),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, fired=[NONE_READY, replace(NONE_READY, namespace="")]),
            "NoneReady fired for no namespace, which is well",
        ),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, moments=[*OUTAGE_SEEN.moments, Moment(4.0, WELL)]),
            "the overview showed WELL, oldest 0.3 s, 0 pages, 0 tickets, ready 2 of 2 after 4.0 min; it must be OUT",
        ),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, moments=[*OUTAGE_SEEN.moments, Moment(4.0, replace(OUT, state=None))]),
            "the overview showed no data, oldest 0.3 s, 1 pages, 0 tickets, ready 0 of 2 after 4.0 min; it must be OUT",
        ),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, moments=[Moment(1.0, OUT)]),
            "nobody looked at the overview after 3 min",
        ),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, healthy=[Moment(1.0, OUT), Moment(2.0, WELL)]),
            (
                "the overview of an installation without fault was not WELL in 1 of 2 moments: OUT, oldest 0.3 s,"
                " 1 pages, 0 tickets, ready 0 of 2 after 1.0 min"
            ),
        ),
        (
            OUTAGE,
            replace(OUTAGE_SEEN, recovered=None),
            "alerts still fire, or the state is not WELL, after the fix",
        ),
        (
            HEALTH,
            replace(HEALTH_SEEN, moments=[Moment(1.0, OUT), *[Moment(2.0, WELL)] * 9]),
            (
                "the overview of an installation without fault was not WELL in 1 of 10 moments: OUT, oldest 0.3 s,"
                " 1 pages, 0 tickets, ready 0 of 2 after 1.0 min"
            ),
        ),
        (OUTAGE, replace(OUTAGE_SEEN, recovered=15.2), "recovered after 15.2 min, 15 are allowed"),
        (OUTAGE, replace(OUTAGE_SEEN, problems=["1 event is lost"]), "1 event is lost"),
        (
            replace(HEALTH, slow=False),
            replace(HEALTH_SEEN, fired=[SLOW], slow=0.3),
            "DurationBurn (ticket) fired unexpectedly after 2.1 min",
        ),
        (
            HEALTH,
            replace(HEALTH_SEEN, fired=[SLOW], slow=0.009),
            "DurationBurn (ticket) fired unexpectedly after 2.1 min",
        ),
        (HEALTH, replace(HEALTH_SEEN, fired=[NONE_READY]), "NoneReady fired unexpectedly after 2.1 min"),
        (
            HEALTH,
            replace(HEALTH_SEEN, moments=[Moment(5.0, replace(WELL, state=1))]),
            (
                "the overview of an installation without fault was not WELL in 1 of 1 moments: DEGRADED, oldest 0.3 s,"
                " 0 pages, 0 tickets, ready 2 of 2 after 5.0 min"
            ),
        ),
    ],
)
def test_what_is_wrong_is_named(expected: Expectation, observed: Observation, problem: str) -> None:
    assert list(judge(expected, observed)) == [problem]


def test_the_runbook_must_list_what_fires() -> None:
    assert list(judge(OUTAGE, OUTAGE_SEEN, {"NoneReady"})) == []
    [problem] = judge(OUTAGE, OUTAGE_SEEN, {"NoneReady", "WorkerStuck"})
    assert problem == "the runbook's row for this fault and the scenario differ in WorkerStuck"


def test_the_runbooks_table_is_read() -> None:
    assert alerts_of("crash loop") == {"CrashLoop"}
    assert alerts_of("PostgreSQL down, frozen or misconfigured") == {
        "NoneReady",
        "WorkerStuck",
        "PartitionStuck",
    }
    with pytest.raises(KeyError):
        alerts_of("a fault that the runbook does not list")


def test_the_first_row_is_known() -> None:
    assert [*first_row()] == ["State", "Oldest waiting event", "Firing alerts", "Workers ready"]


def test_a_difference_by_chance_is_not_significant() -> None:
    assert shuffled_share([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(1 / 70)
    assert shuffled_share([1, 4, 5, 8], [2, 3, 6, 7]) > 0.4
    assert shuffled_share([5, 6, 7, 8], [1, 2, 3, 4]) == 1
