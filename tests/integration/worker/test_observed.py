"""What operators see: a worker under load, with dead letters and an outage of the store in it."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streams
from streams.embedded.postgres import EmbeddedPostgres
from tests.conftest import Database, PostgresServer
from tests.disclosure import assert_silent
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.harness import (
    Channel,
    OutputReader,
    Samples,
    Worker,
    account,
    as_avro,
    as_json,
    query,
    read_result,
)

# Specification, section 7: name to labels.
METRICS = {
    "anabranch_events_received_total": set(),
    "anabranch_events_total": {"outcome"},
    "anabranch_event_duration_seconds": {"profile"},
    "anabranch_event_age_seconds": set(),
    "anabranch_stage_duration_seconds": {"stage"},
    "anabranch_search_duration_seconds": {"scope"},
    "anabranch_passages_returned": {"profile"},
    "anabranch_tokens_used": {"profile"},
    "anabranch_dead_letters_total": {"code"},
    "anabranch_placeholder_dead_letters_total": set(),
    "anabranch_expired_on_arrival_total": set(),
    "anabranch_replies_total": {"outcome"},
    "anabranch_warnings_total": {"code"},
    "anabranch_retries_total": {"cause"},
    "anabranch_live_recall_total": {"size"},
    "anabranch_live_recall_sum": {"size"},
    "anabranch_live_recall_squares_sum": {"size"},
    "anabranch_live_recall_skipped_total": {"reason"},
    "anabranch_live_recall_seconds_total": set(),
    "anabranch_in_flight_events": set(),
    "anabranch_pool_connections": {"state"},
    "anabranch_pool_connections_max": set(),
    "anabranch_consumer_lag": {"partition"},
    "anabranch_committed_offset": {"partition"},
    "anabranch_oldest_waiting_seconds": {"partition"},
    "anabranch_ready": set(),
    "anabranch_store_up": set(),
    "anabranch_kafka_up": set(),
    "anabranch_assigned_partitions": set(),
    "anabranch_event_loop_delay_seconds": set(),
    "anabranch_store_replication_lag_seconds": set(),
    "anabranch_build_info": {"version"},
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
    "process_virtual_memory_bytes": set(),
    "process_start_time_seconds": set(),
    "process_open_fds": set(),
    "process_max_fds": set(),
    "python_gc_collections_total": {"generation"},
    "python_gc_objects_collected_total": {"generation"},
    "python_gc_objects_uncollectable_total": {"generation"},
}

RNG = random.Random(3)
SESSION, TOPIC = random_uuid(RNG), random_uuid(RNG)


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server that may be stopped."""
    with EmbeddedPostgres() as embedded:
        yield PostgresServer(embedded)


def corpus() -> Corpus:
    document = Document(random_uuid(RNG), frozenset({"public"}), file_description="A file")
    return Corpus.of(
        [document],
        [
            Chunk(
                random_uuid(RNG),
                document.id,
                f"Text {number}.",
                vector,
                session_id=SESSION,
                related_topic_ids=[TOPIC] if number % 2 else [],
            )
            for number, vector in enumerate(unit_vectors(40, 1))
        ],
    )


class Load:
    """Good events, and bad ones among them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._vectors = unit_vectors(16, 2)
        self.asked: dict[str, dict[str, object]] = {}
        self.bad: Counter[str] = Counter()
        self.skipped = 0

    async def send(self, count: int) -> None:
        for number in range(count):
            event = query(
                self._vectors[number % 16],
                profile=("extraction", "chat")[number % 2],
                session_id=SESSION,
                topic_id=TOPIC if number % 3 == 0 else None,
            )
            self.asked[event["event_id"]] = event
            await self._channel.send((as_json if number % 2 else as_avro)(event), str(number).encode())
            if number % 20 == 0:
                await self._channel.send(b"noise", str(number).encode())
                await self._channel.send(as_json(query([0] * 768)), str(number).encode())
                await self._channel.send(None, str(number).encode())
                self.bad.update(["undecodable", "zero_embedding"])
                self.skipped += 1


async def test_an_outage_is_seen_survived_and_counted(
    own_postgres: PostgresServer,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    database = own_postgres.database()
    await load(database.writer, corpus())
    worker = start_worker(
        database.worker, ANABRANCH_RETRY_BASE_SECONDS="0.2", ANABRANCH_RETRY_MAX_SECONDS="1"
    )
    await worker.until_ready()
    events = Load(channel)
    await events.send(100)
    await output_reader.until(results=50)

    # The outage comes in the middle of the work, as a crash.
    sending = asyncio.create_task(events.send(300))
    await output_reader.until(results=120)
    await asyncio.to_thread(own_postgres.embedded.stop, "immediate")
    down_after = await worker.until_ready(ready=False, seconds=10)
    assert await asyncio.to_thread(worker.is_live)
    await sending
    await asyncio.sleep(1)
    answered = len(output_reader.results)
    during = await worker.scrape()
    assert during.total("anabranch_consumer_lag") > 0
    assert max(during.all("anabranch_oldest_waiting_seconds").values()) > 1
    assert [during.value(f"anabranch_{name}") for name in ("ready", "store_up", "kafka_up")] == [0, 0, 1]
    assert during.value("anabranch_in_flight_events") >= 8
    await check_live_page_in_outage(worker, database, events)
    await asyncio.sleep(2)
    assert len(output_reader.results) == answered  # nothing is made up
    assert not await asyncio.to_thread(worker.is_ready)
    assert await asyncio.to_thread(worker.is_live)

    await asyncio.to_thread(own_postgres.embedded.start)
    up_after = await worker.until_ready(seconds=15)
    assert await asyncio.to_thread(worker.is_live)
    await output_reader.until_answered(set(events.asked), seconds=60)
    await output_reader.until(dead_letters=events.bad.total())

    outcome = account(events.asked, output_reader.results)
    assert (outcome.lost, outcome.strange, outcome.repeats) == ([], [], 0)
    samples = await settled(worker)
    agree(samples, events, output_reader)
    shown = await live_status(worker)
    assert (shown["state"], shown["problems"], shown["lag"], shown["in_flight"]) == ("ready", {}, 0, 0)
    assert {outcome: count["total"] for outcome, count in shown["events"].items()} == {
        outcome: count for (outcome,), count in samples.all("anabranch_events_total").items()
    }
    assert {each["code"]: each["total"] for each in shown["dead_letters"]} == events.bad
    retries = samples.value("anabranch_retries_total", cause="store_unavailable")
    figures(
        f"{outcome}; not ready {down_after:.1f} s after the crash, ready {up_after:.1f} s after the restart,"
        f" {retries:.0f} retries"
    )
    assert "Traceback" not in worker.log
    assert worker.log.count("store is down") == 1  # told once, however many events met it


async def live_status(worker: Worker) -> dict[str, Any]:
    status, body = await asyncio.to_thread(worker.page, "/status")
    assert status == 200, body
    found = json.loads(body)
    assert isinstance(found, dict)
    return found


async def check_live_page_in_outage(worker: Worker, database: Database, events: Load) -> None:
    reason = "The store is unavailable. The log has the reason."
    shown = await live_status(worker)
    assert (shown["stage"], shown["state"], shown["problems"]) == ("worker", "not_ready", {"store": reason})
    assert shown["dependencies"] == {"store": "down", "kafka": "up"}
    assert shown["versions"]["postgresql"].startswith("18")
    assert (shown["lag"] > 0, shown["oldest_waiting_seconds"] > 1, shown["in_flight"] >= 8) == (
        True,
        True,
        True,
    )
    assert {each["code"] for each in shown["dead_letters"]} == {"undecodable", "zero_embedding"}
    status, page = await asyncio.to_thread(worker.page, "/")
    assert status == 200
    for text in ("Anabranch worker", "Not ready", reason, "undecodable", "zero_embedding"):
        assert text in page, text
    secrets = [database.worker, database.name, *events.asked, "user:1", str(SESSION), str(TOPIC)]
    assert_silent(secrets, page, json.dumps(shown))


async def settled(worker: Worker) -> Samples:
    """A scrape when everything has been committed."""
    deadline = time.monotonic() + 10
    while True:
        samples = await worker.scrape()
        if samples.total("anabranch_consumer_lag") == 0 == samples.value("anabranch_in_flight_events"):
            return samples
        assert time.monotonic() < deadline, samples.all("anabranch_consumer_lag")
        await asyncio.sleep(0.1)


def agree(samples: Samples, events: Load, output_reader: OutputReader) -> None:
    """Every metric is there, with the labels it should have and the numbers that were sent."""
    assert samples.labels() == METRICS
    results = [read_result(record.value) for record in output_reader.results]
    answered = len(events.asked)
    assert samples.value("anabranch_events_received_total") == answered + events.bad.total() + events.skipped
    assert samples.all("anabranch_events_total") == {
        ("answered",): answered,
        ("dead_lettered",): events.bad.total(),
        ("skipped",): events.skipped,
    }
    assert samples.nonzero("anabranch_dead_letters_total") == {(code,): n for code, n in events.bad.items()}
    profiles = Counter(str(event["profile"]) for event in events.asked.values())
    for name in ("event_duration_seconds", "passages_returned", "tokens_used"):
        assert samples.nonzero(f"anabranch_{name}_count") == {
            (profile,): n for profile, n in profiles.items()
        }
    for name, field in (("passages_returned", "k_returned"), ("tokens_used", "tokens_used")):
        for profile in profiles:
            total = sum(result[field] for result in results if result["profile"] == profile)
            assert samples.value(f"anabranch_{name}_sum", profile=profile) == total
    assert samples.value("anabranch_event_age_seconds_count") == answered
    assert samples.value("anabranch_event_age_seconds_sum") > samples.total(
        "anabranch_event_duration_seconds_sum"
    )
    stages = samples.all("anabranch_stage_duration_seconds_count")
    assert stages.pop(("decode",)) >= answered  # once an attempt
    assert stages == {(stage,): answered for stage in ("search", "assemble", "encode", "publish")}
    topics = sum(event["topic_id"] is not None for event in events.asked.values())
    assert samples.all("anabranch_search_duration_seconds_count") == {
        ("local",): topics,
        ("global",): answered,
    }
    # The store is small.
    assert samples.nonzero("anabranch_live_recall_skipped_total") == {("exact",): topics + answered}
    assert samples.total("anabranch_live_recall_total") == 0
    assert samples.value("anabranch_retries_total", cause="store_unavailable") >= 8
    assert samples.all("anabranch_build_info") == {(streams.__version__,): 1}
    assert 0 < samples.total("anabranch_pool_connections") <= 17
    assert samples.value("anabranch_pool_connections_max") == 17
    assert [samples.value(f"anabranch_{name}") for name in ("ready", "store_up", "kafka_up")] == [1, 1, 1]
    assert samples.value("anabranch_assigned_partitions") == 3
    assert samples.all("anabranch_oldest_waiting_seconds") == {("0",): 0, ("1",): 0, ("2",): 0}
    assert samples.value("anabranch_event_loop_delay_seconds_count") > 4
    assert samples.total("anabranch_warnings_total") == sum(len(result["warnings"]) for result in results)
    assert samples.value("anabranch_placeholder_dead_letters_total") == 0
    assert samples.value("anabranch_expired_on_arrival_total") == 0
    assert samples.value("process_cpu_seconds_total") > 0
    assert samples.value("anabranch_pool_connections", state="busy") <= 1  # the probe
    assert samples.all("anabranch_consumer_lag") == {("0",): 0, ("1",): 0, ("2",): 0}
    # A boundary exactly on each limit of the objectives.
    assert samples.value("anabranch_event_duration_seconds_bucket", profile="chat", le="0.25") > 0
    assert samples.value("anabranch_event_age_seconds_bucket", le="2.0") > 0


# A worker whose other parts take long to stop after its store is closed.
SLOW_TO_STOP = """
import asyncio
import sys
from streams.cli import main
from streams.worker.app import WorkerApp

close = WorkerApp.close

async def close_slowly(self):
    await close(self)
    await asyncio.sleep(3)

WorkerApp.close = close_slowly
sys.argv[1:] = ["worker"]
main()
"""


@pytest.mark.parametrize("broker", ["either"], indirect=True)
async def test_a_worker_that_stops_reports_no_outage(
    database: Database, channel: Channel, tmp_path: Path
) -> None:
    worker = Worker(tmp_path / "worker.log", channel, database.worker, {}, ("-c", SLOW_TO_STOP))
    try:
        await worker.until_ready()
        code, _ = await worker.terminate()
    finally:
        worker.end()
    assert code == 0
    assert "store is up" in worker.log
    assert "store is down" not in worker.log
