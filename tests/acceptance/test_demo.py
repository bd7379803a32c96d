"""The demo as a new user runs it: its own process, the installed command, nothing of the environment."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from streams.demo.stack import Stack, demo_settings, worker_environment
from streams.settings import load
from tests.acceptance.kept_demo import kept_demo

pytestmark = pytest.mark.slow

INGESTED = (
    '{"id": "00000000-0000-0000-0000-000000000001", "grants": ["public"],'
    ' "chunks": [{"text_content": "a", "searchable": false}]}'
)
COMMAND = Path(sys.executable).parent / "anabranch"
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "COLUMNS": "110"}


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "demo", *arguments],
        env=ENVIRONMENT | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_the_summary_is_alone_on_standard_output_and_every_question_is_answered_well() -> None:
    ended = run("--json")
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    print(summary)
    assert summary.keys() == {"events", "results", "passages", "dead_letters", "latency_ms", "golden"}
    assert summary["dead_letters"] == {"dimension_mismatch": 1}
    assert summary["results"] == summary["golden"]["queries"] == summary["events"] - 1 >= 30
    assert summary["passages"] > summary["results"]
    latency = summary["latency_ms"]
    assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
    assert summary["golden"]["hit_at_5"] == 1.0
    assert 0.9 <= summary["golden"]["ndcg_at_10"] <= 1.0


def test_a_person_sees_each_result_a_summary_and_the_next_step() -> None:
    ended = run("--all")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert sum(line.startswith("✓ ") for line in lines) >= 30
    assert not [line for line in lines if line.startswith("✗ ") and "dead letter" not in line]
    assert any(line.strip() == "… 6 more" for line in lines)
    assert any(" local " in line for line in lines)
    assert any("dimension_mismatch (intentional: 384 components instead of 768)" in line for line in lines)
    assert any("Kafka to Kafka" in line for line in lines)
    # A question alone could not be asked in another terminal: it needs the addresses.
    assert lines[-1] == (
        "Next: anabranch demo --keep leaves everything running, and prints lines to paste into another terminal;"
        " the last one asks a question"
    )


@pytest.fixture
def background() -> Iterator[None]:
    """As a shell starts a job with `&`: interrupts are ignored, and whoever it starts inherits that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_worker_gets_the_settings_that_decide_how_events_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = ("ANABRANCH_PROFILES_FILE", "ANABRANCH_EMBEDDING_MODEL")
    for name in passed:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANABRANCH_DEAD_LETTER_TOPIC", "another")  # of a worker that is not the demo's
    monkeypatch.chdir(tmp_path)
    addresses = ("broker:1", "postgresql://admin", "postgresql://worker", "http://web", 3)
    stack = Stack(*addresses, tmp_path / "demo", demo_settings())
    assert stack.settings == load({})
    environment = worker_environment(stack)
    assert not environment.keys() & set(passed)
    assert load(environment).anabranch_dead_letter_topic == load({}).anabranch_dead_letter_topic

    monkeypatch.setenv("ANABRANCH_PROFILES_FILE", "profiles.toml")
    monkeypatch.setenv("ANABRANCH_EMBEDDING_MODEL", "mine")
    environment = worker_environment(replace(stack, settings=demo_settings()))
    # The worker runs in another directory.
    assert environment["ANABRANCH_PROFILES_FILE"] == str(tmp_path / "profiles.toml")
    assert environment["ANABRANCH_EMBEDDING_MODEL"] == "mine"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("background")
def test_what_is_kept_answers_until_it_is_interrupted_and_leaves_nothing_behind(
    tmp_path: Path, end: signal.Signals
) -> None:
    with kept_demo(COMMAND, tmp_path, ENVIRONMENT, settings={"COLUMNS": "80"}, end=end) as demo:
        lines = demo.output.splitlines()
        assert sum(line.startswith("✓ ") for line in lines) == 5
        assert any(line.endswith(" more answers; anabranch demo --all shows them") for line in lines)
        assert lines[-1].startswith("anabranch ask ")
        addresses = dict(line.split(maxsplit=1) for line in lines if "http://" in line)
        with urllib.request.urlopen(addresses["health"].strip(), timeout=5) as health:
            assert json.load(health)["ready"] is True
        dead_letter, *answer = demo.paste(f"echo '{INGESTED}' | anabranch ingest --json", "anabranch check")
        shown = json.loads(dead_letter)
        assert shown["headers"]["anabranch.error.code"] == "dimension_mismatch"
        assert shown["event_id"] == shown["key"] == str(UUID(shown["key"]))
        [log] = (line.split()[-1] for line in lines if "worker log" in line)
        assert "dead letter code=dimension_mismatch" in Path(log).read_text()
        assert answer[0].startswith("  group:students · extraction · all readable documents · 15 passages, ")
        assert answer[1].split()[:3] == ["1", "global", "1.000"]  # the chunk itself
        children = psutil.Process(demo.pid).children(recursive=True)
        assert len(children) >= 3  # broker, database, worker
    ended, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, [child.cmdline() for child in alive]
    assert len(ended) == len(children)


def test_another_model_than_the_sample_s_is_refused() -> None:
    ended = run(ANABRANCH_EMBEDDING_MODEL="another")
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    assert "set ANABRANCH_EMBEDDING_MODEL to this name, or unset it for the demo" in line
