"""The findings of a store inspection."""

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["MIGRATE", "Finding", "Level", "rename_column", "set_dimensions"]

#: ``refused``: unsafe, a worker must not run. ``unready``: a worker cannot run yet, but no data leaks; retry.
#: ``warning``: a worker can run, but something is slow or not set up as recommended.
Level = Literal["ok", "warning", "unready", "refused"]

#: The remedy of most findings.
MIGRATE: Final = "anabranch migrate"


def set_dimensions(stored: int) -> str:
    """The remedy for a store whose embeddings do not have the configured dimensions."""
    return f"set ANABRANCH_EMBEDDING_DIMENSIONS={stored}, or use another database for a model with other dimensions"


def rename_column(table: str, column: str) -> str:
    """The remedy for a missing column that only the application can fill."""
    return f"ALTER TABLE public.{table} RENAME COLUMN … TO {column}; or add and fill it (migrate does not)"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        check: the name of the check; stable, for machines.
        level: what it means for a worker.
        detail: what was found, in one line.
        remedy: a command or SQL; empty if nothing is wrong.
    """

    check: str
    level: Level
    detail: str
    remedy: str = ""
