"""`anabranch`: one command for each operator task.

Each command imports its dependencies when it runs: importing Faust takes half a second, and few commands need it.
"""
# ruff: noqa: PLC0415  # see above

import asyncio
import math
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

import streams
from streams.core.errors import dead_letter_codes
from streams.settings import Settings, SettingsError, load
from streams.terminal import echo, json_text

__all__ = ["NEEDS_CONSENT", "main"]

T = TypeVar("T")

_USAGE_ERROR = 2
#: The exit code of a migration that an operator has to review first; a Kubernetes Job does not retry it.
NEEDS_CONSENT = 3


class _Failed(click.ClickException):
    """One line on standard error, exit code 1."""

    def show(self, file: Any = None) -> None:
        del file
        echo(f"anabranch: {self.message}", err=True)


class _Unusable(_Failed):
    """Like `_Failed`, for usage errors."""

    exit_code = _USAGE_ERROR


class _NeedsConsent(_Failed):
    """Like `_Failed`, if an operator has to review something first."""

    exit_code = NEEDS_CONSENT


class _CompactHelp(click.Command):
    """A command that also reports wrong options in one line."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _Unusable(f"replay: {error.format_message()}") from None


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(streams.__version__, prog_name="anabranch")
def commands() -> None:
    """Retrieval over Kafka and pgvector: takes query embeddings and returns ranked, token-budgeted passages.

    Settings are read from environment variables; see the documentation for the list.
    """


def main() -> None:
    """Entry point. Reports wrong settings in one line, with exit code 2."""
    try:
        commands()
    except SettingsError as error:
        echo(f"anabranch: {error}", err=True)
        sys.exit(_USAGE_ERROR)


@commands.command()
def worker() -> None:
    """Run a worker until SIGTERM."""
    from streams.telemetry import logs
    from streams.worker.run import run_worker

    settings = load()
    logs.configure(settings.anabranch_log_format)
    run_worker(settings)


@commands.command()
@click.option("--keep", is_flag=True, help="Keep everything running until Ctrl-C, and print the addresses.")
@click.option("--json", "as_json", is_flag=True, help="Print only a JSON summary on standard output.")
def demo(*, keep: bool, as_json: bool) -> None:
    """Run a demo on this machine: embedded broker and database, a real worker, real questions."""
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
        raise _Failed("a golden question's expected passage is not among the first five")


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
                echo(line)
        else:
            lines = _run_on_store(
                store.migrate(
                    settings.admin_dsn,
                    principals_setting=setting,
                    consent=yes,
                    prune=prune,
                    report=echo,
                )
            )
    except store.ConsentRequired as error:
        raise _NeedsConsent(str(error)) from None
    except store.MigrationError as error:
        raise _Failed(str(error)) from None
    if not lines:
        echo(f"{'-- ' if dry_run else ''}nothing to do: the store matches the reference schema")


@commands.command()
@click.option(
    "--partitions", type=click.IntRange(1), default=12, show_default=True, help="Partitions of a new topic."
)
@click.option("--replication-factor", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--max-event-bytes",
    type=click.IntRange(1024),
    default=1024 * 1024,
    show_default=True,
    help="Maximum event size of the input topic; the dead-letter topic accepts 64 KiB more.",
)
@click.option("--check", is_flag=True, help="Only check the topics; do not create any.")
def topics(*, partitions: int, replication_factor: int, max_event_bytes: int, check: bool) -> None:
    """Create the topics with the required limits and retention, or check them. Idempotent."""
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
        echo(f"{'ok' if finding.ok else 'FAULT':5}  {finding.topic}  {finding.detail}")
        if finding.remedy:
            echo(f"       remedy: {finding.remedy}")
    if not all(finding.ok for finding in findings):
        sys.exit(1)


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(*, as_json: bool) -> None:
    """Check whether a worker can run here: store, role, policies, indexes, topics. Prints a remedy for each problem.

    Exit code 1 if a worker would refuse to start or could not process events.
    """
    from streams.cli.check import examine, table

    settings = load()
    _silence_client_logs()
    findings = asyncio.run(examine(settings))
    if as_json:
        echo(json_text([finding.__dict__ for finding in findings]))
    else:
        table(findings)
    if any(finding.level in {"refused", "unready"} for finding in findings):
        sys.exit(1)


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print the statistics as JSON.")
def stats(*, as_json: bool) -> None:
    """Print statistics of the store: chunks, embeddings, indexes, sizes, completeness, grants. Runs as its owner.

    Exit code 1 if derived data is wrong.
    """
    from streams.cli import stats as view
    from streams.store.statistics import StatisticsError

    settings = load()
    try:
        found = _run_on_store(view.read(settings.admin_dsn))
    except StatisticsError as error:
        raise _Failed(str(error)) from None
    if as_json:
        echo(view.as_json(found))
    else:
        view.show(found)
    if found.differences:
        sys.exit(1)


@commands.group()
def contract() -> None:
    """Derive the Avro schemas from the JSON contracts, and check them."""


@contract.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a schema is stale.")
def derive(*, check: bool) -> None:
    """Derive schemas/avro/*.avsc from contracts/**/*.schema.json."""
    from pathlib import Path

    from streams import resources
    from streams.wire.derive import stale, write

    contracts, avro = resources.contracts(), resources.schemas() / "avro"
    if check:
        names = stale(contracts, avro)
        for name in names:
            echo(f"stale: {name}")
        sys.exit(1 if names else 0)
    for name in write(contracts, Path(str(avro))):
        echo(f"wrote {name}")


@contract.command()
def compatible() -> None:
    """Check that each schema and its released versions can read each other's data; exit code 1 if not."""
    from streams import resources
    from streams.cli.contracts import broken

    faults = broken(resources.schemas() / "avro")
    for fault in faults:
        echo(fault)
    if faults:
        sys.exit(1)
    echo("all schemas are compatible with all released versions, in both directions")


@commands.command()
@click.argument("events", type=click.File("r", encoding="utf-8"), default="-")
def publish(events: Any) -> None:
    """Publish events from JSONL (a file, or - for standard input) to the input topic, as Avro.

    Each line is a query_embedding. If a line violates the contract, the command names it and publishes nothing.
    """
    from streams.cli.exchange import publish_events, read_events

    settings = load()
    queries = read_events(events)
    _run_on_kafka(publish_events(settings, _client_options(settings), queries), settings)
    events_published = "1 event" if len(queries) == 1 else f"{len(queries)} events"
    echo(f"published {events_published} to {settings.anabranch_input_topic}")


@commands.command()
@click.option("--from-beginning", is_flag=True, help="Start with the oldest record instead of the next one.")
@click.option(
    "--dead-letters",
    is_flag=True,
    help="Show why events were dead-lettered: headers, key and event_id, not the event.",
)
@click.option("--limit", type=click.IntRange(1), help="Stop after this many.")
def tail(*, from_beginning: bool, dead_letters: bool, limit: int | None) -> None:
    """Print results as they arrive, as one JSON object per line."""
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
                show=echo,
                notify=lambda line: echo(line, err=True) if sys.stderr.isatty() else None,
            ),
            settings,
        )
    except KeyboardInterrupt:
        sys.exit(0)


@commands.command(cls=_CompactHelp)
@click.option(
    "--apply", "apply", is_flag=True, help="Replay the dead letters. Without this option, nothing is written."
)
@click.option(
    "--code",
    "codes",
    multiple=True,
    type=click.Choice(sorted(dead_letter_codes())),
    metavar="CODE",
    help="Only dead letters with this code (see the documentation); can be repeated.",
)
@click.option(
    "--partition",
    "partitions",
    multiple=True,
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
    type=click.FloatRange(0, 10_000, min_open=True),
    default=50.0,
    show_default=True,
    help="Maximum events per second.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Skip events that were replayed this many times and dead-lettered again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def replay(
    *,
    apply: bool,
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

    Exit code 1 if a selected dead letter was skipped (see the table) or Kafka fails, 2 if an option is invalid.
    """
    from streams.cli import replay as view
    from streams.replay.dead_letters import ReplayFilter
    from streams.replay.run import BadPartition, ReplayError

    if math.isnan(rate):  # click's range check accepts it
        raise _Unusable("replay: --rate: nan is not a number")
    try:
        replay_filter = ReplayFilter(frozenset(codes), frozenset(partitions), *view.period(since, until))
    except ValueError as error:
        raise _Unusable(f"replay: {error}") from None
    settings = load()
    try:
        outcome = _run_on_kafka(
            view.replay(
                settings,
                _client_options(settings),
                replay_filter=replay_filter,
                max_attempts=max_attempts,
                rate=rate if apply else None,
            ),
            settings,
        )
    except BadPartition as error:
        raise _Unusable(f"replay: --partition: {error}") from None
    except ReplayError as error:
        raise _Failed(str(error)) from None
    except KeyboardInterrupt:
        raise _Failed("interrupted; run the same command again to continue") from None
    if as_json:
        echo(view.as_json(outcome))
    else:
        view.show(outcome)
    if apply and outcome.tally.refused:
        sys.exit(1)


@commands.command()
@click.argument("golden", type=click.File("r", encoding="utf-8"), required=False)
@click.option("--sample", is_flag=True, help="Use the sample corpus's golden set instead of a file.")
@click.option("--direct", is_flag=True, help="Query the store directly as the worker's role, without Kafka.")
@click.option(
    "--principal",
    "principals",
    multiple=True,
    help="Requesting principal for lines without principals; can be repeated.",
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
    "--in-flight",
    type=click.IntRange(1, 500),
    default=1,
    show_default=True,
    help="Maximum concurrent queries.",
)
@click.option(
    "--relevant-grade",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Minimum grade that counts for hit rate, recall and MRR.",
)
@click.option("--min-ndcg", type=click.FloatRange(0, 1), help="Fail if the mean nDCG@10 is lower.")
@click.option("--min-hit-rate", type=click.FloatRange(0, 1), help="Fail if hit rate@5 is lower.")
@click.option(
    "--worst", type=click.IntRange(0), default=10, show_default=True, help="Number of worst queries to show."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON report on standard output.")
@click.option(
    "--html",
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

    Queries go through the live pipeline, whose consumers see these results too, or with --direct to the store. Exit
    code 1 if a bound is missed or a query was not answered, 2 if the golden set or an option is invalid.
    """
    from pathlib import Path

    from streams.cli import validate as validation
    from streams.evaluation.golden import GoldenError
    from streams.evaluation.query_runner import EvaluationError
    from streams.evaluation.report import Bounds

    if (golden is None) == (not sample):
        raise click.UsageError("specify either a golden set or --sample")
    settings = load()
    name = "the sample's golden set" if sample else golden.name
    try:
        queries = validation.read(golden, principals=principals, relevant_grade=relevant_grade)
    except GoldenError as error:
        raise _Unusable(
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
        report = _run_on_kafka(validation.validate(settings, queries, options), settings)
    except EvaluationError as error:
        raise _Failed(str(error)) from None
    if html is not None:
        try:
            validation.write_page(report, Path(html))
        except OSError as error:
            raise _Failed(f"{html}: {error.strerror}") from None
    if as_json:
        echo(validation.as_json(report))
    else:
        validation.show(report, worst=worst)
    if report.failures:
        sys.exit(1)


@commands.command()
@click.option(
    "--events",
    type=click.File("r", encoding="utf-8"),
    help="Events (JSONL) to offer to the workers of a deployment, at the addresses in the settings; requires --rate.",
)
@click.option("--rate", type=click.FloatRange(0, 100_000, min_open=True), help="Events per second to offer.")
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=10.0,
    show_default=True,
    help="Duration of each measurement.",
)
@click.option(
    "--workload",
    type=click.Choice(["chat", "extraction", "mixed"]),
    default="mixed",
    show_default=True,
    help="Queries to send if --events is not given.",
)
@click.option(
    "--chunks",
    type=click.IntRange(1000, 200_000),
    default=10_000,
    show_default=True,
    help="Chunks in the embedded store, if --events is not given.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON report on standard output.")
def bench(
    *, events: Any, rate: float | None, seconds: float, workload: Any, chunks: int, as_json: bool
) -> None:
    """Measure throughput and latency, and the ceiling beside them: the same SQL without Kafka, contracts or selection.

    Without --events: one worker on an embedded broker and database, as much as it can process, then half of that.
    Latency starts when an event was due. Consumers of the output topic see the results too.
    """
    from streams.bench import BenchError
    from streams.cli import bench as view
    from streams.cli.exchange import read_events
    from streams.core.errors import AnabranchError, TerminalError
    from streams.embedded import EmbeddedBrokerError, EmbeddedPostgresError

    if events is not None and rate is None:
        raise _Unusable("bench: --events requires --rate")
    if rate is not None and math.isnan(rate):  # click's range check accepts it
        raise _Unusable("bench: --rate: nan is not a number")
    settings = load()
    queries = None if events is None else read_events(events)
    if queries is not None and not queries:
        raise _Unusable("bench: --events contains no event")
    try:
        report = _run_on_kafka(
            view.bench(settings, queries, chunks=chunks, workload=workload, rate=rate, seconds=seconds),
            settings,
        )
    except (BenchError, EmbeddedBrokerError, EmbeddedPostgresError) as error:
        raise _Failed(str(error)) from None
    except AnabranchError as error:
        culprit = "--events" if isinstance(error, TerminalError) else "PostgreSQL"
        raise _Failed(f"{culprit}: {error.code}: {error}") from None
    except TimeoutError:
        raise _Failed("no worker answers: no result within 30 s; run `anabranch check`") from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    if as_json:
        echo(view.as_json(report))
    else:
        view.show(report)
    if any(line.unanswered for line in report.lines):
        sys.exit(1)


def _client_options(settings: Settings) -> dict[str, Any]:
    from streams.configured import broker_connection

    return broker_connection(settings).client_options()


def _silence_client_logs() -> None:
    import logging

    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # aiokafka also logs the errors that it raises


def _run_on_kafka(work: Coroutine[Any, Any, T], settings: Settings) -> T:
    from aiokafka.errors import KafkaError

    from streams.broker.diagnosis import diagnose
    from streams.broker.topics import MissingTopics
    from streams.configured import broker_connection

    _silence_client_logs()
    try:
        return asyncio.run(work)
    except MissingTopics as error:
        raise _Failed(str(error)) from None
    except KafkaError as error:
        diagnosis = asyncio.run(diagnose(broker_connection(settings)))
        raise _Failed(
            f"Kafka at {settings.kafka_bootstrap_servers}: {type(error).__name__}: {error}"
            if diagnosis is None
            else str(diagnosis)
        ) from None


def _run_on_store(work: Coroutine[Any, Any, T]) -> T:
    """Run as the owner."""
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
