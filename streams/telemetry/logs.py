"""Logs: one line per occurrence, as JSON or for the console. Never contains a text, principal or embedding."""

import logging
import sys
from collections.abc import Iterable
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

from streams.terminal import printable

__all__ = ["configure"]

# Libraries that log every message at DEBUG and every step of a rebalance at INFO.
_QUIET = {
    "aiokafka": logging.ERROR,
    "faust": logging.WARNING,
    "mode": logging.WARNING,
    "asyncio": logging.WARNING,
    "aiohttp": logging.WARNING,
    "aiohttp.access": logging.ERROR,
}


# A library's message is repeated only after this time, in seconds.
_QUIET_SECONDS = 60.0


class _RateLimitFilter(logging.Filter):
    """Limits the rate of each of a library's messages: aiokafka logs each attempt to reach a broker."""

    def __init__(self, libraries: Iterable[str]) -> None:
        super().__init__()
        self._libraries = tuple(libraries)
        self._last: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(self._libraries):
            return True
        # The template, not the text: the same message for all nodes.
        message = (record.name, str(record.msg))
        if record.created - self._last.get(message, -_QUIET_SECONDS) < _QUIET_SECONDS:
            return False
        self._last[message] = record.created
        return True


class _Printable(logging.Formatter):
    """For the console: a server's message may contain terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


def configure(style: Literal["json", "console"]) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        formatter: logging.Formatter = JsonFormatter(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        )
    else:
        formatter = _Printable("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(formatter)
    handler.addFilter(_RateLimitFilter(_QUIET))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
