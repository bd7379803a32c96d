"""`anabranch tail`."""

import sys
from uuid import UUID

import click

from streams.cli.command import command, json_option, texts_option
from streams.terminal import echo

__all__ = ["tail"]


@command(
    "anabranch tail --from-beginning | jq .warnings",
    "anabranch tail --dead-letters --event 6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d",
)
@click.option("--from-beginning", is_flag=True, help="Start with the oldest record instead of the next one.")
@click.option(
    "--dead-letters",
    is_flag=True,
    help="Show why events were dead-lettered: headers, key and event_id, not the event.",
)
@texts_option("Show the embedding stage's dead letters.")
@click.option(
    "--event",
    "events",
    metavar="ID",
    type=click.UUID,
    multiple=True,
    help="Only this event; can be repeated.",
)
@click.option(
    "--session",
    "sessions",
    metavar="ID",
    type=click.UUID,
    multiple=True,
    help="Only this session; can be repeated.",
)
@click.option(
    "--profile",
    "profiles",
    metavar="NAME",
    multiple=True,
    help="Only this profile, also where it is the default; can be repeated.",
)
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Stop after this many.")
@json_option("Print JSON also if standard output is a terminal.")
def tail(
    *,
    from_beginning: bool,
    dead_letters: bool,
    texts: bool,
    events: tuple[UUID, ...],
    sessions: tuple[UUID, ...],
    profiles: tuple[str, ...],
    limit: int | None,
    as_json: bool,
) -> None:
    """Show results as they arrive: readable on a terminal, otherwise as one JSON object per line.

    A dead letter whose event cannot be decoded has neither session nor profile; --event finds it by its key.

    Ctrl-C ends it, with exit code 0.
    """
    from streams.cli.connections import client_options, run_on_kafka
    from streams.cli.environment import load_one
    from streams.cli.tail import TailFilter, print_json, print_readable, tail_topic

    if texts and not dead_letters:
        raise click.UsageError("--texts requires --dead-letters")
    settings = load_one(texts=texts)
    try:
        run_on_kafka(
            tail_topic(
                settings,
                client_options(settings),
                dead_letters=dead_letters,
                texts=texts,
                from_beginning=from_beginning,
                limit=limit,
                selected=TailFilter(frozenset(events), frozenset(sessions), frozenset(profiles)),
                show=print_json if as_json or not sys.stdout.isatty() else print_readable,
                notify=lambda line: echo(line, err=True) if sys.stderr.isatty() else None,
            ),
            settings,
            texts=texts,
        )
    except KeyboardInterrupt:
        sys.exit(0)
