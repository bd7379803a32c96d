"""Runs the dashboards' queries as Grafana would, and says which panels show nothing.

Grafana itself is not needed: its variables are replaced as it replaces them, and its step is computed as it does.
"""

import asyncio
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import aiohttp

from k8s.observability import dashboards as source
from k8s.observability.rules import Parameters

__all__ = ["MAY_BE_EMPTY", "PanelResult", "Series", "load_dashboards", "run_panels", "visible"]

Json: TypeAlias = dict[str, Any]

_FOLDER: Final = Path(__file__).parents[2] / "k8s/observability/grafana/dashboards"
# As on a screen of 1920 pixels, beside Grafana's menu.
_PIXELS: Final = 1600
_COLUMNS: Final = 24
# `timeInterval` of the data source.
_SCRAPE_SECONDS: Final = 15.0
# Queries at the same time: Prometheus allows 20.
_AT_ONCE: Final = 8
# Grafana's steps: up to the first number of seconds, the second one.
_STEPS: Final = (
    (0.015, 0.01),
    (0.035, 0.02),
    (0.075, 0.05),
    (0.15, 0.1),
    (0.35, 0.2),
    (0.75, 0.5),
    (1.5, 1),
    (3.5, 2),
    (7.5, 5),
    (12.5, 10),
    (17.5, 15),
    (25, 20),
    (45, 30),
    (90, 60),
    (210, 120),
    (450, 300),
    (750, 600),
    (1050, 900),
    (1500, 1200),
    (2700, 1800),
    (5400, 3600),
)

MAY_BE_EMPTY: Final[Mapping[tuple[str, str, str], str]] = {
    ("Anabranch overview", "Workers ready", "A"): "B shows it in red while fewer are ready than wanted",
    ("Anabranch overview", "Workers ready", "B"): "A shows it in green while as many are ready as wanted",
    ("Anabranch overview", "Alerts", "B"): "no alert fired in this time; A shows that",
    ("Anabranch overview", "Availability, last 5 minutes", "A"): "a share of no events",
    ("Anabranch overview", "Duration, last 5 minutes", "A"): "a share of no events",
    ("Anabranch overview", "Availability burn rate", "A"): "a share of no events",
    ("Anabranch overview", "Duration burn rate", "A"): "a share of no events",
    ("Anabranch pipeline", "Recall of live answers", "A"): "no search was repeated",
    ("Anabranch pipeline", "Recall of live answers", "B"): "no search was repeated",
    ("Anabranch pipeline", "Recall of live answers", "C"): "no search was repeated",
    ("Anabranch pipeline", "Provider", "A"): "no embedding stage is scraped",
    ("Anabranch pipeline", "Embedding duration, quantiles", "A"): "no embedding stage is scraped",
    ("Anabranch pipeline", "Embedding duration, quantiles", "B"): "no embedding stage is scraped",
    ("Anabranch pipeline", "Embedding duration, quantiles", "C"): "no embedding stage is scraped",
}
"""By dashboard, panel and query, why it may return nothing although nothing is wrong."""


@dataclass(frozen=True)
class Series:
    """A line, or a number.

    Attributes:
        query: its `refId`.
        name: as the legend shows it.
        color: fixed by the panel.
        points: time in seconds since the epoch, and value.
    """

    query: str
    name: str
    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]
    color: str | None = None

    @property
    def last(self) -> float:
        """The last number; NaN if there is none."""
        return next((value for _, value in reversed(self.points) if not math.isnan(value)), math.nan)

    @property
    def total(self) -> float:
        """The sum of all points."""
        return sum(value for _, value in self.points if not math.isnan(value))


@dataclass(frozen=True)
class PanelResult:
    """What a panel shows.

    Attributes:
        type: Grafana's, or "bars" for time series that are drawn as bars.
        thresholds: from this value on, this color.
        problem: what is wrong with it, or None.
        panel: as the dashboard describes it.
        step: seconds between two points.
    """

    dashboard: str
    title: str
    type: str
    series: Sequence[Series]
    unit: str
    thresholds: Sequence[tuple[float, str]]
    problem: str | None
    panel: Mapping[str, Any] = field(repr=False)
    start: float
    end: float
    step: float

    def by(self, label: str) -> Mapping[str, Series]:
        """The series by the value of a label."""
        return {series.labels[label]: series for series in self.series if label in series.labels}


def load_dashboards(compress: float = 1) -> Sequence[Json]:
    """As they are shipped, or with all durations divided by a factor, as the rules'."""
    texts = (
        source.render(Parameters(compress=compress))
        if compress != 1
        else {file.name: file.read_text(encoding="utf-8") for file in _FOLDER.glob("*.json")}
    )
    return [json.loads(texts[name]) for name in sorted(texts)]


async def run_panels(
    base_url: str,
    start: float,
    end: float,
    *,
    compress: float = 1,
    chosen: Mapping[str, Sequence[str]] | None = None,
) -> Sequence[PanelResult]:
    """Runs every panel of every dashboard.

    Args:
        base_url: of Prometheus.
        start: of the time that Grafana is asked to show, in seconds since the epoch.
        end: its end.
        compress: Prometheus scrapes and evaluates faster by this factor.
        chosen: values of the dashboards' variables; all by default.
    """
    async with aiohttp.ClientSession(base_url, timeout=aiohttp.ClientTimeout(total=60)) as http:
        runner = _Runner(http, start, end, _SCRAPE_SECONDS / compress, chosen or {})
        return await asyncio.gather(
            *(
                runner.run(dashboard, panel)
                for dashboard in load_dashboards(compress)
                for panel in visible(dashboard)
            )
        )


def visible(dashboard: Mapping[str, Any]) -> Iterator[Json]:
    """Its panels without the headings of rows."""
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


class _Runner:
    def __init__(
        self,
        http: aiohttp.ClientSession,
        start: float,
        end: float,
        scrape_seconds: float,
        chosen: Mapping[str, Sequence[str]],
    ) -> None:
        self._http = http
        self._start, self._end = start, end
        self._scrape_seconds = scrape_seconds
        self._chosen = chosen
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def run(self, dashboard: Mapping[str, Any], panel: Json) -> PanelResult:
        step = self._step(panel)
        problems: list[str] = []
        found: list[Series] = []
        for target in panel["targets"]:
            name = target["refId"]
            try:
                series = await self._query(dashboard, panel, target, step)
            except _QueryFailed as error:
                problems.append(f"query {name}: {error}")
                continue
            found += series
            if all(math.isnan(one.last) for one in series) and (
                (dashboard["title"], panel["title"], name) not in MAY_BE_EMPTY
            ):
                problems.append(f"query {name} returned {'only NaN' if series else 'nothing'}")
        if not found and not problems and not _says_why_empty(panel):
            problems.append("every query returned nothing, and the panel does not say why")
        defaults = panel["fieldConfig"]["defaults"]
        return PanelResult(
            dashboard=dashboard["title"],
            title=panel["title"],
            type="bars" if defaults.get("custom", {}).get("drawStyle") == "bars" else panel["type"],
            series=found,
            unit=defaults["unit"],
            thresholds=[
                (-math.inf if one["value"] is None else float(one["value"]), one["color"])
                for one in defaults.get("thresholds", {}).get("steps", [])
            ],
            problem="; ".join(problems) or None,
            panel=panel,
            start=self._start,
            end=self._end,
            step=step,
        )

    async def _query(
        self, dashboard: Mapping[str, Any], panel: Json, target: Json, step: float
    ) -> list[Series]:
        query = self._substituted(target["expr"], dashboard, step)
        if target.get("instant"):
            found = await self._get("query", query=query, time=f"{self._end:.3f}")
            samples = [(one["metric"], [one["value"]]) for one in found["result"]]
        else:
            # Grafana starts and ends at multiples of the step.
            start, end = (math.floor(at / step) * step for at in (self._start, self._end))
            found = await self._get(
                "query_range", query=query, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step:g}"
            )
            samples = [(one["metric"], one["values"]) for one in found["result"]]
        color = _fixed_color(panel, target["refId"])
        return [
            Series(
                target["refId"],
                _legend(target["legendFormat"], labels),
                labels,
                [(float(at), float(value)) for at, value in values],
                color,
            )
            for labels, values in samples
        ]

    async def _get(self, path: str, **parameters: str) -> Json:
        async with self._slots, self._http.post(f"/api/v1/{path}", data=parameters) as response:
            answer = await response.json()
        if answer["status"] != "success":
            raise _QueryFailed(answer["error"])
        return dict(answer["data"])

    def _step(self, panel: Json) -> float:
        pixels = _PIXELS * panel["gridPos"]["w"] / _COLUMNS
        wanted = (self._end - self._start) / pixels
        rounded = next((step for limit, step in _STEPS if wanted <= limit), 7200.0)
        return max(rounded, _seconds(panel["interval"]) if "interval" in panel else 0, self._scrape_seconds)

    def _substituted(self, expression: str, dashboard: Mapping[str, Any], step: float) -> str:
        values = {
            "__range": _duration(self._end - self._start),
            "__interval": _duration(step),
            "__interval_ms": f"{1000 * step:.0f}",
            "__rate_interval": _duration(max(step + self._scrape_seconds, 4 * self._scrape_seconds)),
        }
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                picked = self._chosen.get(variable["name"])
                values[variable["name"]] = "|".join(picked) if picked else variable["allValue"]

        def value(match: re.Match[str]) -> str:
            return values[match[1] or match[2]]  # an unknown variable is an error

        return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, expression)


class _QueryFailed(Exception):
    pass


def _says_why_empty(panel: Json) -> bool:
    return bool(panel["fieldConfig"]["defaults"]["noValue"] != "no data")


def _fixed_color(panel: Json, name: str) -> str | None:
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == name:
            for one in override["properties"]:
                if one["id"] == "color":
                    return str(one["value"]["fixedColor"])
    return None


def _legend(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template).strip()


def _duration(seconds: float) -> str:
    return f"{round(1000 * seconds)}ms"


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)(ms|[smhd])", text)
    assert found, text
    return int(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]
