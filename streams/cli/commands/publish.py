"""`anabranch publish`."""

import math
import sys
from typing import Any

import click

from streams.cli.command import command, texts_option
from streams.cli.errors import Failed
from streams.terminal import echo

__all__ = ["publish"]


@command("anabranch publish events.jsonl --rate 20", "anabranch publish --texts < questions.jsonl > ids")
@click.argument("events", metavar="[FILE]", type=click.File("rb"), default="-")
@click.option(
    "--rate",
    metavar="N",
    type=click.FloatRange(0, 100_000, min_open=True),
    help="Maximum events per second; without it, as fast as Kafka accepts them.",
)
@click.option("--skip-invalid", is_flag=True, help="Publish the valid lines although others are invalid.")
@texts_option("Publish questions in words to ANABRANCH_TEXT_TOPIC.")
def publish(events: Any, *, rate: float | None, skip_invalid: bool, texts: bool) -> None:
    """Publish events from JSONL (a file, or - for standard input) to the input topic, as Avro. Prints their ids.

    Each line is a query_embedding, or with --texts a query_text. Where schema_version, event_id or occurred_at are
    missing, the command adds them. If lines violate the contract, it names each of them and publishes nothing, unless
    --skip-invalid is given.

    Exit code 1 if a line is invalid or Kafka fails.
    """
    from streams.cli.connections import client_options, run_on_kafka
    from streams.cli.environment import load_one
    from streams.cli.publish import Published, publish_events, read_events, read_texts

    if rate is not None and math.isnan(rate):  # click's range check accepts it
        raise click.UsageError("--rate: nan is not a number")
    settings = load_one(texts=texts)
    dimensions = settings.anabranch_embedding_dimensions
    valid, invalid = read_texts(events) if texts else read_events(events, dimensions=dimensions)
    for line in invalid:
        echo(str(line), err=True)
    if invalid and not skip_invalid:
        lines = len(valid) + len(invalid)
        raise Failed(
            f"{len(invalid)} of {lines} lines are invalid; nothing was published, --skip-invalid publishes the others"
        )
    with Published(settings.anabranch_input_topic, len(valid)) as published:
        run_on_kafka(
            publish_events(
                settings, client_options(settings), valid, rate=rate, acknowledged=published.acknowledged
            ),
            settings,
            texts=texts,
        )
    if invalid:
        sys.exit(1)
