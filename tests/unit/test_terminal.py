"""Nothing that somebody wrote into the store, a record, a file or a server's message is obeyed by a terminal.

Every function that prints is given hostile text in every place where text comes from outside. The output may hold
printable characters and line ends, and SGR sequences (colours) of our own where it is made for a terminal.
"""

import dataclasses
import io
import json
import logging
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch
from uuid import UUID, uuid4

import pytest
from aiokafka import ConsumerRecord
from click import UsageError
from click.exceptions import Exit
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from streams import sample, terminal
from streams.cli import ask, check, publish, replay, settings, stats, tail, validate
from streams.cli.errors import Failed, reported
from streams.core.errors import StoreMisconfigured, UnknownProfile
from streams.demo import conversation
from streams.demo.screen import Screen
from streams.demo.summary import summarize
from streams.evaluation.golden import Expectation
from streams.evaluation.query_runner import Answered, DeadLettered, Outcome, Unanswered
from streams.evaluation.report import Bounds, Report, assess
from streams.replay.dead_letters import DeadLetter, Disposition
from streams.replay.tally import Tally
from streams.settings import SettingsError
from streams.store.preflight import Finding
from streams.store.statistics import Statistics
from streams.telemetry import logs
from streams.wire import Codec
from streams.wire.deadletter import error_headers
from tests.evaluation import made_up

# Line ends, and spaces of any width.
WHITE = "\n\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
SGR = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = (
    "\x1b[2J\x1b]0;title\x07\x1b[31mred",
    "\x9b31m\x85\x90",  # C1: CSI, NEL, DCS
    "\u202efdp.exe\u2066\u2069\u200f\u061c",
    "one\ntwo\r✓ passed\t\x0b\x0c\x08\x7f\x00",
    "\u2028\u2029\ufeff\u200b\u00ad",
    "[/bold] [bold]x[/] [link=https://example.org]y[/link] \\[z] [@click=app.quit] :smile:",
    "\ud800 lone",
    "\U000e0041\U0010ffff\ufff9",
    "naïve Ω 漢字 🌊",
)
CORPUS = sample.load()


def hostile(kind: Any, text: str) -> Any:  # noqa: PLR0911  # one for each kind of type
    """A value of a type, all of whose strings are this text."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is str:
        return text
    if origin is Literal:
        return arguments[0]
    if origin in (types.UnionType, typing.Union):
        return hostile(next(one for one in arguments if one is not type(None)), text)
    if origin is not None and issubclass(origin, Mapping):
        return {hostile(arguments[0], text): hostile(arguments[1], text)}
    if origin is not None and issubclass(origin, Sequence):
        return [hostile(arguments[0], text)] * 2
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        values = {field.name: hostile(hints[field.name], text) for field in dataclasses.fields(kind)}
        return kind(**values)  # type: ignore[operator]  # a class, of which the type checker only knows that it is a dataclass
    if kind is UUID:
        return uuid4()
    return {int: 3, float: 0.5, bool: True, datetime: datetime(2026, 5, 1, tzinfo=UTC)}[kind]


def report(text: str) -> Report:
    passage = made_up.passage(title="t", section="s").model_copy(update={"title": text, "section": text})
    result = made_up.result([passage]).model_copy(update={"warnings": (text,), "profile": text})
    outcomes: list[Outcome] = [Answered(result, 5.0), DeadLettered(text, text), Unanswered(text)]
    queries = [made_up.golden(text, [Expectation("source_url", text)], text) for _ in outcomes]
    return assess(
        queries, outcomes, mode="live", golden=text, relevant_grade=1, bounds=Bounds(1, 1), vectors=None
    )


def record(**fields: Any) -> ConsumerRecord:
    known = dict.fromkeys(field.name for field in dataclasses.fields(ConsumerRecord))
    return ConsumerRecord(**known | {"partition": 0, "offset": 1} | fields)


def tally(text: str) -> Tally:
    dead_letters = (
        (DeadLetter(0, number, datetime(2026, 5, 1, tzinfo=UTC), text, text), disposition)
        for number, disposition in enumerate(Disposition)
    )
    return Tally(dead_letters)


# Each prints, or writes, what it was given from outside.


def shows_findings(text: str) -> None:
    check.show(check.CheckReport([Finding(text, "unready", text, text)], [(text, text)]))


def shows_statistics(text: str) -> None:
    found = hostile(Statistics, text)
    stats.show(dataclasses.replace(found, indexes=[dataclasses.replace(found.indexes[0], state="valid")]))


def prints_statistics_as_json(text: str) -> None:
    terminal.echo(stats.as_json(hostile(Statistics, text)))


def shows_a_report(text: str) -> None:
    validate.show(report(text), worst=10)


def prints_a_report_as_json(text: str) -> None:
    terminal.echo(validate.as_json(report(text)))


def shows_a_replay(text: str) -> None:
    for rate in (None, 1.0):
        replay.show(replay.Outcome(tally(text), text, text, 3, rate, 1))
        replay.show(replay.Outcome(Tally(), text, text, 3, rate, 0))


def prints_a_replay_as_json(text: str) -> None:
    terminal.echo(replay.as_json(replay.Outcome(tally(text), text, text, 3, None, 1)))


def shows_settings(text: str) -> None:
    settings.show([settings.ListedSetting("ANABRANCH_CONSUMER_GROUP", text, "file", text)])


def prints_settings_as_json(text: str) -> None:
    terminal.echo(settings.as_json([settings.ListedSetting("ANABRANCH_CONSUMER_GROUP", text, "file", text)]))


def tails_a_result(text: str) -> None:
    passage = made_up.passage().model_copy(
        update={"text_content": text, "title": text, "metadata": {text: text}}
    )
    result = made_up.result([passage]).model_copy(update={"profile": text, "warnings": (text,)})
    codec = SimpleNamespace(decode_result=lambda _: result)
    shown = tail._result(typing.cast("Codec", codec), record(timestamp=0))
    tail.print_json(shown)
    tail.print_readable(shown)


def tails_a_dead_letter(text: str) -> None:
    raw = text.encode(errors="surrogatepass")
    clean = text.encode(errors="replace").decode()  # what a worker writes is UTF-8
    ours = error_headers(UnknownProfile(clean), topic=clean, partition=0, offset=0)
    for headers in ([(text, raw)], [(text, raw), *ours]):
        shown = tail._dead_letter(
            Codec().decode_query, record(headers=headers, key=raw, timestamp=0), default_profile=text
        )
        tail.print_json(shown)
        tail.print_readable(shown)


def shows_the_demo(text: str) -> None:
    screen = Screen(terminal.Console(), CORPUS, show_all=True)
    question = dataclasses.replace(
        CORPUS.queries[0], text=text, principals=(text,), session_id=None, topic_id=None
    )
    passage = made_up.passage(page=1).model_copy(update={"title": text, "text_content": text})
    answer = conversation.Answer(
        question, made_up.result([passage]).model_copy(update={"profile": text}), 5.0
    )
    dead_letter = conversation.DeadLetter(text, text)
    screen.show_introduction(CORPUS)
    screen.show(answer)
    screen.show(dead_letter)
    screen.show_summary(summarize([answer, dead_letter]), 1.0)
    screen.show_next_step()


def shows_an_answer(text: str) -> None:
    passage = made_up.passage(page=1).model_copy(update={"title": text, "text_content": text})
    result = made_up.result([passage], warnings=["k_clamped"]).model_copy(update={"profile": text})
    question = ask.Question(None, uuid4(), [text], None, None, None, None, None, 1)
    ask.show(ask.Answer(result, [text]), question, explain=True)


def fails(text: str) -> None:
    for error in (Failed(f"PostgreSQL: {text}"), SettingsError(text), UsageError(text), ValueError(text)):
        with pytest.raises(Exit), reported(f"anabranch {text}"):
            raise error


def names_a_bad_line(text: str) -> None:
    _, [invalid] = publish.read_events([(json.dumps({text: text}) + text).encode(errors="surrogatepass")])
    terminal.echo(str(invalid))


def logs_an_error(text: str) -> None:
    logs.configure("console")
    main_logger = logging.getLogger("streams")
    main_logger.error("store is down: %s", StoreMisconfigured(text))


PRINTERS: Sequence[Callable[[str], None]] = (
    shows_findings,
    shows_statistics,
    prints_statistics_as_json,
    shows_a_report,
    prints_a_report_as_json,
    shows_a_replay,
    prints_a_replay_as_json,
    shows_settings,
    prints_settings_as_json,
    tails_a_result,
    tails_a_dead_letter,
    shows_the_demo,
    shows_an_answer,
    fails,
    names_a_bad_line,
    logs_an_error,
)


def printed(printer: Callable[[str], None], text: str, *, on_a_terminal: bool) -> str:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return on_a_terminal

        encoding = "utf-8"

    stream = Stream()
    environment = {"COLUMNS": "1000", "TERM": "xterm-256color"}
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with patch.dict("os.environ", environment), redirect_stdout(stream), redirect_stderr(stream):
            printer(text)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return stream.getvalue()


def with_examples(test: Any) -> Any:
    for text in HOSTILE:
        test = example(text=text)(test)
    return test


@pytest.mark.parametrize("on_a_terminal", [False, True], ids=["a file", "a terminal"])
@pytest.mark.parametrize("printer", PRINTERS, ids=lambda printer: printer.__name__)
@with_examples
@given(text=st.text(max_size=60))
@hypothesis_settings(max_examples=15)
def test_what_is_printed_is_printable(
    printer: Callable[[str], None],
    on_a_terminal: bool,  # noqa: FBT001  # a parameter of the test
    text: str,
) -> None:
    output = printed(printer, text, on_a_terminal=on_a_terminal)
    if on_a_terminal:
        output = SGR.sub("", output)
    assert not {char for char in output if not (char.isprintable() or char in WHITE)}, ascii(output)
    output.encode()  # no lone surrogate


@with_examples
@given(text=st.text(max_size=60))
def test_a_prompt_is_printable_on_a_terminal_and_unchanged_elsewhere(text: str) -> None:
    text = text.encode(errors="replace").decode()  # a result has no lone surrogate
    output = printed(terminal.write, text, on_a_terminal=True)
    assert not {char for char in output if not (char.isprintable() or char in WHITE)}
    assert printed(terminal.write, text, on_a_terminal=False) == f"{text}\n"


@pytest.mark.parametrize(
    "printer",
    [printer for printer in PRINTERS if printer is not names_a_bad_line],  # it never quotes a line
    ids=lambda printer: printer.__name__,
)
def test_what_is_harmless_is_printed_as_it_is(printer: Callable[[str], None]) -> None:
    assert "naïve [/b] Ω 漢字 🌊" in printed(printer, "naïve [/b] Ω 漢字 🌊", on_a_terminal=False)


@with_examples
@given(text=st.text(max_size=60))
def test_json_means_what_it_meant(text: str) -> None:
    value = {text: [text, {"a": text}]}
    assert json.loads(terminal.json_text(value)) == json.loads(json.dumps(value))
    assert json.loads(terminal.json_text(value, indent=2)) == json.loads(json.dumps(value))


@with_examples
@given(text=st.text(max_size=60))
def test_the_page_can_be_written_and_holds_nothing_invisible(text: str, tmp_path_factory: Any) -> None:
    page: Path = tmp_path_factory.mktemp("page") / "report.html"
    validate.write_page(report(text), page)
    written = page.read_text(encoding="utf-8")
    assert not {char for char in written if not (char.isprintable() or char in WHITE)}
