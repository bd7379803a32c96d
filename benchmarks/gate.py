"""``python -m benchmarks.gate``: does the pipeline still reach its recorded share of the ceiling?

Exit code 1 if a share has fallen by more than a quarter, or if the gate does not notice a worker that takes two
milliseconds longer. ``--record`` writes the shares to ``recorded.json``. There are two, because they find different
things; neither depends on how fast the machine is:

``cpu``     events per CPU-second of PostgreSQL and worker, under saturation, to those of the ceiling
``latency`` how long the ceiling takes for an event of a small session, to how long the worker takes from reading it to
            publishing its result, one at a time
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import uvloop

from benchmarks.contestants import Arena, Tuning
from streams.bench.cpu import CpuMeter
from streams.bench.generator import Generator
from streams.bench.stack import open_stack
from streams.bench.worker import DELAY_SECONDS, read_records
from streams.bench.world import base, grow

__all__ = ["RECORDED", "Round", "Shares", "shares_of", "verdict"]

RECORDED: Final = Path(__file__).with_name("recorded.json")
#: A share may fall by this much.
_TOLERANCE: Final = 0.25
_CHUNKS: Final = 2000
_QUESTIONS: Final = 40
_ROUNDS: Final = 5
# The recorded shares are compared with many runs, so that they may take longer.
_ROUNDS_TO_RECORD: Final = 15
_SECONDS: Final = 1.5
_WARM_UP: Final = 0.4
# Of latencies. Other work on the machine slows down some events, and more of the worker's, which pass through more
# processes: under load the ratio of medians varied from 0.10 to 0.32, that of fast events from 0.10 to 0.14.
_PERCENTILE: Final = 10


@dataclass(frozen=True)
class Shares:
    """What the pipeline reaches of the ceiling."""

    cpu: float
    latency: float


@dataclass(frozen=True)
class Round:
    """One measurement of everything; CPU in microseconds per event, low percentiles in seconds.

    Attributes:
        ceiling_cpu: of the ceiling under saturation.
        cpu: of the pipeline under saturation.
        ceiling_seconds: the ceiling's time for an event on its own.
        seconds: the worker's, from reading to publishing.
        delayed_seconds: the same of a worker that delays each event.
    """

    ceiling_cpu: float
    cpu: float
    ceiling_seconds: float
    seconds: float
    delayed_seconds: float


def shares_of(rounds: Sequence[Round]) -> tuple[Shares, float]:
    """The pipeline's shares, and its latency's share with the delay: medians of the rounds' ratios.

    Both sides of a ratio were measured within seconds, so that other work on the machine slows down both.
    """
    return (
        Shares(
            cpu=median(each.ceiling_cpu / each.cpu for each in rounds),
            latency=median(each.ceiling_seconds / each.seconds for each in rounds),
        ),
        median(each.ceiling_seconds / each.delayed_seconds for each in rounds),
    )


def verdict(shares: Shares, delayed: float, recorded: Mapping[str, float]) -> list[str]:
    """A line for each share that has fallen too far, and one if the delay lowers the latency's share by too little.

    The delay is compared with the same run. Compared with the recorded share, a run in which the machine wakes up
    processes faster would fail although nothing is wrong.

    Args:
        shares: measured.
        delayed: the latency's share with the delay.
        recorded: by a share's name.
    """
    failures = [
        f"{name}: the pipeline reaches {share:.3f} of the ceiling, recorded {recorded[name]:.3f}, at least"
        f" {_required(recorded[name]):.3f} required"
        for name, share in asdict(shares).items()
        if not share >= _required(recorded[name])  # a NaN fails: nothing was answered
    ]
    if shares.latency >= _required(recorded["latency"]) and not delayed < _required(shares.latency):
        failures.append(
            f"the gate does not notice {1000 * DELAY_SECONDS:g} ms more for each event: latency {delayed:.3f},"
            f" below {_required(shares.latency):.3f} expected"
        )
    return failures


def _required(share: float) -> float:
    return (1 - _TOLERANCE) * share


class _Gate:
    """A ceiling and a worker, started once for all rounds.

    Args:
        recording: where the worker records its events.
        switch: while this file exists, the worker takes longer.
    """

    def __init__(
        self, arena: Arena, generator: Generator, meter: CpuMeter, *, recording: Path, switch: Path
    ) -> None:
        self._arena = arena
        self._generator = generator
        self._meter = meter
        self._recording = recording
        self._switch = switch

    async def measure(self, rounds: int) -> tuple[Shares, float]:
        """The shares, and the latency's share with the delay; prints them."""
        measured = [await self._round() for _ in range(rounds)]
        shares, delayed = shares_of(measured)
        sys.stdout.write(
            f"shares of the ceiling: cpu {shares.cpu:.3f}, latency {shares.latency:.3f};"
            f" with {1000 * DELAY_SECONDS:g} ms more: latency {delayed:.3f}\n"
        )
        return shares, delayed

    async def _round(self) -> Round:
        alone = await self._arena.small_ceiling(_SECONDS, warm_up=_WARM_UP)
        seconds = await self._seconds()
        self._switch.touch()
        delayed_seconds = await self._seconds()
        self._switch.unlink()
        most = await self._arena.ceiling("mixed", Tuning(8), _SECONDS, warm_up=_WARM_UP)
        pipeline = await self._arena.saturated(
            "pipeline", "mixed", self._generator, self._meter, _SECONDS, warm_up=_WARM_UP
        )
        return Round(
            ceiling_cpu=most.own_cpu,
            cpu=pipeline.own_cpu,
            ceiling_seconds=_fast(alone.latencies),
            seconds=seconds,
            delayed_seconds=delayed_seconds,
        )

    async def _seconds(self) -> float:
        """From reading an event of a small session to publishing its result, one event at a time.

        Without the publishing: the embedded broker takes longer for it than the worker for everything else.
        """
        self._generator.ask(self._arena.small_factory)
        measured = await self._generator.saturate(
            in_flight=1, warm_up=_WARM_UP, seconds=_SECONDS, meter=self._meter
        )
        return _fast(
            [
                each.duration - each.publish
                for each in read_records(self._recording)
                if str(each.event_id).encode() in measured.numbers
            ]
        )


def _fast(latencies: Sequence[float]) -> float:
    return float(np.percentile(latencies, _PERCENTILE))


async def _run(*, record: bool) -> list[str]:
    """Measure, at most twice; returns what is wrong."""
    world = grow(base(None), _CHUNKS, 1)
    async with open_stack() as stack:
        arena = Arena(stack, world, count=_QUESTIONS, seed=1, peers_python=None)
        await arena.prepare(peers=False)
        recording, switch = stack.directory / "gate", stack.directory / "delay"
        async with arena.pipeline(Tuning(8), recording=recording, delay_while=switch) as (generator, meter):
            gate = _Gate(arena, generator, meter, recording=recording, switch=switch)
            if record:
                shares, delayed = await gate.measure(_ROUNDS_TO_RECORD)
                rounded = {name: round(share, 3) for name, share in asdict(shares).items()}
                RECORDED.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
                return verdict(shares, delayed, rounded)
            recorded: dict[str, float] = json.loads(RECORDED.read_text(encoding="utf-8"))
            failures = verdict(*await gate.measure(_ROUNDS), recorded)
            if failures:
                sys.stdout.write("\n".join((*failures, "measuring once more\n")))
                failures = verdict(*await gate.measure(_ROUNDS), recorded)
            return failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gate", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write the shares to {RECORDED.name}")
    options = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    failures = uvloop.run(_run(record=options.record))
    for line in failures:
        sys.stdout.write(line + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
