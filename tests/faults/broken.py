"""A worker whose acknowledgement is broken on purpose: ``python -m tests.faults.broken WAY`` in place of the real one.

The oracle that calls every worker faultless would be worth nothing. Each way is a mistake that somebody has made.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from streams.cli import main
from streams.core.acknowledgement import AckTracker, Entry
from streams.worker import processor
from streams.worker.delivery import Delivery

__all__ = ["WAYS"]


def before_publishing() -> None:
    """An event is acknowledged when it is read, and then worked on."""
    work = Delivery._work

    async def acknowledge_first(self: Delivery[Any], entry: Entry[Any]) -> None:
        self._acknowledge(entry)
        await work(self, entry)

    Delivery._work = acknowledge_first  # type: ignore[method-assign]


def out_of_order() -> None:
    """An event is acknowledged as soon as it is done, whatever is still in work before it."""

    def complete(self: AckTracker[Any], entry: Entry[Any]) -> Iterator[Any]:
        entry.done = True
        if (lane := self._lanes.get(entry.lane)) is not None and entry in lane:
            lane.remove(entry)
            yield entry.item

    AckTracker.complete = complete  # type: ignore[method-assign]


def on_exception() -> None:
    """An event is acknowledged when its work ends, however it ends; nothing is tried again."""

    async def acknowledge_finally(self: Delivery[Any], entry: Entry[Any]) -> None:
        try:
            with suppress(Exception):
                await self._handle(entry.item)
        finally:
            self._acknowledge(entry)

    Delivery._work = acknowledge_finally  # type: ignore[method-assign]
    processor._is_retriable = lambda _: False


WAYS: Final = {way.__name__: way for way in (before_publishing, out_of_order, on_exception)}


if __name__ == "__main__":
    WAYS[sys.argv.pop()]()
    sys.argv = ["anabranch", "worker"]
    main()
