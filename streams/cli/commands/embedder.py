"""`anabranch embedder`."""

from streams.cli.command import command
from streams.cli.errors import Failed

__all__ = ["embedder"]


@command("ANABRANCH_WEB_PORT=6067 anabranch embedder")
def embedder() -> None:
    """Run an embedding stage until SIGTERM: reads questions in words, writes query events for the workers.

    Settings: the worker's for Kafka, and ANABRANCH_EMBEDDING_*; see the documentation. Needs no database.

    Exit code 0 after SIGTERM, 1 if startup is refused.
    """
    from streams.embedder.app import EmbedderApp
    from streams.settings import load_embedder, load_embedding
    from streams.telemetry import logs
    from streams.worker.dependency_health import StartupRefused
    from streams.worker.run import run_stage

    (settings, own), embedding = load_embedder(), load_embedding()
    logs.configure(settings.anabranch_log_format)
    try:
        run_stage(settings, lambda: EmbedderApp(settings, own, embedding))
    except StartupRefused as verdict:
        raise Failed(f"startup refused: {verdict}") from None
