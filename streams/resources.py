"""Locates the contracts and schemas: inside the wheel, or at the top of a checkout."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

__all__ = ["contracts", "schemas"]


def contracts() -> Traversable:
    """The folder of the JSON contracts."""
    return _folder("contracts")


def schemas() -> Traversable:
    """The folder of the Avro schemas and the store's SQL."""
    return _folder("schemas")


def _folder(name: str) -> Traversable:
    bundled = files("streams") / "_bundled" / name
    if bundled.is_dir():
        return bundled
    return Path(__file__).resolve().parent.parent / name
