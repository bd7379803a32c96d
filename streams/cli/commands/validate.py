"""`anabranch validate`."""

import sys
from typing import Any

import click

from streams.cli.command import command, json_option
from streams.cli.errors import Failed, Unusable
from streams.terminal import echo

__all__ = ["validate"]


@command(
    "anabranch validate golden.jsonl --principal group:staff --min-ndcg 0.6", "anabranch validate --sample"
)
@click.argument("golden", metavar="[FILE]", type=click.File("r", encoding="utf-8"), required=False)
@click.option("--sample", is_flag=True, help="Use the sample corpus's golden set instead of a file.")
@click.option("--direct", is_flag=True, help="Query the store directly as the worker's role, without Kafka.")
@click.option(
    "--principal",
    "principals",
    metavar="PRINCIPAL",
    multiple=True,
    help="Requesting principal for lines without principals; can be repeated.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    metavar="SECONDS",
    type=click.FloatRange(0, 3600, min_open=True),
    default=10.0,
    show_default=True,
    help="Longest wait for one answer.",
)
@click.option(
    "--in-flight",
    metavar="N",
    type=click.IntRange(1, 500),
    default=1,
    show_default=True,
    help="Maximum concurrent queries.",
)
@click.option(
    "--relevant-grade",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Minimum grade that counts for hit rate, recall and MRR.",
)
@click.option(
    "--min-ndcg", metavar="SHARE", type=click.FloatRange(0, 1), help="Fail if the mean nDCG@10 is lower."
)
@click.option(
    "--min-hit-rate", metavar="SHARE", type=click.FloatRange(0, 1), help="Fail if hit rate@5 is lower."
)
@click.option(
    "--worst",
    metavar="N",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Number of worst queries to show.",
)
@json_option()
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True),
    help="Also write the report to this file, as a self-contained page.",
)
def validate(
    *,
    golden: Any,
    sample: bool,
    direct: bool,
    principals: tuple[str, ...],
    timeout_seconds: float,
    in_flight: int,
    relevant_grade: int,
    min_ndcg: float | None,
    min_hit_rate: float | None,
    worst: int,
    as_json: bool,
    html: str | None,
) -> None:
    """Run golden queries (JSONL: an event's fields and the expected passages), and measure the results.

    Queries go through the live pipeline, whose consumers see these results too, or with --direct to the store.

    Exit code 1 if a bound is missed or a query was not answered, 2 if the golden set is invalid.
    """
    from pathlib import Path

    from streams.cli import validate as validation
    from streams.cli.connections import run_on_kafka
    from streams.evaluation.golden import GoldenError
    from streams.evaluation.query_runner import EvaluationError
    from streams.evaluation.report import Bounds
    from streams.settings import load

    if (golden is None) == (not sample):
        raise click.UsageError("specify either a golden set or --sample")
    settings = load()
    name = "the sample's golden set" if sample else golden.name
    try:
        queries = validation.read(
            golden,
            principals=principals,
            dimensions=settings.anabranch_embedding_dimensions,
            relevant_grade=relevant_grade,
        )
    except GoldenError as error:
        raise Unusable(
            f"{name}: {error}".replace(": line", ":\n  line", 1).replace("\nline", "\n  line")
        ) from None
    options = validation.ValidateOptions(
        golden=name,
        direct=direct,
        timeout_seconds=timeout_seconds,
        in_flight=in_flight,
        relevant_grade=relevant_grade,
        bounds=Bounds(min_ndcg, min_hit_rate),
    )
    try:
        report = run_on_kafka(validation.validate(settings, queries, options), settings)
    except EvaluationError as error:
        raise Failed(str(error)) from None
    if html is not None:
        try:
            validation.write_page(report, Path(html))
        except OSError as error:
            raise Failed(f"{html}: {error.strerror}") from None
    if as_json:
        echo(validation.as_json(report))
    else:
        validation.show(report, worst=worst)
    if report.failures:
        sys.exit(1)
