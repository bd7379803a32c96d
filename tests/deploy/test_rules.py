"""Which alerts fire when, and which stay silent: `promtool test rules` with series like those of real workers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import pytest
import yaml

from k8s.observability import rules as rule_source
from k8s.observability.rules import ALERT_PREFIX, Parameters
from tests.left_out import unavailable

Minute: TypeAlias = float
#: ok; waiting: ready, but no event is finished; unready; down: the scrape fails; gone: no target.
Mode: TypeAlias = Literal["ok", "waiting", "unready", "down", "gone"]

STEP: Final = 15
PER_MINUTE: Final = 60 // STEP
EMBEDDER: Final = "anabranch-embedder"


@dataclass(frozen=True)
class Worker:
    """A worker as Prometheus sees it, in steps of 15 seconds.

    Attributes:
        instance: unique in its installation.
        namespace: None: there is no such label.
        mode: its mode in each minute.
        per_minute: events that arrive, and are answered within 250 ms.
        slow: how many of them are slow, per minute; None: an embedding stage, which does not have this metric.
        counts: further counters, by series without common labels; how many in each minute.
        oldest: age of the oldest event, in the first partition, while no partition is stuck.
        stuck: its partitions that are stuck, in each minute.
        started: the minute of its start, before the test.
        restarts: minutes of further starts: its counters start at 0.
    """

    instance: str = "a:6066"
    namespace: str | None = "one"
    job: str = "anabranch"
    partitions: Sequence[int] = (0, 1)
    mode: Callable[[Minute], Mode] = lambda _: "ok"
    per_minute: Callable[[Minute], float] = lambda _: 600
    slow: Callable[[Minute], float] | None = lambda _: 0
    counts: Mapping[str, Callable[[Minute], float]] = field(default_factory=dict)
    gauges: Mapping[str, Callable[[Minute], float]] = field(default_factory=dict)
    oldest: Callable[[Minute], float] = lambda _: 0.3
    stuck: Callable[[Minute], Sequence[int]] = lambda _: ()
    started: Minute = -60
    restarts: Sequence[Minute] = ()
    version: str = "1.0.0"

    def series(self, minutes: int) -> dict[str, list[float | None]]:
        found: dict[str, list[float | None]] = {}
        totals: dict[str, float] = {}
        since: dict[int, Minute] = {}
        for step in range(minutes * PER_MINUTE + 1):
            minute = step / PER_MINUTE
            mode = self.mode(minute)
            started = max(start for start in (self.started, *self.restarts) if start <= minute)
            if started == minute:
                totals = {}
            sample = {"up{}": 0.0 if mode == "down" else 1.0} if mode != "gone" else {}
            if mode in {"ok", "waiting", "unready"}:
                sample |= self._counters(minute, mode, totals)
                sample |= self._gauges(minute, mode, since)
                sample["process_start_time_seconds{}"] = started * 60
            for name in found.keys() | sample.keys():
                values = found.setdefault(name, [None] * step)
                values.append(sample.get(name))
        return {self._labelled(name): values for name, values in found.items()}

    def _counters(self, minute: Minute, mode: Mode, totals: dict[str, float]) -> dict[str, float]:
        done = self.per_minute(minute) if mode == "ok" else 0.0
        letters = {
            name: of(minute) for name, of in self.counts.items() if name.startswith("anabranch_dead_letters")
        }
        durations = {}
        if self.slow is not None:
            slow = self.slow(minute) if mode == "ok" else 0.0
            durations = {
                'anabranch_event_duration_seconds_count{profile="chat"}': done,
                'anabranch_event_duration_seconds_bucket{profile="chat", le="0.25"}': done - slow,
            }
        for name, rate in {
            **durations,
            'anabranch_events_total{outcome="answered"}': done,
            'anabranch_events_total{outcome="dead_lettered"}': sum(letters.values()),
            'anabranch_events_total{outcome="skipped"}': 0,
            "anabranch_events_received_total{}": done + sum(letters.values()),
            'anabranch_dead_letters_total{code="internal_error"}': 0,
            'anabranch_dead_letters_total{code="contract_violation"}': 0,
            "anabranch_expired_on_arrival_total{}": 0,
            "anabranch_placeholder_dead_letters_total{}": 0,
            **{name: of(minute) for name, of in self.counts.items()},
        }.items():
            totals[name] = totals.get(name, 0) + rate / PER_MINUTE
        return dict(totals)

    def _gauges(self, minute: Minute, mode: Mode, since: dict[int, Minute]) -> dict[str, float]:
        found = {
            "anabranch_ready{}": 0.0 if mode == "unready" else 1.0,
            f'anabranch_build_info{{version="{self.version}"}}': 1.0,
            **{name: of(minute) for name, of in self.gauges.items()},
        }
        stuck = self.partitions if mode != "ok" else self.stuck(minute)
        for partition in self.partitions:
            waiting = (minute - since.setdefault(partition, minute)) if partition in stuck else 0
            if partition not in stuck:
                since.pop(partition, None)
            rate = self.per_minute(minute) / len(self.partitions)
            oldest = self.oldest(minute) if partition == self.partitions[0] else 0.0
            label = f'{{partition="{partition}"}}'
            found[f"anabranch_oldest_waiting_seconds{label}"] = max(oldest, 60 * waiting)
            lag = rate * max(waiting, oldest / 60) if rate else float(oldest > 0)
            found.setdefault(f"anabranch_consumer_lag{label}", lag)
            found[f"anabranch_committed_offset{label}"] = rate * (
                (minute if not waiting else since[partition]) + 60
            )
        return found

    def _labelled(self, name: str) -> str:
        own = {"namespace": self.namespace, "job": self.job, "instance": self.instance}
        labels = ", ".join(f'{label}="{value}"' for label, value in own.items() if value is not None)
        metric, _, rest = name.partition("{")
        return f"{metric}{{{labels}{', ' if rest != '}' else ''}{rest}"


def _values(values: Sequence[float | None]) -> Iterator[str]:
    """In promtool's notation. A failed scrape ends a series at once."""
    previous: float | None = None
    for value in values:
        if value is None:
            yield "_" if previous is None else "stale"
        else:
            yield f"{value:.6g}" if value < 1e5 else f"{value:.1f}"
        previous = value


@dataclass(frozen=True)
class Case:
    """Workers, and what fires at which minute: `alert` for a page, `alert?` for a ticket, `namespace/…` if not one/,
    `embedder/…` for the embedding stage in it.

    Attributes:
        minutes: no alert fires in so many; else only what `firing` says is checked.
        values: further queries with their results at a minute.
        wanted: number of workers that must be ready.
        group: evaluate only this group of rules, over recorded series.
    """

    name: str
    workers: Sequence[Worker]
    firing: Mapping[Minute, Sequence[str]]
    values: Sequence[tuple[Minute, str, Mapping[str, float]]] = ()
    wanted: int = 1
    minutes: int = 0
    group: str | None = None
    recorded: Mapping[str, Sequence[float]] = field(default_factory=dict)


def between(start: Minute, end: Minute, then: Mode, otherwise: Mode = "ok") -> Callable[[Minute], Mode]:
    return lambda minute: then if start <= minute < end else otherwise


def constant(rate: float, after: Minute = 0) -> Callable[[Minute], float]:
    return lambda minute: rate if minute >= after else 0


def at(*minutes: Minute, count: float = 1) -> Callable[[Minute], float]:
    """So many in the step that ends at each of these minutes."""
    return lambda minute: count * PER_MINUTE if minute in minutes else 0


def pair(**options: Any) -> list[Worker]:
    return [
        Worker("a:6066", partitions=(0, 1), **options),
        Worker("b:6066", partitions=(2, 3), **options),
    ]


def embedder(**options: Any) -> Worker:
    """A process of an embedding stage whose provider takes more than a second."""
    return Worker("e:6066", job=EMBEDDER, slow=None, **({"oldest": constant(1.5)} | options))


def letters(code: str) -> str:
    return f'anabranch_dead_letters_total{{code="{code}"}}'


six_an_hour = at(*range(5, 1000, 10))
slow_or_failed = {
    "slow": at(25),
    "counts": {letters("search_timeout"): at(45)},
    # Nothing else is answered for ten minutes, so three timeouts do not prove that this event is the cause.
    "oldest": lambda minute: 60 * (minute - 34) if 34 <= minute < 45 else 0.0,
}
availability5m = 'anabranch:slo_errors:ratio5m{slo="availability"}'
one = '{namespace="one", job="anabranch"}'

CASES: Final = [
    Case(
        "healthy",
        pair(),
        {},
        [
            (55, "anabranch:state", {f"anabranch:state{one}": 0}),
            (
                55,
                'anabranch:slo_budget_left:ratio{slo="availability"}',
                {'anabranch:slo_budget_left:ratio{namespace="one", job="anabranch", slo="availability"}': 1},
            ),
        ],
        wanted=2,
        minutes=60,
    ),
    Case("low traffic", [Worker(per_minute=six_an_hour)], {}, minutes=60),
    Case(
        "low traffic with a slow and a failed event",
        [Worker(per_minute=six_an_hour, **slow_or_failed)],  # type: ignore[arg-type]  # the parameters' values have two types
        {},
        minutes=75,
    ),
    Case(
        "no worker is ready",
        pair(mode=between(10, 17, "unready")),
        {
            9: [],
            13: ["NoneReady", "WorkerStuck", "PartitionStuck", "AvailabilityBurn"],
            21: [],
        },
        [
            (10.5, "anabranch:state", {f"anabranch:state{one}": 2}),
            (11.5, availability5m, {f'{availability5m[:-1]}, namespace="one", job="anabranch"}}': 1}),
        ],
    ),
    Case(
        "no worker is ready, and nobody sends events",
        pair(mode=between(10, 17, "unready"), per_minute=constant(0), oldest=constant(0)),
        {13: ["NoneReady"], 18: []},
        [(11.5, availability5m, {f'{availability5m[:-1]}, namespace="one", job="anabranch"}}': 1})],
    ),
    Case(
        "ready workers do not finish events",
        pair(mode=between(10, 17, "waiting")),
        {13: ["WorkerStuck", "PartitionStuck", "AvailabilityBurn"], 21: []},
        [(12, "anabranch:state", {f"anabranch:state{one}": 2})],
    ),
    Case(
        "one of two workers is cut off from the store",
        [
            Worker("a:6066", partitions=(0, 1), mode=between(10, 60, "unready")),
            Worker("b:6066", partitions=(2, 3)),
        ],
        {
            15: ["WorkerStuck", "PartitionStuck", "AvailabilityBurn"],
            21: ["WorkerStuck", "PartitionStuck", "AvailabilityBurn", "FewerReady?"],
            31: ["WorkerStuck", "PartitionStuck", "AvailabilityBurn", "FewerReady?", "FreshnessBurn"],
        },
        [(11, "anabranch:state", {f"anabranch:state{one}": 1})],
        wanted=2,
    ),
    Case(
        "one of two workers is cut off from Kafka, and the other one has its partitions",
        [
            Worker("a:6066", partitions=(0, 1), mode=between(10, 60, "unready")),
            Worker("b:6066", partitions=(0, 1, 2, 3)),
        ],
        {15: [], 21: ["FewerReady?"]},
        wanted=2,
    ),
    Case(
        "a partition is stuck",
        [Worker(partitions=(0, 1, 2, 3), stuck=lambda minute: [2] if minute >= 10 else [])],
        {15: ["PartitionStuck", "AvailabilityBurn"]},
    ),
    Case(
        "a partition is stuck, with little behind it",
        [
            Worker(
                partitions=(0, 1, 2, 3),
                per_minute=constant(2),
                stuck=lambda minute: [2] if minute >= 10 else [],
                gauges={'anabranch_consumer_lag{partition="2"}': constant(2, 10)},
            )
        ],
        {15: ["PartitionStuck"]},
    ),
    Case(
        "workers work through a burst of events, all sent at the same time",
        pair(oldest=lambda minute: 60 * (minute - 5) if 5 < minute < 15 else 0.3),
        {},
        minutes=16,
    ),
    Case("no worker is up", pair(mode=between(10, 20, "down")), {11: [], 13: ["NoWorkerUp"], 21: []}),
    Case(
        "targets disappear",
        pair(mode=between(10, 400, "gone")),
        {13: ["NoWorkerUp"], 30: ["NoWorkerUp", "FreshnessBurn"]},
    ),
    Case("nothing was ever there", [], {5: ["/NoWorkerUp"]}),
    Case(
        "a worker is down",
        [Worker("a:6066", mode=between(10, 60, "down")), Worker("b:6066")],
        {19: [], 21: ["FewerReady?"]},
    ),
    Case("fewer workers than wanted", [Worker()], {9: [], 11: ["FewerReady?"]}, wanted=2),
    Case("more workers than partitions", [Worker("a:6066"), Worker("b:6066", partitions=())], {}, minutes=25),
    Case(
        "crash loop",
        [
            Worker(
                mode=lambda minute: "down" if minute >= 10 and (minute - 10) % 1.5 < 0.75 else "ok",
                restarts=[10.75 + 1.5 * number for number in range(20)],
            )
        ],
        {10: [], 15: ["CrashLoop"], 25: ["CrashLoop"]},
    ),
    Case(
        "a rollout",
        [Worker(instance, restarts=[10 + number]) for number, instance in enumerate(("a", "b", "c", "d"))],
        {},
        minutes=25,
    ),
    Case(
        "half of the events were expired when they were sent",
        pair(
            counts={letters("expired"): constant(300), "anabranch_expired_on_arrival_total{}": constant(300)}
        ),
        {45: ["DeadLettersHigh?"]},
    ),
    Case(
        "one event in ten expires while it waits",
        pair(counts={letters("expired"): constant(60)}),
        {5: ["AvailabilityBurn"], 45: ["AvailabilityBurn", "AvailabilityBurn?", "DeadLettersHigh?"]},
    ),
    Case(
        "poison flood",
        pair(counts={letters("contract_violation"): constant(6000, 10)}),
        {12: [], 16: ["DeadLettersHigh?"]},
    ),
    Case(
        "one event in 500 fails",
        pair(counts={letters("search_timeout"): constant(1.2)}),
        {20: [], 45: ["AvailabilityBurn?"]},
    ),
    Case(
        "an unexpected error before the first scrape",
        [Worker(started=0, counts={letters("internal_error"): at(0)})],
        {2: ["InternalError?"], 58: ["InternalError?"], 65: []},
    ),
    Case(
        "placeholders",
        [Worker(counts={"anabranch_placeholder_dead_letters_total{}": at(10.0)})],
        {12: ["PlaceholderDeadLetters?"]},
    ),
    Case(
        "two releases",
        [Worker("a:6066"), Worker("b:6066", version="1.1.0")],
        {58: [], 63: ["VersionSkew?"]},
    ),
    Case(
        "a fifth of the events is slow",
        pair(slow=constant(120)),
        {5: ["DurationBurn"], 45: ["DurationBurn", "DurationBurn?"]},
    ),
    Case("one event in twenty is slow", pair(slow=constant(30)), {20: [], 45: ["DurationBurn?"]}),
    Case(
        "events always wait for five seconds",
        pair(oldest=constant(5)),
        {17: [], 21: ["FreshnessBurn"]},
    ),
    Case(
        # 5 % of three days are 216 minutes.
        "events always wait for five seconds, for hours",
        [],
        {210: [], 250: ["FreshnessBurn?"]},
        group="anabranch-slow",
        recorded={f"anabranch:stale:bool{one}": [1] * 251 * PER_MINUTE},
    ),
    Case(
        "now and then, events wait for five seconds",
        pair(oldest=lambda minute: 5 if minute % 4 == 0 else 0.3),
        {},
        minutes=25,
    ),
    Case(
        "recall is low",
        pair(
            counts={
                'anabranch_live_recall_total{size="normal"}': constant(4),
                'anabranch_live_recall_sum{size="normal"}': constant(3.6),
                'anabranch_live_recall_squares_sum{size="normal"}': constant(3.28),
            }
        ),
        {13: [], 45: ["RecallLow?"]},
    ),
    Case(
        "recall may be sufficient",
        pair(
            counts={
                'anabranch_live_recall_total{size="normal"}': constant(4),
                'anabranch_live_recall_sum{size="normal"}': constant(3.78),
                'anabranch_live_recall_squares_sum{size="normal"}': constant(3.7),
            }
        ),
        {},
        minutes=45,
    ),
    Case(
        "two installations",
        [
            Worker("a:6066", "one", mode=between(10, 60, "unready")),
            Worker("a:6066", "two"),
            Worker("a:6066", "three", mode=between(10, 60, "gone")),
        ],
        {13: ["NoneReady", "WorkerStuck", "PartitionStuck", "AvailabilityBurn", "three/NoWorkerUp"]},
        [(13, 'anabranch:state{namespace="two"}', {'anabranch:state{namespace="two", job="anabranch"}': 0})],
    ),
    Case(
        "two installations without namespaces",
        [
            Worker("a:6066", None, "blue", mode=between(10, 60, "unready")),
            Worker("a:6066", None, "green"),
        ],
        {13: ["blue/NoneReady", "blue/WorkerStuck", "blue/PartitionStuck", "blue/AvailabilityBurn"]},
    ),
    Case(
        "an embedding stage of one process beside two workers",
        [*pair(), embedder()],
        {},
        [
            (
                25,
                f'anabranch:state{{job="{EMBEDDER}"}}',
                {f'anabranch:state{{namespace="one", job="{EMBEDDER}"}}': 0},
            )
        ],
        wanted=2,
        minutes=30,
    ),
    Case(
        "questions wait for an embedding stage that does nothing",
        [Worker(), embedder(mode=between(10, 17, "waiting"))],
        {13: ["embedder/WorkerStuck", "embedder/PartitionStuck", "embedder/AvailabilityBurn"], 21: []},
    ),
    Case(
        "the provider of an embedding stage is down",
        [Worker(), embedder(mode=between(10, 17, "unready"))],
        {
            9: [],
            13: [
                *("embedder/NoneReady", "embedder/WorkerStuck"),
                *("embedder/PartitionStuck", "embedder/AvailabilityBurn"),
            ],
            21: [],
        },
    ),
    Case(
        "the provider is down, and nobody asks",
        [Worker(), embedder(mode=between(10, 17, "unready"), per_minute=constant(0), oldest=constant(0))],
        {13: ["embedder/NoneReady"], 18: []},
    ),
    Case(
        "an embedding stage disappears",
        [Worker(), embedder(mode=between(10, 400, "gone"))],
        {11: [], 13: ["embedder/NoWorkerUp"]},
    ),
    Case(
        "one question in ten is dead-lettered because the provider is down",
        [Worker(), embedder(counts={letters("provider_unavailable"): constant(60)})],
        {5: ["embedder/AvailabilityBurn"]},
    ),
    Case(
        "counters agree with what was sent",
        [
            Worker(
                # Before the first scrape, in bursts, while scrapes fail, and around a restart.
                counts={letters("contract_violation"): at(0, 5, 12, 20, 20.25, 30, count=5)},
                started=0,
                restarts=[20.0],
                mode=between(11, 14, "down"),
                per_minute=constant(0),
            )
        ],
        {},
        [
            (
                40,
                'sum(sum_over_time(anabranch:dead_letters:increase{code="contract_violation"}[1h]))',
                {"{}": 25},
            ),
        ],
    ),
]


def _expected(alerts: Sequence[str]) -> set[tuple[str, str, str]]:
    """Installation, alert and severity."""
    found = set()
    for alert in alerts:
        where, _, name = alert.rpartition("/") if "/" in alert else ("one", "", alert)
        severity = "ticket" if name.endswith("?") else "page"
        found.add((where, ALERT_PREFIX + name.rstrip("?"), severity))
    return found


def _firing(minute: Minute, alerts: Sequence[str], expression: str) -> dict[str, Any]:
    samples = []
    for where, name, severity in sorted(_expected(alerts)):
        labels = {"alertname": name, "severity": severity}
        if where in {"blue", "green"}:
            labels |= {"job": where}
        elif where == "embedder":
            labels |= {"namespace": "one", "job": EMBEDDER}
        elif where:
            labels |= {"namespace": where, "job": "anabranch"}
        text = ", ".join(f'{label}="{value}"' for label, value in labels.items())
        samples.append({"labels": f"{{{text}}}", "value": 1})
    return {"expr": expression, "eval_time": f"{round(minute * 60)}s", "exp_samples": samples}


def _test_file(case: Case) -> dict[str, Any]:
    minutes = int(max([case.minutes, *case.firing, *(minute for minute, _, _ in case.values)])) + 1
    by = "max by (namespace, job, alertname, severity)"
    firing = f'{by} (ALERTS{{alertstate="firing"}})'
    tests = [_firing(minute, alerts, firing) for minute, alerts in case.firing.items()]
    if case.minutes:
        ever = f'{by} (max_over_time(ALERTS{{alertstate="firing"}}[{minutes}m]))'
        tests.append(_firing(case.minutes, [], ever))
    tests += [
        {
            "expr": expression,
            "eval_time": f"{round(minute * 60)}s",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in results.items()],
        }
        for minute, expression, results in case.values
    ]
    return {
        "rule_files": ["rules.yml"],
        "evaluation_interval": f"{STEP}s",
        "tests": [
            {
                "name": case.name,
                "interval": f"{STEP}s",
                "input_series": [
                    {"series": name, "values": " ".join(_values(values))}
                    for name, values in [
                        *case.recorded.items(),
                        *(series for worker in case.workers for series in worker.series(minutes).items()),
                    ]
                ],
                "promql_expr_test": tests,
            }
        ],
    }


@pytest.fixture(scope="module")
def promtool(which: Callable[[str], str | None]) -> str:
    return which("promtool") or unavailable(
        "promtool is not installed", enable="install Prometheus (Debian's package `prometheus`)"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_alerts(case: Case, promtool: str, run: Callable[..., Any], tmp_path: Path) -> None:
    rules = yaml.safe_load(rule_source.render(Parameters(jobs="anabranch|blue|green", workers=case.wanted)))
    rules["groups"] = [group for group in rules["groups"] if case.group in {None, group["name"]}]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(_test_file(case), width=1_000_000))
    result = run([promtool, "test", "rules", str(file)])
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_seen_to_fire() -> None:
    fired = {
        (name, severity)
        for case in CASES
        for alerts in case.firing.values()
        for _, name, severity in _expected(alerts)
    }
    assert fired == {
        (ALERT_PREFIX + alert.name, alert.severity) for alert in rule_source.alerts(Parameters())
    }
