"""Draws the live page of a real worker, ready and in an outage, for the documentation and to look at after a change.

python -m tests.live_page build/ --seconds 300
"""

import argparse
import asyncio
import time
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from streams.embedded.broker import EmbeddedBroker
from streams.embedded.postgres import EmbeddedPostgres
from tests.browser import Browser
from tests.conftest import PostgresServer
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, Worker, as_avro, open_channel, query

_WIDTHS: Final = (360, 1120)
# One event in so many is a dead letter.
_BAD_EVERY: Final = 500


async def _draw(browser: Browser, worker: Worker, output: Path, name: str) -> None:
    for width in _WIDTHS:
        for dark in (False, True):
            async with browser.tab() as tab:
                await tab.open(f"http://127.0.0.1:{worker.port}/", width=width, dark=dark)
                file = output / f"live-page-{name}-{width}-{'dark' if dark else 'light'}.png"
                file.write_bytes(await tab.screenshot())
                print(file)


async def _ask(channel: Channel, seconds: float) -> None:
    vectors = unit_vectors(16, 2)
    began = time.monotonic()
    for number in count(1):
        if (spent := time.monotonic() - began) > seconds:
            return
        bad = number % _BAD_EVERY == 0
        await channel.send(b"noise" if bad else as_avro(query(vectors[number % 16])), str(number).encode())
        # The rate rises and falls.
        await asyncio.sleep(0.01 + 0.02 * abs(spent % 200 - 100) / 100)


async def _run(output: Path, seconds: float) -> None:
    with (
        TemporaryDirectory() as folder,
        EmbeddedBroker(Path(folder)) as broker,
        EmbeddedPostgres() as embedded,
        Browser() as browser,
    ):
        postgres = await asyncio.to_thread(PostgresServer, embedded)
        database = await asyncio.to_thread(postgres.database)
        await load(database.writer, tiny_corpus())
        async with open_channel(broker.bootstrap_servers, "page") as channel:
            worker = Worker(Path(folder) / "worker.log", channel, database.worker, {})
            try:
                await worker.until_ready()
                await _ask(channel, seconds)
                await _draw(browser, worker, output, "ready")
                await asyncio.to_thread(embedded.stop, "immediate")
                await _ask(channel, 10)
                await _draw(browser, worker, output, "outage")
            finally:
                worker.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=30, help="how long the worker answers before")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    asyncio.run(_run(given.output, given.seconds))
