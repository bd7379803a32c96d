"""A real Prometheus with compressed rules, and targets that may change while it runs."""

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import aiohttp
import yaml

from k8s.observability.rules import Parameters, render
from tests.integration.harness import free_port
from tests.ops.clock import PARAMETERS

__all__ = ["JOB", "Prometheus", "Series", "Unavailable", "program"]

JOB: Final = "anabranch"
_START_SECONDS: Final = 30.0
# Of the deployment files, and Prometheus's default.
_SCRAPE_SECONDS: Final = 15.0
_LOOKBACK_SECONDS: Final = 300.0


class Unavailable(Exception):
    """Prometheus is not installed."""


@dataclass(frozen=True)
class Series:
    """Samples, as (seconds since the epoch, value), in order."""

    labels: Mapping[str, str]
    samples: Sequence[tuple[float, float]]


def program() -> str:
    """The server's path; one beside the interpreter comes first.

    Raises:
        Unavailable: there is none.
    """
    found = shutil.which("prometheus", path=str(Path(sys.executable).parent)) or shutil.which("prometheus")
    if found is None:
        raise Unavailable("prometheus is not installed")
    return found


class Prometheus:
    """A server of its own, with its data in a temporary folder.

    Args:
        parameters: of the rules; all intervals are divided by their factor.
        rule_file: instead of the shipped rules.
        job: of all targets.

    Attributes:
        url: where its HTTP API is, without a slash at the end.
    """

    def __init__(
        self, parameters: Parameters = PARAMETERS, *, rule_file: str | None = None, job: str = JOB
    ) -> None:
        self._rules = render(parameters) if rule_file is None else rule_file
        self._compress = parameters.compress
        self._job = job
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._temporary = TemporaryDirectory(prefix="anabranch-prometheus-")
        self._folder = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        targets = self._folder / "targets"
        targets.mkdir()
        (self._folder / "rules.yml").write_text(self._rules, encoding="utf-8")
        interval = self._compressed(_SCRAPE_SECONDS)
        configuration = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": interval,
            },
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {
                    "job_name": self._job,
                    "file_sd_configs": [{"files": ["targets/*.json"], "refresh_interval": "1s"}],
                }
            ],
        }
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        self._process = self._start()
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        try:
            await self._until_up()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, 10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._temporary.cleanup()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                [
                    program(),
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    f"--query.lookback-delta={self._compressed(_LOOKBACK_SECONDS)}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def set_targets(self, namespace: str, ports: Collection[int], *, job: str | None = None) -> None:
        """What a job of an installation has; by default its workers. None: they are discovered no more."""
        job = job or self._job
        file = self._folder / "targets" / f"{namespace}-{job}.json"
        labels = {"namespace": namespace, "job": job}
        text = json.dumps(
            [{"targets": [f"127.0.0.1:{port}" for port in ports], "labels": labels}] if ports else []
        )
        written = file.with_suffix(".new")
        written.write_text(text, encoding="utf-8")
        written.replace(file)

    async def query(self, expression: str, at: float | None = None) -> list[tuple[Mapping[str, str], float]]:
        """An instant vector."""
        result = await self._get("query", query=expression, time=time.time() if at is None else at)
        return [(series["metric"], float(series["value"][1])) for series in result]

    async def until(self, expression: str, *, seconds: float) -> None:
        """Waits until an expression returns something.

        Raises:
            AssertionError: it does not, in time.
        """
        deadline = time.monotonic() + seconds
        while not await self.query(expression):
            assert time.monotonic() < deadline, f"after {seconds:.0f} s, still nothing: {expression}"
            await asyncio.sleep(0.2)

    async def samples(self, selector: str, start: float, end: float) -> list[Series]:
        """The samples as they were scraped or recorded, not at steps."""
        span = max(1, round(1000 * (end - start)))
        result = await self._get("query", query=f"{selector}[{span}ms]", time=end)
        return [
            Series(series["metric"], [(float(at), float(value)) for at, value in series["values"]])
            for series in result
        ]

    def _compressed(self, seconds: float) -> str:
        return f"{round(1000 * seconds / self._compress)}ms"

    async def _until_up(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while True:
            assert self._process.poll() is None, f"Prometheus ended:\n{self.log[-4000:]}"
            try:
                assert self._http is not None
                async with self._http.get(f"{self.url}/-/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            assert time.monotonic() < deadline, f"Prometheus does not start:\n{self.log[-4000:]}"
            await asyncio.sleep(0.1)

    async def _get(self, path: str, **parameters: Any) -> Any:
        assert self._http is not None
        async with self._http.get(f"{self.url}/api/v1/{path}", params=parameters) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]["result"]
