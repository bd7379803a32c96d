"""`anabranch settings`."""

from streams.cli.command import command, json_option
from streams.terminal import echo

__all__ = ["settings"]


@command("anabranch settings", "anabranch settings --json | jq '.[] | select(.origin != \"default\")'")
@json_option("Print the settings as JSON.")
def settings(*, as_json: bool) -> None:
    """List every setting in this environment: its value, and where the value comes from. Secrets are masked.

    Exit code 2 if a setting is invalid or unknown, with the line that a worker would print.
    """
    from streams.cli import settings as view

    found = view.read()
    if as_json:
        echo(view.as_json(found))
    else:
        view.show(found)
