"""What becomes of questions when the provider fails: each fault has its own answer, through a real embedding stage.

Once, on the embedded broker: it only carries the events.
"""

import asyncio
import time

import pytest

from tests.disclosure import assert_silent
from tests.embedding.imitation import KEY, hang_up, status
from tests.integration.embedder.conftest import Stages
from tests.integration.embedder.stages import code_of, question, read_queries

pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)


async def embedded(stages: Stages) -> list[str]:
    """The ids of all query events, which must be one for each question without a dead letter."""
    dead = {record.key for record in stages.texts.dead_letters}
    expected = [event.name for event in stages.texts.asked if event.key not in dead]
    async with asyncio.timeout(30):
        found = await read_queries(stages.channel, len(expected))
    assert sorted(str(query.event_id) for _, query in found) == sorted(expected)
    return expected


async def test_an_outage_blocks(stages: Stages) -> None:
    embedder = stages.start_embedder()
    await embedder.until_ready()
    stages.server.failing = status(500)
    for number in range(20):
        await stages.texts.send(question(f"Number {number}?"))
    await embedder.until_ready(ready=False, seconds=15)
    assert embedder.is_live()
    samples = await embedder.scrape()
    assert samples.value("anabranch_provider_up") == 0
    assert samples.value("anabranch_retries_total", cause="provider_unavailable") > 0
    assert samples.total("anabranch_events_total") == 0
    page = embedder.page("/")[1]
    for text in (
        "Anabranch embedding stage",
        "Not ready",
        "The provider is unavailable. The log has the reason.",
    ):
        assert text in page, text
    assert_silent([KEY, stages.server.url, *(event.name for event in stages.texts.asked)], page)
    stages.server.failing = None
    await embedder.until_ready(seconds=15)
    assert len(await embedded(stages)) == 20
    assert stages.texts.dead_letters == []
    lines = [line for line in embedder.log.splitlines() if "provider is" in line]
    assert ["down" in line for line in lines] == [False, True, False], embedder.log


async def test_an_outage_dead_letters_if_it_is_set(stages: Stages) -> None:
    embedder = stages.start_embedder(ANABRANCH_PROVIDER_OUTAGE="dead_letter", ANABRANCH_RETRY_ATTEMPTS="2")
    await embedder.until_ready()
    stages.server.failing = status(502)
    name = await stages.texts.send(question("Now?"))
    await stages.texts.until_answered(stages.reader, seconds=20)
    [dead] = stages.texts.dead_letters
    headers = dict(dead.headers)
    assert (dead.key, code_of(dead)) == (name.encode(), "provider_unavailable")
    assert headers["__connect.errors.stage"] == b"embed"
    assert headers["__connect.errors.exception.message"] == b"the provider was unavailable in 2 attempts"
    stages.server.failing = None
    await stages.texts.send(question("And now?"))
    assert len(await embedded(stages)) == 1


async def test_a_text_at_which_the_provider_fails_does_not_block_the_others(stages: Stages) -> None:
    embedder = stages.start_embedder()
    await embedder.until_ready()
    stages.server.broken["Fail!"] = 500
    broken = ""
    for number in range(60):
        if number == 20:
            broken = await stages.texts.send(question("Fail!"), partition=1)
        await stages.texts.send(question(f"Number {number}?"), partition=number % 3)
        await asyncio.sleep(0.05)  # others succeed all the while
    async with asyncio.timeout(15):
        while not stages.texts.dead_letters:  # noqa: ASYNC110  # it comes when it comes
            await asyncio.sleep(0.05)
    [dead] = stages.texts.dead_letters
    assert (dead.key, code_of(dead)) == (broken.encode(), "provider_unavailable")
    assert len(await embedded(stages)) == 60
    assert embedder.is_ready()


async def test_a_provider_that_rejects_a_text_is_not_down(stages: Stages) -> None:
    embedder = stages.start_embedder()
    await embedder.until_ready()
    stages.server.broken["forbidden"] = 422
    await stages.texts.send(question("forbidden"), expects="text_rejected")
    await stages.texts.send(question("allowed"))
    assert len(await embedded_after(stages, 1)) == 1
    assert list(map(code_of, stages.texts.dead_letters)) == ["text_rejected"]
    assert embedder.is_ready()


async def embedded_after(stages: Stages, dead_letters: int) -> list[str]:
    async with asyncio.timeout(15):
        while len(stages.texts.dead_letters) < dead_letters:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.05)
    return await embedded(stages)


async def test_a_wrong_key_is_one_line_and_dead_letters_nothing(stages: Stages) -> None:
    stages.server.key = "another key"
    embedder = stages.start_embedder()
    for number in range(10):
        await stages.texts.send(question(f"Number {number}?"))
    deadline = time.monotonic() + 20
    while "the provider rejects the API key" not in embedder.log:
        assert time.monotonic() < deadline, embedder.log
        await asyncio.sleep(0.1)
    await asyncio.sleep(7)  # another check, and time enough to join and read
    assert embedder.is_live()
    assert not embedder.is_ready()
    lines = [line for line in embedder.log.splitlines() if "key" in line]
    assert len(lines) == 1, embedder.log
    assert "provider is misconfigured: the provider rejects the API key (HTTP 401)" in lines[0]
    samples = await embedder.scrape()
    assert samples.total("anabranch_dead_letters_total") == 0
    stages.server.key = KEY
    await embedder.until_ready(seconds=20)
    assert len(await embedded(stages)) == 10
    assert stages.texts.dead_letters == []


async def test_a_key_that_is_withdrawn_holds_questions_back(stages: Stages) -> None:
    embedder = stages.start_embedder(ANABRANCH_PROVIDER_OUTAGE="dead_letter")
    await embedder.until_ready()
    stages.server.key = "another key"
    for number in range(10):
        await stages.texts.send(question(f"Number {number}?"))
    await embedder.until_ready(ready=False, seconds=10)
    await asyncio.sleep(2)
    stages.server.key = KEY
    assert len(await embedded(stages)) == 10
    await embedder.until_ready(seconds=20)
    assert stages.texts.dead_letters == []
    assert len([line for line in embedder.log.splitlines() if "misconfigured" in line]) == 1, embedder.log


async def test_a_wrong_dimension_is_refused_at_the_start(stages: Stages) -> None:
    stages.server.dimensions = 384
    embedder = stages.start_embedder()
    assert await embedder.ended(seconds=20) == 1
    assert embedder.log.strip() == (
        "anabranch embedder: startup refused: the model's embeddings have 384 dimensions, not 768: set"
        " ANABRANCH_EMBEDDING_DIMENSIONS or ANABRANCH_EMBEDDING_MODEL to match the store"
    )


async def test_a_wrong_dimension_is_refused_when_a_provider_comes_back(stages: Stages) -> None:
    stages.server.failing, stages.server.dimensions = hang_up, 384
    embedder = stages.start_embedder()
    deadline = time.monotonic() + 30
    while "provider is down" not in embedder.log:
        assert time.monotonic() < deadline, embedder.log
        await asyncio.sleep(0.1)
    stages.server.failing = None
    assert await embedder.ended(seconds=30) == 1
    assert "startup refused: the model's embeddings have 384 dimensions" in embedder.log
