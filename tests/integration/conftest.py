"""Workers as they really run: their own process, a broker, a server, and topics and a group for each test.

What a test measured goes into ``figures`` and is printed at the end of the run, whether it passed or not.
"""

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

# Modules that several tests share are imported by their own names.
_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from harness import Channel, Outbox, Worker, open_channel  # noqa: E402  # found through the path above

from streams.embedded.broker import EmbeddedBroker  # noqa: E402

StartWorker = Callable[..., Worker]

_FIGURES: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _FIGURES:
        terminalreporter.section("figures")
        for line in _FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a line to print at the end of the run."""

    def add(line: str) -> None:
        _FIGURES.append(f"{request.node.name}: {line}")

    return add


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest.fixture
async def channel(broker: EmbeddedBroker) -> AsyncIterator[Channel]:
    """Three topics and a group that no other test has, and a producer."""
    async with open_channel(broker.bootstrap_servers, f"t{uuid4().hex[:8]}") as opened:
        yield opened


@pytest.fixture
async def outbox(channel: Channel) -> AsyncIterator[Outbox]:
    """What comes out on the output topic and the dead-letter topic of ``channel``."""
    async with Outbox(channel) as opened:
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
