"""`anabranch ingest`."""

import sys
from typing import Any

import click

from streams.cli.command import command, json_option
from streams.cli.errors import Failed, Interrupted
from streams.terminal import echo

__all__ = ["ingest"]


@command("anabranch ingest --dry-run documents.jsonl", "anabranch ingest documents.jsonl")
@click.argument("documents", metavar="[FILE]", type=click.File("rb"), default="-")
@click.option("--delete", "delete", is_flag=True, help="Delete the documents with these ids instead.")
@click.option("--dry-run", is_flag=True, help="Only validate the lines; write nothing.")
@click.option(
    "--embed-again",
    is_flag=True,
    help="Embed chunks again even if the store has them with the same text and an embedding.",
)
@json_option()
def ingest(*, documents: Any, delete: bool, dry_run: bool, embed_again: bool, as_json: bool) -> None:
    """Write documents with their grants and chunks from JSONL (a file, or - for standard input) to the store.

    Each line is a document with all its chunks. Idempotent: after an interruption, run the same command again. Chunks
    without an embedding are embedded by ANABRANCH_EMBEDDING_PROVIDER.

    Exit code 1 if a line was rejected; the other documents are written.
    """
    import os
    import stat

    from streams.cli import ingest as view
    from streams.cli.connections import run_on_store
    from streams.core.embedding_errors import EmbeddingError
    from streams.settings import load_ingestion
    from streams.store.ingestion import IngestionError

    if delete and (dry_run or embed_again):
        raise click.UsageError("--delete cannot be combined with --dry-run or --embed-again")
    status = os.fstat(documents.fileno())
    work = view.run(
        load_ingestion(),
        documents,
        size=status.st_size if stat.S_ISREG(status.st_mode) else None,
        mode="delete" if delete else "validate" if dry_run else "write",
        embed_again=embed_again,
    )
    try:
        outcome = run_on_store(work, "DATABASE_INGESTION_CONNECTION_STRING")
    except IngestionError as error:
        raise Failed(str(error)) from None
    except EmbeddingError as error:
        raise Failed(f"{error.code}: {error}; to continue, run the same command again") from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted; to continue, run the same command again") from None
    if as_json:
        echo(view.as_json(outcome))
    else:
        view.show(outcome)
    if outcome.rejected:
        sys.exit(1)
