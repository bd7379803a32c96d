"""The real worker, observed: ``python -m streams.bench.worker [--record FILE] [--delay-while FILE]``.

With ``--record`` it appends one `RECORD` for each answered event, which the histograms of a deployment cannot tell
apart. With ``--delay-while`` every event takes `DELAY_SECONDS` longer while the file exists, so that the gate on ratios
can be seen to fail. Without options it is the worker of a deployment.
"""

import argparse
import asyncio
import os
import struct
import sys
from contextvars import ContextVar
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from uuid import UUID

import streams.retrieval
from streams.broker.publisher import Publisher
from streams.retrieval import Retrieved
from streams.settings import load
from streams.telemetry import logs
from streams.terminal import printable
from streams.worker import processor
from streams.worker.dependency_health import StartupRefused
from streams.worker.event_processor import EventProcessor, InputRecord
from streams.worker.processor import Processor
from streams.worker.run import run_worker

__all__ = ["DELAY_SECONDS", "RecordedEvent", "read_records"]

#: How much longer an event takes with ``--delay-while``.
DELAY_SECONDS: Final = 0.002

# The event's id, then seconds: from read to acknowledged, of the searches, of the slower arm, of publishing.
RECORD: Final = struct.Struct("<16sdddd")


class RecordedEvent:
    """One answered event; durations in seconds.

    Attributes:
        duration: from reading the event to the broker's acknowledgement of its result.
        search: waiting for the store: both arms, sizes and texts.
        slower_arm: the slower of the event's arms.
        publish: from handing the result to the producer to the broker's acknowledgement.
    """

    __slots__ = ("duration", "event_id", "publish", "search", "slower_arm")

    def __init__(
        self, event_id: UUID, duration: float, search: float, slower_arm: float, publish: float
    ) -> None:
        self.event_id = event_id
        self.duration = duration
        self.search = search
        self.slower_arm = slower_arm
        self.publish = publish


def read_records(file: Path) -> list[RecordedEvent]:
    """Everything that a worker has recorded so far."""
    content = file.read_bytes() if file.exists() else b""
    whole = len(content) - len(content) % RECORD.size
    return [
        RecordedEvent(UUID(bytes=event_id), *durations)
        for event_id, *durations in RECORD.iter_unpack(content[:whole])
    ]


class _Observed:
    """What is known of the event in flight."""

    found: Retrieved | None = None
    publish = 0.0


_observed: ContextVar[_Observed] = ContextVar("observed")


def _record(file: Path) -> None:
    """Record every answered event. This process exists to be observed, so the worker has no hook for it."""
    retrieve, handle, publish = streams.retrieval.retrieve, Processor.handle, Publisher.publish
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    async def retrieve_and_keep(*args: Any, **kwargs: Any) -> Retrieved:
        found = _observed.get().found = await retrieve(*args, **kwargs)
        return found

    async def publish_and_time(self: Publisher, *args: Any, **kwargs: Any) -> None:
        began = perf_counter()
        await publish(self, *args, **kwargs)
        _observed.get().publish = perf_counter() - began

    async def handle_and_record(self: EventProcessor[Any], record: InputRecord) -> None:
        observed = _Observed()
        _observed.set(observed)
        await handle(self, record)
        if (found := observed.found) is not None:
            duration, arms = perf_counter() - record.read_at, found.arm_seconds.values()
            row = (duration, found.search_seconds, max(arms), observed.publish)
            os.write(descriptor, RECORD.pack(found.result.event_id.bytes, *row))

    vars(processor)["retrieve"] = retrieve_and_keep
    Publisher.publish = publish_and_time  # type: ignore[method-assign]  # the same, observed
    Processor.handle = handle_and_record  # type: ignore[method-assign]  # the same, observed


def _delay(switch: Path) -> None:
    handle = Processor.handle

    async def handle_late(self: EventProcessor[Any], record: InputRecord) -> None:
        if switch.exists():  # noqa: ASYNC240  # a microsecond
            await asyncio.sleep(DELAY_SECONDS)
        await handle(self, record)

    Processor.handle = handle_late  # type: ignore[method-assign]  # slower on purpose


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m streams.bench.worker", description=__doc__)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--delay-while", type=Path)
    options = parser.parse_args()
    if options.record is not None:
        _record(options.record)
    if options.delay_while is not None:
        _delay(options.delay_while)
    settings = load()
    logs.configure(settings.anabranch_log_format)
    try:
        run_worker(settings)
    except StartupRefused as verdict:
        sys.exit(printable(f"startup refused: {verdict}"))


if __name__ == "__main__":
    main()
