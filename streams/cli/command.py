"""What all commands have in common: lazy loading, help with examples, errors in one line, options of the same name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar, cast

import click

from streams.cli.errors import Unusable, did_you_mean, reported
from streams.terminal import echo

__all__ = ["Choice", "Command", "CommandModules", "Group", "command", "json_option", "texts_option"]

_F = TypeVar("_F", bound=Callable[..., Any])


class _Reporting(click.Command):
    """Reports its errors, and shows examples at the end of its help.

    Args:
        examples: command lines, at most 78 characters each.
        reads_settings: warn about misspelt settings before it runs.
    """

    def __init__(
        self, *args: Any, examples: Sequence[str] = (), reads_settings: bool = True, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        # Each command's own, because click remembers the option of the first context, which may have no parent.
        self.context_settings = {"help_option_names": ["-h", "--help"], **self.context_settings}
        self.examples = examples
        self._reads_settings = reads_settings

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        path = " ".join(filter(None, (parent.command_path if parent else "", info_name)))
        with reported(path):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with reported(ctx.command_path):
            return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Example" if len(self.examples) == 1 else "Examples"):
                for example in self.examples:  # not wrapped, so that they can be pasted
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")
        super().format_epilog(ctx, formatter)


class Command(_Reporting):
    """One command."""

    def invoke(self, ctx: click.Context) -> Any:
        if self._reads_settings:
            from streams.settings import misspelt_names  # noqa: PLC0415  # takes longer than printing the help

            for name, meant in misspelt_names().items():
                echo(f"{ctx.command_path}: warning: {name} is ignored; did you mean {meant}?", err=True)
        return super().invoke(ctx)


class Group(_Reporting, click.Group):
    """Commands in the order in which they were defined, with whole sentences in the list."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            echo(ctx.get_help(), err=True)
            ctx.exit(Unusable.exit_code)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            guess = did_you_mean(args[0], self.commands)
            raise click.UsageError(f"no such command: {args[0]}{'; ' if guess else ''}{guess}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click's own cuts the sentences to fit on one line.
        whole = 1000
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, found.get_short_help_str(whole))
                    for name in self.list_commands(ctx)
                    if (found := self.get_command(ctx, name)) and not found.hidden
                ]
            )


class CommandModules(Mapping[str, click.Command]):
    """Commands by name, each imported when it is needed, from the module of its name."""

    def __init__(self, package: str, names: Sequence[str]) -> None:
        self._package = package
        self._names = names

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._names:
            raise KeyError(name)
        return cast("click.Command", getattr(import_module(f"{self._package}.{name}"), name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Choice(click.Choice[str]):
    """A choice with a suggestion for a misspelt value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices and (guess := did_you_mean(str(value), self.choices)):
            self.fail(f"{value!r} is not one of the choices; {guess}", param, ctx)
        return super().convert(value, param, ctx)


def command(*examples: str, reads_settings: bool = True) -> Callable[[Callable[..., Any]], Command]:
    """Makes a function a command of its name; see `Command` for the arguments."""
    return click.command(cls=Command, examples=examples, reads_settings=reads_settings)


def json_option(help_text: str = "Print the result as JSON.") -> Callable[[_F], _F]:
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def texts_option(help_text: str) -> Callable[[_F], _F]:
    return click.option("--texts", is_flag=True, help=help_text)
