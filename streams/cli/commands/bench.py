"""`anabranch bench`."""

import math
import sys
from typing import Any

import click

from streams.cli.command import Choice, command, json_option
from streams.cli.errors import Failed, Interrupted, Unusable
from streams.terminal import echo

__all__ = ["bench"]


@command("anabranch bench --workload chat", "anabranch bench --events events.jsonl --rate 20 --seconds 60")
@click.option(
    "--events",
    metavar="FILE",
    type=click.File("rb"),
    help="Events (JSONL) to offer to the workers of a deployment, at the addresses in the settings; requires --rate.",
)
@click.option(
    "--rate",
    metavar="N",
    type=click.FloatRange(0, 100_000, min_open=True),
    help="Events per second to offer.",
)
@click.option(
    "--seconds",
    metavar="SECONDS",
    type=click.FloatRange(1, 3600),
    default=10.0,
    show_default=True,
    help="Duration of each measurement.",
)
@click.option(
    "--workload",
    type=Choice(["chat", "extraction", "mixed"]),
    default="mixed",
    show_default=True,
    help="Queries to send if --events is not given.",
)
@click.option(
    "--chunks",
    metavar="N",
    type=click.IntRange(1000, 200_000),
    default=10_000,
    show_default=True,
    help="Chunks in the embedded store, if --events is not given.",
)
@json_option()
def bench(
    *, events: Any, rate: float | None, seconds: float, workload: Any, chunks: int, as_json: bool
) -> None:
    """Measure throughput and latency, and the ceiling beside them: the same SQL without Kafka, contracts or selection.

    Without --events: one worker on an embedded broker and database, as much as it can process, then half of that.
    Latency starts when an event was due. Consumers of the output topic see the results too.

    Exit code 1 if an event was not answered.
    """
    import asyncio

    from streams.bench import BenchError
    from streams.cli import bench as view
    from streams.cli.connections import run_on_kafka
    from streams.core.errors import AnabranchError, TerminalError
    from streams.embedded import EmbeddedBrokerError, EmbeddedPostgresError, WorkerError
    from streams.settings import load

    if events is not None and rate is None:
        raise click.UsageError("--events requires --rate")
    if rate is not None and math.isnan(rate):  # click's range check accepts it
        raise click.UsageError("--rate: nan is not a number")
    settings = load()
    dimensions = settings.anabranch_embedding_dimensions
    queries = None if events is None else view.read_all(events, dimensions=dimensions)
    if queries is not None and not queries:
        raise Unusable(f"{events.name} contains no event; add one event per line")
    try:
        report = run_on_kafka(
            view.bench(settings, queries, chunks=chunks, workload=workload, rate=rate, seconds=seconds),
            settings,
        )
    except (BenchError, EmbeddedBrokerError, EmbeddedPostgresError, WorkerError) as error:
        raise Failed(str(error)) from None
    except AnabranchError as error:
        culprit = "--events" if isinstance(error, TerminalError) else "PostgreSQL"
        raise Failed(f"{culprit}: {error.code}: {error}") from None
    except TimeoutError:
        raise Failed("no worker answers: no result within 30 s; run `anabranch check`") from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Interrupted("interrupted; nothing was measured") from None
    if as_json:
        echo(view.as_json(report))
    else:
        view.show(report)
    if any(line.unanswered for line in report.lines):
        sys.exit(1)
