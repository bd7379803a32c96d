"""A scenario, and one run of it: calm, the fault, the runbook's fix, and recovery."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from k8s.observability.rules import ALERT_PREFIX
from tests.faults.load import Event, good_events
from tests.ops.clock import FACTOR, SCRAPE_SECONDS, minutes, seconds
from tests.ops.installation import Installation, open_installation
from tests.ops.judge import Expectation, Fired, Moment, Observation, judge
from tests.ops.panels import PanelResult, run_panels
from tests.ops.place import Place
from tests.ops.prometheus import Prometheus
from tests.ops.runbook import alerts_of
from tests.ops.shown import Sent, panel_problems
from tests.ops.top_row import top_row

__all__ = ["Outcome", "Scenario", "end_background", "run"]

Step = Callable[[Installation], Awaitable[None]]

_SETTLE_SECONDS: Final = 60.0
_SLOW_SECONDS: Final = 0.25
_FROM_READINESS: Final = frozenset({"FewerReady", "NoneReady"})
# Whoever fixed the cause sees the state turn WELL only after this, at the earliest.
_WELL_MINUTES: Final = 1.0


async def nothing(_: Installation) -> None:
    """All is well."""


async def end_background(installation: Installation) -> None:
    """The runbook: remove the cause. What the fault has left running ends."""
    await installation.end_background()


@dataclass(frozen=True)
class Scenario:
    """A fault, and what an operator must see.

    Attributes:
        name: on the command line, and the namespace.
        expected: which alerts, and when.
        inject: begins the fault.
        fix: what the runbook says.
        fault_minutes: how long the fault lasts, uncompressed.
        calm_minutes: how long all must be well before the fault, uncompressed.
        runbook: the fault in the runbook's table; None: it is not there, because no alert is expected.
        start: starts the workers.
        prepare: before the first worker starts.
        own_broker: whether its fault concerns all who use the broker.
        own_store: whether its fault concerns all who use the PostgreSQL server.
        beside: whether a second, healthy installation runs meanwhile.
        accounted: whether every event must have exactly one answer.
        background: whether it goes on for as long as other scenarios run.
        alone: whether it runs after the others, beside those in the background only.
        exporter: whether postgres_exporter watches its store.
        countable: whether its workers live until Prometheus has seen what they counted.
    """

    name: str
    expected: Expectation
    inject: Step = nothing
    fix: Step = nothing
    fault_minutes: float = 7.0
    calm_minutes: float = 2.0
    runbook: str | None = None
    start: Step | None = None
    prepare: Step = nothing
    workers: int = 2
    per_second: float = 10.0
    events: Callable[[], Iterator[Event]] = good_events
    settings: Mapping[str, str] = field(default_factory=dict)
    own_broker: bool = False
    own_store: bool = False
    beside: bool = False
    accounted: bool = True
    background: bool = False
    alone: bool = False
    exporter: bool = False
    countable: bool = True


@dataclass(frozen=True)
class Outcome:
    """What came of a scenario.

    Attributes:
        observed: None: it did not get that far.
        failures: a line for everything that is wrong.
        panels: of all dashboards, from the fault's start to the end.
        figures: what a scenario measured itself.
    """

    scenario: Scenario
    observed: Observation | None
    failures: list[str]
    seconds: float
    panels: Sequence[PanelResult]
    figures: list[str] = field(default_factory=list)
    logs: str = ""


async def run(scenario: Scenario, place: Place, *, until: asyncio.Event | None = None) -> Outcome:
    """Runs one scenario.

    Args:
        scenario: what to run.
        place: where.
        until: the fault of a background scenario lasts until this is set, but at least `fault_minutes`.
    """
    began = time.monotonic()
    observed: Observation | None = None
    panels: Sequence[PanelResult] = ()
    failures: list[str] = []
    logs = ""
    installation: Installation | None = None
    async with AsyncExitStack() as open_now:
        try:
            rng = random.Random(scenario.name)
            installation = await open_now.enter_async_context(
                open_installation(
                    place,
                    scenario.name,
                    rng=rng,
                    per_second=scenario.per_second,
                    events=scenario.events,
                    settings=scenario.settings,
                )
            )
            healthy: Installation | None = None
            if scenario.beside:
                healthy = await open_now.enter_async_context(
                    open_installation(
                        place, f"{scenario.name}-beside", rng=rng, per_second=scenario.per_second
                    )
                )
            observed = await _observe(scenario, installation, healthy, until)
            failures += judge(
                scenario.expected, observed, None if scenario.runbook is None else alerts_of(scenario.runbook)
            )
            panels = await _panels(installation, observed)
            failures += panel_problems(
                panels, _sent(scenario, installation, observed), exporter=scenario.exporter
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the other scenarios must run too
            failures += [
                str(each) if isinstance(each, AssertionError) else f"{type(each).__name__}: {each}"
                for each in getattr(error, "exceptions", [error])
            ]
        if installation is not None and failures:
            logs = installation.stack.logs
    return Outcome(
        scenario,
        observed,
        failures,
        time.monotonic() - began,
        panels,
        figures=[] if installation is None else installation.figures,
        logs=logs,
    )


async def _observe(
    scenario: Scenario, installation: Installation, healthy: Installation | None, until: asyncio.Event | None
) -> Observation:
    installations = [installation, *([] if healthy is None else [healthy])]
    for each in installations:
        await _begin(scenario if each is installation else Scenario("beside", Expectation()), each)
    start = time.time()
    moments: list[Moment] = []
    healthy_moments: list[Moment] = []
    looking = asyncio.create_task(_watch_overview(installation, start, moments))
    beside = (
        asyncio.create_task(_watch_overview(healthy, start, healthy_moments)) if healthy is not None else None
    )
    try:
        await scenario.inject(installation)
        await asyncio.sleep(max(0.0, start + seconds(scenario.fault_minutes) - time.time()))
        if until is not None:
            await until.wait()
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    fixed = time.time()
    await scenario.fix(installation)
    recovered = None
    if scenario.expected.recovery is not None:
        recovered = await _until_well(
            installation, fixed, scenario.expected.recovery, tickets=not scenario.expected.lasting
        )
    if beside is not None:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    end = time.time()
    if scenario.accounted:
        for each in installations:
            verdict = await each.stack.settle(_SETTLE_SECONDS)
            installation.problems += verdict.violations
            each.repeats = verdict.repeats
            installation.figures.append(f"{verdict.events:,} events, {verdict.repeats:,} repeats")
    return Observation(
        namespace=installation.namespace,
        beside=[each.namespace for each in installations[1:]],
        fired=await fired(
            installation.prometheus,
            {each.namespace for each in installations},
            start,
            fixed,
            end,
            noticed=installation.noticed,
        ),
        moments=moments,
        healthy=healthy_moments,
        recovered=recovered,
        problems=installation.problems,
        slow=_slow(installation),
        start=start,
    )


def _slow(installation: Installation) -> float:
    """The share of events whose result was published later than the objective for durations allows, if ever."""
    published = installation.stack.published()
    seconds_of = [
        published.get(name, math.inf) - at for name, (_, at) in installation.stack.load.sent.items()
    ]
    share = fmean(each > _SLOW_SECONDS for each in seconds_of)
    installation.figures.append(f"{share:.1%} of the events took longer than {1000 * _SLOW_SECONDS:.0f} ms")
    return share


async def _panels(installation: Installation, observed: Observation) -> Sequence[PanelResult]:
    """What the dashboards show when Prometheus has seen the last events."""
    await asyncio.sleep(2 * SCRAPE_SECONDS)
    return await run_panels(
        installation.prometheus.url,
        observed.start,
        time.time(),
        compress=FACTOR,
        chosen={"namespace": [installation.namespace]},
    )


def _sent(scenario: Scenario, installation: Installation, observed: Observation) -> Sent | None:
    if not scenario.countable:
        return None
    load = installation.stack.load
    return Sent(
        sum(at >= observed.start for _, at in load.sent.values()) + installation.replayed,
        # Those before the first scrape, and repeated ones.
        installation.repeats + 3 * SCRAPE_SECONDS * scenario.per_second,
    )


async def _begin(scenario: Scenario, installation: Installation) -> None:
    """Workers run, events are answered, and Prometheus has seen it."""
    stack = installation.stack
    await scenario.prepare(installation)
    if scenario.start is not None:
        await scenario.start(installation)
    else:
        for _ in range(scenario.workers):
            stack.start_worker()
    await installation.until_ready()
    installation.discover()
    if scenario.exporter:
        await installation.watch_store()
    if stack.load._running is None:
        await stack.load.start()
    calm_since, limit = time.monotonic(), time.monotonic() + seconds(30)
    # Rules over a minute need a minute without the rebalances of the start, and Prometheus needs to know some events.
    while time.monotonic() - calm_since < seconds(scenario.calm_minutes):
        await asyncio.sleep(SCRAPE_SECONDS)
        row = await top_row(installation.prometheus, installation.namespace, time.time())
        if row.state != 0:
            calm_since = time.monotonic()
        assert time.monotonic() < limit, f"{installation.namespace} is not well before its fault: {row}"


async def _watch_overview(installation: Installation, start: float, moments: list[Moment]) -> None:
    """An operator looks at the overview after every scrape."""
    while True:
        now = time.time()
        row = await top_row(installation.prometheus, installation.namespace, now)
        moments.append(Moment(minutes(now - start), row))
        await asyncio.sleep(max(0.0, SCRAPE_SECONDS - (time.time() - now)))


async def _until_well(
    installation: Installation, fixed: float, limit_minutes: float, *, tickets: bool
) -> float | None:
    """When pages (and tickets) were silent and the state was WELL; in uncompressed minutes after the fix."""
    well_since: float | None = None
    while True:
        now = time.time()
        row = await top_row(installation.prometheus, installation.namespace, now)
        if row.state == 0 and not row.pages and not (tickets and row.tickets):
            well_since = now if well_since is None else well_since
            if now - well_since >= seconds(_WELL_MINUTES):
                return minutes(well_since - fixed)
        else:
            well_since = None
        if minutes(now - fixed) > limit_minutes + _WELL_MINUTES:
            return None
        await asyncio.sleep(SCRAPE_SECONDS / 2)


async def fired(
    prometheus: Prometheus,
    namespaces: set[str],
    start: float,
    fixed: float,
    end: float,
    *,
    noticed: float,
) -> list[Fired]:
    """The alerts of these installations, and those without one; in the order of their beginning.

    Args:
        prometheus: knows them.
        namespaces: of the installations.
        start: of the fault; in seconds since the epoch, as the next two.
        fixed: its end.
        end: of the scenario.
        noticed: real seconds until the workers noticed.
    """

    def after(name: str, first: float) -> float:
        # These start to count when workers report that they are not ready, which takes as long as in production.
        real = noticed if name in _FROM_READINESS else 0.0
        return real / 60 + minutes(first - start - real)

    alerts = f'ALERTS{{alertname=~"{ALERT_PREFIX}.+", alertstate="firing"}}'
    still = {_key(labels) for labels, _ in await prometheus.query(alerts, end)}
    spans: dict[tuple[str, str, str], tuple[float, float]] = {}
    for series in await prometheus.samples(alerts, start, end):
        key, (first, *_), (*_, last) = _key(series.labels), series.samples, series.samples
        before = spans.get(key, (first[0], last[0]))
        spans[key] = min(before[0], first[0]), max(before[1], last[0])
    return [
        Fired(
            name,
            severity,
            namespace,
            after(name, first),
            None if (name, severity, namespace) in still else minutes(last - fixed),
        )
        for (name, severity, namespace), (first, last) in sorted(spans.items(), key=lambda item: item[1])
        if not namespace or namespace in namespaces
    ]


def _key(labels: Mapping[str, str]) -> tuple[str, str, str]:
    """Name, severity, namespace. A budget's page and ticket have the same name: the ticket's is marked."""
    name, severity = labels["alertname"].removeprefix(ALERT_PREFIX), labels["severity"]
    if severity == "ticket" and "slo" in labels:
        name += " (ticket)"
    return name, severity, labels.get("namespace", "")
