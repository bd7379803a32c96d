"""The gate on ratios: does the pipeline still reach its recorded share of the ceiling?

``python -m benchmarks.gate`` measures; ``--record`` also writes the shares to ``recorded.json``. Two shares, because
they find different things; neither depends on how fast the machine is:

``cpu``     events per CPU-second of PostgreSQL and worker, under saturation, to those of the ceiling
``latency`` how long the ceiling takes for an event, to how long the worker takes, one event at a time
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

from benchmarks.contestants import Arena, Tuning
from streams.bench.stack import open_stack
from streams.bench.worker import read_records
from streams.bench.world import base, grow

__all__ = ["RECORDED", "Shares", "measure", "missed"]

RECORDED: Final = Path(__file__).with_name("recorded.json")
#: A share may fall by this much.
_TOLERANCE: Final = 0.25
_CHUNKS: Final = 2000
_QUESTIONS: Final = 40
_ROUNDS: Final = 3
_SECONDS: Final = 2.5
# Of the latencies: less affected by other work on the machine than the median.
_PERCENTILE: Final = 25


@dataclass(frozen=True)
class Shares:
    """What the pipeline reaches of the ceiling."""

    cpu: float
    latency: float


@dataclass
class _Rounds:
    cpu: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)

    def shares(self) -> Shares:
        return Shares(float(np.median(self.cpu)), float(np.median(self.latency)))


async def measure(delays_ms: Sequence[float] = (0.0,)) -> list[Shares]:
    """Measure workers that delay each event by so much, interleaved with the ceiling."""
    world = grow(base(None), _CHUNKS, 1)
    async with open_stack() as stack:
        arena = Arena(stack, world, count=_QUESTIONS, seed=1, peers_python=None)
        await arena.prepare(peers=False)
        rounds = [_Rounds() for _ in delays_ms]
        for _ in range(_ROUNDS):
            most = await arena.ceiling("mixed", Tuning(8), _SECONDS, warm_up=0.5)
            alone = await arena.ceiling("extraction", Tuning(1), _SECONDS, warm_up=0.5)
            for number, delay in enumerate(delays_ms):
                cpu, seconds = await _pipeline(arena, number, delay)
                rounds[number].cpu.append(most.own_cpu / cpu)
                rounds[number].latency.append(alone.p25 / seconds)
        return [each.shares() for each in rounds]


async def _pipeline(arena: Arena, number: int, delay_ms: float) -> tuple[float, float]:
    """CPU of PostgreSQL and worker per event, and the duration of an event on its own."""
    recording = arena.stack.directory / f"gate-{number}"
    recording.unlink(missing_ok=True)
    async with arena.pipeline(Tuning(8), recording=recording, delay_ms=delay_ms, name=f"gate-{number}") as (
        generator,
        meter,
    ):
        figures = await arena.saturated("pipeline", "mixed", generator, meter, _SECONDS, warm_up=1)
        generator.ask(arena.factories["extraction"])
        measured = await generator.saturate(in_flight=1, warm_up=0.5, seconds=_SECONDS, meter=meter)
    durations = [
        each.duration for each in read_records(recording) if str(each.event_id).encode() in measured.numbers
    ]
    return figures.own_cpu, float(np.percentile(durations, _PERCENTILE))


def missed(shares: Shares) -> list[str]:
    """A line for each share that has fallen too far."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    return [
        f"{name}: the pipeline reaches {share:.2f} of the ceiling, recorded {recorded[name]:.2f}, at least"
        f" {(1 - _TOLERANCE) * recorded[name]:.2f} required"
        for name, share in asdict(shares).items()
        if share < (1 - _TOLERANCE) * recorded[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write the shares to {RECORDED.name}")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="slow the worker down, to see it fail")
    options = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    [shares] = uvloop.run(measure([options.delay_ms]))
    sys.stdout.write(json.dumps(asdict(shares)) + "\n")
    if options.record:
        rounded = {name: round(share, 2) for name, share in asdict(shares).items()}
        RECORDED.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
        return 0
    lines = missed(shares)
    for line in lines:
        sys.stdout.write(line + "\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
