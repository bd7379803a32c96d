"""The source of prometheus/rules.yml: service level objectives, recording rules and alerts.

Everything is grouped by namespace and job, so installations on one Prometheus do not hide each other. Workers need no
namespace label. An embedding stage is an installation too, by the name of its job: its metrics have the workers' names.
"""

import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

__all__ = ["ALERT_PREFIX", "SEVERITIES", "SLOS", "STALE_SECONDS", "Parameters", "alerts", "groups", "render"]

Severity: TypeAlias = Literal["page", "ticket"]

SEVERITIES: Final[Mapping[Severity, str]] = {
    "page": "users are affected now, or the next event would be: respond immediately",
    "ticket": "respond during working hours",
}

ALERT_PREFIX: Final = "Anabranch"

# An instant is bad while an event has been waiting longer. It is the limit of SPEC section 7 for the age of a result: a
# result is late when its event has waited this long. In health the gauge stays below one second, because offsets are
# committed four times per second.
STALE_SECONDS: Final = 2
# An event that waits longer, in a partition that does not move, counts as not answered until it is. One whose search
# times out three times (ANABRANCH_SEARCH_TIMEOUT_SECONDS) is finished within 40 seconds.
LATE_SECONDS: Final = 60
# Below these numbers, a ratio says nothing: at six events an hour, one failure is a sixth of all events.
MIN_BAD_EVENTS: Final = 10
MIN_WAITING_EVENTS: Final = 2
# Dead letters that are not the event's fault. unreadable_batch and record_too_large are left out: nobody knows how many
# events such a batch contains. Of `expired`, those that were sent expired are subtracted.
FAILED_CODES: Final = (
    "expired|internal_error|provider_unavailable|result_too_large|search_timeout|store_unavailable"
)
# An installation is missed this long after its last target has disappeared.
REMEMBERED_HOURS: Final = 6
RECALL_OBJECTIVE: Final = 0.95
RECALL_MIN_SAMPLES: Final = 100

_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86_400
# How often the base group is evaluated: Prometheus's scrape interval in the deployment files.
_STEP: Final = 15
# How far back the last value of a counter is found, while its worker cannot be scraped.
_SCRAPE_GAP: Final = 15 * _MINUTE

_BY: Final = "by (namespace, job)"
_ON: Final = "on (namespace, job)"
_INSTANCE: Final = "namespace, job, instance"


@dataclass(frozen=True)
class Parameters:
    """What differs between deployments.

    Attributes:
        jobs: regular expression of the workers' job names in Prometheus.
        workers: number of workers that must be ready, unless Prometheus discovers more.
        embedder_jobs: as `jobs`, of embedding stages. All of their processes that Prometheus discovers must be ready.
        runbook_url: absolute URL of the runbook; an alert's name in lower case is appended as anchor.
        dashboard_url: absolute URL of Grafana.
        compress: all intervals, windows and durations are divided by it: for tests with faults.
    """

    jobs: str = "anabranch"
    workers: int = 1
    embedder_jobs: str = "anabranch-embedder"
    runbook_url: str = "https://anabranch.example.com/k8s/observability/RUNBOOK.html"
    dashboard_url: str = "http://localhost:3000"
    compress: float = 1

    @property
    def all_jobs(self) -> str:
        return f"{self.jobs}|{self.embedder_jobs}"

    def span(self, seconds: float) -> str:
        """A duration for Prometheus, compressed."""
        milliseconds = round(seconds * 1000 / self.compress)
        for unit, length in (("d", _DAY), ("h", _HOUR), ("m", _MINUTE), ("s", 1)):
            if milliseconds % (length * 1000) == 0:
                return f"{milliseconds // (length * 1000)}{unit}"
        return f"{milliseconds}ms"

    def seconds(self, seconds: float) -> str:
        """A number of seconds for an expression, compressed."""
        return f"{seconds / self.compress:g}"


@dataclass(frozen=True)
class Burn:
    """A burn rate that leads to an alert.

    Attributes:
        factor: 1 spends the budget in 30 days.
        long_seconds: the window that shows that it matters.
        short_seconds: the window that shows that it continues.
        for_seconds: how long both must exceed the factor.
    """

    factor: float
    long_seconds: int
    short_seconds: int
    for_seconds: int


@dataclass(frozen=True)
class Slo:
    """A service level objective over 30 days.

    Attributes:
        objective: the share of events, or of time, that must be good.
        unit: what the objective counts.
        bad: completes "…% of …".
        by_time: whether it counts seconds, not events.
    """

    name: str
    objective: float
    unit: str
    bad: str
    page: Burn
    ticket: Burn
    by_time: bool = False

    @property
    def budget(self) -> str:
        return f"{1 - self.objective:g}"

    @property
    def alert(self) -> str:
        return f"{ALERT_PREFIX}{self.name.capitalize()}Burn"


# An outage is reported by other alerts, within three minutes. These report what is bad without being an outage.
_FAST: Final = Burn(14.4, _HOUR, 5 * _MINUTE, _MINUTE)
_SLOW: Final = Burn(1, 3 * _DAY, 6 * _HOUR, 30 * _MINUTE)

SLOS: Final = (
    Slo("availability", 0.999, "valid events", "were not answered", _FAST, _SLOW),
    Slo("duration", 0.99, "events", "took longer than 250 ms", _FAST, _SLOW),
    # A budget of 5 % burns at most 20 times as fast as allowed, so 14.4 would page after 43 minutes of an outage. 6
    # pages after 18 minutes, or if 30 % of an hour are bad.
    Slo(
        "freshness",
        0.95,
        "the time",
        f"was bad: an event had been waiting longer than {STALE_SECONDS} s",
        Burn(6, _HOUR, 5 * _MINUTE, _MINUTE),
        _SLOW,
        by_time=True,
    ),
)

# Window, and the group that evaluates it: a sum over 30 days need not be computed every 15 seconds.
_WINDOWS: Final[Mapping[str, tuple[int, str]]] = {
    "5m": (5 * _MINUTE, "anabranch"),
    "1h": (_HOUR, "anabranch"),
    "6h": (6 * _HOUR, "anabranch-slow"),
    "3d": (3 * _DAY, "anabranch-slow"),
    "30d": (30 * _DAY, "anabranch-budget"),
}
_INTERVALS: Final[Mapping[str, int]] = {
    "anabranch": _STEP,
    "anabranch-slow": _MINUTE,
    # In an outage, nobody should see a whole budget for minutes.
    "anabranch-budget": _MINUTE,
}


@dataclass(frozen=True)
class Record:
    """A recording rule."""

    name: str
    expression: str
    labels: Mapping[str, str] = field(default_factory=dict)
    comment: str = ""


@dataclass(frozen=True)
class Alert:
    """An alert.

    Attributes:
        name: without the prefix.
        for_seconds: how long the expression must hold; not compressed.
    """

    name: str
    severity: Severity
    expression: str
    summary: str
    description: str
    for_seconds: int = 0
    dashboard: str = "overview"
    labels: Mapping[str, str] = field(default_factory=dict)
    comment: str = ""


Rule: TypeAlias = Record | Alert


def groups(parameters: Parameters) -> Mapping[str, list[Rule]]:
    """All rules by group, in the order of evaluation."""
    found: dict[str, list[Rule]] = {
        "anabranch": [
            *_workers(parameters),
            *_waiting(parameters),
            *_increases(parameters),
            *_state(parameters),
            *_slo_events(parameters),
        ],
        "anabranch-slow": [],
        "anabranch-budget": [],
    }
    for window, (seconds, group) in _WINDOWS.items():
        for slo in SLOS:
            found[group] += _window(parameters, slo, window, seconds)
    found["anabranch"] += [*_symptoms(parameters), *(_burn(slo, "page") for slo in SLOS)]
    found["anabranch-slow"] += [
        *(_burn(slo, "ticket") for slo in SLOS),
        *_tickets(parameters),
        *_recall(parameters),
    ]
    found["anabranch-budget"] += _budget()
    return found


def alerts(parameters: Parameters) -> list[Alert]:
    return [rule for rules in groups(parameters).values() for rule in rules if isinstance(rule, Alert)]


def _workers(parameters: Parameters) -> Iterator[Rule]:
    up = f'up{{job=~"{parameters.all_jobs}"}}'
    yield Record(
        "anabranch:workers_up:count",
        f"""
        sum {_BY} ({up})
        or
        0 * group {_BY} (last_over_time({up}[{parameters.span(REMEMBERED_HOURS * _HOUR)}]))
        """,
        comment=f"An installation without targets counts as down for {REMEMBERED_HOURS} hours.",
    )
    yield Record(
        "anabranch:workers_ready:count",
        f"sum {_BY} (anabranch_ready) or 0 * anabranch:workers_up:count",
    )
    yield Record(
        "anabranch:partitions:count",
        f"count {_BY} (count by (namespace, job, partition) (anabranch_oldest_waiting_seconds))",
    )
    workers, embedders = (
        f'count {_BY} (up{{job=~"{jobs}"}})' for jobs in (parameters.jobs, parameters.embedder_jobs)
    )
    targets = f"(clamp_min({workers}, {parameters.workers}) or {embedders})"
    yield Record(
        "anabranch:workers_wanted:count",
        f"""
        max_over_time(anabranch:partitions:count[{parameters.span(_HOUR)}])
        < {targets}
        or
        {targets}
        or
        {parameters.workers} + 0 * anabranch:workers_up:count
        """,
        comment="More workers than partitions are never ready.",
    )


def _waiting(parameters: Parameters) -> Iterator[Rule]:
    yield Record(
        "anabranch:partition_oldest_waiting_seconds:min",
        "min by (namespace, job, partition) (anabranch_oldest_waiting_seconds)",
        comment="While partitions move, two workers report the same one. The one that reads it has the lowest value.",
    )
    yield Record(
        "anabranch:oldest_waiting_seconds:max",
        f"max {_BY} (anabranch:partition_oldest_waiting_seconds:min)",
    )
    yield Record(
        "anabranch:partition_committed_offset:max",
        "max by (namespace, job, partition) (anabranch_committed_offset)",
    )
    yield Record(
        "anabranch:partition_stuck_events:count",
        f"""
        max by (namespace, job, partition) (anabranch_consumer_lag)
        and
        anabranch:partition_oldest_waiting_seconds:min > {parameters.seconds(LATE_SECONDS)}
        and
        changes(anabranch:partition_committed_offset:max[{parameters.span(_MINUTE)}]) == 0
        or
        0 * anabranch:partition_oldest_waiting_seconds:min
        """,
        comment="Events that wait in partitions where nothing has been committed for a minute. They count as not"
        " answered, until they are. While workers work through a burst, events wait too, but their partitions move.",
    )
    yield Record(
        "anabranch:stuck_events:count",
        f"sum {_BY} (anabranch:partition_stuck_events:count) or 0 * anabranch:workers_up:count",
    )


def _increase(parameters: Parameters, metric: str, *labels: str) -> str:
    """What a counter has counted since the last evaluation: the difference of what both have seen.

    `increase` extrapolates, and does not see what a worker counts before its first scrape. Over these values,
    sum_over_time is exact: what one evaluation leaves out, the next one includes.
    """
    seen = _seen_name(metric)
    return f"""
        sum by ({", ".join(labels)}) (
          {seen}
          - last_over_time({seen}[{parameters.span(_SCRAPE_GAP)}] offset {parameters.span(_STEP / 2)}) >= 0
          or
          {seen}
          and on ({_INSTANCE}) time() - process_start_time_seconds < {parameters.seconds(300)}
        )
        """


def _seen(metric: str, where: str = "", comment: str = "") -> Record:
    """The value of a counter that this evaluation sees.

    The counter one interval ago is not what the last evaluation saw. A scrape's samples are stored when it ends, with
    the time of its start. An evaluation during a scrape does not see them, but the next one finds them in its past, so
    nobody would count that difference. Phases are constant, so this would happen in every interval, or never.
    """
    return Record(_seen_name(metric), f"{metric}{where}", comment=comment)


def _seen_name(metric: str) -> str:
    return f"anabranch:{metric.removeprefix('anabranch_')}:seen"


def _increases(parameters: Parameters) -> Iterator[Rule]:
    comment = (
        "What each counter has counted since the last evaluation: the difference of what both have seen, or all of it"
        " if the worker has just started. Sums over time are exact; those of increase() are not."
    )
    for name, labels in {
        "events_received": (),
        "events": ("outcome",),
        "dead_letters": ("code",),
        "expired_on_arrival": (),
        "placeholder_dead_letters": (),
        "replies": ("outcome",),
        "retries": ("cause",),
        "warnings": ("code",),
        "live_recall": ("size",),
        "live_recall_skipped": ("reason",),
    }.items():
        metric = f"anabranch_{name}_total"
        yield _seen(metric, comment=comment)
        yield Record(f"anabranch:{name}:increase", _increase(parameters, metric, _INSTANCE, *labels))
        comment = ""


def _state(parameters: Parameters) -> Iterator[Rule]:
    minute = parameters.span(_MINUTE)
    yield Record(
        "anabranch:outage:bool",
        f"""
        1 + (anabranch:workers_ready:count == 0)
        or
        1 + 0 * (
          anabranch:stuck_events:count > 0
          unless
          sum {_BY} (sum_over_time(anabranch:events:increase[{minute}])) > 0
        )
        or
        0 * anabranch:workers_up:count
        """,
        comment="No worker is ready, or partitions are stuck and nothing has been finished for a minute.",
    )
    yield Record(
        "anabranch:stale:bool",
        f"""
        anabranch:oldest_waiting_seconds:max > bool {STALE_SECONDS}
        or
        1 + 0 * anabranch:workers_up:count
        """,
        comment="1 in a bad instant of freshness, also while no worker reads a partition: nobody knows what waits.",
    )
    yield Record(
        "anabranch:state",
        f"""
        anabranch:outage:bool
        +
        clamp_max(
          anabranch:outage:bool
          + (anabranch:workers_ready:count < bool anabranch:workers_wanted:count)
          + (avg_over_time(anabranch:stale:bool[{minute}]) >= bool 0.5)
          + (
            (count {_BY} (ALERTS{{alertname=~"{ALERT_PREFIX}.+", alertstate="firing", severity="page"}}) > bool 0)
            or
            0 * anabranch:workers_up:count
          ),
          1
        )
        """,
        comment="0: well. 1: degraded: too few workers, stale, or a page is firing. 2: out.",
    )


def _slo_events(parameters: Parameters) -> Iterator[Rule]:
    bad = f'sum {_BY} (anabranch:dead_letters:increase{{code=~"{FAILED_CODES}"}})'
    yield Record(
        "anabranch:slo_bad_events:increase",
        f"""
        {bad}
        - sum {_BY} (anabranch:expired_on_arrival:increase)
        """,
        {"slo": "availability"},
        comment="Availability: valid events that were dead-lettered, of those and the answered ones.",
    )
    yield Record(
        "anabranch:slo_events:increase",
        f"""
        sum {_BY} (anabranch:events:increase{{outcome="answered"}})
        + {_ON}
        anabranch:slo_bad_events:increase{{slo="availability"}}
        """,
        {"slo": "availability"},
    )
    duration, one_installation = "anabranch_event_duration_seconds", "namespace, job"
    yield _seen(f"{duration}_count", comment="Duration: finished events, without those within the limit.")
    yield _seen(f"{duration}_bucket", '{le="0.25"}')
    yield Record(
        "anabranch:slo_events:increase",
        _increase(parameters, f"{duration}_count", one_installation),
        {"slo": "duration"},
    )
    yield Record(
        "anabranch:slo_bad_events:increase",
        f"""
        anabranch:slo_events:increase{{slo="duration"}}
        - {_ON}
        {_increase(parameters, f"{duration}_bucket", one_installation).strip()}
        """,
        {"slo": "duration"},
    )


def _window(parameters: Parameters, slo: Slo, window: str, seconds: int) -> Iterator[Rule]:
    """The share of bad events, or of bad time, in a window."""
    labels, span = {"slo": slo.name}, parameters.span(seconds)
    ratio = f"anabranch:slo_errors:ratio{window}"
    if slo.by_time:
        # Not avg_over_time: a Prometheus that has just started knows one bad minute, not a bad hour.
        yield Record(ratio, f"sum_over_time(anabranch:stale:bool[{span}]) / {seconds // _STEP}", labels)
        return
    # They are answered later; until then they are not.
    stuck = f" + {_ON} group_left () anabranch:stuck_events:count" if slo.name == "availability" else ""
    bad, events = (
        f'sum_over_time(anabranch:{kind}:increase{{slo="{slo.name}"}}[{span}]){stuck}'
        for kind in ("slo_bad_events", "slo_events")
    )
    yield Record(f"anabranch:slo_bad_events:increase{window}", bad, labels)
    share = f"""
        anabranch:slo_bad_events:increase{window}{{slo="{slo.name}"}}
        /
        ({events} > 0)
        """
    if slo.name == "availability" and window == "5m":
        # Nothing finishes in an outage, so nothing fails.
        share = f"""
        1 + 0 * (min_over_time(anabranch:outage:bool[{parameters.span(_MINUTE)}]) == 1)
        or {_ON}
        {share.strip()}
        """
    yield Record(ratio, share, labels)


def _burn(slo: Slo, severity: Severity) -> Alert:
    burn = slo.page if severity == "page" else slo.ticket
    names = {seconds: window for window, (seconds, _) in _WINDOWS.items()}
    long, short = names[burn.long_seconds], names[burn.short_seconds]
    conditions = [
        f'anabranch:slo_errors:ratio{window}{{slo="{slo.name}"}} > {burn.factor:g} * {slo.budget}'
        for window in (long, short)
    ]
    if not slo.by_time:
        conditions.append(f'anabranch:slo_bad_events:increase{long}{{slo="{slo.name}"}} >= {MIN_BAD_EVENTS}')
    return Alert(
        slo.alert.removeprefix(ALERT_PREFIX),
        severity,
        "\nand\n".join(conditions),
        f"{slo.name.capitalize()}: the error budget burns {burn.factor:g} times too fast"
        if burn.factor > 1
        else f"{slo.name.capitalize()}: the error budget will not last for 30 days",
        f"Over the last {long}, {{{{ $value | humanizePercentage }}}} of {slo.unit} {slo.bad}. The objective allows"
        f" {100 * (1 - slo.objective):g}%.",
        for_seconds=burn.for_seconds,
    )


def _symptoms(parameters: Parameters) -> Iterator[Rule]:
    minute = parameters.span(_MINUTE)
    late, up = parameters.seconds(LATE_SECONDS), f'{{job=~"{parameters.all_jobs}"}}'
    yield Alert(
        "NoWorkerUp",
        "page",
        "anabranch:workers_up:count == 0 or absent(anabranch:workers_up:count)",
        "No worker is up",
        "Prometheus cannot reach any worker. No event is answered.",
        for_seconds=90,
    )
    yield Alert(
        "NoneReady",
        "page",
        "anabranch:workers_ready:count == 0 and anabranch:workers_up:count > 0",
        "No worker is ready",
        "Workers run, but none can answer events: PostgreSQL (an embedding stage: its provider), Kafka, or both cannot"
        " be used.",
        for_seconds=90,
    )
    yield Alert(
        "WorkerStuck",
        "page",
        f"""
        sum by ({_INSTANCE}) (
          anabranch_consumer_lag
          and
          (
            anabranch_oldest_waiting_seconds
            == on (namespace, job, partition) group_left ()
            anabranch:partition_oldest_waiting_seconds:min
          ) > {late}
        ) >= {MIN_WAITING_EVENTS}
        and
        sum by ({_INSTANCE}) (sum_over_time(anabranch:events:increase[{minute}])) == 0
        """,
        "Worker {{ $labels.instance }} is stuck",
        "This worker has not finished any event for two minutes. {{ $value }} events wait for it.",
        for_seconds=60,
        dashboard="pipeline",
    )
    yield Alert(
        "PartitionStuck",
        "page",
        f"anabranch:stuck_events:count >= {MIN_WAITING_EVENTS}",
        "A partition is stuck",
        "Nothing has been committed in at least one partition for two minutes. {{ $value }} events wait in such"
        " partitions.",
        for_seconds=60,
        dashboard="pipeline",
    )
    yield Alert(
        "CrashLoop",
        "page",
        f"max {_BY} (changes(process_start_time_seconds{up}[{parameters.span(15 * _MINUTE)}])) >= 3",
        "A worker restarts again and again",
        "A worker has restarted {{ $value }} times in 15 minutes. Its events are delayed and answered repeatedly.",
    )


def _tickets(parameters: Parameters) -> Iterator[Rule]:
    hour, half = parameters.span(_HOUR), parameters.span(30 * _MINUTE)
    dead_letters = f"sum {_BY} (sum_over_time(anabranch:dead_letters:increase[{half}]))"
    finished = f'sum {_BY} (sum_over_time(anabranch:events:increase{{outcome!="skipped"}}[{half}]))'
    yield Alert(
        "FewerReady",
        "ticket",
        "anabranch:workers_ready:count < anabranch:workers_wanted:count and anabranch:workers_ready:count > 0",
        "Fewer workers are ready than wanted",
        "Only {{ $value }} workers are ready. The others are down or cannot use PostgreSQL (an embedding stage: its"
        " provider) or Kafka.",
        for_seconds=10 * _MINUTE,
    )
    yield Alert(
        "DeadLettersHigh",
        "ticket",
        f"""
        {dead_letters}
        / {finished} > 0.05
        and
        {dead_letters} >= {MIN_BAD_EVENTS}
        """,
        "Many events are dead-lettered",
        "{{ $value | humanizePercentage }} of all events became dead letters in the last 30 minutes.",
        for_seconds=5 * _MINUTE,
        dashboard="pipeline",
    )
    yield Alert(
        "InternalError",
        "ticket",
        f'sum {_BY} (sum_over_time(anabranch:dead_letters:increase{{code="internal_error"}}[{hour}])) > 0',
        "An event failed with an unexpected error",
        "{{ $value }} events were dead-lettered as internal_error in the last hour. This is a defect.",
        dashboard="pipeline",
    )
    yield Alert(
        "PlaceholderDeadLetters",
        "ticket",
        f"sum {_BY} (sum_over_time(anabranch:placeholder_dead_letters:increase[{hour}])) > 0",
        "Dead letters do not contain their events",
        "{{ $value }} dead letters of the last hour are placeholders. Their events exist only in the input topic,"
        " until its retention deletes them.",
        dashboard="pipeline",
    )
    yield Alert(
        "VersionSkew",
        "ticket",
        f"count {_BY} (count by (namespace, job, version) (anabranch_build_info)) > 1",
        "Workers of different releases run",
        "Workers of {{ $value }} releases have been running for an hour.",
        for_seconds=_HOUR,
        dashboard="pipeline",
    )


def _recall(parameters: Parameters) -> Iterator[Rule]:
    window = parameters.span(_DAY)
    samples, total, squares = (
        f"sum by (namespace, job, size) (increase(anabranch_live_recall_{name}[{window}]))"
        for name in ("total", "sum", "squares_sum")
    )
    yield Record(
        "anabranch:live_recall_samples:increase1d",
        samples,
        comment="Recall of live answers compared with exact search, and half of its 95 % confidence interval; apart for"
        " scopes of more than 100,000 rows, which are sampled more rarely.",
    )
    yield Record(
        "anabranch:live_recall:mean1d",
        f"{total} / (anabranch:live_recall_samples:increase1d > 0)",
    )
    yield Record(
        "anabranch:live_recall:margin1d",
        f"""
        1.96 * sqrt(
          clamp_min(
            {squares}
            / (anabranch:live_recall_samples:increase1d > 0)
            - anabranch:live_recall:mean1d ^ 2,
            0
          )
          / anabranch:live_recall_samples:increase1d
        )
        """,
    )
    yield Alert(
        "RecallLow",
        "ticket",
        f"""
        anabranch:live_recall:mean1d{{size="normal"}} + anabranch:live_recall:margin1d < {RECALL_OBJECTIVE:g}
        and
        anabranch:live_recall_samples:increase1d >= {RECALL_MIN_SAMPLES}
        """,
        "Searches miss nearest neighbours",
        "At most {{ $value | humanizePercentage }} of the nearest chunks are found, with 95 % confidence."
        f" The objective is {100 * RECALL_OBJECTIVE:g}%.",
        for_seconds=15 * _MINUTE,
        dashboard="pipeline",
    )


def _budget() -> Iterator[Rule]:
    for slo in SLOS:
        yield Record("anabranch:slo_objective:ratio", f"vector({slo.objective:g})", {"slo": slo.name})
    yield Record(
        "anabranch:slo_budget_left:ratio",
        "1 - anabranch:slo_errors:ratio30d / on (slo) group_left () (1 - anabranch:slo_objective:ratio)",
        comment="1: nothing is spent. Below 0: the objective is missed.",
    )


def render(parameters: Parameters) -> str:
    """The rule file."""
    lines = [
        "# Written by `make observability` from ../rules.py: change that file. ../RUNBOOK.md explains every alert.",
        "#",
        *(f"#   {slo.name:12}  {100 * slo.objective:g} % of {slo.unit} over 30 days" for slo in SLOS),
        "#",
        *(f"#   {severity:12}  {meaning}" for severity, meaning in SEVERITIES.items()),
        *(
            (f"#   All intervals, windows and durations are divided by {parameters.compress:g}.",)
            if parameters.compress != 1
            else ()
        ),
        "",
        "groups:",
    ]
    for name, rules in groups(parameters).items():
        lines += [f"  - name: {name}", f"    interval: {parameters.span(_INTERVALS[name])}", "    rules:"]
        for rule in rules:
            lines += _record(rule) if isinstance(rule, Record) else _alert(parameters, rule)
    return "\n".join(lines) + "\n"


def _record(rule: Record) -> Iterator[str]:
    yield from _comment(rule.comment)
    yield f"      - record: {rule.name}"
    yield from _expression(rule.expression)
    yield from _mapping("labels", rule.labels)


def _alert(parameters: Parameters, rule: Alert) -> Iterator[str]:
    yield from _comment(rule.comment)
    name = ALERT_PREFIX + rule.name
    yield f"      - alert: {name}"
    yield from _expression(rule.expression)
    if rule.for_seconds:
        yield f"        for: {parameters.span(rule.for_seconds)}"
    yield from _mapping("labels", {"severity": rule.severity, **rule.labels})
    yield from _mapping(
        "annotations",
        {
            "summary": rule.summary,
            "description": rule.description,
            "runbook_url": f"{parameters.runbook_url}#{name.lower()}",
            "dashboard_url": f"{parameters.dashboard_url}/d/anabranch-{rule.dashboard}"
            "?var-namespace={{ $labels.namespace }}&var-job={{ $labels.job }}",
        },
    )


def _comment(text: str) -> Iterator[str]:
    return (f"      # {line}" for line in textwrap.wrap(text, width=110))


def _expression(text: str) -> Iterator[str]:
    """Without the indentation that it has in this file."""
    lines = inspect.cleandoc(text).splitlines()
    if len(lines) == 1:
        yield f"        expr: {json.dumps(lines[0]) if _needs_quotes(lines[0]) else lines[0]}"
        return
    yield "        expr: |-"
    yield from (f"          {line}" for line in lines)


def _needs_quotes(text: str) -> bool:
    return ": " in text or " #" in text or text[0] in "{}[]&*!|>'\"%@`"


def _mapping(name: str, values: Mapping[str, str]) -> Iterator[str]:
    if values:
        yield f"        {name}:"
        yield from (
            f"          {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
        )
