"""`anabranch bench` as a user runs it."""

import json
import os
import subprocess
import sys

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "streams", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={"PATH": os.environ["PATH"]},
        check=False,
    )


@pytest.mark.slow
def test_it_measures_a_worker_and_the_ceiling() -> None:
    done = bench("--chunks", "1000", "--seconds", "1", "--rate", "20", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    saturated, offered, ceiling = report["lines"]
    assert (saturated["name"], offered["offered"], ceiling["name"]) == ("pipeline", 20, "ceiling")
    for line in report["lines"]:
        assert line["per_second"] > 0
        assert line["unanswered"] == 0
        assert 0 < line["latency"]["p50"] <= line["latency"]["p99"] <= line["latency"]["max"]
    assert saturated["cpu"].keys() == {"postgres", "broker", "generator", "worker"}
    assert ceiling["cpu"].keys() == {"postgres", "client"}
    assert 0 < report["ratio"] < 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--events", os.devnull], "--events requires --rate"),
        (["--events", os.devnull, "--rate", "5"], "contains no event"),
        (["--rate", "nan"], "nan is not a number"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: list[str], complaint: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert complaint in line
