"""docker-compose.yml from end to end without Docker: Apache Kafka, PostgreSQL, the one-shots, a worker, the sample.

Apache Kafka is configured by the image's own program, from the service's environment.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from streams import sample
from streams.embedded.postgres import EmbeddedPostgres
from tests.deploy.processes import ComposeProcesses
from tests.deploy.test_store import ONE_SHOTS, Store
from tests.integration.harness import free_port
from tests.integration.kafka.apache_kafka import free_ports

pytestmark = pytest.mark.slow

_START_SECONDS = 60.0
# What the image's configuration of Log4j has, as far as its program reads it.
_LOG4J = """\
Configuration:
  Appenders:
    Console:
      name: STDOUT
      PatternLayout:
        pattern: "%p %m%n"
  Loggers:
    Root:
      level: INFO
      AppenderRef:
        - ref: STDOUT
    Logger: []
"""


class Broker:
    """The service `kafka`: set up, formatted and started by what its image contains."""

    def __init__(self, service: Mapping[str, Any], jars: Path, folder: Path) -> None:
        self.folder = folder
        ports = re.findall(r":(\d+)", service["environment"]["KAFKA_LISTENERS"])
        here = dict(zip(ports, map(str, free_ports(len(ports))), strict=True))
        self.address = f"127.0.0.1:{here['19092']}"
        environment = {
            name: re.sub(
                rf":({'|'.join(ports)})\b",
                lambda match: f":{here[match[1]]}",
                value.replace("kafka:", "127.0.0.1:"),
            )
            for name, value in service["environment"].items()
        }
        # A volume and tmpfs in a container: both empty at the first start.
        for name in ("default", "mounted", "final", "data"):
            (folder / name).mkdir()
        for name in ("log4j2.yaml", "tools-log4j2.yaml"):
            (folder / "default" / name).write_text(_LOG4J)
        self._java = ["java", "-XX:TieredStopAtLevel=1", "-Xmx512m", "-cp", f"{jars}/*"]
        self._environment = {
            **environment,
            "PATH": os.environ["PATH"],
            "KAFKA_LOG_DIRS": str(folder / "data"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        set_up = subprocess.run(
            [
                *self._java,
                *("kafka.docker.KafkaDockerWrapper", "setup"),
                *("--default-configs-dir", "default"),
                *("--mounted-configs-dir", "mounted"),
                *("--final-configs-dir", "final"),
            ],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
            check=False,
        )
        assert set_up.returncode == 0, set_up.stdout + set_up.stderr
        log = self.folder / "broker.log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*self._java, "kafka.Kafka", "final/server.properties"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        deadline = time.monotonic() + _START_SECONDS
        while b"Kafka Server started" not in log.read_bytes():
            assert self._process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def broker(
    compose: dict[str, Any], kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    started = Broker(compose["services"]["kafka"], kafka_jars, tmp_path_factory.mktemp("kafka"))
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def processes(
    compose: dict[str, Any], root: Path, broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComposeProcesses]:
    """With a store that has been set up."""
    folder = tmp_path_factory.mktemp("secrets")
    with EmbeddedPostgres() as server:
        store = Store(server, compose, root, folder)
        store.up()
        yield ComposeProcesses(
            compose,
            root,
            folder,
            {"postgres:5432": f"{server.host}:{server.port}", "kafka:19092": broker.address},
        )


def _health(processes: ComposeProcesses, service: Mapping[str, Any], port: int) -> int:
    """The exit code of the worker's health check, which asks the port that a container has."""
    kind, *check = service["healthcheck"]["test"]
    assert kind == "CMD"
    assert check[0] == "python"
    command = [part.replace("6066", str(port)) for part in check[1:]]
    done = subprocess.run(
        [processes.command("worker")[0], *command], capture_output=True, timeout=30, check=False
    )
    return done.returncode


def test_the_sample_is_answered(compose: dict[str, Any], processes: ComposeProcesses, tmp_path: Path) -> None:
    """The whole stack, in the order of its dependencies; twice what may be run twice."""
    services = compose["services"]
    assert not {"migrate", "roles"} - set(ONE_SHOTS)
    for _ in range(2):
        topics = processes.run("topics")
        assert topics.returncode == 0, topics.stdout + topics.stderr
    port = free_port()
    log = tmp_path / "worker.log"
    worker = processes.start("worker", log, ANABRANCH_WEB_PORT=str(port))
    try:
        deadline = time.monotonic() + _START_SECONDS
        while _health(processes, services["worker"], port) != 0:
            assert worker.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()[-4000:]
        for _ in range(2):
            asked = processes.run("sample")
            assert asked.returncode == 0, asked.stdout + asked.stderr
            expected = len(sample.load().queries)
            assert f"{expected} questions answered, {expected} with the expected passage" in " ".join(
                asked.stdout.split()
            )
        process = psutil.Process(worker.pid)
        limit = int(services["worker"]["mem_limit"].removesuffix("m")) * 1024**2
        assert process.memory_info().rss < limit / 2
        assert process.num_threads() < services["worker"]["pids_limit"] / 2
        worker.send_signal(signal.SIGTERM)
        grace = int(services["worker"]["stop_grace_period"].removesuffix("s"))
        assert worker.wait(timeout=grace) == 0, log.read_text()[-4000:]
        assert _health(processes, services["worker"], port) != 0
        assert [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    finally:
        worker.kill()
        worker.wait()


def test_without_an_answer_the_sample_fails_in_one_line(processes: ComposeProcesses) -> None:
    """No broker there."""
    asked = processes.run("sample", KAFKA_BOOTSTRAP_SERVERS=f"127.0.0.1:{free_port()}")
    assert asked.returncode == 1
    assert re.fullmatch(r"sample: Kafka.+\n", asked.stderr)
