"""`anabranch validate`: runs golden queries, and shows the measurements."""

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from streams import sample
from streams.configured import broker_connection, load_profiles, open_codec
from streams.evaluation.direct import DirectStore
from streams.evaluation.golden import GoldenError, GoldenQuery, read_golden
from streams.evaluation.live import LivePipeline
from streams.evaluation.query_runner import EvaluationError, Outcome, QueryClient, run_queries
from streams.evaluation.report import Bounds, Report, assess
from streams.evaluation.sample import sample_lines
from streams.evaluation.scoring import HIT_DEPTH, NDCG_DEPTH, Percentiles
from streams.evaluation.vectors import VectorCount, count_vectors
from streams.settings import Settings
from streams.store.postgres import PostgresStore
from streams.terminal import Console, Text, json_text
from streams.tokens import count_tokens

__all__ = ["ValidateOptions", "as_json", "read", "show", "validate", "write_page"]


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """The options from the command line.

    Attributes:
        golden: the golden set's name.
        direct: query the store directly, not through Kafka.
        timeout_seconds: how long to wait for one answer.
        in_flight: maximum number of concurrent queries.
        relevant_grade: minimum grade that counts for hit, recall and reciprocal rank.
    """

    golden: str
    direct: bool
    timeout_seconds: float
    in_flight: int
    relevant_grade: int
    bounds: Bounds


def read(
    lines: Iterable[str] | None, *, principals: Sequence[str], dimensions: int, relevant_grade: int
) -> list[GoldenQuery]:
    """Read a golden set; None: the sample's.

    Raises:
        GoldenError: the golden set is invalid.
    """
    try:
        queries = read_golden(
            sample_lines(sample.load()) if lines is None else lines,
            principals=principals,
            dimensions=dimensions,
        )
    except UnicodeDecodeError:
        raise GoldenError("the file is not valid UTF-8") from None
    below_grade = [
        query.key
        for query in queries
        if all(expectation.grade < relevant_grade for expectation in query.expected)
    ]
    if below_grade:
        raise GoldenError(
            f"{len(below_grade)} of {len(queries)} queries, including {below_grade[0]}, have no expectation with grade"
            f" {relevant_grade} or higher"
        )
    return queries


async def validate(settings: Settings, queries: Sequence[GoldenQuery], options: ValidateOptions) -> Report:
    """Run all queries, and measure the results.

    Raises:
        EvaluationError: the queries cannot be run here.
        KafkaError: the broker is unreachable or rejects the request.
        SettingsError: a setting that this mode requires is missing or unusable.
    """
    for package in ("ir_measures", "jinja2"):  # check before running a thousand queries in vain
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise EvaluationError(f"the package {name} is missing; run: pip install 'anabranch[validate]'")
    outcomes = await (_directly if options.direct else _live)(settings, queries, options)
    return assess(
        queries,
        outcomes,
        mode="direct" if options.direct else "live",
        golden=options.golden,
        relevant_grade=options.relevant_grade,
        bounds=options.bounds,
        vectors=await _vectors(settings, queries),
    )


async def _live(
    settings: Settings, queries: Sequence[GoldenQuery], options: ValidateOptions
) -> list[Outcome]:
    async with LivePipeline(
        broker_connection(settings).client_options(),
        codec=open_codec(settings),
        input_topic=settings.anabranch_input_topic,
        output_topic=settings.anabranch_output_topic,
        dead_letter_topic=settings.anabranch_dead_letter_topic,
        timeout_seconds=options.timeout_seconds,
    ) as pipeline:
        return await _ask(queries, pipeline, options)


async def _directly(
    settings: Settings, queries: Sequence[GoldenQuery], options: ValidateOptions
) -> list[Outcome]:
    profiles = load_profiles(settings)
    count_tokens("")  # loads the vocabulary, so that the first query does not have to wait for it
    store = PostgresStore(
        settings.store_dsn,
        connections=2 * options.in_flight,
        search_timeout_seconds=min(options.timeout_seconds, settings.anabranch_search_timeout_seconds),
        exact_scan_rows=settings.anabranch_exact_scan_rows,
        statement_cache_size=settings.anabranch_statement_cache_size,
        max_replication_lag_seconds=settings.anabranch_max_replication_lag_seconds,
    )
    direct = DirectStore(
        store,
        principals_setting=settings.anabranch_principals_setting,
        dimensions=settings.anabranch_embedding_dimensions,
        profiles=profiles,
        default_profile=settings.anabranch_default_profile,
        embedding_model=settings.anabranch_embedding_model,
        count_tokens=count_tokens,
    )
    async with direct:
        return await _ask(queries, direct, options)


async def _ask(
    queries: Sequence[GoldenQuery], client: QueryClient, options: ValidateOptions
) -> list[Outcome]:
    # On standard error, and only if it is a terminal.
    with Progress(
        console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal
    ) as bar:
        task = bar.add_task("asking", total=len(queries))
        return await run_queries(
            queries, client, in_flight=options.in_flight, progress=lambda: bar.advance(task)
        )


async def _vectors(settings: Settings, queries: Sequence[GoldenQuery]) -> VectorCount | None:
    """Count all vectors as the owner, if configured; else those readable by the callers, as the worker; else none."""
    owner, worker = settings.database_admin_connection_string, settings.database_connection_string
    principals = sorted({principal for query in queries for principal in query.event.principals})
    for dsn, readers in ((owner, None), (worker, principals)):
        if dsn is not None:
            found = await count_vectors(
                dsn.get_secret_value(),
                principals_setting=settings.anabranch_principals_setting,
                principals=readers,
            )
            if found is not None:
                return found
    return None


def write_page(report: Report, path: Path) -> None:
    """Write the HTML page.

    Raises:
        OSError: the page cannot be written.
    """
    from streams.evaluation.page import render  # noqa: PLC0415  # without jinja2, `validate` names what to install

    path.write_text(render(report), encoding="utf-8")


def as_json(report: Report) -> str:
    """The report as one JSON object; its keys are those of `Report.to_json`."""
    return json_text(report.to_json())


def show(report: Report, *, worst: int) -> None:
    """Print the report, with this many of the worst queries."""
    console = Console()
    total = len(report.assessments)
    mode = "through the live pipeline" if report.mode == "live" else "directly against the store"
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    mean, bounds = report.mean, report.bounds
    table.add_row("queries", f"{total:,} of {report.golden}, {mode}")
    answered = Text(f"{report.answered:,}")
    if report.unanswered:
        answered.append(" · ").append(f"{report.unanswered:,} without an answer", "red")
    for code, count in report.dead_letters.items():
        answered.append(" · ").append(f"{count:,} dead letters {code}", "red")
    table.add_row("answered", answered)
    table.add_row(f"hit rate@{HIT_DEPTH}", _figure(mean.hit, bounds.min_hit_rate))
    table.add_row(f"nDCG@{NDCG_DEPTH}", _figure(mean.ndcg, bounds.min_ndcg))
    table.add_row("recall@k", _figure(mean.recall, None))
    table.add_row("MRR", _figure(mean.reciprocal_rank, None))
    table.add_row("latency", _durations(report.latency))
    table.add_row("query_time_ms", _durations(report.query_time))
    table.add_row(
        "passages",
        f"{report.passages:,}, share with a "
        + " · ".join(
            f"{field} {'–' if share is None else f'{share:.1%}'}"
            for field, share in report.completeness.items()
        ),
    )
    table.add_row("vectors", _counted(report.vectors))
    table.add_row(
        "warnings", ", ".join(f"{code} × {count:,}" for code, count in report.warnings.items()) or "none"
    )
    console.print(table)
    shown = report.worst(worst)
    if shown:
        console.print()
        console.print(_worst(report, worst))
    console.print()
    for failure in report.failures:
        console.print(Text(f"✗ {failure}", style="red"))
    if not report.failures:
        console.print(Text("✓ passed", "green"))


def _worst(report: Report, number: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("nDCG@10", justify="right", width=7)
    table.add_column("rank", justify="right", width=4)
    table.add_column("worst queries", ratio=3, no_wrap=True, overflow="ellipsis")
    table.add_column("first passage", ratio=2, no_wrap=True, overflow="ellipsis", style="cyan")
    for each in report.worst(number):
        if each.trouble is not None:
            first = Text(each.trouble, style="red")
        elif each.passages:
            passage = each.passages[0]
            first = Text(f"{passage.score:.3f} {passage.title or passage.document_id}")
        else:
            first = Text("nothing", style="red")
        table.add_row(
            f"{each.scores.ndcg:.3f}", str(each.first_relevant_rank or "–"), Text(each.label), first
        )
    return table


def _figure(value: float, minimum: float | None) -> Text:
    if minimum is None:
        return Text(f"{value:.4f}")
    style = "green" if value >= minimum else "red"
    return Text(f"{value:.4f}", style).append(f" (at least {minimum:g})", "default")


def _durations(of: Percentiles | None) -> str:
    if of is None:
        return "–"
    return f"p50 {of.p50:.1f} ms · p95 {of.p95:.1f} ms · p99 {of.p99:.1f} ms · max {of.maximum:.1f} ms"


def _counted(vectors: VectorCount | None) -> str:
    if vectors is None:
        return "not counted: set DATABASE_ADMIN_CONNECTION_STRING or DATABASE_CONNECTION_STRING to a reachable store"
    readers = "in the store" if vectors.scope == "store" else "readable by the queries' principals"
    return f"{vectors.count:,} {readers}"
