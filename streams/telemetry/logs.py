"""Logs: one line an event of the worker's life, JSON or for the eye. Never a text, principal or embedding."""

import logging
import sys
from collections.abc import Iterable
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

__all__ = ["configure"]

# Libraries that build records by the message at DEBUG, and tell every step of a rebalance at INFO.
_QUIET = {
    "aiokafka": logging.ERROR,
    "faust": logging.WARNING,
    "mode": logging.WARNING,
    "asyncio": logging.WARNING,
    "aiohttp": logging.WARNING,
    "aiohttp.access": logging.ERROR,
}


# How long a library's message is not repeated, in seconds.
_QUIET_SECONDS = 60.0


class _Seldom(logging.Filter):
    """Lets each of a library's messages through once in a while: aiokafka tells of each attempt to reach a broker."""

    def __init__(self, libraries: Iterable[str]) -> None:
        super().__init__()
        self._libraries = tuple(libraries)
        self._last: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(self._libraries):
            return True
        # The template, not the text: it is one message, whatever node it names.
        message = (record.name, str(record.msg))
        if record.created - self._last.get(message, -_QUIET_SECONDS) < _QUIET_SECONDS:
            return False
        self._last[message] = record.created
        return True


def configure(style: Literal["json", "console"]) -> None:
    """Send the process's log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        formatter: logging.Formatter = JsonFormatter(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        )
    else:
        formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(formatter)
    handler.addFilter(_Seldom(_QUIET))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
