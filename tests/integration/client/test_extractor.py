"""The example's extractor acts once on each result, wherever it is killed."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import pytest

from examples import extractor
from streams.broker.clients import running_admin
from streams.core.messages import RetrievalResult, result_id
from streams.wire import Codec
from tests.conftest import Database
from tests.integration.client import killed_extractor
from tests.integration.harness import Channel

ROOT = Path(__file__).resolve().parents[3]
TEXT = "Built in 1848, rebuilt in 1912, and not in 12345."
# The embedded broker keeps each new member of a group waiting for ten seconds.
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("broker", ["either"], indirect=True)]


def result_of(event_id: UUID) -> bytes:
    """As a worker publishes it."""
    chunk_id = uuid4()
    passage = {
        "rank": 1,
        "chunk_id": chunk_id,
        "document_id": uuid4(),
        "matched_chunk_id": chunk_id,
        "scope": "global",
        "score": 0.5,
        "text_content": TEXT,
        "token_count": 10,
        "metadata": {},
    }
    result = {
        "schema_version": "1.0.0",
        "event_id": event_id,
        "result_id": result_id(event_id),
        "profile": "docs",
        "query_embedding_dimensions": 768,
        "k_effective": 5,
        "k_returned": 1,
        "score_type": "cosine_similarity",
        "tokens_used": 10,
        "query_time_ms": 1.5,
        "warnings": (),
        "results": (passage,),
    }
    return Codec().encode_result(RetrievalResult.parse(result))


async def test_it_acts_once_on_each_result(channel: Channel, database: Database) -> None:
    """Killed at the second result before its transaction ends, at the third one right after; the first is repeated.

    The first run has a group of its own, so the second one gets everything again, and need not wait until Kafka has
    noticed that a member is missing.
    """
    ids = [uuid4() for _ in range(4)]
    for event_id in (*ids, ids[0]):
        await channel.producer.send_and_wait(channel.output, result_of(event_id), partition=0)

    def start(*program: str) -> subprocess.Popen[bytes]:
        environment = {
            "PATH": os.environ["PATH"],
            "KAFKA_BOOTSTRAP_SERVERS": channel.bootstrap_servers,
            "ANABRANCH_INPUT_TOPIC": channel.input,
            "ANABRANCH_OUTPUT_TOPIC": channel.output,
            "ANABRANCH_DEAD_LETTER_TOPIC": channel.dead_letters,
        }
        return subprocess.Popen([sys.executable, "-m", *program], cwd=ROOT, env=environment)

    connection = await asyncpg.connect(database.owner)
    try:
        for group, event_id, when, acted_on in (
            ("first-run", ids[1], "before", ids[:1]),
            (extractor.GROUP, ids[2], "after", ids[:3]),
        ):
            arguments = (database.owner, group, str(event_id), when)
            with start(killed_extractor.__name__, *arguments) as process:
                assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
            assert await years(connection) == {result_id(each): [1848, 1912] for each in acted_on}
        with start(extractor.__name__, database.owner) as process:
            try:
                async with asyncio.timeout(60):
                    while await committed(channel) < len(ids) + 1:
                        assert process.poll() is None
                        await asyncio.sleep(0.1)
            finally:
                process.terminate()
        assert await years(connection) == {result_id(each): [1848, 1912] for each in ids}
    finally:
        await connection.close()


async def years(connection: "asyncpg.Connection[asyncpg.Record]") -> dict[UUID, list[int]]:
    rows = await connection.fetch("SELECT result_id, array_agg(year ORDER BY year) FROM years GROUP BY 1")
    return {found: list(each) for found, each in rows}


async def committed(channel: Channel) -> int:
    """Results committed by the extractor's group."""
    async with running_admin({"bootstrap_servers": channel.bootstrap_servers}) as admin:
        offsets = await admin.list_consumer_group_offsets(extractor.GROUP)
    return sum(max(0, found.offset) for place, found in offsets.items() if place.topic == channel.output)
