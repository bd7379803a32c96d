"""`anabranch worker`."""

from streams.cli.command import command
from streams.cli.errors import Failed

__all__ = ["worker"]


@command("anabranch worker", "ANABRANCH_LOG_FORMAT=console anabranch worker")
def worker() -> None:
    """Run a worker until SIGTERM.

    Exit code 0 after SIGTERM, 1 if startup is refused: `anabranch check` shows the reasons.
    """
    from streams.settings import load
    from streams.telemetry import logs
    from streams.worker.dependency_health import StartupRefused
    from streams.worker.run import run_worker

    settings = load()
    logs.configure(settings.anabranch_log_format)
    try:
        run_worker(settings)
    except StartupRefused as verdict:
        raise Failed(f"startup refused: {verdict}") from None
