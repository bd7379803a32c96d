"""`anabranch validate`: golden queries asked, measured, and shown."""

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from streams import sample
from streams.configured import broker_connection, load_profiles, open_codec
from streams.evaluation.direct import DirectStore
from streams.evaluation.golden import GoldenError, GoldenQuery, read_golden
from streams.evaluation.live import LivePipeline
from streams.evaluation.page import render
from streams.evaluation.query_runner import EvaluationError, Outcome, QueryClient, run_queries
from streams.evaluation.report import Bounds, Report, assess
from streams.evaluation.sample import sample_lines
from streams.evaluation.scoring import HIT_DEPTH, NDCG_DEPTH, Percentiles
from streams.evaluation.vectors import VectorCount, count_vectors
from streams.settings import Settings
from streams.store.postgres import PostgresStore
from streams.tokens import count_tokens

__all__ = ["ValidateOptions", "read", "show", "validate", "write_page"]


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """What the command line asks for.

    Attributes:
        golden: the set's name.
        direct: straight to the store, not through Kafka.
        timeout_seconds: how long one answer is waited for.
        in_flight: most queries asked at a time.
        relevant_grade: least grade that counts for hit, recall and reciprocal rank.
    """

    golden: str
    direct: bool
    timeout_seconds: float
    in_flight: int
    relevant_grade: int
    bounds: Bounds


def read(lines: Iterable[str] | None, *, principals: Sequence[str], relevant_grade: int) -> list[GoldenQuery]:
    """Read a golden set; None: the sample's.

    Raises:
        GoldenError: it cannot be used.
    """
    try:
        queries = read_golden(sample_lines(sample.load()) if lines is None else lines, principals=principals)
    except UnicodeDecodeError:
        raise GoldenError("it is not in UTF-8") from None
    beneath = [
        query.key
        for query in queries
        if all(expectation.grade < relevant_grade for expectation in query.expected)
    ]
    if beneath:
        raise GoldenError(
            f"{len(beneath)} of {len(queries)} queries, {beneath[0]} among them, expect nothing of grade"
            f" {relevant_grade} or better"
        )
    return queries


async def validate(settings: Settings, queries: Sequence[GoldenQuery], wishes: ValidateOptions) -> Report:
    """Ask every query, and measure what comes.

    Raises:
        EvaluationError: they cannot be asked here.
        KafkaError: the broker cannot be reached or refuses.
        SettingsError: a setting that this way needs is missing or unusable.
    """
    if importlib.util.find_spec("ir_measures") is None:  # before a thousand queries are asked for nothing
        raise EvaluationError("the measures need ir-measures: pip install 'anabranch[validate]'")
    outcomes = await (_directly if wishes.direct else _live)(settings, queries, wishes)
    return assess(
        queries,
        outcomes,
        way="direct" if wishes.direct else "live",
        golden=wishes.golden,
        relevant_grade=wishes.relevant_grade,
        bounds=wishes.bounds,
        vectors=await _vectors(settings, queries),
    )


async def _live(settings: Settings, queries: Sequence[GoldenQuery], wishes: ValidateOptions) -> list[Outcome]:
    async with LivePipeline(
        broker_connection(settings).client_options(),
        codec=open_codec(settings),
        input_topic=settings.anabranch_input_topic,
        output_topic=settings.anabranch_output_topic,
        dead_letter_topic=settings.anabranch_dead_letter_topic,
        timeout_seconds=wishes.timeout_seconds,
    ) as pipeline:
        return await _ask(queries, pipeline, wishes)


async def _directly(
    settings: Settings, queries: Sequence[GoldenQuery], wishes: ValidateOptions
) -> list[Outcome]:
    profiles = load_profiles(settings)
    count_tokens("")  # loads its vocabulary, which the first query should not wait for
    store = PostgresStore(
        settings.store_dsn,
        connections=2 * wishes.in_flight,
        search_timeout_seconds=min(wishes.timeout_seconds, settings.anabranch_search_timeout_seconds),
        principals_setting=settings.anabranch_principals_setting,
        exact_scan_rows=settings.anabranch_exact_scan_rows,
    )
    direct = DirectStore(
        store,
        principals_setting=settings.anabranch_principals_setting,
        profiles=profiles,
        default_profile=settings.anabranch_default_profile,
        embedding_model=settings.anabranch_embedding_model,
        count_tokens=count_tokens,
    )
    async with direct:
        return await _ask(queries, direct, wishes)


async def _ask(queries: Sequence[GoldenQuery], asker: QueryClient, wishes: ValidateOptions) -> list[Outcome]:
    # On standard error, and only where somebody is looking.
    with Progress(
        console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal
    ) as bar:
        task = bar.add_task("asking", total=len(queries))
        return await run_queries(
            queries, asker, in_flight=wishes.in_flight, progress=lambda: bar.advance(task)
        )


async def _vectors(settings: Settings, queries: Sequence[GoldenQuery]) -> VectorCount | None:
    """As the owner where we know one: all of them. Else as the worker: what the askers may read. Else none."""
    owner, worker = settings.database_admin_connection_string, settings.database_connection_string
    askers = sorted({principal for query in queries for principal in query.event.principals})
    for dsn, whose in ((owner, None), (worker, askers)):
        if dsn is not None:
            found = await count_vectors(
                dsn.get_secret_value(),
                principals_setting=settings.anabranch_principals_setting,
                askers=whose,
            )
            if found is not None:
                return found
    return None


def write_page(report: Report, path: Path) -> None:
    """Write the HTML page.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(render(report), encoding="utf-8")


def show(report: Report, *, worst: int) -> None:
    """Print the report, with so many of the worst queries."""
    console = Console(highlight=False)
    total = len(report.assessments)
    way = "through the live pipeline" if report.way == "live" else "straight to the store"
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    mean, bounds = report.mean, report.bounds
    table.add_row("queries", f"{total:,} of {escape(report.golden)}, {way}")
    answered = f"{report.answered:,}"
    if report.unanswered:
        answered += f" · [red]{report.unanswered:,} without an answer[/]"
    for code, count in report.dead_letters.items():
        answered += f" · [red]{count:,} dead letters {escape(code)}[/]"
    table.add_row("answered", answered)
    table.add_row(f"hit rate@{HIT_DEPTH}", _figure(mean.hit, bounds.min_hit_rate))
    table.add_row(f"nDCG@{NDCG_DEPTH}", _figure(mean.ndcg, bounds.min_ndcg))
    table.add_row("recall@k", _figure(mean.recall, None))
    table.add_row("MRR", _figure(mean.reciprocal_rank, None))
    table.add_row("latency", _durations(report.latency))
    table.add_row("query_time_ms", _durations(report.query_time))
    table.add_row(
        "passages",
        f"{report.passages:,}, of which have a "
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
        console.print("[green]✓ passed[/]")


def _worst(report: Report, number: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("nDCG@10", justify="right", width=7)
    table.add_column("rank", justify="right", width=4)
    table.add_column("the worst queries", ratio=3, no_wrap=True, overflow="ellipsis")
    table.add_column("what came first", ratio=2, no_wrap=True, overflow="ellipsis", style="cyan")
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


def _figure(value: float, least: float | None) -> str:
    if least is None:
        return f"{value:.4f}"
    style = "green" if value >= least else "red"
    return f"[{style}]{value:.4f}[/] (at least {least:g})"


def _durations(of: Percentiles | None) -> str:
    if of is None:
        return "–"
    return f"p50 {of.p50:.1f} ms · p95 {of.p95:.1f} ms · p99 {of.p99:.1f} ms · most {of.most:.1f} ms"


def _counted(vectors: VectorCount | None) -> str:
    if vectors is None:
        return "not counted: neither DATABASE_ADMIN_CONNECTION_STRING nor DATABASE_CONNECTION_STRING leads to a store"
    whose = "in the store" if vectors.scope == "store" else "that the askers may read"
    return f"{vectors.count:,} {whose}"
