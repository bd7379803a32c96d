"""`anabranch completion`."""

import click

from streams.cli.command import Choice, command
from streams.terminal import echo

__all__ = ["completion"]


@command(
    "source <(anabranch completion bash)",
    "source <(anabranch completion zsh)",
    "anabranch completion fish | source",
    reads_settings=False,
)
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
def completion(*, shell: str) -> None:
    """Print the script with which a shell completes commands, options and choices.

    The examples are for the current shell; the documentation shows how to install it. bash has to be version 4.4 or
    later; zsh needs compinit.
    """
    from click.shell_completion import get_completion_class

    from streams.cli.main import commands

    script = get_completion_class(shell)
    assert script is not None  # noqa: S101  # click supports all three
    echo(script(commands, {}, "anabranch", "_ANABRANCH_COMPLETE").source())
