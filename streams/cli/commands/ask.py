"""`anabranch ask`."""

import math
from uuid import UUID

import click

from streams.cli.command import command, json_option
from streams.cli.errors import Failed, Unusable
from streams.terminal import echo

__all__ = ["ask"]


@command(
    "anabranch ask 'How do I open the gates?' --principal group:staff",
    "anabranch ask --like 5d2a5b3e-8f0c-4a58-9d5e-3a1b7c9e0f24 --explain",
    "anabranch ask 'How do I open the gates?' --filter document_type=manual",
)
@click.argument("question", required=False)
@click.option(
    "--like",
    type=click.UUID,
    metavar="ID",
    help="Instead of a question: find what is similar to this chunk. Needs no model, but"
    " DATABASE_CONNECTION_STRING, the worker's.",
)
@click.option(
    "--principal",
    "principals",
    metavar="PRINCIPAL",
    multiple=True,
    default=["public"],
    show_default=True,
    help="Whom to ask as: what this principal may read is searched; can be repeated.",
)
@click.option("--session", type=click.UUID, metavar="ID", help="Search only this session.")
@click.option(
    "--topic", type=click.UUID, metavar="ID", help="Search this topic of the session too; requires --session."
)
@click.option("--profile", metavar="NAME", help="The retrieval profile; default: the workers'.")
@click.option("--k", metavar="N", type=int, help="How many passages; the profile limits the number.")
@click.option(
    "--filter",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Only passages that meet this: section=…, document_type=…, source_url_prefix=…, metadata.KEY=…,"
    " 'metadata.KEY in A, B', 'metadata.KEY has A, B', 'metadata.KEY>=2020' (or >, <=, <; also dates); can be"
    " repeated.",
)
@click.option("--explain", is_flag=True, help="Also show what became of the candidates.")
@json_option()
@click.option(
    "--prompt", "as_prompt", is_flag=True, help="Print the passages' texts as they belong in a prompt."
)
@click.option(
    "--timeout",
    "timeout_seconds",
    metavar="SECONDS",
    type=click.FloatRange(0, 3600, min_open=True),
    default=10.0,
    show_default=True,
    help="How long to wait for the answer.",
)
def ask(
    *,
    question: str | None,
    like: UUID | None,
    principals: tuple[str, ...],
    session: UUID | None,
    topic: UUID | None,
    profile: str | None,
    k: int | None,
    conditions: tuple[str, ...],
    explain: bool,
    as_json: bool,
    as_prompt: bool,
    timeout_seconds: float,
) -> None:
    """Ask one question through the live pipeline, and print the answer.

    The question is embedded by ANABRANCH_EMBEDDING_PROVIDER in this process, or if that is not set, by an embedding
    stage (`anabranch embedder`).

    Exit code 1 if there is no answer, 2 if an option or a setting is invalid. An empty answer is an answer.
    """
    import asyncio
    import logging

    from streams.cli import ask as view
    from streams.cli.connections import silence_client_logs
    from streams.cli.filters import FilterError, parse_filters

    problems = {
        "specify either a question or --like": (question is None) == (like is None),
        "the question is empty": question is not None and not question.strip(),
        "--topic requires --session": topic is not None and session is None,
        "--timeout: nan is not a number": math.isnan(timeout_seconds),  # click's range check accepts it
        "--explain, --json and --prompt cannot be combined": explain + as_json + as_prompt > 1,
    }
    for problem, exists in problems.items():
        if exists:
            raise click.UsageError(problem)
    try:
        filters = parse_filters(conditions)
    except FilterError as error:
        raise click.UsageError(f"--filter {error}") from None
    asked = view.Question(question, like, principals, session, topic, profile, k, filters, timeout_seconds)
    silence_client_logs()
    logging.getLogger("streams").setLevel(logging.CRITICAL)  # it also logs the errors that it raises
    try:
        answer = asyncio.run(view.ask(asked))
    except view.NotAnswered as error:
        raise (Unusable if error.invalid else Failed)(str(error)) from None
    if as_json:
        echo(view.as_json(answer))
    elif as_prompt:
        view.show_prompt(answer, asked)
    else:
        view.show(answer, asked, explain=explain)
