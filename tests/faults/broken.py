"""A worker, or an embedding stage, whose acknowledgement is broken on purpose.

``python -m tests.faults.broken WAY [embedder]`` in place of the real one.

Accounting that finds nothing wrong with any worker would be worth nothing. Each way is a mistake that was once made.
"""

import sys
from contextlib import suppress
from typing import Any, Final

from streams.cli import main
from streams.core.acknowledgement import AckTracker, Entry
from streams.worker import event_processor
from streams.worker.delivery import Delivery

__all__ = ["WAYS"]


def before_publishing() -> None:
    """An event is acknowledged when it is read, and then worked on."""
    work = Delivery._run_one

    async def acknowledge_first(self: Delivery[Any], entry: Entry, record: Any) -> None:
        self._acknowledge(entry, record)
        await work(self, entry, record)

    Delivery._run_one = acknowledge_first  # type: ignore[method-assign]  # breaking it is the point


def out_of_order() -> None:
    """An event is acknowledged as soon as it is done, whatever is still in flight before it."""
    highest: dict[Any, int] = {}

    def complete(self: AckTracker, entry: Entry) -> int | None:
        entry.done = True
        if (queue := self._queues.get(entry.queue)) is not None and entry in queue:
            queue.remove(entry)
            # What is committed does not go back.
            highest[entry.queue] = max(highest.get(entry.queue, -1), entry.offset)
            return highest[entry.queue]
        return None

    AckTracker.complete = complete  # type: ignore[method-assign]  # breaking it is the point


def on_exception() -> None:
    """An event is acknowledged when its work ends, however it ends; nothing is tried again."""

    async def acknowledge_finally(self: Delivery[Any], entry: Entry, record: Any) -> None:
        try:
            with suppress(Exception):
                await self._handle(record)
        finally:
            self._acknowledge(entry, record)

    Delivery._run_one = acknowledge_finally  # type: ignore[method-assign]  # breaking it is the point
    event_processor._is_retriable = lambda error: False  # noqa: ARG005  # the name is a part of the signature


WAYS: Final = {way.__name__: way for way in (before_publishing, out_of_order, on_exception)}


if __name__ == "__main__":
    _, way, *command = sys.argv
    WAYS[way]()
    sys.argv = ["anabranch", *(command or ["worker"])]
    main()
