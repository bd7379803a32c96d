"""Running a stage as a process: a worker, or an embedding stage."""

import asyncio
import errno
import faulthandler
import gc
import logging
import os
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import NoReturn

import uvloop

from streams.settings import Settings, SettingsError
from streams.worker.app import WorkerApp
from streams.worker.faust_internals import Worker
from streams.worker.stage_app import StageApp

__all__ = ["run_stage", "run_worker"]

# Objects with references that are created, and not freed, before the youngest generation is collected; then how often
# that happens before the next older one is.
_GC_THRESHOLDS = (20_000, 20, 20)


def _check_port(address: IPv4Address | IPv6Address, port: int) -> None:
    """Check that the web server can bind its port; otherwise Faust would crash later with a traceback."""
    with socket.socket(socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(address), port))
        except OSError as error:
            setting = "BIND_ADDRESS" if error.errno == errno.EADDRNOTAVAIL else "PORT"
            remedy = "; set it to another port" if error.errno == errno.EADDRINUSE else ""
            raise SettingsError(
                f"ANABRANCH_WEB_{setting}: cannot bind port {port} on {address}: {error.strerror}{remedy}"
            ) from None


def _tune_garbage_collector() -> None:
    """Collect rarely, and never look at what exists from here on as long as the process runs.

    Events create few reference cycles, but so many objects that Python's defaults would collect every few events.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def run_worker(settings: Settings) -> NoReturn:
    """Run a worker until a signal; as `run_stage`."""
    run_stage(settings, lambda: WorkerApp(settings))


def run_stage(settings: Settings, build: Callable[[], StageApp]) -> NoReturn:
    """Run until a signal. Exits with 0 after SIGTERM or SIGINT, with 1 if the process crashes.

    Args:
        settings: the stage's.
        build: returns the stage; called on the event loop's thread, while the loop does not run.

    Raises:
        SettingsError: a required setting is missing or unusable.
        StartupRefused: the preflight finds that it must not run.
    """
    faulthandler.enable()  # a crash in native code leaves the stack of each thread in the log
    _check_port(settings.anabranch_web_bind_address, settings.anabranch_web_port)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    stage = build()
    loop.run_until_complete(stage.preflight())
    worker = Worker(stage.app, loop=loop)
    _tune_garbage_collector()
    try:
        worker.execute_from_commandline()
    except SystemExit as end:
        code = 1 if stage.refused or end.code else 0
    # Everything is stopped and closed. Freeing the memory would take Python half a second, longer on a busy machine.
    logging.shutdown()
    os._exit(code)
