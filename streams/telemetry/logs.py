"""Logs: one line per occurrence, as JSON or for the console. Never contains a text, principal or embedding.

What a line is about (event, topic, partition, offset, code) is passed as ``extra`` and logged as fields of its own: the
message is the same each time. Timestamps are in UTC, as in RFC 3339.
"""

import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, Literal

from pythonjsonlogger.json import JsonFormatter

from streams.terminal import printable

__all__ = ["configure"]

# Libraries that log every message at DEBUG and every step of a rebalance at INFO.
_QUIET = {
    "aiokafka": logging.ERROR,
    "faust": logging.WARNING,
    "mode": logging.WARNING,
    # Warns if a commit takes longer than its interval, for which there is no setting here. Failed commits are logged.
    "mode.timers": logging.ERROR,
    "asyncio": logging.WARNING,
    "aiohttp": logging.WARNING,
    "aiohttp.access": logging.ERROR,
    "httpx": logging.WARNING,  # logs every request
}


# What every record has; all else was passed as `extra`.
_STANDARD_FIELDS: Final = {*vars(logging.makeLogRecord({})), "asctime", "message", "taskName"}
# A value that the console shows without quotes.
_PLAIN: Final = re.compile(r"[\w.:/@+-]+")

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


class _UtcTime(logging.Formatter):
    """Timestamps in UTC, with milliseconds."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # logging's
        del datefmt
        at = datetime.fromtimestamp(record.created, UTC)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Json(_UtcTime, JsonFormatter):
    """One JSON object per line."""


class _Console(_UtcTime):
    """For the console: a server's message may contain terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's
        return " ".join([super().formatMessage(record), *_fields(vars(record))])


def _fields(record: Mapping[str, object]) -> Iterable[str]:
    """The fields passed as ``extra``, as ``name=value``; without those that are None."""
    for name, value in record.items():
        if name not in _STANDARD_FIELDS and value is not None:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
            yield f"{name}={text if _PLAIN.fullmatch(text) or not isinstance(value, str) else json.dumps(text)}"


def configure(style: Literal["json", "console"]) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        formatter: logging.Formatter = _Json(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        )
    else:
        formatter = _Console("%(asctime)s %(levelname)-7s %(message)s")
    handler.setFormatter(formatter)
    handler.addFilter(_RateLimitFilter(_QUIET))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
