"""Locates the contracts and schemas: inside the wheel, or at the top of a checkout."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

__all__ = ["contracts", "in_checkout", "schemas"]


def contracts() -> Traversable:
    """The folder of the JSON contracts."""
    return _folder("contracts")


def schemas() -> Traversable:
    """The folder of the Avro schemas and the store's SQL."""
    return _folder("schemas")


def in_checkout() -> bool:
    """Whether this is a checkout of the source, whose folders may be written; not an installed wheel."""
    return not _bundled().is_dir()


def _bundled() -> Traversable:
    return files("streams") / "_bundled"


def _folder(name: str) -> Traversable:
    if not in_checkout():
        return _bundled() / name
    return Path(__file__).resolve().parent.parent / name
