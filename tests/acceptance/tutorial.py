"""docs/tutorial.md as a program: its files, its commands in one shell as a reader types them, and what they print."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["PAGE", "Tutorial", "comparable", "read_tutorial", "run_commands"]

PAGE: Final = Path(__file__).resolve().parents[2] / "docs/tutorial.md"

_BLOCK: Final = re.compile(r"((?:[^\n]+\n)*)\n```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAME: Final = re.compile(r"Save\s+(?:this|it)\s+as\s+`([^`]+)`:\s*\Z")
_MARK: Final = "=== next command ==="


@dataclass(frozen=True)
class Tutorial:
    """What the page has.

    Attributes:
        set_up: what a reader types before there is anything; a test replaces it.
        files: name to content.
        commands: the rest of what a reader types, in the page's order.
        shown: what the page shows as a command's output, by the command's place in `commands`.
    """

    set_up: Sequence[str]
    files: Mapping[str, str]
    commands: Sequence[str]
    shown: Mapping[int, Sequence[str]]


def read_tutorial() -> Tutorial:
    """The page's blocks. Each must be one that can be run, so that none is left out."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = _BLOCK.findall(page)
    assert len(blocks) == page.count("\n```") // 2
    set_up: list[str] = []
    files: dict[str, str] = {}
    commands: list[str] = []
    shown: dict[int, Sequence[str]] = {}
    previous = ""
    for before, language, text in blocks:
        match language:
            case "console":
                set_up += [line.removeprefix("$ ") for line in text.splitlines()]
            case "sh":
                commands += text.splitlines()
            case "json" | "python":
                name = _NAME.search(before)
                assert name, f"the paragraph before this block does not name its file:\n{text}"
                files[name[1]] = text
            case "text":
                assert previous == "sh", f"there is no command before this output:\n{text}"
                shown[len(commands) - 1] = text.splitlines()
            case _:
                raise AssertionError(f"what is to be done with a block of {language!r}?")
        previous = language
    unused = [
        name for name in files if not any(name in re.split(r"[\s()]+", command) for command in commands)
    ]
    assert not unused, f"no command uses {unused}"
    return Tutorial(set_up, files, commands, shown)


def comparable(line: str) -> str:
    """Without what differs between runs and between exports of a model: times, and the last digits of a similarity."""
    return re.sub(r"\b(\d\.\d)\d\d\b", r"\1", re.sub(r"\b\d+ ms\b", "ms", line))


def run_commands(
    tutorial: Tutorial, folder: Path, environment: Mapping[str, str], *, timeout_seconds: float = 240
) -> list[list[str]]:
    """Run all commands in one shell; each must succeed.

    Args:
        tutorial: the commands, and the files that they need.
        folder: an empty one.
        environment: of the shell.
        timeout_seconds: for all commands together.

    Returns:
        The lines that each command prints. The last background process has ended in order.
    """
    for name, text in tutorial.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    lines = [line for command in tutorial.commands for line in (f"echo '{_MARK}'", command)]
    output = folder / "output"
    with output.open("wb") as sink:
        # A session of its own: whatever still runs at the end can be ended together.
        shell = subprocess.Popen(
            ["/bin/sh", "-ec", "\n".join([*lines, "wait $!"])],
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            code = shell.wait(timeout_seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            print(output.read_text())
    assert code == 0
    parts = re.split(f"^{_MARK}\n", output.read_text(), flags=re.MULTILINE)[1:]
    return [text.splitlines() for text in parts]
