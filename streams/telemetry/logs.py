"""Logs: one line an event of the worker's life, JSON or for the eye. Never a text, principal or embedding."""

import logging
import sys
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
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
