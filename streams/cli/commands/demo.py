"""`anabranch demo`."""

import sys

import click

from streams.cli.command import command, json_option
from streams.cli.errors import Failed, Interrupted

__all__ = ["demo"]


@command("anabranch demo", "anabranch demo --keep", reads_settings=False)
@click.option("--keep", is_flag=True, help="Keep everything running until Ctrl-C, and print the addresses.")
@click.option("--all", "show_all", is_flag=True, help="Print all answers, not only five.")
@json_option()
def demo(*, keep: bool, show_all: bool, as_json: bool) -> None:
    """Run a demo on this machine: embedded broker and database, a real worker, real questions."""
    import asyncio

    from streams.demo.run import run_demo
    from streams.demo.stack import DemoError
    from streams.embedded import EmbeddedBrokerError, EmbeddedPostgresError, WorkerError

    try:
        answered_well = asyncio.run(run_demo(keep=keep, show_all=show_all, as_json=as_json))
    except (DemoError, EmbeddedBrokerError, EmbeddedPostgresError, WorkerError) as error:
        raise Failed(str(error)) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        if keep:
            sys.exit(0)
        raise Interrupted("interrupted; everything that was started is stopped") from None
    if not answered_well:
        raise Failed("a golden question's expected passage is not among the first five")
