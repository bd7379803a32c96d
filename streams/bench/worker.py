"""The real worker, observed: ``python -m streams.bench.worker [--record FILE] [--delay-ms MS]``.

With ``--record`` it appends one `RECORD` for each answered event, which the histograms of a deployment cannot tell
apart. With ``--delay-ms`` every event takes longer, so that the gate on ratios can be seen to fail. Without options it
is the worker of a deployment.
"""

import argparse
import asyncio
import os
import struct
from contextvars import ContextVar
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from uuid import UUID

import streams.retrieval
from streams.retrieval import Retrieved
from streams.settings import load
from streams.telemetry import logs
from streams.worker import processor
from streams.worker.processor import InputRecord, Processor
from streams.worker.run import run_worker

__all__ = ["RecordedEvent", "read_records"]

# The event's id, then seconds: from read to acknowledged, of the searches, of the slower arm.
RECORD: Final = struct.Struct("<16sddd")


class RecordedEvent:
    """One answered event; durations in seconds.

    Attributes:
        duration: from reading the event to the broker's acknowledgement of its result.
        search: waiting for the store: both arms, sizes and texts.
        slower_arm: the slower of the event's arms.
    """

    __slots__ = ("duration", "event_id", "search", "slower_arm")

    def __init__(self, event_id: UUID, duration: float, search: float, slower_arm: float) -> None:
        self.event_id = event_id
        self.duration = duration
        self.search = search
        self.slower_arm = slower_arm


def read_records(file: Path) -> list[RecordedEvent]:
    """Everything that a worker has recorded so far."""
    content = file.read_bytes() if file.exists() else b""
    whole = len(content) - len(content) % RECORD.size
    return [
        RecordedEvent(UUID(bytes=event_id), *durations)
        for event_id, *durations in RECORD.iter_unpack(content[:whole])
    ]


_retrieved: ContextVar[list[Retrieved]] = ContextVar("retrieved")


def _record(file: Path) -> None:
    """Record every answered event. This process exists to be observed, so the worker has no hook for it."""
    retrieve, handle = streams.retrieval.retrieve, Processor.handle
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    async def retrieve_and_keep(*args: Any, **kwargs: Any) -> Retrieved:
        found = await retrieve(*args, **kwargs)
        _retrieved.get().append(found)
        return found

    async def handle_and_record(self: Processor, record: InputRecord) -> None:
        kept: list[Retrieved] = []
        _retrieved.set(kept)
        await handle(self, record)
        if kept:
            found = kept[-1]
            row = (perf_counter() - record.read_at, found.search_seconds, max(found.arm_seconds.values()))
            os.write(descriptor, RECORD.pack(found.result.event_id.bytes, *row))

    vars(processor)["retrieve"] = retrieve_and_keep
    Processor.handle = handle_and_record  # type: ignore[method-assign]  # the same, observed


def _delay(seconds: float) -> None:
    handle = Processor.handle

    async def handle_late(self: Processor, record: InputRecord) -> None:
        await asyncio.sleep(seconds)
        await handle(self, record)

    Processor.handle = handle_late  # type: ignore[method-assign]  # slower on purpose


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m streams.bench.worker", description=__doc__)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    options = parser.parse_args()
    if options.record is not None:
        _record(options.record)
    if options.delay_ms:
        _delay(options.delay_ms / 1000)
    settings = load()
    logs.configure(settings.anabranch_log_format)
    run_worker(settings)


if __name__ == "__main__":
    main()
