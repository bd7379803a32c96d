"""``python -m benchmarks.gate``: does the pipeline still reach its recorded share of the ceiling?

Exit code 1 if a share has fallen by more than a quarter, or if the gate does not notice a worker that takes two
milliseconds longer. ``--record`` writes the shares to ``recorded.json``. There are two, because they find different
things; neither depends on how fast the machine is:

``cpu``     events per CPU-second of PostgreSQL and worker, under saturation, to those of the ceiling
``latency`` how long the ceiling takes for an event of a small session, to how long the worker takes, one at a time
"""

import argparse
import json
import logging
import sys
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

from benchmarks.contestants import Arena, Figures, Tuning
from streams.bench.ceiling import LoopResult
from streams.bench.stack import open_stack
from streams.bench.worker import read_records
from streams.bench.world import base, grow

__all__ = ["RECORDED", "Shares", "measure", "missed"]

RECORDED: Final = Path(__file__).with_name("recorded.json")
#: A share may fall by this much.
_TOLERANCE: Final = 0.25
# What the gate has to notice.
_DELAY_MS: Final = 2.0
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


async def measure(*, delay_ms: float = _DELAY_MS) -> tuple[Shares, Shares]:
    """The shares, as medians of rounds; and those of a worker that delays each event, of the last round only."""
    world = grow(base(None), _CHUNKS, 1)
    async with open_stack() as stack:
        arena = Arena(stack, world, count=_QUESTIONS, seed=1, peers_python=None)
        await arena.prepare(peers=False)
        rounds = []
        for _ in range(_ROUNDS):
            most = await arena.ceiling("mixed", Tuning(8), _SECONDS, warm_up=0.5)
            alone = await arena.small_ceiling(_SECONDS)
            rounds.append(_shares(most, alone, await _pipeline(arena, 0)))
        delayed = _shares(most, alone, await _pipeline(arena, delay_ms))
    shares = Shares(*(float(np.median(each)) for each in zip(*map(astuple, rounds), strict=True)))
    return shares, delayed


def _shares(most: Figures, alone: LoopResult, pipeline: tuple[float, float]) -> Shares:
    cpu, seconds = pipeline
    return Shares(most.own_cpu / cpu, float(np.percentile(alone.latencies, _PERCENTILE)) / seconds)


async def _pipeline(arena: Arena, delay_ms: float) -> tuple[float, float]:
    """CPU of PostgreSQL and worker per event, and the duration of an event on its own."""
    recording = arena.stack.directory / "gate"
    recording.unlink(missing_ok=True)
    async with arena.pipeline(Tuning(8), recording=recording, delay_ms=delay_ms) as (
        generator,
        meter,
    ):
        figures = await arena.saturated("pipeline", "mixed", generator, meter, _SECONDS, warm_up=1)
        generator.ask(arena.small_factory)
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
    parser = argparse.ArgumentParser(prog="make gate", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write the shares to {RECORDED.name}")
    options = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    shares, delayed = uvloop.run(measure())
    if not options.record and missed(shares):
        sys.stdout.write("below the recorded share; measured once more\n")
        shares, delayed = uvloop.run(measure())
    sys.stdout.write(
        f"shares of the ceiling: {_shown(shares)}; with {_DELAY_MS:g} ms more: {_shown(delayed)}\n"
    )
    if options.record:
        rounded = {name: round(share, 2) for name, share in asdict(shares).items()}
        RECORDED.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
    failures = missed(shares)
    if not missed(delayed):
        failures.append(f"the gate does not notice {_DELAY_MS:g} ms added to each event")
    for line in failures:
        sys.stdout.write(line + "\n")
    return 1 if failures else 0


def _shown(shares: Shares) -> str:
    return ", ".join(f"{name} {share:.2f}" for name, share in asdict(shares).items())


if __name__ == "__main__":
    sys.exit(main())
