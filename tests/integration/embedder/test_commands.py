"""The commands with `--texts`: create and check the topics, publish questions, show and replay what was dead-lettered.

Once, on the embedded broker: the commands themselves are tested on both.
"""

import asyncio
import json
from functools import partial

import pytest

from streams.core.messages import QueryText
from streams.wire import Codec
from tests.embedding.imitation import status
from tests.integration.embedder.conftest import Stages
from tests.integration.embedder.stages import code_of, question, read_queries
from tests.integration.harness import Channel, anabranch, free_port, until

pytestmark = pytest.mark.parametrize("broker", ["embedded"], indirect=True)


async def run(
    stages: Stages, *arguments: str, given: str = "", code: int = 0, **settings: str
) -> tuple[str, str]:
    command = partial(
        anabranch,
        *arguments,
        channel=stages.channel,
        given=given,
        ANABRANCH_EMBEDDING_PROVIDER="openai",  # the stage's settings may stand beside the command's
        **{**stages.texts.settings, **settings},
    )
    done = await asyncio.to_thread(command)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


async def test_topics_knows_the_stage_s(channel: Channel) -> None:
    other = {
        "ANABRANCH_TEXT_TOPIC": f"{channel.name}.a",
        "ANABRANCH_TEXT_DEAD_LETTER_TOPIC": f"{channel.name}.b",
    }

    async def topics(*options: str) -> tuple[int, str]:
        done = await asyncio.to_thread(
            partial(anabranch, "topics", "--partitions", "3", *options, channel=channel, **other)
        )
        return done.returncode, done.stdout

    code, shown = await topics("--check", "--texts")
    assert (code, shown.count("FAULT"), shown.count("ok")) == (1, 2, 4)
    code, shown = await topics("--texts")
    assert (code, shown.count("created, 3 partitions"), shown.count("exists, 3 partitions")) == (0, 2, 4)
    code, shown = await topics("--check", "--texts")
    assert (code, shown.count("exists")) == (0, 6)
    for name in other.values():
        assert name in shown


async def test_check_lists_the_stage_s_topics(stages: Stages) -> None:
    dsn = "postgresql://nobody@127.0.0.1:1/none"
    shown, _ = await run(stages, "check", "--texts", "--json", code=1, DATABASE_CONNECTION_STRING=dsn)
    topics = [finding for finding in json.loads(shown) if finding["check"] == "topic"]
    assert [finding["level"] for finding in topics] == ["ok"] * 6
    assert stages.texts.input in shown
    shown, _ = await run(
        stages,
        "check",
        "--texts",
        "--json",
        code=1,
        DATABASE_CONNECTION_STRING=dsn,
        ANABRANCH_TEXT_TOPIC="another",
    )
    [missing] = [f for f in json.loads(shown) if f["level"] == "unready" and f["check"] == "topic"]
    assert (missing["detail"], missing["remedy"]) == ("another is missing", "anabranch topics --texts")


async def test_questions_are_published_dead_lettered_shown_and_replayed(stages: Stages) -> None:
    embedder = stages.start_embedder(ANABRANCH_PROVIDER_OUTAGE="dead_letter", ANABRANCH_RETRY_ATTEMPTS="1")
    await embedder.until_ready()
    stages.server.failing = status(500)
    asked, empty = question("What moves an estuary?", filters={"section": "1"}), question(" ")
    lines = "\n".join(map(json.dumps, (asked, empty)))
    shown, said = await run(stages, "publish", "--texts", given=lines)
    assert shown.splitlines() == [asked["event_id"], empty["event_id"]]
    assert said == f"published 2 events to {stages.texts.input}\n"
    await until(
        lambda: len(stages.texts.dead_letters) == 2,
        lambda: f"{len(stages.texts.dead_letters)} dead letters",
        seconds=20,
    )
    codes = {code_of(record): record for record in stages.texts.dead_letters}
    assert codes.keys() == {"provider_unavailable", "empty_text"}
    kept = Codec().decode_text(codes["provider_unavailable"].value)
    assert kept == QueryText.parse(asked)

    shown, _ = await run(stages, "tail", "--dead-letters", "--texts", "--from-beginning", "--limit", "2")
    assert {json.loads(line)["event_id"] for line in shown.splitlines()} == {
        asked["event_id"],
        empty["event_id"],
    }
    assert asked["text"] not in shown

    stages.server.failing = None
    await embedder.until_ready(seconds=20)
    shown, _ = await run(stages, "replay", "--texts")
    assert "1 will fail again (empty_text)" in shown
    assert f"use --apply to replay 2 to {stages.texts.input}" in shown
    await run(stages, "replay", "--texts", "--code", "provider_unavailable", "--apply")
    [(record, query)] = await read_queries(stages.channel, 1)
    assert (str(query.event_id), record.key) == (asked["event_id"], asked["event_id"].encode())
    samples = await embedder.scrape()
    assert samples.value("anabranch_event_age_seconds_count") == 0  # it was replayed


async def test_an_invalid_line_is_named_and_nothing_is_published(stages: Stages) -> None:
    lines = "\n".join(map(json.dumps, (question("good"), question("bad", k="ten"))))
    _, error = await run(stages, "publish", "--texts", given=lines, code=1)
    assert "line 2: contract_violation: k is not an integer" in error
    _, error = await run(stages, "tail", "--texts", code=2)
    assert error == "anabranch tail: --texts requires --dead-letters; see `anabranch tail --help`\n"


async def test_an_unusable_provider_is_one_line(stages: Stages) -> None:
    _, error = await run(
        stages,
        "embedder",
        code=1,
        ANABRANCH_WEB_PORT=str(free_port()),
        ANABRANCH_EMBEDDING_MODEL="m",
        ANABRANCH_EMBEDDING_BASE_URL="nowhere",
    )
    assert error == (
        "anabranch embedder: startup refused: provider_misconfigured: the provider's address is not a URL that begins"
        " with http:// or https://\n"
    )
    _, error = await run(stages, "embedder", code=2)
    assert error == "anabranch embedder: ANABRANCH_EMBEDDING_MODEL must be set\n"
