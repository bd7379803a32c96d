"""The demo as a new user runs it: its own process, the installed command, nothing of the environment."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

from streams.demo.stack import Stack, demo_settings, worker_environment
from streams.settings import load

pytestmark = pytest.mark.slow

COMMAND = [str(Path(sys.executable).parent / "anabranch"), "demo"]
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "COLUMNS": "110"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=ENVIRONMENT,
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


def test_a_person_sees_each_result_and_a_summary() -> None:
    ended = run()
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert sum(line.startswith("✓ ") for line in lines) >= 30
    assert not [line for line in lines if line.startswith("✗ ") and "dead letter" not in line]
    assert any(" local " in line for line in lines)
    assert any("dimension_mismatch (intentional: 384 components instead of 768)" in line for line in lines)
    assert any("Kafka to Kafka" in line for line in lines)


@pytest.fixture
def background() -> Iterator[None]:
    """As a shell starts a job with `&`: interrupts are ignored, and whoever it starts inherits that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def interruptible() -> Iterator[None]:
    """Whoever is started here is interrupted as from a terminal, in spite of what this process ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def pasted(output: str) -> Any:
    """The dead letter that the printed lines show in another terminal, line by line."""
    lines = [line for line in output.splitlines() if line.startswith(("export ", "anabranch "))]
    assert [line.split("=")[0] for line in lines[:-1]] == [
        "export KAFKA_BOOTSTRAP_SERVERS",
        "export DATABASE_CONNECTION_STRING",
        "export DATABASE_ADMIN_CONNECTION_STRING",
    ]
    assert lines[-1] == "anabranch tail --dead-letters --from-beginning"
    done = subprocess.run(
        ["/bin/sh", "-e"],
        input="\n".join([*lines[:-1], "anabranch check", f"{lines[-1]} --limit 1"]),
        env=ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [log] = (line.split()[-1] for line in output.splitlines() if "worker log" in line)
    assert "dead letter code=dimension_mismatch" in Path(log).read_text()
    return json.loads(done.stdout.splitlines()[-1])


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
    environment = worker_environment(stack, 7)
    assert not environment.keys() & set(passed)
    assert load(environment).anabranch_dead_letter_topic == load({}).anabranch_dead_letter_topic

    monkeypatch.setenv("ANABRANCH_PROFILES_FILE", "profiles.toml")
    monkeypatch.setenv("ANABRANCH_EMBEDDING_MODEL", "mine")
    environment = worker_environment(replace(stack, settings=demo_settings()), 7)
    # The worker runs in another directory.
    assert environment["ANABRANCH_PROFILES_FILE"] == str(tmp_path / "profiles.toml")
    assert environment["ANABRANCH_EMBEDDING_MODEL"] == "mine"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("background")
def test_what_is_kept_answers_until_it_is_interrupted_and_leaves_nothing_behind(
    tmp_path: Path, end: signal.Signals
) -> None:
    output = tmp_path / "output"
    with output.open("wb") as sink, interruptible():
        demo = subprocess.Popen(
            [*COMMAND, "--keep"],
            env=ENVIRONMENT | {"COLUMNS": "80"},
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
        )
    try:
        deadline = time.monotonic() + 90
        while "Ctrl-C" not in output.read_text():
            assert demo.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        addresses = dict(
            line.split(maxsplit=1) for line in output.read_text().splitlines() if "http://" in line
        )
        with urllib.request.urlopen(addresses["health"].strip(), timeout=5) as answer:
            assert json.load(answer)["ready"] is True
        shown = pasted(output.read_text())
        assert shown["headers"]["anabranch.error.code"] == "dimension_mismatch"
        assert shown["event_id"] == shown["key"] == str(UUID(shown["key"]))
        children = psutil.Process(demo.pid).children(recursive=True)
        assert len(children) >= 3  # broker, database, worker
    finally:
        demo.send_signal(end)
        try:
            demo.wait(30)
        finally:
            demo.terminate()  # whatever became of it, the next test begins without it
            demo.wait(30)
    ended, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, [child.cmdline() for child in alive]
    assert len(ended) == len(children)
