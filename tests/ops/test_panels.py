"""Every panel shows something, and what counters show is what was sent: real workers, a real Prometheus."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

import pytest
import pytest_asyncio
from aiokafka.codec import gzip_encode

from k8s.observability.rules import Parameters
from tests.accounting import Asked
from tests.bad_inputs import BAD_INPUTS
from tests.faults.load import Event
from tests.faults.stack import Servers, Stack, open_stack
from tests.integration.corpora import Chunk, Corpus, Document, load, random_uuid, unit_vectors
from tests.integration.harness import PARTITIONS, Samples, as_avro, as_json, query
from tests.ops.panels import MAY_BE_EMPTY, PanelResult, load_dashboards, run_panels, visible
from tests.ops.prometheus import Prometheus
from tests.ops.shown import panel_problems

# The proxies of `servers` live in the module's loop.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("prometheus"),
    pytest.mark.long,  # `make ops` looks at all panels in each scenario
]

COMPRESS = 20.0
# What a panel of counters cannot show yet: its step, and an evaluation.
BEHIND_SECONDS = 2 * 60 / COMPRESS

SESSION, TOPIC = UUID(int=1, version=4), UUID(int=2, version=4)
BAD_CODES = ("undecodable", "zero_embedding", "contract_violation")
BAD, EXPIRED, TOMBSTONES, GOOD = 30, 5, 4, 240
REPLY_EVERY = 4  # of the good events, how many ask for a reply
# Of good events: every profile; one with a topic, and so with two searches; one that asks for more than is allowed.
KINDS: Sequence[Mapping[str, object]] = (
    {"profile": "chat", "session_id": SESSION, "topic_id": TOPIC},
    {"profile": "docs", "k": 500, "similarity_threshold": 0},
    {"profile": "extraction", "session_id": SESSION},
    {"profile": "drafting"},  # nothing is as near as its threshold
)


def corpus() -> Corpus:
    """More chunks than are always searched exactly, so that live recall has something to measure."""
    rng = random.Random(10)
    document = Document(random_uuid(rng), frozenset({"user:1"}), session_id=SESSION, title="Panels")
    return Corpus.of(
        [document],
        [
            Chunk(
                random_uuid(rng),
                document.id,
                "text",
                vector,
                session_id=SESSION,
                token_count=20,
                related_topic_ids=[TOPIC] if number % 20 == 0 else [],
            )
            for number, vector in enumerate(unit_vectors(1500, 1))
        ],
    )


def questions(count: int | None = None) -> Iterator[Event]:
    """Good events, of each kind in turn."""
    vectors = unit_vectors(32, 2)
    number = 0
    while count is None or number < count:
        event = query(vectors[number % len(vectors)], **KINDS[number % len(KINDS)])
        key, wants_reply = b"key-%d" % (number % 24), number % REPLY_EVERY == 0
        yield Event(Asked(event["event_id"], key, wants_reply=wants_reply), as_avro(event))
        number += 1


@asynccontextmanager
async def installation(
    servers: Servers, *, workers: int, settings: Mapping[str, str], per_second: float = 1
) -> AsyncIterator[Stack]:
    """Workers that are ready and share the partitions."""
    async with open_stack(
        servers,
        brokers=1,
        rng=random.Random(1),
        per_second=per_second,
        events=questions,
        settings=settings,
    ) as stack:
        await load(stack.database.writer, corpus())
        for _ in range(workers):
            stack.start_worker()
        for worker in stack.members:
            await worker.until_ready(seconds=60)
        await stack.until_assigned(seconds=60)
        yield stack


async def send(stack: Stack) -> Counter[str]:
    """A known number of events of each kind, for some seconds; returns the expected number of dead letters by code."""
    expected: Counter[str] = Counter()
    bad = [(value, code) for code in BAD_CODES for _, value, is_code in BAD_INPUTS if is_code == code]
    rng = random.Random(2)
    picked = rng.sample(bad, BAD)
    vector = unit_vectors(1, 3)[0]
    for number, event in enumerate(questions(GOOD)):
        stack.load.send(event)
        if number % (GOOD // BAD) == 0:
            value, code = picked.pop()
            stack.load.send(Event(Asked(f"bad-{number}", b"bad-%d" % number, code), value))
            expected[code] += 1
        await asyncio.sleep(0.05)
    for _ in range(EXPIRED):
        late = query(vector, expires_at="2020-01-01T00:00:00Z")
        stack.load.send(Event(Asked(late["event_id"], b"late", "expired"), as_json(late)))
    for number in range(TOMBSTONES):
        await stack.channel.send(None, b"tombstone-%d" % number)
    expected["expired"] = EXPIRED
    huge = Event(Asked("huge", b"huge", "record_too_large"), b"\0" * (32 << 20))
    await stack.load.send_batch([huge], 0, "gzip", gzip_encode)
    expected["record_too_large"] = 1
    await stack.load.finish()
    return expected


def totals(panel: PanelResult, label: str) -> Mapping[str, float]:
    """What a panel of bars has counted, without what stayed 0."""
    return {value: series.total for value, series in panel.by(label).items() if series.total}


def integral(panel: PanelResult, series: Callable[[str], bool]) -> float:
    """How many events a panel of rates shows."""
    return panel.step * sum(one.total for one in panel.series if series(one.name))


@dataclass(frozen=True)
class Run:
    """What was sent, and what is shown.

    Attributes:
        expected: dead letters by code.
        exposed: each worker's metrics at the end.
    """

    results: Sequence[PanelResult]
    expected: Mapping[str, int]
    exposed: Sequence[Samples]

    @property
    def received(self) -> int:
        return GOOD + self.dead_letters + TOMBSTONES

    @property
    def dead_letters(self) -> int:
        return sum(self.expected.values())

    def panels(self, dashboard: str) -> Mapping[str, PanelResult]:
        """By title."""
        return {one.title: one for one in self.results if one.dashboard == f"Anabranch {dashboard}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(servers: Servers) -> Run:
    parameters = Parameters(workers=2, compress=COMPRESS)
    # A higher share, so that there are samples of recall within seconds.
    settings = {"ANABRANCH_LIVE_RECALL_SHARE": "1"}
    async with installation(servers, workers=2, settings=settings) as stack, Prometheus(parameters) as server:
        server.set_targets("test", [worker.port for worker in stack.members])
        await server.until("anabranch:workers_ready:count == 2 and anabranch:state", seconds=30)
        # Whatever was counted before is not in the panels.
        await asyncio.sleep(BEHIND_SECONDS)
        start = time.time()
        expected = await send(stack)
        await stack.until_committed(30)
        await stack.output_reader.until(results=GOOD, dead_letters=sum(expected.values()))
        await asyncio.sleep(BEHIND_SECONDS)
        results = await run_panels(server.url, start, time.time(), compress=COMPRESS)
        exposed = [await worker.scrape() for worker in stack.members]
        assert "level=error" not in server.log, server.log
    return Run(results, expected, exposed)


async def test_every_panel_shows_something(run: Run) -> None:
    assert len(run.results) > 45
    # tests/deploy/test_store_dashboard.py has a postgres_exporter.
    assert list(panel_problems(run.results, None, exporter=False)) == []
    ready = run.panels("overview")["Workers ready"]
    assert {series.query: series.last for series in ready.series} == {"A": 2, "C": 2}


async def test_counters_show_what_was_sent(run: Run) -> None:
    panels = run.panels("pipeline")
    assert {one.name.partition(" ")[0]: one.last for one in panels["Events in the selected time"].series} == {
        "received": run.received,
        "answered": GOOD,
        "dead_lettered": run.dead_letters,
        "skipped": TOMBSTONES,
    }
    assert totals(panels["Dead letters by code"], "code") == run.expected
    warnings = totals(panels["Warnings by code"], "code")
    assert warnings == _sum(run.exposed, "anabranch_warnings_total")
    assert warnings["k_clamped"] == GOOD / len(KINDS)
    assert totals(panels["Replies by outcome"], "outcome") == {"answered": GOOD / REPLY_EVERY}
    assert totals(panels["Retries by cause"], "cause") == _sum(run.exposed, "anabranch_retries_total")
    others = panels["Placeholders and events expired when sent"]
    assert {one.name.partition(" test")[0]: one.total for one in others.series} == {
        "placeholders": 1,
        "expired when sent": EXPIRED,
    }
    samples = panels["Recall samples"]
    compared = _sum(run.exposed, "anabranch_live_recall_total")
    assert compared
    assert totals(samples, "size") == compared
    assert totals(samples, "reason") == _sum(run.exposed, "anabranch_live_recall_skipped_total")


async def test_rates_add_up(run: Run, figures: Callable[[str], None]) -> None:
    """They are averages, so not exactly."""
    pipeline = run.panels("pipeline")
    for panel in (run.panels("overview")["Events"], pipeline["Events in and out"]):
        received = integral(panel, lambda name: name.startswith("received"))
        answered = integral(panel, lambda name: name.startswith("answered"))
        assert received == pytest.approx(run.received, rel=0.1)
        assert answered == pytest.approx(GOOD, rel=0.1)
    columns = {one.labels["le"]: one.total for one in pipeline["Event duration"].series}
    assert columns["+Inf"] == pytest.approx(GOOD, rel=0.1)
    by_partition = pipeline["Committed by partition"]
    assert by_partition.by("partition").keys() == {str(number) for number in range(PARTITIONS)}
    committed = integral(by_partition, lambda _: True)
    assert committed == pytest.approx(run.received, rel=0.1)
    figures(
        f"received {run.received}, by its rate {received:.1f}, committed by its rate {committed:.1f};"
        f" answered {GOOD}, in the heat map {columns['+Inf']:.1f}"
    )


def _sum(exposed: Sequence[Samples], name: str) -> Mapping[str, float]:
    """By the only label, of all workers, without 0."""
    found: Counter[str] = Counter()
    for scrape in exposed:
        found.update({value: round(number) for (value,), number in scrape.nonzero(name).items()})
    return found


async def test_what_may_be_empty_exists() -> None:
    existing = {
        (dashboard["title"], panel["title"], target["refId"])
        for dashboard in load_dashboards()
        for panel in visible(dashboard)
        for target in panel["targets"]
    }
    assert MAY_BE_EMPTY.keys() <= existing
