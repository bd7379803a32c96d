"""`anabranch check`."""

import sys

from streams.cli.command import command, json_option, texts_option
from streams.terminal import echo

__all__ = ["check"]


@command("anabranch check", "anabranch check --texts --json")
@json_option()
@texts_option("Also check the embedding stage's topics.")
def check(*, as_json: bool, texts: bool) -> None:
    """Check whether a worker can run here: store, role, policies, indexes, topics.

    Prints each problem with its remedy, then versions, addresses and topics, then a verdict.

    Exit code 1 if a worker would refuse to start or could not process events.
    """
    import asyncio

    from streams.cli import check as view
    from streams.cli.connections import silence_client_logs
    from streams.cli.environment import load_both

    settings, stage = load_both(texts=texts)
    silence_client_logs()
    report = asyncio.run(view.examine(settings, stage))
    if as_json:
        echo(view.as_json(report))
    else:
        view.show(report)
    if not report.can_run:
        sys.exit(1)
