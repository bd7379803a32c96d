"""Running the worker process."""

import asyncio
import socket
import sys
from typing import NoReturn

import faust
import uvloop

from streams.settings import Settings, SettingsError
from streams.worker.app import WorkerApp
from streams.worker.store_health import StartupRefused

__all__ = ["run_worker"]


class _Worker(faust.Worker):
    """Faust's worker with its signal handling, without its way of logging and its spinner."""

    def _setup_logging(self) -> None:
        """Leave logging as it was configured."""

    def _setproctitle(self, info: str, *, ident: str = "anabranch") -> None:
        """Leave the process's title: it is how people find it."""

    def on_worker_shutdown(self) -> None:
        """Say nothing."""


def _check_port(port: int) -> None:
    """See that the web server will get its port; found out later, it would end the worker with a trace of Faust's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise SettingsError(f"ANABRANCH_WEB_PORT: port {port} cannot be used: {error.strerror}") from None


def run_worker(settings: Settings) -> NoReturn:
    """Run until a signal; exits with 0 after SIGTERM or SIGINT, with 1 where the store refuses or something breaks.

    Raises:
        SettingsError: something that a worker needs is missing or unusable.
    """
    _check_port(settings.anabranch_web_port)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    anabranch = WorkerApp(settings)
    try:
        loop.run_until_complete(anabranch.look())
    except StartupRefused as verdict:
        sys.exit(f"anabranch: refused: {verdict}")
    worker = _Worker(anabranch.app, loop=loop, redirect_stdouts=False, quiet=True)
    worker.spinner = None
    try:
        worker.execute_from_commandline()
    except SystemExit as end:
        sys.exit(1 if anabranch.refused else end.code)
