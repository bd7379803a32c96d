"""Dashboards, rules and runbook: they speak of metrics, labels and values that exist."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from streams.core import errors
from streams.telemetry import metrics
from tests.left_out import unavailable
from tests.metric_names import metric_names

# Put there by Prometheus itself.
TARGET_LABELS = {"job", "instance"}
# Grafana puts durations in their place.
GRAFANA_DURATIONS = ("$__rate_interval", "$__range", "$__interval")
GAVE_UP = {"search_timeout", "store_unavailable", "internal_error"}


@dataclass(frozen=True)
class Expression:
    """A PromQL expression and what names it."""

    where: str
    text: str

    @property
    def ast(self) -> Any:
        text = self.text
        for duration in GRAFANA_DURATIONS:
            text = text.replace(duration, "5m")
        return promql.parse(text)

    def nodes(self) -> list[Any]:
        return _nodes(self.ast)

    def selectors(self) -> list[Any]:
        return _selectors(self.ast)


def _nodes(ast: Any) -> list[Any]:
    nodes: list[Any] = []
    promql.walk(ast, nodes.append)
    return nodes


def _selectors(ast: Any) -> list[Any]:
    return [node for node in _nodes(ast) if isinstance(node, promql.VectorSelector)]


@pytest.fixture(scope="module")
def observability(root: Path) -> Path:
    return root / "k8s/observability"


@pytest.fixture(scope="module")
def rules(observability: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load((observability / "prometheus/rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def alerts(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for rule in rules if "alert" in rule]


@pytest.fixture(scope="module")
def dashboards(observability: Path) -> dict[str, dict[str, Any]]:
    return {
        file.name: json.loads(file.read_text())
        for file in (observability / "grafana/dashboards").glob("*.json")
    }


def _panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


@pytest.fixture(scope="module")
def dashboard_expressions(dashboards: dict[str, dict[str, Any]]) -> list[Expression]:
    return [
        Expression(f"{name}: {panel['title']}", target["expr"])
        for name, dashboard in dashboards.items()
        for panel in _panels(dashboard)
        for target in panel.get("targets", [])
    ]


@pytest.fixture(scope="module")
def expressions(rules: list[dict[str, Any]], dashboard_expressions: list[Expression]) -> list[Expression]:
    return [
        *dashboard_expressions,
        *(Expression(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules),
    ]


@pytest.fixture(scope="module")
def known(rules: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Every series that there can be, and its labels."""
    scraped = {name: set(labels) | TARGET_LABELS for name, labels in metric_names().items()}
    recorded: dict[str, set[str]] = {rule["record"]: set() for rule in rules if "record" in rule}
    return {"up": TARGET_LABELS, **scraped, **recorded}


@pytest.fixture(scope="module")
def label_values() -> dict[str, set[str]]:
    """The labels whose values the code fixes."""
    codes: set[str] = set(GAVE_UP)
    pending = [errors.TerminalError]
    while pending:
        error = pending.pop()
        pending.extend(error.__subclasses__())
        if code := getattr(error, "code", None):
            codes.add(code)
    return {
        "outcome": set(metrics.OUTCOMES),
        "stage": set(metrics.STAGES),
        "scope": set(metrics.SCOPES),
        "code": codes,
        "job": {"anabranch"},
    }


@pytest.fixture(scope="module")
def boundaries() -> dict[str, set[str]]:
    """The histograms' boundaries, as they are rendered."""
    exposed = metrics.Metrics(profiles=["extraction"])
    found: dict[str, set[str]] = {}
    for name, boundary in re.findall(
        r'^(\w+_bucket)\{.*?le="([^"]+)"', exposed.exposition()[0].decode(), re.MULTILINE
    ):
        found.setdefault(name, set()).add(boundary)
    return found


def test_there_are_expressions(expressions: list[Expression], alerts: list[dict[str, Any]]) -> None:
    assert len(expressions) > 50
    assert len(alerts) > 10


def test_every_metric_exists(expressions: list[Expression], known: dict[str, set[str]]) -> None:
    for expression in expressions:
        selectors = expression.selectors()
        assert selectors or expression.text == "vector(0)", expression.where
        for selector in selectors:
            assert selector.name in known, f"{expression.where}: {selector.name}"


def test_every_label_exists(expressions: list[Expression], known: dict[str, set[str]]) -> None:
    for expression in expressions:
        for node in expression.nodes():
            if isinstance(node, promql.VectorSelector):
                for matcher in node.matchers.matchers:
                    assert matcher.name in known[str(node.name)], (
                        f"{expression.where}: {node.name} {matcher.name}"
                    )
            elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                for selector in _selectors(node.expr):
                    missing = set(node.modifier.labels) - known[selector.name]
                    assert not missing, f"{expression.where}: {selector.name} {missing}"


def test_every_label_value_exists(
    expressions: list[Expression], label_values: dict[str, set[str]], boundaries: dict[str, set[str]]
) -> None:
    checked = 0
    for expression in expressions:
        for selector in expression.selectors():
            for matcher in selector.matchers.matchers:
                # Another spelling of a boundary, or a limit between two of them, selects nothing.
                possible = boundaries[selector.name] if matcher.name == "le" else label_values[matcher.name]
                assert set(matcher.value.split("|")) <= possible, f"{expression.where}: {matcher.value}"
                checked += 1
    assert checked > 20


def test_quantiles_are_taken_over_buckets(expressions: list[Expression]) -> None:
    for expression in expressions:
        for node in expression.nodes():
            if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
                aggregation = node.args[1]
                assert "le" in aggregation.modifier.labels, expression.where
                assert all(selector.name.endswith("_bucket") for selector in _selectors(aggregation))


def test_counters_are_never_shown_raw(expressions: list[Expression]) -> None:
    for expression in expressions:
        ranged = {
            id(node.vector_selector.name): node.vector_selector.name
            for node in expression.nodes()
            if isinstance(node, promql.MatrixSelector)
        }.values()
        raw = {selector.name for selector in expression.selectors()} - set(ranged)
        counters = {
            name for name in raw if re.search(r"_(total|sum|count|bucket)$", name) and ":" not in name
        }
        assert not counters, f"{expression.where}: {counters}"


# The panels for these are not built yet.
_WITHOUT_PANEL = (
    "process_",
    "python_gc_",
    "anabranch_assigned_partitions",
    "anabranch_committed_offset",
    "anabranch_event_loop_delay_seconds",
    "anabranch_events_received",
    "anabranch_expired_on_arrival",
    "anabranch_kafka_up",
    "anabranch_live_recall",
    "anabranch_oldest_waiting_seconds",
    "anabranch_placeholder_dead_letters",
    "anabranch_pool_connections_max",
    "anabranch_ready",
    "anabranch_store_up",
    "anabranch_warnings",
)


def test_every_metric_is_on_a_dashboard(dashboard_expressions: list[Expression]) -> None:
    def family(name: str) -> str:
        return re.sub(r"_(bucket|sum|count|created)$", "", name)

    shown = {
        family(selector.name) for expression in dashboard_expressions for selector in expression.selectors()
    }
    exposed = {family(name) for name in metric_names()}
    # `_created` of a counter carries the counter's name without `_total`.
    missing = {name for name in exposed if name not in shown and f"{name}_total" not in shown}
    assert {name for name in missing if not name.startswith(_WITHOUT_PANEL)} == set()


def test_failed_events_are_the_same_everywhere(expressions: list[Expression]) -> None:
    definitions = {
        matcher.value
        for expression in expressions
        for selector in expression.selectors()
        if selector.name == "anabranch_dead_letters_total"
        for matcher in selector.matchers.matchers
        if "|" in matcher.value
    }
    assert len(definitions) == 1
    assert set(definitions.pop().split("|")) >= GAVE_UP


def _labels_left(node: Any, known: dict[str, set[str]]) -> set[str]:
    """The labels of an expression's result."""
    match node:
        case promql.VectorSelector():
            left = known[str(node.name)]
        case promql.MatrixSelector():
            left = known[str(node.vector_selector.name)]
        case promql.AggregateExpr():
            left = set(node.modifier.labels) if node.modifier else set()
        case promql.Call():
            left = set().union(*(_labels_left(argument, known) for argument in node.args))
            left -= {"le"} if node.func.name == "histogram_quantile" else set()
        case promql.BinaryExpr():
            # One side may be a number; both sides of ours have the same labels otherwise.
            left = _labels_left(node.lhs, known) or _labels_left(node.rhs, known)
        case promql.ParenExpr():
            left = _labels_left(node.expr, known)
        case promql.NumberLiteral():
            left = set()
        case _:
            raise NotImplementedError(type(node))
    return left


def test_legends_tell_lines_apart(dashboards: dict[str, dict[str, Any]], known: dict[str, set[str]]) -> None:
    for dashboard in dashboards.values():
        for panel in _panels(dashboard):
            if panel["type"] == "table":
                continue
            for target in panel.get("targets", []):
                wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                left = _labels_left(Expression(panel["title"], target["expr"]).ast, known)
                assert wanted <= left, panel["title"]
                assert left - wanted <= TARGET_LABELS, panel["title"]


def test_panels_use_the_provisioned_datasource(
    dashboards: dict[str, dict[str, Any]], observability: Path
) -> None:
    provisioned = yaml.safe_load(
        (observability / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    wanted = {(source["type"], source["uid"]) for source in provisioned}
    for dashboard in dashboards.values():
        for panel in _panels(dashboard):
            sources = [
                source["datasource"]
                for source in (panel, *panel.get("targets", []))
                if "datasource" in source
            ]
            assert sources or panel["type"] == "row"
            assert {(source["type"], source["uid"]) for source in sources} <= wanted


def test_panels_are_laid_out(dashboards: dict[str, dict[str, Any]]) -> None:
    for name, dashboard in dashboards.items():
        panels = list(_panels(dashboard))
        ids = [panel["id"] for panel in panels]
        assert len(ids) == len(set(ids)), name
        cells: set[tuple[int, int]] = set()
        for panel in panels:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24, panel["title"]
            covered = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not covered & cells, panel["title"]
            cells |= covered
        assert dashboard["uid"]


def test_every_alert_has_a_severity_and_a_summary(alerts: list[dict[str, Any]]) -> None:
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket"), alert["alert"]
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"]


def test_every_alert_has_a_runbook_heading(
    alerts: list[dict[str, Any]], observability: Path, root: Path
) -> None:
    text = (observability / "RUNBOOK.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert set(headings) == {alert["alert"] for alert in alerts}
    for alert in alerts:
        path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert (root / path).samefile(observability / "RUNBOOK.md")
        assert anchor == alert["alert"].lower()
    anchors = {heading.lower() for heading in headings}
    assert set(re.findall(r"\(#([\w-]+)\)", text)) <= anchors


def test_runbook_speaks_of_what_exists(
    dashboards: dict[str, dict[str, Any]], label_values: dict[str, set[str]], observability: Path
) -> None:
    text = (observability / "RUNBOOK.md").read_text()
    titles = {panel["title"] for dashboard in dashboards.values() for panel in _panels(dashboard)}
    panels = re.findall(r"[Pp]anel \*([^*]+)\*", text) + re.findall(r"In \*([^*]+)\*", text)
    assert panels
    assert {re.sub(r"\s+", " ", panel) for panel in panels} <= titles
    codes = set(re.findall(r"`([a-z]+_[a-z_]+)`", text)) - {
        "store_misconfigured",
        "kafka_unavailable",
        "commit_failed",
        "max_connections",
        "runbook_url",
    }
    assert codes - {"expires_at", "occurred_at", "result_id"} <= label_values["code"]


def test_slo_burn_alerts_are_complete(alerts: list[dict[str, Any]]) -> None:
    budgets = {"availability": "0.001", "duration": "0.01", "age": "0.05"}
    windows = {
        ("14.4", "1h", "5m", "page"),
        ("6", "6h", "30m", "page"),
        ("3", "1d", "2h", "ticket"),
        ("1", "3d", "6h", "ticket"),
    }
    found = set()
    for alert in alerts:
        burn = re.fullmatch(
            r"anabranch:(\w+)_error:ratio_rate(\w+) > ([\d.]+) \* ([\d.]+)\nand\n"
            r"anabranch:\1_error:ratio_rate(\w+) > \3 \* \4\n",
            alert["expr"],
        )
        if burn:
            slo, long, factor, budget, short = burn.groups()
            assert budget == budgets[slo]
            assert (alert["labels"]["slo"], alert["labels"]["window"]) == (slo, long)
            found.add((slo, (factor, long, short, alert["labels"]["severity"])))
    assert found == {(slo, window) for slo in budgets for window in windows}


@pytest.fixture(scope="module")
def promtool(which: Callable[[str], str | None]) -> str:
    return which("promtool") or unavailable(
        "promtool is not installed", enable="install Prometheus (Debian's package `prometheus`)"
    )


def test_prometheus_accepts_its_configuration(promtool: str, run: Callable[..., Any]) -> None:
    result = run([promtool, "check", "config", "--lint-fatal", "k8s/observability/prometheus/prometheus.yml"])
    assert result.returncode == 0, result.stdout + result.stderr


def test_alerts_fire_when_they_should(promtool: str, run: Callable[..., Any]) -> None:
    result = run([promtool, "test", "rules", "tests/deploy/rules.test.yml"])
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_seen_to_fire(alerts: list[dict[str, Any]], root: Path) -> None:
    groups = yaml.safe_load((root / "tests/deploy/rules.test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for group in groups
        for case in group.get("alert_rule_test", [])
        if case.get("exp_alerts")
    }
    assert fired == {alert["alert"] for alert in alerts}
