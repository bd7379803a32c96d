"""What stops a command: `anabranch COMMAND: what is wrong; what to do` on standard error, and an exit code."""

import errno
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import click

from streams.terminal import echo

__all__ = ["NEEDS_CONSENT", "Failed", "Interrupted", "NeedsConsent", "Unusable", "did_you_mean", "reported"]

_USAGE_ERROR = 2
#: The exit code of a migration that an operator has to review first; a Kubernetes Job does not retry it.
NEEDS_CONSENT = 3
_INTERRUPTED = 130


class Failed(click.ClickException):
    """The command failed; exit code 1. The message is what is wrong and what to do."""


class Unusable(Failed):
    """An option, argument, setting or input file is invalid."""

    exit_code = _USAGE_ERROR


class NeedsConsent(Failed):
    """An operator has to review something first."""

    exit_code = NEEDS_CONSENT


class Interrupted(Failed):
    """Ctrl-C before the command was done."""

    exit_code = _INTERRUPTED


@contextmanager
def reported(command: str) -> Iterator[None]:
    """Report any exception in one line. The only place that does.

    Args:
        command: the command as typed, without options: ``anabranch topics``.

    Raises:
        click.exceptions.Exit: with the exit code, after the line was printed.
        OSError: the pipe on standard output is closed; click ends the process.
    """
    try:
        yield
    except click.exceptions.Exit:
        raise
    except click.UsageError as error:
        at = command if error.ctx is None else error.ctx.command_path
        code, line = error.exit_code, f"{at}: {_usage(error, at)}"
    except click.ClickException as error:
        code, line = error.exit_code, f"{command}: {error.format_message()}"
    except (KeyboardInterrupt, click.Abort):
        code, line = _INTERRUPTED, f"{command}: interrupted"
    except Exception as error:  # noqa: BLE001  # a defect is reported too, without control characters
        code, line = _of_other(error, command)
    else:
        return
    if code == _INTERRUPTED and sys.stderr.isatty():
        line = f"\n{line}"  # the terminal shows ^C
    echo(line, err=True)
    raise click.exceptions.Exit(code)


def _of_other(error: Exception, command: str) -> tuple[int, str]:
    from streams.settings import SettingsError  # noqa: PLC0415  # takes longer than printing the help

    if isinstance(error, SettingsError):
        return _USAGE_ERROR, f"{command}: {error}"
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        raise error
    trace = traceback.format_exc()
    return (
        Failed.exit_code,
        f"{trace}{command}: unexpected {type(error).__name__}; please report it as a defect",
    )


def _usage(error: click.UsageError, command: str) -> str:
    """The message in this project's format."""
    see = f"see `{command} --help`"
    if isinstance(error, click.NoSuchOption):
        guess = did_you_mean(error.option_name, error.possibilities or ())
        return f"no such option: {error.option_name}; {guess or see}"
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    return message if "; " in message else f"{message}; {see}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean X?``, or nothing if no known name is similar."""
    similar = get_close_matches(name, list(known), n=1)
    return f"did you mean {similar[0]}?" if similar else ""
