"""`anabranch`: one command for each thing an operator does.

Each command imports what it needs when it runs: Faust alone takes half a second, and most commands need none of it.
"""
# ruff: noqa: PLC0415

import asyncio
import json
import math
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

import streams
from streams.core.errors import dead_letter_codes
from streams.settings import Settings, SettingsError, load

__all__ = ["NEEDS_CONSENT", "main"]

T = TypeVar("T")

#: The exit code of a migration that an operator has to review first; a Kubernetes Job does not retry it.
NEEDS_CONSENT = 3
_USAGE_ERROR = 2


class _Failed(click.ClickException):
    """One line on standard error, exit code 1."""

    def show(self, file: Any = None) -> None:
        del file
        click.echo(f"anabranch: {self.message}", err=True)


class _Unusable(_Failed):
    """As `_Failed`, for what the caller got wrong."""

    exit_code = _USAGE_ERROR


class _NeedsConsent(_Failed):
    """Like `_Failed`, if an operator has to review something first."""

    exit_code = NEEDS_CONSENT


class _CompactHelp(click.Command):
    """A command whose options, where they are wrong, are told in one line too."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _Unusable(f"replay: {error.format_message()}") from None


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(streams.__version__, prog_name="anabranch")
def commands() -> None:
    """Retrieval as a stream: query embeddings in, ranked and budgeted passages out, over Kafka and pgvector.

    Settings come from the environment; the README has the table.
    """


def main() -> None:
    """Entry point. A mistake in the settings is told in one line; exit code 2."""
    try:
        commands()
    except SettingsError as error:
        click.echo(f"anabranch: {error}", err=True)
        sys.exit(_USAGE_ERROR)


@commands.command()
def worker() -> None:
    """Run the processor until SIGTERM."""
    from streams.telemetry import logs
    from streams.worker.run import run_worker

    settings = load()
    logs.configure(settings.anabranch_log_format)
    run_worker(settings)


@commands.command()
@click.option("--keep", is_flag=True, help="Leave everything running until Ctrl-C, and print the addresses.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one machine-readable summary alone on standard output."
)
def demo(*, keep: bool, as_json: bool) -> None:
    """Show it all on this machine: embedded broker and database, a real worker, real questions."""
    from streams.demo.run import run_demo
    from streams.demo.stack import DemoError
    from streams.embedded import EmbeddedBrokerError, EmbeddedPostgresError

    try:
        answered_well = asyncio.run(run_demo(keep=keep, as_json=as_json))
    except (DemoError, EmbeddedBrokerError, EmbeddedPostgresError) as error:
        raise _Failed(str(error)) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(0 if keep else 130)
    if not answered_well:
        raise _Failed("a golden question has its expected passage outside the first five")


@commands.command()
@click.option("--dry-run", is_flag=True, help="Print the SQL without running it.")
@click.option(
    "--yes",
    is_flag=True,
    help="Continue even if roles lose access to rows, or another role owns the tables.",
)
@click.option(
    "--prune", is_flag=True, help="Also remove what only older workers need. Upgrade all workers first."
)
def migrate(*, dry_run: bool, yes: bool, prune: bool) -> None:
    """Migrate the store to the reference schema, as its owner. Idempotent.

    Without --yes, changes nothing and exits with 3 if roles would lose access to rows or another role owns the tables.
    """
    import streams.store.migrate as store

    settings = load()
    setting = settings.anabranch_principals_setting
    try:
        if dry_run:
            lines = _run_on_store(store.plan(settings.admin_dsn, principals_setting=setting, prune=prune))
            for line in lines:
                click.echo(line)
        else:
            lines = _run_on_store(
                store.migrate(
                    settings.admin_dsn,
                    principals_setting=setting,
                    consent=yes,
                    prune=prune,
                    report=click.echo,
                )
            )
    except store.ConsentRequired as error:
        raise _NeedsConsent(str(error)) from None
    except store.MigrationError as error:
        raise _Failed(str(error)) from None
    if not lines:
        click.echo(f"{'-- ' if dry_run else ''}nothing to do: the store matches the reference schema")


@commands.command()
@click.option(
    "--partitions", type=click.IntRange(1), default=12, show_default=True, help="Of a topic that is created."
)
@click.option("--replication-factor", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--max-event-bytes",
    type=click.IntRange(1024),
    default=1024 * 1024,
    show_default=True,
    help="Largest event that the input topic takes; the dead-letter topic takes 64 KiB more.",
)
@click.option("--check", is_flag=True, help="Change nothing.")
def topics(*, partitions: int, replication_factor: int, max_event_bytes: int, check: bool) -> None:
    """Create the topics with the right sizes and retention, or check them; idempotent."""
    from streams.broker.topics import check_topics, create_topics, topic_specs

    settings = load()
    specs = topic_specs(
        input_topic=settings.anabranch_input_topic,
        output_topic=settings.anabranch_output_topic,
        dead_letter_topic=settings.anabranch_dead_letter_topic,
        partitions=partitions,
        replication_factor=replication_factor,
        max_event_bytes=max_event_bytes,
    )
    act = check_topics if check else create_topics
    findings = _run_on_kafka(act(_client_options(settings), specs), settings)
    for finding in findings:
        click.echo(f"{'ok' if finding.ok else 'FAULT':5}  {finding.topic}  {finding.detail}")
        if finding.remedy:
            click.echo(f"       remedy: {finding.remedy}")
    if not all(finding.ok for finding in findings):
        sys.exit(1)


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(*, as_json: bool) -> None:
    """Say whether a worker would run here: store, role, policies, indexes, topics; each fault with its remedy.

    Exit code 1 if a worker would refuse to start or could not serve.
    """
    from streams.cli.check import examine, table

    settings = load()
    _silence_client_logs()
    findings = asyncio.run(examine(settings))
    if as_json:
        click.echo(json.dumps([finding.__dict__ for finding in findings]))
    else:
        table(findings)
    if any(finding.level in {"refused", "unready"} for finding in findings):
        sys.exit(1)


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def stats(*, as_json: bool) -> None:
    """Say what is in the store: chunks, embeddings, indexes, sizes, completeness, grants; as its owner."""
    from streams.cli import stats as view
    from streams.store.statistics import StatisticsError

    settings = load()
    try:
        found = _run_on_store(view.read(settings.admin_dsn))
    except StatisticsError as error:
        raise _Failed(str(error)) from None
    if as_json:
        click.echo(view.as_json(found))
    else:
        view.show(found)
    if found.differences:
        sys.exit(1)


@commands.group()
def contract() -> None:
    """Derive the Avro schemas from the JSON contracts, and check them."""


@contract.command()
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 where a schema is stale.")
def derive(*, check: bool) -> None:
    """Derive schemas/avro/*.avsc from contracts/**/*.schema.json."""
    from pathlib import Path

    from streams import resources
    from streams.wire.derive import stale, write

    contracts, avro = resources.contracts(), resources.schemas() / "avro"
    if check:
        names = stale(contracts, avro)
        for name in names:
            click.echo(f"stale: {name}")
        sys.exit(1 if names else 0)
    for name in write(contracts, Path(str(avro))):
        click.echo(f"wrote {name}")


@contract.command()
def compatible() -> None:
    """Check that every schema can read and be read by each one released before; exit code 1 where not."""
    from streams import resources
    from streams.cli.contracts import broken

    faults = broken(resources.schemas() / "avro")
    for fault in faults:
        click.echo(fault)
    if faults:
        sys.exit(1)
    click.echo("every schema is compatible with each released one, in both directions")


@commands.command()
@click.argument("events", type=click.File("r", encoding="utf-8"), default="-")
def publish(events: Any) -> None:
    """Publish events from JSONL (a file, or - for standard input) to the input topic, as Avro.

    Each line is a query_embedding; one that breaks the contract is named and stops the command before anything is sent.
    """
    from streams.cli.exchange import publish_events, read_events

    settings = load()
    queries = read_events(events)
    _run_on_kafka(publish_events(settings, _client_options(settings), queries), settings)
    click.echo(f"published {len(queries)} events to {settings.anabranch_input_topic}")


@commands.command()
@click.option("--from-beginning", is_flag=True, help="Start with the oldest result, not with the next one.")
@click.option("--dead-letters", is_flag=True, help="Show dead letters instead of results.")
@click.option("--limit", type=click.IntRange(1), help="End after so many.")
def tail(*, from_beginning: bool, dead_letters: bool, limit: int | None) -> None:
    """Print results as they arrive, decoded, one JSON object a line."""
    from streams.cli.exchange import tail_topic

    settings = load()
    try:
        _run_on_kafka(
            tail_topic(
                settings,
                _client_options(settings),
                dead_letters=dead_letters,
                from_beginning=from_beginning,
                limit=limit,
                show=click.echo,
            ),
            settings,
        )
    except KeyboardInterrupt:
        sys.exit(0)


@commands.command(cls=_CompactHelp)
@click.option("--apply", "really", is_flag=True, help="Do it. Without this, nothing is written.")
@click.option(
    "--code",
    "codes",
    multiple=True,
    type=click.Choice(sorted(dead_letter_codes())),
    metavar="CODE",
    help="Only dead letters of this code; may be given several times. The README has the table.",
)
@click.option(
    "--partition",
    "partitions",
    multiple=True,
    type=click.IntRange(0),
    help="Only from this partition of the dead-letter topic; may be given several times.",
)
@click.option(
    "--since",
    metavar="WHEN",
    help="Only those put aside at this time or later: 2026-05-01T12:00:00Z, or 45s, 30m, 2h, 7d ago.",
)
@click.option("--until", metavar="WHEN", help="Only those put aside before this time; as --since.")
@click.option(
    "--rate",
    type=click.FloatRange(0, 10_000, min_open=True),
    default=50.0,
    show_default=True,
    help="Most events a second.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Leave an event that has been replayed so many times and came back.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def replay(
    *,
    really: bool,
    codes: tuple[str, ...],
    partitions: tuple[int, ...],
    since: str | None,
    until: str | None,
    rate: float,
    max_attempts: int,
    as_json: bool,
) -> None:
    """Send dead letters back to the input topic, each once; by default only show which.

    Key, value and headers are the event's own, with two marks: anabranch.replay.from names the dead letter,
    anabranch.replay.attempts counts. What was interrupted is taken up where it ended by the same command again.

    Exit code 1 where a chosen letter had to be left (see the table) or Kafka fails, 2 where an option is unusable.
    """
    from streams.cli import replay as view
    from streams.replay.dead_letters import ReplayFilter
    from streams.replay.run import BadPartition, ReplayError

    if math.isnan(rate):  # which is in no range and out of none
        raise _Unusable("replay: --rate: nan is no number")
    try:
        choice = ReplayFilter(frozenset(codes), frozenset(partitions), *view.period(since, until))
    except ValueError as error:
        raise _Unusable(f"replay: {error}") from None
    settings = load()
    try:
        outcome = _run_on_kafka(
            view.replay(
                settings,
                _client_options(settings),
                choice=choice,
                max_attempts=max_attempts,
                rate=rate if really else None,
            ),
            settings,
        )
    except BadPartition as error:
        raise _Unusable(f"replay: --partition: {error}") from None
    except ReplayError as error:
        raise _Failed(str(error)) from None
    except KeyboardInterrupt:
        raise _Failed("interrupted; the same command goes on where this one ended") from None
    if as_json:
        click.echo(view.as_json(outcome))
    else:
        view.show(outcome)
    if really and outcome.tally.refused:
        sys.exit(1)


@commands.command()
@click.argument("golden", type=click.File("r", encoding="utf-8"), required=False)
@click.option("--sample", is_flag=True, help="The sample corpus's golden set, instead of a file.")
@click.option("--direct", is_flag=True, help="Straight to the store, as the worker's role; without Kafka.")
@click.option(
    "--principal",
    "principals",
    multiple=True,
    help="Who asks, where a line does not say; may be given several times.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(0, 3600, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds to wait for one answer.",
)
@click.option(
    "--in-flight", type=click.IntRange(1, 500), default=1, show_default=True, help="Queries asked at a time."
)
@click.option(
    "--relevant-grade",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Least grade that counts for hit rate, recall and MRR.",
)
@click.option("--min-ndcg", type=click.FloatRange(0, 1), help="Fail below this mean nDCG@10.")
@click.option("--min-hit-rate", type=click.FloatRange(0, 1), help="Fail below this hit rate@5.")
@click.option("--worst", type=click.IntRange(0), default=10, show_default=True, help="Worst queries shown.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, alone on standard output.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True),
    help="Write the report as one self-contained page, too.",
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
    """Ask golden queries (JSONL: an event's fields, and what is expected), and measure the answers.

    Through the live pipeline, whose subscribers see these results too, or --direct to the store. Exit code 1 where
    a bound is missed or a query came to no answer, 2 where the golden set or an option is unusable.
    """
    from pathlib import Path

    from streams.cli import validate as validation
    from streams.evaluation.golden import GoldenError
    from streams.evaluation.query_runner import EvaluationError
    from streams.evaluation.report import Bounds

    if (golden is None) == (not sample):
        raise click.UsageError("give a golden set, or --sample")
    settings = load()
    name = "the sample's golden set" if sample else golden.name
    try:
        queries = validation.read(golden, principals=principals, relevant_grade=relevant_grade)
    except GoldenError as error:
        raise _Unusable(
            f"{name}: {error}".replace(": line", ":\n  line", 1).replace("\nline", "\n  line")
        ) from None
    wishes = validation.ValidateOptions(
        golden=name,
        direct=direct,
        timeout_seconds=timeout_seconds,
        in_flight=in_flight,
        relevant_grade=relevant_grade,
        bounds=Bounds(min_ndcg, min_hit_rate),
    )
    try:
        report = _run_on_kafka(validation.validate(settings, queries, wishes), settings)
    except EvaluationError as error:
        raise _Failed(str(error)) from None
    if html is not None:
        try:
            validation.write_page(report, Path(html))
        except OSError as error:
            raise _Failed(f"{html}: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        validation.show(report, worst=worst)
    if report.failures:
        sys.exit(1)


def _client_options(settings: Settings) -> dict[str, Any]:
    from streams.configured import broker_connection

    return broker_connection(settings).client_options()


def _silence_client_logs() -> None:
    import logging

    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # it logs what it raises


def _run_on_kafka(work: Coroutine[Any, Any, T], settings: Settings) -> T:
    from aiokafka.errors import KafkaError

    from streams.broker.diagnosis import diagnose
    from streams.configured import broker_connection

    _silence_client_logs()
    try:
        return asyncio.run(work)
    except KafkaError as error:
        diagnosis = asyncio.run(diagnose(broker_connection(settings)))
        raise _Failed(
            f"Kafka at {settings.kafka_bootstrap_servers}: {type(error).__name__}: {error}"
            if diagnosis is None
            else str(diagnosis)
        ) from None


def _run_on_store(work: Coroutine[Any, Any, T]) -> T:
    """As the owner."""
    import asyncpg

    from streams.store.connect_errors import explain

    try:
        return asyncio.run(work)
    except Exception as error:
        if (refused := explain(error, "DATABASE_ADMIN_CONNECTION_STRING")) is not None:
            raise _Failed(str(refused)) from None
        if not isinstance(error, (asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
            raise
        raise _Failed(f"PostgreSQL: {type(error).__name__}: {error}") from None
