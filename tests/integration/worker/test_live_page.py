"""The live page in a real browser: it refreshes itself, asks nobody else, and fits any window."""

from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from tests.browser import Browser
from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, query

pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)

TEXT = "document.body.innerText"


async def test_the_page_follows_the_worker(
    browser: Browser,
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    address = f"http://127.0.0.1:{worker.port}/"
    async with browser.tab() as tab:
        await tab.open(address)
        await tab.evaluate("window.sameDocument = true")
        assert "None since the start" in await tab.evaluate(TEXT)

        vector = unit_vectors(1, 1)[0]
        await channel.send(as_avro(query(vector)))
        await channel.send(b"noise")
        await output_reader.until(results=1, dead_letters=1)
        await tab.until(f"{TEXT}.includes('undecodable')")
        await tab.until("document.querySelector('rect.dead_lettered') !== null")  # after the next snapshot
        assert await tab.evaluate("document.title") == "Ready · Anabranch worker"
        assert await tab.evaluate("window.sameDocument") is True

        for width in (320, 600, 1280):
            await tab.open(address, width=width, dark=width == 600)
            # Beside the scroll bar.
            assert await tab.evaluate(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            )
        await tab.open(address, dark=True)
        ink, ground = [
            await tab.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "background")
        ]
        assert ink.startswith("rgb(239,")
        assert ground.startswith("rgb(17,")

        assert {urlsplit(request).netloc for request in tab.requests if not request.startswith("data:")} == {
            f"127.0.0.1:{worker.port}"
        }
        assert tab.messages == []

        # As if the worker had been replaced by another release.
        await tab.evaluate("window.sameDocument = true")
        await tab.evaluate("document.querySelector('style').textContent += ' '")
        await tab.until("window.sameDocument === undefined")
        assert (await worker.terminate())[0] == 0
        await tab.until("!document.getElementById('lost').hidden")
        assert (await tab.evaluate(TEXT)).count("No answer since") == 1
