"""`anabranch`: one command for each operator task.

Each command is a module of `streams.cli.commands`, imported when it is needed. Such a module has only the options and
the help; it imports what it runs when it runs, because Faust and the drivers take half a second.
"""

from typing import cast

import click

import streams
from streams.cli.command import CommandModules, Group
from streams.cli.errors import NEEDS_CONSENT

__all__ = ["NEEDS_CONSENT", "commands", "main"]

# In the order of the help: try it, set it up, run it, use it, look after it, measure it.
_NAMES = (
    *("demo",),
    *("settings", "migrate", "topics", "check"),
    *("worker", "embedder"),
    *("ingest", "ask", "publish", "tail"),
    *("stats", "replay"),
    *("validate", "bench"),
    *("contract", "completion"),
)


@click.group(
    "anabranch",
    cls=Group,
    commands=cast("dict[str, click.Command]", CommandModules("streams.cli.commands", _NAMES)),
    examples=(
        "anabranch demo",
        "anabranch check",
        "anabranch ask --help",
    ),
)
@click.version_option(streams.__version__, prog_name="anabranch")
def commands() -> None:
    """Retrieval over Kafka and pgvector: takes query embeddings and returns ranked, token-budgeted passages.

    Settings are read from environment variables: `anabranch settings` lists them.

    Exit codes: 0 success, 1 failure, 2 wrong option, argument, setting or input, 3 review needed (migrate, topics
    --check), 130 interrupted.
    """


def main() -> None:
    """Entry point."""
    commands.main(prog_name="anabranch")
