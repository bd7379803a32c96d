"""Two scenarios of `make ops` that take a minute: PostgreSQL frozen, and a healthy installation beside it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ops.health import HEALTHY
from tests.ops.outages import STORE_FROZEN
from tests.ops.runner import open_place_for, run_all

# Until the alerts of the runbook have fired. In `make ops`, the outage lasts longer.
_FAULT_MINUTES, _CALM_MINUTES = 3.5, 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("prometheus")
async def test_alerts_fire_where_the_store_is_frozen_and_nowhere_else(
    kafka_jars: Path, record_property: Callable[[str, object], None]
) -> None:
    scenarios = [
        replace(HEALTHY, fault_minutes=_FAULT_MINUTES, calm_minutes=_CALM_MINUTES),
        replace(STORE_FROZEN, fault_minutes=_FAULT_MINUTES, calm_minutes=_CALM_MINUTES),
    ]
    async with open_place_for(scenarios, kafka_jars) as place:
        outcomes = await run_all(scenarios, place, lanes=1)
    for outcome in outcomes:
        print(outcome.logs)
        assert outcome.failures == []
        assert outcome.observed is not None
        for alert in outcome.observed.fired:
            record_property(
                "figure",
                f"{outcome.scenario.name}: {alert.name} after {alert.after:.1f} uncompressed minutes",
            )
