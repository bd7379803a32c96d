"""The benchmark measures what it says: its events, its exact answers, its gate and its records."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np
import pytest

from benchmarks import gate
from benchmarks.__main__ import fan_out_ratios
from benchmarks.gate import Round, Shares, shares_of, verdict
from benchmarks.goals import Goal
from benchmarks.peers.plain import PlainStore, interleave
from streams.bench import BenchError
from streams.bench.cpu import CpuMeter, resident_bytes
from streams.bench.worker import RECORD, RecordedEvent, read_records
from streams.bench.world import CHUNKS_PER_DOCUMENT, EventFactory, World, base, exact, grow, questions
from streams.core.selection import Arm, Candidate, select
from streams.wire import Codec


@pytest.fixture(scope="module")
def world() -> World:
    return grow(base(None), 1000, seed=3)


def test_a_world_is_the_same_for_the_same_seed(world: World) -> None:
    again = grow(base(None), 1000, seed=3)
    assert np.array_equal(world.vectors, again.vectors)
    assert world.chunk_ids == again.chunk_ids
    assert not np.array_equal(world.vectors, grow(base(None), 1000, seed=4).vectors)


def test_the_exact_answer_has_the_nearest_readable_chunks(world: World) -> None:
    for question in questions(world, "extraction", 5, seed=1):
        readable = [
            number
            for number in range(world.size)
            if set(question.principals) & set(world.readers(number // CHUNKS_PER_DOCUMENT))
        ]
        assert 0 < len(readable) < world.size
        nearest = sorted(readable, key=lambda number: -float(world.vectors[number] @ question.vector))[:15]
        assert exact(world, question) == {world.chunk_ids[number] for number in nearest}


def test_a_chat_stays_in_its_session(world: World) -> None:
    for question in questions(world, "chat", 20, seed=1):
        of_session = {
            chunk_id
            for chunk_id, session in zip(world.chunk_ids, world.session_of_chunk, strict=True)
            if session == question.session
        }
        assert exact(world, question) <= of_session


def test_events_differ_only_in_their_id(world: World) -> None:
    codec = Codec()
    asked = [question.event() for question in questions(world, "chat", 2, seed=1)]
    factory = EventFactory(codec, asked)
    events = {}
    for number in range(4):
        key, value = factory(number)
        decoded = codec.decode_query(value)
        assert str(decoded.event_id).encode() == key
        assert decoded.model_copy(update={"event_id": asked[number % 2].event_id}) == asked[number % 2]
        events[key] = decoded
    assert len(events) == 4


def test_records_are_read_up_to_the_last_whole_one(tmp_path: Path) -> None:
    file, event_id = tmp_path / "records", uuid4()
    assert read_records(file) == []
    file.write_bytes(RECORD.pack(event_id.bytes, 0.3, 0.2, 0.1, 0.05) + b"half")
    [event] = read_records(file)
    assert (event.event_id, event.duration, event.search, event.slower_arm, event.publish) == (
        event_id,
        0.3,
        0.2,
        0.1,
        0.05,
    )


def test_the_fan_out_is_measured_where_there_are_two_arms(world: World) -> None:
    [chat], [extraction] = (questions(world, kind, 1, seed=1) for kind in ("chat", "extraction"))
    one = RecordedEvent(uuid4(), duration=0.4, search=0.1, slower_arm=0.1, publish=0.1)
    two = RecordedEvent(uuid4(), duration=0.4, search=0.3, slower_arm=0.2, publish=0.1)
    assert fan_out_ratios([(extraction, one), (chat, two), (extraction, one)]) == [pytest.approx(1.5)]


def test_only_other_processes_need_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution without extras does not contain it, and measures the workers of a deployment."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    meter = CpuMeter({"generator": os.getpid()})
    assert 0 < meter.read()["generator"] <= meter.read()["generator"]
    with pytest.raises(BenchError, match=r"psutil is not installed; run: pip install"):
        CpuMeter({"generator": os.getpid(), "worker": os.getppid()})
    with pytest.raises(BenchError, match="psutil is not installed"):
        resident_bytes(os.getppid())


@pytest.mark.parametrize("lengths", [(9, 9), (2, 9), (0, 9), (9, 3), (0, 0)])
def test_the_peers_take_turns_as_the_profile_does(lengths: tuple[int, int]) -> None:
    ids = [UUID(int=number) for number in range(14)]
    local, wide = ids[: lengths[0]], ids[5 : 5 + lengths[1]]
    arms = {
        name: Arm([Candidate(each, 0.1) for each in arm], complete=True)
        for name, arm in (("local", local), ("global", wide))
    }
    picks = select(arms, k=9).picks  # type: ignore[arg-type]  # the names are scopes
    taken = interleave([{"id": each} for each in local], [{"id": each} for each in wide])
    assert [row["id"] for row in taken] == [pick.candidate.chunk_id for pick in picks]


def test_plain_principals_are_a_list_or_an_array() -> None:
    assert PlainStore().principals(["user:1", "group:2"]) == "user:1,group:2"
    assert json.loads(PlainStore(json=True).principals(["user:1", "group:2"])) == ["user:1", "group:2"]


RECORDED = {"cpu": 0.4, "latency": 0.2}


def test_the_gate_allows_a_quarter() -> None:
    assert verdict(Shares(0.4, 0.2), 0.1, RECORDED) == []
    assert verdict(Shares(0.301, 0.151), 0.113, RECORDED) == []


def test_the_gate_compares_the_delay_with_the_same_run() -> None:
    assert verdict(Shares(0.4, 0.4), 0.29, RECORDED) == []
    [line] = verdict(Shares(0.4, 0.16), 0.14, RECORDED)
    assert line.startswith("the gate does not notice")


@pytest.mark.parametrize("low", [0.74, 0.0, float("nan")])
@pytest.mark.parametrize("name", ["cpu", "latency"])
def test_the_gate_fails_below_a_quarter(name: str, low: float) -> None:
    [line] = verdict(Shares(**{**RECORDED, name: low * RECORDED[name]}), 0.1, RECORDED)
    assert line.startswith(f"{name}: the pipeline reaches {low * RECORDED[name]:.3f} of the ceiling")


@pytest.mark.parametrize("delayed", [0.151, 0.2, float("nan")])
def test_the_gate_fails_if_it_does_not_notice_the_delay(delayed: float) -> None:
    [line] = verdict(Shares(0.4, 0.2), delayed, RECORDED)
    assert line.startswith("the gate does not notice 2 ms more for each event")


def test_a_busy_round_changes_no_share() -> None:
    quiet = Round(ceiling_cpu=200, cpu=400, ceiling_seconds=0.001, seconds=0.004, delayed_seconds=0.008)
    busy = Round(ceiling_cpu=900, cpu=900, ceiling_seconds=0.001, seconds=0.1, delayed_seconds=0.001)
    for rounds in ([quiet], [busy, quiet, quiet], [quiet, quiet, busy]):
        assert shares_of(rounds) == (Shares(cpu=0.5, latency=0.25), 0.125)


def test_every_share_is_recorded() -> None:
    recorded = json.loads(gate.RECORDED.read_text())
    assert recorded.keys() == asdict(Shares(0, 0)).keys()
    assert verdict(Shares(**recorded), 0.0, recorded) == []


@pytest.mark.parametrize(
    ("value", "direction", "reached"),
    [(0.9, "≥", True), (0.8, "≥", False), (0.8, "≤", True), (0.9, "≤", False), (float("nan"), "≤", False)],
)
def test_a_goal_is_reached_on_its_side(value: float, direction: str, *, reached: bool) -> None:
    assert Goal("", value, 0.85, direction).reached is reached  # type: ignore[arg-type]  # one of both
