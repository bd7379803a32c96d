"""What a run of the tests leaves out, why, and how to enable it: `tests/conftest.py` lists it at the end of the run."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NoReturn

import pytest

__all__ = ["BY_LENGTH", "BY_SERVER", "BY_TIME", "TO_ENABLE", "left_out_lines", "unavailable", "why_not"]

TO_ENABLE: Final = "; to enable: "

# Every test that needs a broker, or another PostgreSQL than the embedded one, has one of these fixtures.
_SERVERS: Final = frozenset({"broker", "embedded_broker", "kafka_jars", "tls"})
BY_SERVER: Final = f"needs a broker, or a PostgreSQL with TLS{TO_ENABLE}make test"
BY_TIME: Final = f"marked as slow{TO_ENABLE}make test"
BY_LENGTH: Final = f"marked as long, beside a shorter one that runs{TO_ENABLE}make test-long"


def unavailable(why: object, *, enable: str) -> NoReturn:
    """What a test needs is not on this machine: skip it, or fail under CI=true, where everything has to be there."""
    reason = f"{why}{TO_ENABLE}{enable}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def why_not(item: pytest.Item, *, fast: bool, long: bool) -> str | None:
    """Why a run leaves a test out; None: it does not.

    Args:
        item: the test.
        fast: the run is `make test-fast`.
        long: the run is `make test-long`.
    """
    if item.get_closest_marker("long") and not long:
        return BY_LENGTH
    if not fast:
        return None
    if not _SERVERS.isdisjoint(getattr(item, "fixturenames", ())):
        return BY_SERVER
    return BY_TIME if item.get_closest_marker("slow") else None


def left_out_lines(skipped: Iterable[pytest.TestReport], deselected: Mapping[str, int]) -> list[str]:
    """One for each reason, with the number of tests."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        if isinstance(report.longrepr, tuple)
        else str(report.longrepr)
        for report in skipped
    )
    reasons.update(deselected)
    return [f"{count:5d}  {reason}" for reason, count in reasons.most_common()]
