"""`anabranch topics`."""

import sys

import click

from streams.cli.command import command, texts_option
from streams.cli.errors import NEEDS_CONSENT, Failed
from streams.terminal import echo

__all__ = ["topics"]


@command("anabranch topics --partitions 24 --replication-factor 3", "anabranch topics --check")
@click.option(
    "--partitions",
    metavar="N",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    help="Partitions of a new topic.",
)
@click.option(
    "--replication-factor",
    metavar="N",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Replicas of a new topic's partitions.",
)
@click.option(
    "--max-event-bytes",
    metavar="BYTES",
    type=click.IntRange(1024),
    default=1024 * 1024,
    show_default=True,
    help="Maximum event size of the input topic; the dead-letter topic accepts 64 KiB more.",
)
@click.option("--check", is_flag=True, help="Only check the topics; do not create any.")
@texts_option("Also the embedding stage's topics.")
def topics(
    *, partitions: int, replication_factor: int, max_event_bytes: int, check: bool, texts: bool
) -> None:
    """Create the topics with the required limits and retention, or check them. Idempotent.

    Never changes an existing topic. Names where partitions, replicas or retention differ from what is wanted, and the
    command or option that removes the difference.

    Exit code 1 if a topic is missing or its limits are too small; with --check, 3 if topics only differ.
    """
    from streams.broker.topics import check_topics, create_topics
    from streams.cli.connections import client_options, run_on_kafka
    from streams.cli.environment import load_both
    from streams.configured import required_topics

    settings, stage = load_both(texts=texts)
    specs = required_topics(
        settings,
        stage,
        partitions=partitions,
        replication_factor=replication_factor,
        max_event_bytes=max_event_bytes,
    )
    act = check_topics if check else create_topics
    findings = run_on_kafka(act(client_options(settings), specs), settings)
    for finding in findings:
        state = "differs" if finding.differences else "ok"
        if not finding.ok:
            state = "warning" if finding.optional else "FAULT"
        echo(f"{state:7}  {finding.topic}  {finding.detail}")
        if finding.remedy:
            echo(f"         remedy: {finding.remedy}")
        for difference in finding.differences:
            echo(f"         {difference.detail}; remedy: {difference.remedy}")
    if not all(finding.ok or finding.optional for finding in findings):
        sys.exit(Failed.exit_code)
    if check and any(finding.differences for finding in findings):
        sys.exit(NEEDS_CONSENT)
