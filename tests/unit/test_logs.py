"""Log lines, as a collector and as a person reads them."""

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from typing import Literal

import pytest

from streams.telemetry.logs import configure

NAMES = ("aiokafka", "faust", "mode", "asyncio", "aiohttp", "aiohttp.access")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in NAMES}
    yield
    root.handlers[:], root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def test_json_is_one_object_a_line_whatever_the_message_holds(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    logging.getLogger("streams.test").warning("store is %s:\n%s", "down", 'a "quoted" line')
    logging.getLogger("streams.test").info("second")
    captured = capsys.readouterr()
    assert captured.out == ""  # standard output belongs to results
    first, second = map(json.loads, captured.err.splitlines())
    assert first.keys() == {"time", "level", "logger", "message"}
    assert (first["level"], first["logger"]) == ("WARNING", "streams.test")
    assert first["message"] == 'store is down:\na "quoted" line'
    assert second["message"] == "second"


@pytest.mark.parametrize("style", ["json", "console"])
def test_the_time_is_utc_wherever_the_machine_is(
    style: Literal["json", "console"], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        configure(style)
        record = logging.makeLogRecord(
            {"name": "streams.test", "levelname": "INFO", "levelno": logging.INFO, "msg": "canary"}
        )
        record.created = 1_700_000_000.0049
        logging.getLogger().handle(record)
    finally:
        monkeypatch.undo()
        time.tzset()
    line = capsys.readouterr().err
    logged = json.loads(line)["time"] if style == "json" else line.split()[0]
    assert logged == "2023-11-14T22:13:20.004Z"


FIELDS = {
    "code": "expired",
    "topic": "retrieval.query-embeddings.v1",
    "partition": 3,
    "offset": 42,
    "event_id": None,
    "partitions": [0, 1],
    "reason": 'a "quoted" line,\nand another',
}


def test_json_has_the_fields_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    logging.getLogger("streams.test").warning("dead letter", extra=FIELDS)
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time")
    assert line == {"level": "WARNING", "logger": "streams.test", "message": "dead letter", **FIELDS}


def test_console_has_the_fields_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console")
    logging.getLogger("streams.test").warning("dead letter", extra=FIELDS)
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"\S+Z WARNING dead letter code=expired topic=retrieval\.query-embeddings\.v1 partition=3 offset=42"
        r' partitions=\[0,1\] reason="a \\"quoted\\" line,\\nand another"\n',
        line,
    ), line


def test_a_traceback_follows_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console")
    try:
        raise ValueError  # noqa: TRY301  # for its traceback
    except ValueError:
        logging.getLogger("mode").exception("crashed", extra={"code": "internal_error"})
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("crashed code=internal_error")
    assert rest[0].startswith("Traceback")


def test_console_is_for_the_eye(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console")
    logging.getLogger("streams.test").error("store is %s", "down")
    line = capsys.readouterr().err
    assert line.endswith("ERROR   store is down\n")


@pytest.mark.parametrize("style", ["json", "console"])
def test_the_root_has_one_handler_and_says_no_debug(
    style: Literal["json", "console"], capsys: pytest.CaptureFixture[str]
) -> None:
    configure("json")
    configure(style)
    [handler] = logging.getLogger().handlers
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.stderr
    logging.getLogger("streams.test").debug("quiet")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "level", "is_logged"),
    [
        # Built from messages at DEBUG, and the steps of every rebalance at INFO.
        ("aiokafka.consumer", logging.DEBUG, False),
        ("aiokafka.cluster", logging.WARNING, False),
        ("aiokafka.conn", logging.ERROR, True),
        ("faust.agents", logging.INFO, False),
        ("mode.services", logging.INFO, False),
        ("mode.services", logging.WARNING, True),
        ("asyncio", logging.INFO, False),
        ("aiohttp.access", logging.WARNING, False),
        ("streams.worker", logging.INFO, True),
    ],
)
def test_libraries_are_quiet_until_it_matters(
    name: str, level: int, capsys: pytest.CaptureFixture[str], *, is_logged: bool
) -> None:
    configure("json")
    logging.getLogger(name).log(level, "canary")
    assert ("canary" in capsys.readouterr().err) is is_logged


def test_a_library_tells_a_thing_once_in_a_while_and_we_tell_it_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("console")
    for node in range(5):
        logging.getLogger("aiokafka.client").error("cannot reach node %d", node)
        logging.getLogger("aiokafka.client").error("another trouble with node %d", node)
        logging.getLogger("streams.worker").warning("dead letter %d", node)
    logged = capsys.readouterr().err
    assert logged.count("cannot reach node") == logged.count("another trouble") == 1
    assert logged.count("dead letter") == 5
