"""Running the worker process."""

import asyncio
import contextlib
import sys
from typing import NoReturn

import faust
import uvloop

from streams.settings import Settings
from streams.worker.app import Anabranch
from streams.worker.health import Refused

__all__ = ["run_worker"]


class _Worker(faust.Worker):
    """Faust's worker with its signal handling, without its way of logging and its spinner."""

    def _setup_logging(self) -> None:
        """Leave logging as it was configured."""

    def _setproctitle(self, info: str, *, ident: str = "anabranch") -> None:
        """Leave the process's title: it is how people find it."""

    def on_worker_shutdown(self) -> None:
        """Say nothing."""


def run_worker(settings: Settings) -> NoReturn:
    """Run until a signal; exits with 0 after SIGTERM or SIGINT, else with 1.

    Raises:
        SettingsError: something that a worker needs is missing or unusable.
    """
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    worker = _Worker(Anabranch(settings).app, loop=loop, redirect_stdouts=False, quiet=True)
    worker.spinner = None
    with contextlib.suppress(Refused):
        worker.execute_from_commandline()
    sys.exit(1)
