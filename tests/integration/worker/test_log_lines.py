"""What a worker logs from its start to its end, as a collector reads it."""

import json
import re
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import streams
from tests.conftest import Database
from tests.disclosure import assert_silent
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import PARTITIONS, Channel, OutputReader, Worker, as_json, query, until

pytestmark = pytest.mark.parametrize("broker", ["either"], indirect=True)

CANARY = "canary-8d1f"
LIFE = ("starting", "partitions assigned", "ready", "dead letter", "stopping", "drained")


def lines_of(worker: Worker) -> list[dict[str, Any]]:
    return [json.loads(line) for line in worker.log.splitlines()]


async def test_a_worker_s_life_is_a_few_lines_with_fields(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    began = datetime.now(UTC)
    worker = start_worker(database.worker, ANABRANCH_LOG_FORMAT="json", TZ="Asia/Kathmandu")
    await until(lambda: '"ready"' in worker.log, lambda: worker.log, seconds=30)
    good = query(unit_vectors(1, 2)[0], principals=["user:1", f"user:{CANARY}"])
    await channel.send(as_json(good))
    bad = query([0.0] * 768, principals=[f"user:{CANARY}"], filters={"section": CANARY})
    partition, offset = await channel.send(as_json(bad))
    await output_reader.until(results=1, dead_letters=1)
    await worker.terminate()
    ended = datetime.now(UTC)

    lines = lines_of(worker)
    for line in lines:
        assert {"time", "level", "logger", "message"} <= line.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert began - timedelta(seconds=1) <= datetime.fromisoformat(line["time"]) <= ended
    found = {line["message"]: line for line in lines if line["message"] in LIFE}
    assert [line["message"] for line in lines if line["message"] in LIFE] == list(LIFE)

    def fields(message: str) -> dict[str, Any]:
        standard = ("time", "level", "logger", "message")
        return {name: value for name, value in found[message].items() if name not in standard}

    assert fields("starting") == {
        "version": streams.__version__,
        "brokers": channel.bootstrap_servers,
        "group": channel.name,
        "input_topic": channel.input,
        "output_topic": channel.output,
        "dead_letter_topic": channel.dead_letters,
        "reply_topics": [channel.replies],
        "default_profile": "extraction",
        "port": worker.port,
    }
    assert fields("partitions assigned") == {"topic": channel.input, "partitions": list(range(PARTITIONS))}
    assert fields("ready") == {"partitions": PARTITIONS}
    reason = fields("dead letter").pop("reason")
    assert "all zeros" in reason
    assert fields("dead letter") == {
        "code": "zero_embedding",
        "topic": channel.input,
        "partition": partition,
        "offset": offset,
        "event_id": bad["event_id"],
        "reason": reason,
    }
    assert fields("stopping") == {"grace_seconds": 3.0}
    drained = fields("drained")
    assert drained.pop("seconds") < 3
    assert drained == {"cause": "shutdown", "cancelled_events": 0}
    assert_silent([CANARY], worker.log)


async def test_a_rebalance_has_its_lines(database: Database, start_worker: Callable[..., Worker]) -> None:
    await load(database.writer, tiny_corpus())
    first = start_worker(database.worker, ANABRANCH_LOG_FORMAT="json")
    await first.until_ready()
    second = start_worker(database.worker, ANABRANCH_LOG_FORMAT="json")
    await second.until_ready()

    def shared() -> bool:
        last = [line["partitions"] for line in lines_of(first) if line["message"] == "partitions assigned"]
        other = [line["partitions"] for line in lines_of(second) if line["message"] == "partitions assigned"]
        return sorted([*last[-1], *other[-1]]) == list(range(PARTITIONS))

    await until(shared, lambda: first.log, seconds=30)
    [drained] = [line for line in lines_of(first) if line["message"] == "drained"]
    assert (drained["cause"], drained["cancelled_events"]) == ("rebalance", 0)


async def test_a_crash_in_native_code_leaves_a_stack(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("postgresql://worker@127.0.0.1:1/nowhere")
    await worker.until_ready(ready=False)
    worker.process.send_signal(signal.SIGSEGV)
    assert await worker.ended(seconds=30) == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in worker.log
    assert "run_stage" in worker.log
