"""The only module that writes to a terminal: control characters in external strings are shown, not executed.

Titles, codes, headers, files and servers' messages may contain escape sequences, C1 control characters, bidirectional
controls, or rich's markup. `printable` is the only function that makes them harmless. Everything here uses it, and the
linter forbids other ways of printing.
"""

import json
import re
import sys
from typing import Any, Final, cast

import click
import rich.console
import rich.text

__all__ = ["Console", "Text", "echo", "json_text", "printable", "write"]

# Spaces of any width are printed unchanged; line separators are not.
_SPACES: Final = re.compile(r"[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_BEYOND_ASCII: Final = re.compile(r"[^\x20-\x7e\n]")


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text, with every character that a terminal might interpret or not show as an escape: ``\x1b``, ``\u202e``.

    Args:
        text: any text.
        lines: keep line ends.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or _SPACES.match(char) or (lines and char == "\n")
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON that is also readable for people: letters of any script unchanged, non-printable characters escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    # Such characters can only be in strings; outside strings there are at most line ends.
    return _BEYOND_ASCII.sub(
        lambda match: match[0] if printable(match[0]) == match[0] else _escaped(match[0]), text
    )


def _escaped(char: str) -> str:
    r"""The JSON escape: ``\u202e``, or a surrogate pair beyond U+FFFF."""
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def echo(text: str, *, err: bool = False) -> None:
    """Print one or more lines."""
    click.echo(printable(text, lines=True), err=err)


def write(text: str) -> None:
    """Print a text for a program or a person: unchanged into a pipe or file, printable on a terminal."""
    if sys.stdout.isatty():
        echo(text)
    else:
        sys.stdout.write(f"{text}\n")  # click would remove escape sequences


class Text(rich.text.Text):
    """rich's Text on one line, with all content made printable."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(printable(text), *args, **options)

    def append(self, text: rich.text.Text | str, style: Any = None) -> "Text":
        super().append(printable(text) if isinstance(text, str) else text, style)
        return self

    @classmethod
    def assemble(cls, *parts: Any, **options: Any) -> "Text":
        return cast("Text", super().assemble(*parts, **options))


class Console(rich.console.Console):
    """rich's Console without markup: strings are plain text, and only a `Text` has a style."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False} | options)

    def render_str(self, text: str, **options: Any) -> rich.text.Text:
        return super().render_str(printable(text, lines=True), **options)
