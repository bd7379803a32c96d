"""What a run leaves out is listed, with the way to enable it; and `make test-fast` leaves out what it says."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.left_out import TO_ENABLE, left_out_lines, unavailable

ROOT: Final = Path(__file__).resolve().parents[2]
SKIPS: Final = {"pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.importorskip"}


def run_pytest(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "CI"))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: nothing was left to run
    return done.stdout


@pytest.mark.slow
def test_a_fast_run_lists_what_it_leaves_out() -> None:
    files = [f"tests/integration/{name}.py" for name in ("kafka/test_lag", "worker/test_faust_facts")]
    printed = run_pytest("--fast", "--numprocesses", "1", *files)
    assert re.search(r" [1-9]\d* passed", printed)
    [listed] = re.findall(r"= left out =+\n+(.*)", printed)
    assert re.fullmatch(r" +4  needs a broker, .*; to enable: make test", listed)


def skipped(reason: str) -> pytest.TestReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CI", raising=False)
        with pytest.raises(pytest.skip.Exception) as caught:
            unavailable(reason, enable="install it")
    return pytest.TestReport(
        "id", ("file", 1, "name"), {}, "skipped", ("file", 1, f"Skipped: {caught.value}"), "setup"
    )


def test_reasons_are_counted() -> None:
    reports = [skipped("no Java"), skipped("no promtool"), skipped("no Java")]
    assert [line.split(maxsplit=1) for line in left_out_lines(reports, {"slow": 7})] == [
        ["7", "slow"],
        ["2", "no Java; to enable: install it"],
        ["1", "no promtool; to enable: install it"],
    ]


def test_in_ci_nothing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no Java; to enable: install it"):
        unavailable("no Java", enable="install it")


def test_every_skip_says_how_to_enable_it() -> None:
    found = []
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in SKIPS and file.name != "left_out.py":
                found.append(file)
                assert "TO_ENABLE" in ast.unparse(node), f"{file}:{node.lineno}"
    assert found, TO_ENABLE
