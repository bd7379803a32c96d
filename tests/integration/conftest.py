"""Workers as they really run: their own process, a broker, a server, and topics and a group for each test.

``broker`` is Apache Kafka where it is available, else the embedded one; in CI it has to be Kafka. With --long it is
each of them, and so every test that stands on it runs twice, unless its module says which it needs, and why.

What a test measured goes into ``figures`` and is printed at the end of the run, whether it passed or not.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path
from uuid import uuid4

import pytest

from streams.embedded.broker import EmbeddedBroker
from tests.certificates import Certificates
from tests.integration.harness import Channel, OutputReader, Worker, open_channel
from tests.integration.kafka.apache_kafka import ApacheKafka, KafkaUnavailable, jars

StartWorker = Callable[..., Worker]


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a line to print at the end of the run."""

    def add(line: str) -> None:
        request.node.user_properties.append(("figure", f"{request.node.name}: {line}"))

    return add


@pytest.fixture(scope="session")
def embedded_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """One authority for the whole run."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def kafka(kafka_jars: Path, certificates: Certificates) -> Iterator[ApacheKafka]:
    """One Apache Kafka for the whole run."""
    with ApacheKafka(kafka_jars, certificates) as started:
        yield started


@cache
def _kafka_is_available() -> bool:
    try:
        jars()
    except KafkaUnavailable:
        return False
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "broker" in metafunc.fixturenames and "broker" not in chosen:
        both = metafunc.config.getoption("long")
        metafunc.parametrize("broker", ["embedded", "kafka"] if both else ["either"], indirect=True)


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker | ApacheKafka]:
    """What ``channel`` connects to. A test may stop Apache Kafka and leave it stopped.

    "either" is Apache Kafka where it is available: the embedded broker keeps members of a group waiting for seconds.
    """
    needed = request.param == "kafka" or os.environ.get("CI") == "true"
    if request.param == "embedded" or not (needed or _kafka_is_available()):
        yield request.getfixturevalue("embedded_broker")
        return
    kafka: ApacheKafka = request.getfixturevalue("kafka")
    yield kafka
    if not kafka.is_running:
        kafka.start()


@pytest.fixture
async def channel(broker: EmbeddedBroker | ApacheKafka) -> AsyncIterator[Channel]:
    """Three topics and a group that no other test has, and a producer."""
    async with open_channel(broker.bootstrap_servers, f"t{uuid4().hex[:8]}") as opened:
        yield opened


@pytest.fixture
async def output_reader(channel: Channel) -> AsyncIterator[OutputReader]:
    """What comes out on the output topic and the dead-letter topic of ``channel``."""
    async with OutputReader(channel) as opened:
        yield opened


@pytest.fixture
def start_worker(channel: Channel, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts ``anabranch worker`` as a process of its own; each is ended with the test, by its own id."""
    started: list[Worker] = []

    def start(dsn: str | None, **settings: str) -> Worker:
        worker = Worker(tmp_path / f"worker-{len(started)}.log", channel, dsn, settings)
        started.append(worker)
        return worker

    try:
        yield start
    finally:
        for worker in started:
            worker.end()
            print(f"--- {worker.log_file.name} ---\n{worker.log[-4000:]}")  # shown where the test failed
