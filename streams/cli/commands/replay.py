"""`anabranch replay`."""

import math
import sys

import click

from streams.cli.command import Choice, command, json_option, texts_option
from streams.cli.errors import Failed, Interrupted
from streams.core.embedding_errors import text_dead_letter_codes
from streams.core.errors import dead_letter_codes
from streams.terminal import echo

__all__ = ["replay"]


@command("anabranch replay --since 2h", "anabranch replay --code store_unavailable --apply")
@click.option(
    "--apply", "apply", is_flag=True, help="Replay the dead letters. Without this option, nothing is written."
)
@click.option(
    "--code",
    "codes",
    multiple=True,
    type=Choice(sorted(dead_letter_codes() | text_dead_letter_codes())),
    metavar="CODE",
    help="Only dead letters with this code (see the documentation); can be repeated.",
)
@click.option(
    "--partition",
    "partitions",
    multiple=True,
    metavar="N",
    type=click.IntRange(0),
    help="Only from this partition of the dead-letter topic; can be repeated.",
)
@click.option(
    "--since",
    metavar="WHEN",
    help="Only those dead-lettered at this time or later: 2026-05-01T12:00:00Z, or 45s, 30m, 2h, 7d ago.",
)
@click.option(
    "--until", metavar="WHEN", help="Only those dead-lettered before this time; same format as --since."
)
@click.option(
    "--rate",
    metavar="N",
    type=click.FloatRange(0, 10_000, min_open=True),
    default=50.0,
    show_default=True,
    help="Maximum events per second.",
)
@click.option(
    "--max-attempts",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Skip events that were replayed this many times and dead-lettered again.",
)
@texts_option("Use the embedding stage's topics: ANABRANCH_TEXT_TOPIC and its dead letters.")
@json_option()
def replay(
    *,
    apply: bool,
    texts: bool,
    codes: tuple[str, ...],
    partitions: tuple[int, ...],
    since: str | None,
    until: str | None,
    rate: float,
    max_attempts: int,
    as_json: bool,
) -> None:
    """Publish dead letters to the input topic again, each once. Without --apply, only show which.

    Key, value and headers are the event's own, plus two headers: anabranch.replay.from names the dead letter,
    anabranch.replay.attempts counts the replays. After an interruption, run the same command again to continue.

    Exit code 1 if a selected dead letter was skipped (see the table) or Kafka fails.
    """
    from streams.cli import replay as view
    from streams.cli.connections import client_options, run_on_kafka
    from streams.cli.environment import load_one
    from streams.replay.dead_letters import ReplayFilter
    from streams.replay.run import BadPartition, ReplayError

    if math.isnan(rate):  # click's range check accepts it
        raise click.UsageError("--rate: nan is not a number")
    try:
        replay_filter = ReplayFilter(frozenset(codes), frozenset(partitions), *view.period(since, until))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    settings = load_one(texts=texts)
    try:
        outcome = run_on_kafka(
            view.replay(
                settings,
                client_options(settings),
                replay_filter=replay_filter,
                max_attempts=max_attempts,
                rate=rate if apply else None,
                texts=texts,
            ),
            settings,
            texts=texts,
        )
    except BadPartition as error:
        raise click.UsageError(f"--partition: {error}") from None
    except ReplayError as error:
        raise Failed(str(error)) from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted; run the same command again to continue") from None
    if as_json:
        echo(view.as_json(outcome))
    else:
        view.show(outcome)
    if apply and outcome.tally.refused:
        sys.exit(1)
