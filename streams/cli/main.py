"""`anabranch`: one command for each thing an operator does."""

import sys

import click

import streams
from streams.settings import Settings, SettingsError, load
from streams.telemetry import logs

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(streams.__version__, prog_name="anabranch")
def commands() -> None:
    """Retrieval as a stream: query embeddings in, ranked and budgeted passages out, over Kafka and pgvector."""


def main() -> None:
    """Entry point. A mistake in the settings is told in one line; exit code 2."""
    try:
        commands(standalone_mode=True)
    except SettingsError as error:
        click.echo(f"anabranch: {error}", err=True)
        sys.exit(2)


@commands.command()
def worker() -> None:
    """Run the processor until SIGTERM."""
    from streams.worker.run import run_worker  # noqa: PLC0415  # Faust takes half a second to import

    settings: Settings = load()
    logs.configure(settings.anabranch_log_format)
    run_worker(settings)
