"""The command-line interface."""

from streams.cli.main import main

__all__ = ["main"]
