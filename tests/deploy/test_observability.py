"""Rules, dashboards and runbook: generated files are current, and all name what exists."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import promql_parser as promql
import pytest
import yaml

from k8s.observability import dashboards as dashboard_source
from k8s.observability import rules as rule_source
from k8s.observability.rules import SEVERITIES, Parameters
from streams.core import errors
from streams.core.warning_codes import WarningCode
from streams.telemetry import metrics
from tests.deploy.postgres_exporter import METRICS as EXPORTER_METRICS
from tests.left_out import unavailable
from tests.metric_names import metric_names

# Added by Prometheus, or by its configuration.
TARGET_LABELS: Final = frozenset({"namespace", "job", "instance"})
# Grafana replaces them with durations.
GRAFANA_DURATIONS: Final = ("$__rate_interval", "$__range", "$__interval")
# And these with numbers.
GRAFANA_NUMBERS: Final = ("$__interval_ms",)
GAVE_UP: Final = {"search_timeout", "store_unavailable", "provider_unavailable", "internal_error"}


@dataclass(frozen=True)
class Expression:
    """A PromQL expression and where it is."""

    where: str
    text: str

    @property
    def parsable(self) -> str:
        text = self.text
        for number in GRAFANA_NUMBERS:
            text = text.replace(number, "60000")
        for duration in GRAFANA_DURATIONS:
            text = text.replace(duration, "5m")
        return text

    @property
    def ast(self) -> Any:
        return promql.parse(self.parsable)

    def nodes(self) -> list[Any]:
        return _nodes(self.ast)

    def selectors(self) -> list[Any]:
        return _selectors(self.ast)


def _nodes(parsed: Any) -> list[Any]:
    nodes: list[Any] = []
    promql.walk(parsed, nodes.append)
    return nodes


def _selectors(parsed: Any) -> list[Any]:
    return [node for node in _nodes(parsed) if isinstance(node, promql.VectorSelector)]


def _family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


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


@pytest.fixture(scope="module")
def dashboard_expressions(dashboards: dict[str, dict[str, Any]]) -> list[Expression]:
    return [
        Expression(f"{name}: {panel['title']}", target["expr"])
        for name, dashboard in dashboards.items()
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


@pytest.fixture(scope="module")
def rule_expressions(rules: list[dict[str, Any]]) -> list[Expression]:
    return [Expression(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules]


@pytest.fixture(scope="module")
def expressions(
    rule_expressions: list[Expression], dashboard_expressions: list[Expression]
) -> list[Expression]:
    return [*dashboard_expressions, *rule_expressions]


@pytest.fixture(scope="module")
def known(rules: list[dict[str, Any]]) -> dict[str, frozenset[str]]:
    """Every series that there can be, and its labels."""
    found = {
        name: frozenset(labels) | TARGET_LABELS
        for name, labels in {"up": frozenset(), **metric_names(), **EXPORTER_METRICS}.items()
    }
    found["ALERTS"] = TARGET_LABELS | {"alertname", "alertstate", "severity"}
    for rule in rules:
        if "record" in rule:
            labels = _labels(promql.parse(rule["expr"]), found) | set(rule.get("labels", {}))
            assert found.setdefault(rule["record"], labels) == labels, rule["record"]
    return found


@pytest.fixture(scope="module")
def label_values() -> dict[str, set[str]]:
    """The labels whose values the code determines."""
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
        "size": {*metrics.SCOPE_SIZES},
        "code": codes,
        "job": {Parameters().jobs, Parameters().embedder_jobs},
        "slo": {slo.name for slo in rule_source.SLOS},
        "severity": {*SEVERITIES},
        "alertname": {f"{rule_source.ALERT_PREFIX}.+"},
        "alertstate": {"firing"},
    }


@pytest.fixture(scope="module")
def boundaries() -> dict[str, set[str]]:
    """The histograms' boundaries, as they are rendered."""
    exposed = "".join(
        each.exposition()[0].decode()
        for each in (metrics.Metrics(profiles=["extraction"]), metrics.EmbedderMetrics())
    )
    found: dict[str, set[str]] = {}
    for name, boundary in re.findall(r'^(\w+_bucket)\{.*?le="([^"]+)"', exposed, re.MULTILINE):
        found.setdefault(name, set()).add(boundary)
    return found


def _labels(  # noqa: PLR0911  # one for each kind of node
    node: Any, known: Mapping[str, frozenset[str]]
) -> frozenset[str]:
    """The labels that an expression's results can have; empty for a number."""
    match node:
        case promql.VectorSelector():
            return known[str(node.name)]
        case promql.MatrixSelector():
            return known[str(node.vector_selector.name)]
        case promql.AggregateExpr():
            return frozenset(node.modifier.labels) if node.modifier else frozenset()
        case promql.Call():
            if node.func.name in {"absent", "vector", "time"}:
                return frozenset()
            found = frozenset[str]().union(*(_labels(argument, known) for argument in node.args))
            return found - {"le"} if node.func.name == "histogram_quantile" else found
        case promql.BinaryExpr():
            return _labels_of_operation(node, known)
        case promql.ParenExpr() | promql.UnaryExpr():
            return _labels(node.expr, known)
        case promql.NumberLiteral():
            return frozenset()
        case _:
            raise NotImplementedError(type(node))


def _labels_of_operation(node: Any, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    left, right = _labels(node.lhs, known), _labels(node.rhs, known)
    matching = node.modifier.matching if node.modifier else None
    match str(node.op):
        case "and" | "unless":
            return left
        case "or":
            return left | right
        case _ if matching and "ManyToOne" not in str(node.modifier.card):
            return frozenset(matching.labels)
        case _:
            # The other side of ours is a number, or has the same labels.
            return left or right


# The generated files


def test_the_files_are_those_that_their_source_generates(observability: Path) -> None:
    defaults = Parameters()
    assert (observability / "prometheus/rules.yml").read_text() == rule_source.render(defaults), (
        "run `make observability`"
    )
    folder = observability / "grafana/dashboards"
    assert {file.name: file.read_text() for file in folder.iterdir()} == dashboard_source.render(defaults), (
        "run `make observability`"
    )


def test_the_file_says_what_its_source_says(rules: list[dict[str, Any]]) -> None:
    """The source writes YAML itself."""
    found = [rule for group in rule_source.groups(Parameters()).values() for rule in group]
    assert len(rules) == len(found)
    for rule, source in zip(rules, found, strict=True):
        assert re.sub(r"\s+", "", rule["expr"]) == re.sub(r"\s+", "", source.expression)
        assert source.labels.items() <= rule.get("labels", {}).items()


def _durations(rules_file: str) -> Iterator[float]:
    """Every duration, in seconds, in the order of the file."""
    for group in yaml.safe_load(rules_file)["groups"]:
        yield _seconds(group["interval"])
        for rule in group["rules"]:
            yield _seconds(rule.get("for", "0s"))
            for duration in re.findall(r"\[(\w+)\]", rule["expr"]):
                yield _seconds(duration)
            for duration in re.findall(r"offset (\w+)", rule["expr"]):
                yield _seconds(duration)


def _seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h|d)", duration).groups()  # type: ignore[union-attr]  # a duration of the rules matches
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}[unit]


def test_a_factor_compresses_every_duration() -> None:
    normal, compressed = (
        list(_durations(rule_source.render(Parameters(compress=factor)))) for factor in (1, 20)
    )
    assert len(normal) > 100
    for before, after in zip_longest(normal, compressed):
        assert after == pytest.approx(before / 20)
    assert "partition_oldest_waiting_seconds:min > 3\n" in rule_source.render(Parameters(compress=20))


def test_parameters_are_in_the_rules() -> None:
    text = rule_source.render(
        Parameters(
            jobs="blue|green",
            workers=7,
            embedder_jobs="texts",
            runbook_url="https://r.test/b",
            dashboard_url="https://g.test",
        )
    )
    alerts = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"] if "alert" in rule]
    assert {alert["annotations"]["runbook_url"].partition("#")[0] for alert in alerts} == {"https://r.test/b"}
    assert all(alert["annotations"]["dashboard_url"].startswith("https://g.test/d/") for alert in alerts)
    assert 'up{job=~"blue|green|texts"}' in text
    assert '"anabranch' not in text
    assert 'clamp_min(count by (namespace, job) (up{job=~"blue|green"}), 7)' in text


# Names


def test_there_are_expressions(
    dashboard_expressions: list[Expression], rules: list[dict[str, Any]], alerts: list[dict[str, Any]]
) -> None:
    assert len(dashboard_expressions) > 80
    assert len(rules) > 60
    assert len(alerts) > 15


def test_every_metric_exists(expressions: list[Expression], known: dict[str, frozenset[str]]) -> None:
    for expression in expressions:
        selectors = expression.selectors()
        assert selectors or expression.text.startswith("vector("), expression.where
        for selector in selectors:
            assert selector.name in known, f"{expression.where}: {selector.name}"


def test_every_label_exists(expressions: list[Expression], known: dict[str, frozenset[str]]) -> None:
    for expression in expressions:
        for node in expression.nodes():
            if isinstance(node, promql.VectorSelector):
                for matcher in node.matchers.matchers:
                    assert matcher.name in known[str(node.name)], (
                        f"{expression.where}: {node.name} {matcher.name}"
                    )
            elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                missing = set(node.modifier.labels) - _labels(node.expr, known)
                assert not missing, f"{expression.where}: {missing}"


def test_every_label_value_exists(
    expressions: list[Expression], label_values: dict[str, set[str]], boundaries: dict[str, set[str]]
) -> None:
    checked = 0
    for expression in expressions:
        for selector in expression.selectors():
            for matcher in selector.matchers.matchers:
                if matcher.value.startswith("$"):
                    continue
                # Another spelling of a boundary, or a limit between two of them, selects nothing.
                possible = boundaries[selector.name] if matcher.name == "le" else label_values[matcher.name]
                assert set(matcher.value.split("|")) <= possible, f"{expression.where}: {matcher.value}"
                checked += 1
    assert checked > 50


def test_every_metric_is_on_a_dashboard(
    dashboard_expressions: list[Expression], rules: list[dict[str, Any]]
) -> None:
    """Directly, or through a recording rule."""
    recorded: dict[str, set[str]] = {}
    for rule in rules:
        if "record" in rule:
            names = {str(selector.name) for selector in _selectors(promql.parse(rule["expr"]))}
            recorded.setdefault(rule["record"], set()).update(names)
    shown: set[str] = set()
    pending = {str(selector.name) for each in dashboard_expressions for selector in each.selectors()}
    while pending:
        name = pending.pop()
        shown.add(name)
        pending |= recorded.get(name, set()) - shown
    missing = {_family(name) for name in metric_names()} - {_family(name) for name in shown}
    assert missing == {"anabranch_live_recall_seconds_total"}  # to check the budget, see docs/metrics.md
    assert EXPORTER_METRICS.keys() - shown == {"pg_stat_database_numbackends"}  # a variable's query


def test_quantiles_are_taken_over_buckets(expressions: list[Expression]) -> None:
    for expression in expressions:
        for node in expression.nodes():
            if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
                aggregation = node.args[1]
                assert "le" in aggregation.modifier.labels, expression.where
                assert all(selector.name.endswith("_bucket") for selector in _selectors(aggregation))


def test_counters_are_never_shown_raw(
    dashboard_expressions: list[Expression], alerts: list[dict[str, Any]]
) -> None:
    for expression in [
        *dashboard_expressions,
        *(Expression(alert["alert"], alert["expr"]) for alert in alerts),
    ]:
        ranged = {
            node.vector_selector.name
            for node in expression.nodes()
            if isinstance(node, promql.MatrixSelector)
        }
        raw = {str(selector.name) for selector in expression.selectors()} - ranged
        assert not {
            name for name in raw if re.search(r"_(total|sum|count|bucket)$", name) and ":" not in name
        } - {
            "pg_stat_activity_count",
            "pg_locks_count",
        }, expression.where


# The rules


def test_failed_events_are_defined_once(rule_expressions: list[Expression]) -> None:
    definitions = [
        set(matcher.value.split("|"))
        for expression in rule_expressions
        for selector in expression.selectors()
        for matcher in selector.matchers.matchers
        if matcher.name == "code" and "|" in matcher.value
    ]
    assert len(definitions) == 1
    assert definitions[0] >= GAVE_UP


def test_installations_are_kept_apart(
    rules: list[dict[str, Any]], rule_expressions: list[Expression], known: dict[str, frozenset[str]]
) -> None:
    """Nothing adds, compares or hides what belongs to different namespaces or jobs."""
    both = {"namespace", "job"}
    for expression in rule_expressions:
        for node in expression.nodes():
            if isinstance(node, promql.AggregateExpr):
                assert node.modifier is not None, expression.where
                assert str(node.modifier.type) == "AggModifierType.By", expression.where
                assert both <= set(node.modifier.labels), expression.where
            elif isinstance(node, promql.BinaryExpr) and node.modifier and node.modifier.matching:
                labels = set(node.modifier.matching.labels)
                assert both <= labels or labels == {"slo"}, expression.where
    for rule in rules:
        of_rule = _labels(promql.parse(rule["expr"]), known)
        assert both <= of_rule or rule["expr"].startswith("vector("), rule


def test_every_alert_has_a_severity_and_texts(alerts: list[dict[str, Any]]) -> None:
    for alert in alerts:
        assert alert["labels"]["severity"] in SEVERITIES, alert["alert"]
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"].endswith((".", "%."))


def test_every_objective_has_a_page_and_a_ticket(alerts: list[dict[str, Any]]) -> None:
    for slo in rule_source.SLOS:
        found = {
            alert["labels"]["severity"]: alert["expr"] for alert in alerts if alert["alert"] == slo.alert
        }
        assert found.keys() == set(SEVERITIES)
        for severity, burn in (("page", slo.page), ("ticket", slo.ticket)):
            assert f" > {burn.factor:g} * {1 - slo.objective:g}" in found[severity]
            # The highest burn rate possible must reach the threshold, well before the budget is spent.
            assert burn.factor < 1 / (1 - slo.objective)
            detected = burn.factor * (1 - slo.objective) * burn.long_seconds
            assert detected <= 0.15 * (1 - slo.objective) * 30 * 86_400


# The dashboards


def test_legends_tell_lines_apart(
    dashboards: dict[str, dict[str, Any]], known: dict[str, frozenset[str]]
) -> None:
    for dashboard in dashboards.values():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                found = _labels(Expression(panel["title"], target["expr"]).ast, known)
                assert wanted <= found, panel["title"]
                assert found - wanted <= TARGET_LABELS | {"slo", "datid"}, panel["title"]


def test_dashboards_use_only_their_variables(dashboards: dict[str, dict[str, Any]]) -> None:
    for name, dashboard in dashboards.items():
        variables = [variable["name"] for variable in dashboard["templating"]["list"]]
        assert variables[:3] == ["datasource", "namespace", "job"], name
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
        assert used - {name[1:] for name in (*GRAFANA_DURATIONS, *GRAFANA_NUMBERS)} == set(variables), name
        assert ("worker" in variables) == (name == "anabranch-pipeline.json")


def test_variables_ask_for_what_exists(
    dashboards: dict[str, dict[str, Any]], known: dict[str, frozenset[str]]
) -> None:
    for dashboard in dashboards.values():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
                assert found
                [selector] = Expression(variable["name"], found[1]).selectors()
                assert {found[2], *(matcher.name for matcher in selector.matchers.matchers)} <= known[
                    str(selector.name)
                ]


def test_panels_use_the_datasource_of_the_variable(dashboards: dict[str, dict[str, Any]]) -> None:
    for dashboard in dashboards.values():
        for panel in dashboard["panels"]:
            assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"


def test_panels_are_laid_out(dashboards: dict[str, dict[str, Any]]) -> None:
    assert {dashboard["uid"] for dashboard in dashboards.values()} == {
        "anabranch-overview",
        "anabranch-pipeline",
        "anabranch-store",
    }
    for name, dashboard in dashboards.items():
        panels = dashboard["panels"]
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
        bottom = max(y for _, y in cells)
        assert len(cells) == 24 * (bottom + 1), f"{name}: there are gaps"


def test_the_first_row_of_the_overview_shows_the_state(dashboards: dict[str, dict[str, Any]]) -> None:
    panels = dashboards["anabranch-overview.json"]["panels"]
    first = [panel["title"] for panel in panels if panel["type"] != "row"][:4]
    assert first == ["State", "Oldest waiting event", "Firing alerts", "Workers ready"]


def test_alerts_link_to_a_dashboard(
    alerts: list[dict[str, Any]], dashboards: dict[str, dict[str, Any]]
) -> None:
    uids = {dashboard["uid"] for dashboard in dashboards.values()}
    for alert in alerts:
        url = alert["annotations"]["dashboard_url"]
        assert url.startswith(Parameters().dashboard_url)
        assert re.search(r"/d/([\w-]+)\?", url)[1] in uids  # type: ignore[index]  # every alert has this link


# The runbook


def _sections(observability: Path) -> dict[str, str]:
    text = (observability / "RUNBOOK.md").read_text()
    parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)[1:]
    assert len(parts[::2]) == len(set(parts[::2]))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_runbook_explains_every_alert(alerts: list[dict[str, Any]], observability: Path) -> None:
    sections = _sections(observability)
    explained = {name for name in sections if name.startswith(rule_source.ALERT_PREFIX)}
    assert explained == {alert["alert"] for alert in alerts}
    for name in explained:
        assert re.findall(r"^\*\*(\w+)\.\*\*", sections[name], re.MULTILINE) == [
            "Meaning",
            "Impact",
            "Diagnosis",
            "Fix",
            "Confirm",
        ], name
    for alert in alerts:
        _, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert anchor == alert["alert"].lower()


def test_the_runbook_explains_every_finding(observability: Path, root: Path) -> None:
    checks: set[str] = set()
    for file in (*(root / "streams/store").glob("*.py"), root / "streams/cli/check.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "Finding"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                checks.add(str(node.args[0].value))
    assert len(checks) >= 20
    rows = re.findall(
        r"^\| `(\w+)` \|", _sections(observability)["Findings of `anabranch check`"], re.MULTILINE
    )
    assert len(rows) == len(set(rows))
    assert set(rows) == checks


def test_the_runbook_names_what_exists(
    dashboards: dict[str, dict[str, Any]], label_values: dict[str, set[str]], observability: Path
) -> None:
    text = (observability / "RUNBOOK.md").read_text()
    anchors = {heading.lower().replace("`", "").replace(" ", "-") for heading in _sections(observability)}
    assert set(re.findall(r"\(#([\w-]+)\)", text)) <= anchors
    titles = {panel["title"] for dashboard in dashboards.values() for panel in dashboard["panels"]}
    panels = re.findall(r"[Pp]anel \*([^*]+)\*", text)
    assert len(panels) > 10
    assert {re.sub(r"\s+", " ", panel) for panel in panels} <= titles
    known = set(re.findall(r"`(anabranch_\w+)`", text)) - {
        "anabranch_worker",
        "anabranch_reader",
    }
    assert known <= metric_names().keys()
    codes = label_values["code"] | set(metrics.RETRY_CAUSES) | {code.value for code in WarningCode}
    listed = {
        code
        for line in re.findall(r"^- (`.+)$", text, re.MULTILINE)
        for code in re.findall(r"`([a-z]+_[a-z_]+)`", line)
    }
    assert listed
    assert listed <= codes | {"max_connections", "statement_timeout", "expires_at"}


def test_severities_are_defined_in_the_runbook(observability: Path) -> None:
    text = (observability / "RUNBOOK.md").read_text()
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text.split("\n## ")[0], re.MULTILINE)) == SEVERITIES


# Prometheus's own opinion


@pytest.fixture(scope="module")
def promtool(which: Callable[[str], str | None]) -> str:
    return which("promtool") or unavailable(
        "promtool is not installed", enable="install Prometheus (Debian's package `prometheus`)"
    )


def test_prometheus_accepts_its_configuration(promtool: str, run: Callable[..., Any]) -> None:
    result = run([promtool, "check", "config", "--lint-fatal", "k8s/observability/prometheus/prometheus.yml"])
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_accepts_other_parameters(promtool: str, run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "rules.yml"
    file.write_text(rule_source.render(Parameters(jobs="a|b", workers=3, compress=20)))
    result = run([promtool, "check", "rules", "--lint-fatal", str(file)])
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_accepts_every_panel_s_query(
    promtool: str, run: Callable[..., Any], dashboard_expressions: list[Expression], tmp_path: Path
) -> None:
    """As recording rules: promtool parses those."""
    file = tmp_path / "queries.yml"
    queries = [
        {"record": f"query:{number}", "expr": expression.parsable}
        for number, expression in enumerate(dashboard_expressions)
    ]
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": queries}]}))
    result = run([promtool, "check", "rules", str(file)])
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(queries)} rules found" in result.stdout
