"""The help of every command, as docs/commands.md shows it. ``python -m tests.commands_page`` writes it to the page."""

import re
from pathlib import Path
from typing import Final

import click
from click.testing import CliRunner

from streams.cli.main import commands

__all__ = ["PAGE", "every_command", "help_of", "with_help"]

PAGE: Final = Path(__file__).resolve().parents[1] / "docs/commands.md"
_BLOCK: Final = re.compile(
    r"(^### `(anabranch[a-z ]*)`\n\n```text\n)(?:.*?\n)??(```$)", re.MULTILINE | re.DOTALL
)


def every_command() -> list[tuple[str, ...]]:
    """The names of each command, without groups."""
    return [
        names
        for name, command in commands.commands.items()
        for names in (
            [(name, each) for each in command.commands] if isinstance(command, click.Group) else [(name,)]
        )
    ]


def help_of(*names: str, columns: int = 80) -> str:
    """What ``--help`` prints."""
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(commands, [*names, "--help"])
    assert done.exit_code == 0, done.output
    return done.stdout


def with_help(page: str) -> str:
    """The page with the help of today below each command's heading."""
    return _BLOCK.sub(lambda block: block[1] + help_of(*block[2].split()[1:]) + block[3], page)


if __name__ == "__main__":
    PAGE.write_text(with_help(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
