"""The source of grafana/dashboards/: overview, pipeline and store."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from k8s.observability.rules import ALERT_PREFIX, LATE_SECONDS, SLOS, STALE_SECONDS, Parameters, Slo

__all__ = ["render"]

Json: TypeAlias = dict[str, Any]

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
# A Grafana row.
_WIDTH: Final = 24

# Recorded series and alerts have no worker. The regular expressions also match where the label is missing.
_INSTALLATION: Final = 'namespace=~"$namespace", job=~"$job"'
_WORKER: Final = f'{_INSTALLATION}, instance=~"$worker"'
_SERVER: Final = f'{_INSTALLATION}, instance=~"$server"'
_DATABASE: Final = f'{_SERVER}, datname=~"$database"'
_NAMESPACE: Final = 'namespace=~"$namespace"'
_BY: Final = "by (namespace, job)"
_WHOSE: Final = "{{namespace}} {{job}}"

_GREEN, _ORANGE, _RED = "green", "orange", "red"


@dataclass(frozen=True)
class Query:
    """A line, or a number.

    Attributes:
        color: fixed color; None: by thresholds, mappings or palette.
    """

    expression: str
    legend: str
    color: str | None = None


@dataclass(frozen=True)
class Panel:
    """A panel; its place follows from those before it.

    Attributes:
        kind: Grafana's panel type, or "bars": time series drawn as stacked bars.
        steps: thresholds from the lowest on, as (value, color); the first value is ignored.
        texts: the text and color of each value.
        empty: what a panel without data says.
    """

    kind: str
    title: str
    queries: Sequence[Query]
    width: int = 8
    height: int = 7
    unit: str = "short"
    about: str = ""
    decimals: int | None = None
    steps: Sequence[tuple[float, str]] = ()
    texts: Sequence[tuple[str, str]] = ()
    maximum: float | None = None
    empty: str = "no data"


# Heading (empty: none) and panels, from left to right.
Row: TypeAlias = tuple[str, Sequence[Panel]]


def render(parameters: Parameters) -> Mapping[str, str]:
    """The dashboards by file name."""
    jobs = [
        ("namespace", "label_values(anabranch_build_info, namespace)"),
        ("job", f"label_values(anabranch_build_info{{{_NAMESPACE}}}, job)"),
    ]
    worker = ("worker", f"label_values(anabranch_build_info{{{_INSTALLATION}}}, instance)")
    servers = [
        ("namespace", "label_values(pg_up, namespace)"),
        ("job", f"label_values(pg_up{{{_NAMESPACE}}}, job)"),
        ("server", f"label_values(pg_up{{{_INSTALLATION}}}, instance)"),
        ("database", f'label_values(pg_stat_database_numbackends{{{_SERVER}, datname!=""}}, datname)'),
    ]
    return {
        f"anabranch-{name}.json": _text(_dashboard(parameters, name, variables, rows))
        for name, variables, rows in (
            ("overview", jobs, _overview(parameters)),
            ("pipeline", [*jobs, worker], _pipeline(parameters)),
            ("store", servers, _store()),
        )
    }


# The content


def _overview(parameters: Parameters) -> Iterator[Row]:
    state = Query(f"anabranch:state{{{_INSTALLATION}}}", _WHOSE)
    states = (("WELL", _GREEN), ("DEGRADED", _ORANGE), ("OUT", _RED))
    oldest = Query(f"anabranch:oldest_waiting_seconds:max{{{_INSTALLATION}}}", _WHOSE)
    alerts = f'ALERTS{{alertname=~"{ALERT_PREFIX}.+", alertstate="firing", {_INSTALLATION}}}'
    ready, wanted = (f"anabranch:workers_{name}:count{{{_INSTALLATION}}}" for name in ("ready", "wanted"))
    yield (
        "Now",
        (
            Panel(
                "stat",
                "State",
                [state],
                width=6,
                height=5,
                texts=states,
                empty="Prometheus finds no worker",
                about="OUT: no worker is ready, or events wait for more than a minute and none is finished. DEGRADED:"
                f" fewer workers than wanted are ready, events wait longer than {STALE_SECONDS} s, or a page fires.",
            ),
            Panel(
                "stat",
                "Oldest waiting event",
                [oldest],
                width=6,
                height=5,
                unit="s",
                decimals=1,
                steps=_waiting(parameters),
                about="Age of the oldest event that is not answered. In health below one second.",
                empty="unknown: no worker reads",
            ),
            Panel(
                "stat",
                "Firing alerts",
                [
                    Query(f'count({alerts[:-1]}, severity="{severity}"}}) or vector(0)', severity)
                    for severity in ("page", "ticket")
                ],
                width=6,
                height=5,
                steps=((0, _GREEN), (1, _RED)),
                about="They are listed below.",
            ),
            Panel(
                "stat",
                "Workers ready",
                [
                    Query(f"{ready} >= {wanted}", f"ready {_WHOSE}", _GREEN),
                    Query(f"{ready} < {wanted}", f"ready {_WHOSE}", _RED),
                    Query(wanted, f"wanted {_WHOSE}", "text"),
                ],
                width=6,
                height=5,
                about="Wanted are those that Prometheus discovers, at least the number in the rules, and at most one"
                " for each partition.",
            ),
        ),
    )
    yield "Service level objectives over 30 days", [panel for slo in SLOS for panel in _numbers(slo)]
    yield "", [_burn(slo) for slo in SLOS]
    yield (
        "What happened",
        (
            Panel("state-timeline", "State over time", [state], width=12, texts=states),
            Panel(
                "state-timeline",
                "Alerts",
                [
                    Query(f"max {_BY} ({alerts}) or 0 * anabranch:state{{{_INSTALLATION}}}", f"any {_WHOSE}"),
                    Query(
                        f"max by (namespace, job, alertname, severity) ({alerts})",
                        f"{{{{severity}}}} {{{{alertname}}}} {_WHOSE}",
                    ),
                ],
                width=12,
                texts=(("silent", _GREEN), ("firing", _RED)),
                about="The runbook explains each.",
            ),
            _lines("Oldest waiting event over time", oldest, width=12, unit="s", steps=_waiting(parameters)),
            _lines("Events", *_in_and_out(_INSTALLATION), width=12, unit="cps"),
        ),
    )


def _numbers(slo: Slo) -> Iterator[Panel]:
    name, labels = slo.name.capitalize(), f'{{slo="{slo.name}", {_INSTALLATION}}}'
    yield Panel(
        "stat",
        f"{name}, last 5 minutes",
        [Query(f"1 - anabranch:slo_errors:ratio5m{labels}", _WHOSE)],
        width=4,
        height=4,
        unit="percentunit",
        decimals=2,
        steps=((0, _RED), (slo.objective, _GREEN)),
        about=f"Without {slo.unit} that {slo.bad}. The objective is {100 * slo.objective:g} %.",
        empty="no data" if slo.by_time else "no events",
    )
    yield Panel(
        "stat",
        f"{name} budget left",
        [Query(f"anabranch:slo_budget_left:ratio{labels}", _WHOSE)],
        width=4,
        height=4,
        unit="percentunit",
        decimals=1,
        steps=((0, _RED), (0.000_001, _ORANGE), (0.25, _GREEN)),
        about=f"Of the {100 * (1 - slo.objective):g} % that may be bad in 30 days.",
    )


def _burn(slo: Slo) -> Panel:
    return _lines(
        f"{slo.name.capitalize()} burn rate",
        *(
            Query(
                f'anabranch:slo_errors:ratio{window}{{slo="{slo.name}", {_INSTALLATION}}}'
                " / on (slo) group_left () (1 - anabranch:slo_objective:ratio)",
                f"{window} {_WHOSE}",
            )
            for window in ("5m", "1h", "6h")
        ),
        steps=((0, _GREEN), (1, _ORANGE), (slo.page.factor, _RED)),
        about=f"1 spends the budget in 30 days. Above {slo.page.factor:g} in 1h and 5m, it pages.",
        empty="no data" if slo.by_time else "no events",
    )


def _pipeline(parameters: Parameters) -> Iterator[Row]:
    duration, worker = "anabranch_event_duration_seconds", "{{instance}}"
    yield (
        "Events",
        (
            _lines(
                "Events in and out",
                *_in_and_out(_WORKER),
                width=12,
                unit="cps",
                about="After a rebalance or a restart, an event is received again.",
            ),
            Panel(
                "stat",
                "Events in the selected time",
                [_counted("events_received", "received", "$__range"), _by("events", "outcome", "$__range")],
                width=4,
                unit="locale",  # all digits
                decimals=0,
            ),
            _lines("Events in flight", Query(_gauge("anabranch_in_flight_events"), worker)),
        ),
    )
    yield (
        "Latency",
        (
            Panel(
                "heatmap",
                "Event duration",
                [
                    # `increase` over $__interval would miss what is counted between two intervals.
                    Query(
                        f"sum by (le) (rate({duration}_bucket{{{_WORKER}}}[$__rate_interval])) * $__interval_ms / 1000",
                        "{{le}}",
                    )
                ],
                unit="s",
                about="Number of events. From fetching an event to the broker's acknowledgement. The objective is"
                " 250 ms.",
            ),
            _lines("Event duration, quantiles", *_quantiles(duration), unit="s"),
            _lines(
                "Event age, quantiles",
                *_quantiles("anabranch_event_age_seconds"),
                unit="s",
                about="From occurred_at to the broker's acknowledgement.",
            ),
            _lines("Event duration by profile", *_quantiles(duration, "profile", of=(0.99,)), unit="s"),
            _lines(
                "Stages", *_quantiles("anabranch_stage_duration_seconds", "stage", of=(0.95, 0.99)), unit="s"
            ),
            _lines(
                "Searches by scope",
                *_quantiles("anabranch_search_duration_seconds", "scope", of=(0.5, 0.99)),
                unit="s",
                about="With the wait for a connection.",
            ),
        ),
    )
    yield (
        "Lag",
        (
            _lines(
                "Oldest waiting event by partition",
                Query(
                    f"anabranch:partition_oldest_waiting_seconds:min{{{_INSTALLATION}}}",
                    f"{{{{partition}}}} {_WHOSE}",
                ),
                width=12,
                unit="s",
                steps=_waiting(parameters),
            ),
            _lines(
                "Oldest waiting event by worker",
                Query(f"max by (instance) (anabranch_oldest_waiting_seconds{{{_WORKER}}})", worker),
                width=12,
                unit="s",
            ),
            _lines(
                "Lag by partition",
                Query(
                    f"max by (namespace, job, partition) (anabranch_consumer_lag{{{_WORKER}}})",
                    f"{{{{partition}}}} {_WHOSE}",
                ),
                about="Events that are not committed.",
            ),
            _lines(
                "Committed by partition",
                Query(
                    f"rate(anabranch:partition_committed_offset:max{{{_INSTALLATION}}}[$__rate_interval])",
                    f"{{{{partition}}}} {_WHOSE}",
                ),
                unit="cps",
                about="Offsets. 0 while events wait: the partition is stuck.",
            ),
            _lines(
                "Stuck partitions",
                Query(
                    f"anabranch:partition_stuck_events:count{{{_INSTALLATION}}}",
                    f"{{{{partition}}}} {_WHOSE}",
                ),
                about="Events that wait in partitions where nothing has been committed for a minute.",
            ),
        ),
    )
    yield (
        "Failures",
        (
            _bars("Dead letters by code", _by("dead_letters", "code")),
            _bars("Retries by cause", _by("retries", "cause")),
            _bars("Warnings by code", _by("warnings", "code")),
            _bars(
                "Placeholders and events expired when sent",
                _counted("placeholder_dead_letters", "placeholders"),
                _counted("expired_on_arrival", "expired when sent"),
                about="Placeholders are dead letters without their event. Events that were expired when they were sent"
                " are the producer's fault, and spend no budget.",
            ),
            _bars(
                "Replies by outcome",
                _by("replies", "outcome"),
                about="To callers who asked for one. Those other than answered and dead_lettered could not be sent.",
            ),
            Panel(
                "state-timeline",
                "Ready, PostgreSQL, Kafka",
                [
                    Query(_gauge(f"anabranch_{name}"), f"{worker} {title}")
                    for name, title in (("ready", "ready"), ("store_up", "PostgreSQL"), ("kafka_up", "Kafka"))
                ],
                texts=(("no", _RED), ("yes", _GREEN)),
            ),
        ),
    )
    yield (
        "Results",
        (
            _lines("Passages per result", _mean("anabranch_passages_returned")),
            _lines("Tokens per result", _mean("anabranch_tokens_used")),
            _lines(
                "Results without passages",
                Query(
                    _rate("anabranch_passages_returned_bucket", "profile", where=f'{_WORKER}, le="0.0"')
                    + f" / {_rate('anabranch_passages_returned_count', 'profile')}",
                    f"{{{{profile}}}} {_WHOSE}",
                ),
                unit="percentunit",
            ),
            _lines(
                "Recall of live answers",
                *(
                    Query(
                        f"anabranch:live_recall:mean1d{{{_INSTALLATION}}}"
                        + (f" {sign} anabranch:live_recall:margin1d{{{_INSTALLATION}}}" if sign else ""),
                        f"{name}, {{{{size}}}} scopes {_WHOSE}",
                    )
                    for sign, name in (("", "recall"), ("-", "lower bound"), ("+", "upper bound"))
                ),
                unit="percentunit",
                maximum=1,
                about="Over one day, compared with exact search, with the 95 % confidence interval. Large scopes have"
                " more than 100,000 rows.",
                empty="no search was repeated within a day",
            ),
            _bars(
                "Recall samples",
                _counted("live_recall", "compared, {{size}} scopes", by="namespace, job, size"),
                _counted("live_recall_skipped", "skipped: {{reason}}", by="namespace, job, reason"),
            ),
            _lines(
                "Workers by release",
                Query(
                    f"count by (namespace, job, version) (anabranch_build_info{{{_WORKER}}})",
                    f"{{{{version}}}} {_WHOSE}",
                ),
            ),
        ),
    )
    yield (
        "Workers",
        (
            _lines(
                "Pool connections",
                Query(f"sum by (state) (anabranch_pool_connections{{{_WORKER}}})", "{{state}}"),
                Query(f"sum(anabranch_pool_connections_max{{{_WORKER}}})", "maximum"),
            ),
            _lines(
                "Event-loop delay, p99",
                Query(
                    "histogram_quantile(0.99, sum by (instance, le)"
                    f" (rate(anabranch_event_loop_delay_seconds_bucket{{{_WORKER}}}[$__rate_interval])))",
                    worker,
                ),
                unit="s",
                about="How late a worker does what is due: it lacks CPU, or one step takes too long.",
            ),
            _lines("Assigned partitions", Query(_gauge("anabranch_assigned_partitions"), worker)),
            _lines(
                "CPU",
                Query(f"rate(process_cpu_seconds_total{{{_WORKER}}}[$__rate_interval])", worker),
                unit="percentunit",
                about="100 %: one core.",
            ),
            _lines(
                "Memory",
                Query(_gauge("process_resident_memory_bytes"), f"{worker} resident"),
                Query(_gauge("process_virtual_memory_bytes"), f"{worker} virtual"),
                unit="bytes",
            ),
            _lines(
                "Open files",
                Query(_gauge("process_open_fds"), worker),
                Query(_gauge("process_max_fds"), f"{worker} limit"),
            ),
            _lines(
                "Running for",
                Query(f"time() - {_gauge('process_start_time_seconds')}", worker),
                unit="s",
                about="A saw-tooth is a crash loop.",
            ),
            _lines(
                "Garbage collections",
                Query(
                    "sum by (instance, generation)"
                    f" (rate(python_gc_collections_total{{{_WORKER}}}[$__rate_interval]))",
                    f"{worker} generation {{{{generation}}}}",
                ),
                unit="cps",
            ),
            _lines(
                "Garbage",
                *(
                    Query(
                        f"sum by (instance) (rate(python_gc_objects_{kind}_total{{{_WORKER}}}[$__rate_interval]))",
                        f"{worker} {kind}",
                    )
                    for kind in ("collected", "uncollectable")
                ),
                unit="cps",
                about="Objects per second.",
            ),
        ),
    )

    yield (
        "Embedding stage",
        (
            Panel(
                "state-timeline",
                "Provider",
                [Query(_gauge("anabranch_provider_up"), worker)],
                texts=(("no", _RED), ("yes", _GREEN)),
                about="Whether it embeds texts.",
                empty="no embedding stage",
            ),
            _lines(
                "Embedding duration, quantiles",
                *_quantiles("anabranch_embedding_duration_seconds"),
                width=16,
                unit="s",
                about="From fetching a question to the broker's acknowledgement of its query event.",
                empty="no embedding stage",
            ),
        ),
    )


def _store() -> Iterator[Row]:
    server, table = "{{instance}}", "{{instance}} {{relname}}"

    def rate(name: str, *labels: str) -> str:
        by = ", ".join(("instance", *labels))
        return f"sum by ({by}) (rate(pg_stat_{name}{{{_DATABASE}}}[$__rate_interval]))"

    def rows(kind: str) -> Query:
        return Query(f"sum by (instance, relname) (pg_stat_user_tables_n_{kind}_tup{{{_DATABASE}}})", table)

    yield (
        "Server",
        (
            Panel(
                "stat",
                "PostgreSQL",
                [Query(f"pg_up{{{_SERVER}}}", server)],
                width=4,
                texts=(("DOWN", _RED), ("UP", _GREEN)),
                about="As postgres_exporter sees it.",
            ),
            Panel(
                "stat",
                "Running for",
                [Query(f"time() - pg_postmaster_start_time_seconds{{{_SERVER}}}", server)],
                width=4,
                unit="s",
                steps=((0, _ORANGE), (3600, _GREEN)),
            ),
            _lines(
                "Connections",
                Query(
                    f"sum by (instance, state) (pg_stat_activity_count{{{_DATABASE}}})",
                    f"{server} {{{{state}}}}",
                ),
                Query(f"pg_settings_max_connections{{{_SERVER}}}", f"{server} maximum"),
                about="All workers' pools together must stay below the maximum.",
            ),
            _lines(
                "Longest transaction",
                Query(
                    f"max by (instance, state) (pg_stat_activity_max_tx_duration{{{_DATABASE}}})",
                    f"{server} {{{{state}}}}",
                ),
                unit="s",
                about="A long one prevents vacuum from removing dead rows.",
            ),
        ),
    )
    hits, reads = rate("database_blks_hit"), rate("database_blks_read")
    yield (
        "Load",
        (
            _lines(
                "Transactions",
                Query(rate("database_xact_commit"), f"{server} committed"),
                Query(rate("database_xact_rollback"), f"{server} rolled back"),
                unit="cps",
            ),
            _lines(
                "Blocks found in shared_buffers",
                Query(f"{hits} / ({hits} + {reads} > 0)", server),
                unit="percentunit",
                maximum=1,
                about="If it falls, the vector index no longer fits into shared_buffers.",
            ),
            _lines(
                "Rows",
                *(
                    Query(rate(f"database_tup_{kind}"), f"{server} {kind}")
                    for kind in ("fetched", "inserted", "updated", "deleted")
                ),
                unit="cps",
            ),
            _lines(
                "Locks",
                Query(f"sum by (instance, mode) (pg_locks_count{{{_DATABASE}}})", f"{server} {{{{mode}}}}"),
                about="accessexclusivelock stops every search of its table.",
            ),
            _lines("Deadlocks", Query(rate("database_deadlocks"), server), unit="cps"),
            _lines(
                "Temporary files",
                Query(rate("database_temp_bytes"), server),
                unit="Bps",
                about="Written by sorts that exceed work_mem.",
            ),
        ),
    )
    yield (
        "Tables",
        (
            _lines("Index scans", Query(rate("user_tables_idx_scan", "relname"), table), unit="cps"),
            _lines(
                "Sequential scans",
                Query(rate("user_tables_seq_scan", "relname"), table),
                unit="cps",
                about="Many on document_chunks: an index is missing, or not used.",
            ),
            _lines("Dead rows", rows("dead"), about="Searches read them until vacuum removes them."),
            _lines("Live rows", rows("live")),
            _lines(
                "Database size",
                Query(
                    f"sum by (instance, datname) (pg_database_size_bytes{{{_DATABASE}}})",
                    f"{server} {{{{datname}}}}",
                ),
                unit="bytes",
            ),
            _lines(
                "Checkpoints",
                *(
                    Query(
                        "sum by (instance)"
                        f" (rate(pg_stat_checkpointer_num_{kind}_total{{{_SERVER}}}[$__rate_interval]))",
                        f"{server} {kind}",
                    )
                    for kind in ("timed", "requested")
                ),
                unit="cps",
                about="Requested ones: max_wal_size is too small for the load. PostgreSQL 17 or later.",
            ),
        ),
    )
    yield (
        "As the workers see it",
        (
            _lines(
                "Workers that can search",
                Query(f"sum {_BY} (anabranch_store_up{{{_NAMESPACE}}})", _WHOSE),
                width=12,
            ),
            _lines(
                "Replication lag",
                Query(f"max {_BY} (anabranch_store_replication_lag_seconds{{{_NAMESPACE}}})", _WHOSE),
                width=12,
                unit="s",
                about="How old the searched data may be: 0 on a primary.",
            ),
        ),
    )


# Queries and panels


def _waiting(parameters: Parameters) -> Sequence[tuple[float, str]]:
    """Thresholds for the oldest waiting event."""
    return (0, _GREEN), (STALE_SECONDS, _ORANGE), (float(parameters.seconds(LATE_SECONDS)), _RED)


def _lines(title: str, *queries: Query, **options: Any) -> Panel:
    return Panel("timeseries", title, queries, **options)


def _bars(title: str, *queries: Query, **options: Any) -> Panel:
    return Panel("bars", title, queries, **options)


def _gauge(name: str) -> str:
    return f"{name}{{{_WORKER}}}"


def _rate(name: str, *labels: str, where: str = _WORKER) -> str:
    by = ", ".join(("namespace", "job", *labels))
    return f"sum by ({by}) (rate({name}{{{where}}}[$__rate_interval]))"


def _in_and_out(where: str) -> Iterator[Query]:
    yield Query(_rate("anabranch_events_received_total", where=where), f"received {_WHOSE}")
    yield Query(_rate("anabranch_events_total", "outcome", where=where), f"{{{{outcome}}}} {_WHOSE}")


def _counted(name: str, legend: str, span: str = "$__interval", by: str = "namespace, job") -> Query:
    """How many in each time span. The recorded increases sum up exactly; `increase` would extrapolate."""
    return Query(
        f"sum by ({by}) (sum_over_time(anabranch:{name}:increase{{{_WORKER}}}[{span}]))", f"{legend} {_WHOSE}"
    )


def _by(name: str, label: str, span: str = "$__interval") -> Query:
    return _counted(name, f"{{{{{label}}}}}", span, by=f"namespace, job, {label}")


def _mean(name: str) -> Query:
    return Query(
        f"{_rate(f'{name}_sum', 'profile')} / {_rate(f'{name}_count', 'profile')}",
        f"{{{{profile}}}} {_WHOSE}",
    )


def _quantiles(name: str, *labels: str, of: Sequence[float] = (0.5, 0.95, 0.99)) -> Iterator[Query]:
    legend = "".join(f"{{{{{label}}}}} " for label in labels)
    for quantile in of:
        yield Query(
            f"histogram_quantile({quantile:g}, {_rate(f'{name}_bucket', 'le', *labels)})",
            f"{legend}p{100 * quantile:g} {_WHOSE}",
        )


# Grafana's format


def _dashboard(
    parameters: Parameters, name: str, variables: Sequence[tuple[str, str]], rows: Iterable[Row]
) -> Json:
    return {
        "uid": f"anabranch-{name}",
        "title": f"Anabranch {name}",
        "tags": ["anabranch"],
        "editable": False,
        "graphTooltip": 1,
        "schemaVersion": 41,
        "refresh": "30s",
        "time": {"from": f"now-{parameters.span(3 * 3600)}", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Anabranch",
                "tags": ["anabranch"],
                "includeVars": True,
                "keepTime": True,
            },
            {"type": "link", "title": "Runbook", "url": parameters.runbook_url, "targetBlank": True},
        ],
        "templating": {
            "list": [
                {
                    "type": "datasource",
                    "name": "datasource",
                    "label": "Data source",
                    "query": "prometheus",
                },
                *(_variable(variable, query) for variable, query in variables),
            ]
        },
        "panels": list(_placed(parameters, rows)),
    }


def _variable(name: str, query: str) -> Json:
    return {
        "type": "query",
        "name": name,
        "label": name.capitalize(),
        "datasource": _DATASOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Also where the label is missing.
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(parameters: Parameters, rows: Iterable[Row]) -> Iterator[Json]:
    """Panels from left to right, in lines of Grafana's width."""
    y = number = 0
    for heading, panels in rows:
        if heading:
            number += 1
            yield {
                "id": number,
                "type": "row",
                "title": heading,
                "gridPos": {"h": 1, "w": _WIDTH, "x": 0, "y": y},
            }
            y += 1
        x = height = 0
        for panel in panels:
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            number += 1
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            yield {"id": number, **_panel(parameters, panel), "gridPos": place}
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _panel(parameters: Parameters, panel: Panel) -> Json:
    kind = "timeseries" if panel.kind == "bars" else panel.kind
    names = [chr(ord("A") + index) for index in range(len(panel.queries))]
    found: Json = {
        "type": kind,
        "title": panel.title,
        **({"description": panel.about} if panel.about else {}),
        "datasource": _DATASOURCE,
        "targets": [
            {
                "refId": name,
                "expr": query.expression,
                "legendFormat": query.legend,
                **({"instant": True, "range": False} if kind == "stat" else {}),
                **({"format": "heatmap"} if kind == "heatmap" else {}),
            }
            for name, query in zip(names, panel.queries, strict=True)
        ],
        "fieldConfig": {
            "defaults": _defaults(panel, kind),
            "overrides": [
                {
                    "matcher": {"id": "byFrameRefID", "options": name},
                    "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": query.color}}],
                }
                for name, query in zip(names, panel.queries, strict=True)
                if query.color
            ],
        },
    }
    if any("$__interval" in query.expression for query in panel.queries):
        # A shorter step contains no scrape. From three scrapes on, $__rate_interval is one scrape longer than the
        # step, so rates over it count everything once.
        found["interval"] = parameters.span(60)
    if kind == "heatmap":
        found["options"] = {"calculate": False, "yAxis": {"unit": panel.unit}}
    elif panel.kind == "bars":
        # What happened is on top; most series are 0.
        found["options"] = {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["sum"],
                "sortBy": "Total",
                "sortDesc": True,
            }
        }
    elif kind == "stat":
        found["options"] = {
            "colorMode": "background" if panel.steps or panel.texts else "value",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    return found


def _defaults(panel: Panel, kind: str) -> Json:
    found: Json = {"unit": panel.unit, "noValue": panel.empty}
    if panel.decimals is not None:
        found["decimals"] = panel.decimals
    if panel.texts:
        options = {
            str(value): {"index": value, "text": text, "color": color}
            for value, (text, color) in enumerate(panel.texts)
        }
        found["mappings"] = [{"type": "value", "options": options}]
    if panel.steps:
        (_, lowest), *others = panel.steps
        found["thresholds"] = {
            "mode": "absolute",
            "steps": [
                {"value": None, "color": lowest},
                *({"value": value, "color": color} for value, color in others),
            ],
        }
    if kind == "timeseries":
        found["min"] = 0
        found["custom"] = (
            {"drawStyle": "bars", "fillOpacity": 80, "stacking": {"mode": "normal"}}
            if panel.kind == "bars"
            else {"fillOpacity": 5, "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"}}
        )
    if panel.maximum is not None:
        found["max"] = panel.maximum
    return found


def _text(dashboard: Json) -> str:
    """One line for each property of a panel: short enough to compare, long enough to read."""

    def line(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    def properties(of: Json, indentation: str) -> str:
        return f",\n{indentation}".join(f"{line(key)}: {line(value)}" for key, value in of.items())

    panels = ",\n".join(f"  {{{properties(panel, '   ')}}}" for panel in dashboard["panels"])
    others = properties({key: value for key, value in dashboard.items() if key != "panels"}, " ")
    return f'{{{others},\n "panels": [\n{panels}\n ]}}\n'
