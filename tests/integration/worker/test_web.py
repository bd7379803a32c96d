"""The worker's web port against clients that mean no good, and where it listens."""

import asyncio
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from streams.embedded.broker import EmbeddedBroker
from tests.conftest import Database
from tests.integration.harness import Worker, until

_FILES = 160


@pytest.fixture
def broker(embedded_broker: EmbeddedBroker) -> EmbeddedBroker:
    """Which one makes no difference here."""
    return embedded_broker


@pytest.fixture
def half_open() -> Iterator[Callable[[int], None]]:
    """Opens connections, each of which begins a request and never ends it."""
    with ExitStack() as clients:

        def connect(port: int) -> None:
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")

        yield connect


async def test_half_open_requests_take_no_more_than_their_share_of_file_descriptors(
    database: Database,
    start_worker: Callable[..., Worker],
    half_open: Callable[[int], None],
    figures: Callable[[str], None],
) -> None:
    worker = start_worker(database.worker)
    await worker.until_ready()
    resource.prlimit(worker.process.pid, resource.RLIMIT_NOFILE, (_FILES, _FILES))
    before = psutil.Process(worker.process.pid).num_fds()
    for _ in range(3 * _FILES):
        with suppress(OSError):
            await asyncio.to_thread(half_open, worker.port)
    taken = 0

    def within_share() -> bool:
        nonlocal taken
        taken = psutil.Process(worker.process.pid).num_fds() - before
        return taken <= 80

    await asyncio.sleep(2)
    await until(within_share, lambda: f"{taken} file descriptors", seconds=10)
    assert await asyncio.to_thread(worker.is_live)
    await worker.until_ready(seconds=5)
    assert "Too many open files" not in worker.log
    figures(f"{3 * _FILES} half-open requests took {taken} file descriptors")


async def test_the_web_port_listens_where_it_is_configured(
    database: Database, start_worker: Callable[..., Worker]
) -> None:
    here = start_worker(database.worker, ANABRANCH_WEB_BIND_ADDRESS="127.0.0.1")
    everywhere = start_worker(database.worker)
    for worker in (here, everywhere):
        await until(worker.is_live, partial(getattr, worker, "log"), seconds=20)
    socket.create_connection(("127.0.0.2", everywhere.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", here.port), timeout=5)


async def test_whatever_is_in_the_temporary_folder_a_worker_starts(
    database: Database, start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    (folder / "anabranch").write_text("somebody else's")
    await start_worker(database.worker, TMPDIR=str(folder)).until_ready()
    assert [path.name for path in folder.iterdir()] == ["anabranch"]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (
            "application/openmetrics-text; version=1.0.0",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
        ("text/plain", "text/plain; version=0.0.4; charset=utf-8"),
        (None, "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
async def test_metrics_come_in_the_format_that_is_asked_for(
    accept: str | None, content_type: str, database: Database, start_worker: Callable[..., Worker]
) -> None:
    worker = start_worker(database.worker)
    await until(worker.is_live, partial(getattr, worker, "log"), seconds=20)
    request = Request(f"http://127.0.0.1:{worker.port}/metrics", headers={"Accept": accept} if accept else {})

    def scrape() -> tuple[str, str]:
        with urlopen(request, timeout=5) as response:
            return response.headers["Content-Type"], response.read().decode()

    found, text = await asyncio.to_thread(scrape)
    assert found == content_type
    parse = openmetrics_families if "openmetrics" in content_type else text_string_to_metric_families
    names = {sample.name for family in parse(text) for sample in family.samples}
    assert {"anabranch_ready", "anabranch_events_total", "anabranch_build_info"} <= names
    assert not [name for name in names if name.endswith("_created")]
