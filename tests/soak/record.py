"""What a soak has seen: samples of one process, and when what befell it. It can be kept, and judged again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Injection", "Lull", "Record", "Sample"]


@dataclass(frozen=True)
class Sample:
    """The process at one moment.

    Attributes:
        seconds: since the load began.
        values: series to value; what could not be asked for is absent.
    """

    seconds: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Injection:
    """One fault, in seconds since the load began.

    Attributes:
        recovered: everything was well again.
        failure: what was promised and did not come true.
    """

    name: str
    began: float
    repaired: float
    recovered: float
    failure: str | None = None


@dataclass(frozen=True)
class Lull:
    """A time between two faults, when all was well."""

    began: float
    ended: float

    @property
    def middle(self) -> float:
        return (self.began + self.ended) / 2


@dataclass
class Record:
    """A whole soak.

    Attributes:
        seconds: how long the load lasted.
        settle_seconds: how long after a recovery what was opened for it may take to close.
        facts: what else is to be told of the run, as lines.
        failures: broken promises other than growth, as lines.
    """

    seconds: float
    settle_seconds: float
    samples: list[Sample] = field(default_factory=list)
    injections: list[Injection] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def lulls(self) -> Sequence[Lull]:
        """From each recovery to the next fault, in order."""
        ends = [*(injection.began for injection in self.injections), self.seconds]
        begins = [0.0, *(injection.recovered for injection in self.injections)]
        lulls = (Lull(began + self.settle_seconds, ended) for began, ended in zip(begins, ends, strict=True))
        return [lull for lull in lulls if lull.began < lull.ended]

    def points(self, series: str) -> list[tuple[float, float]]:
        """For each lull its middle, and what the process holds between two events: the lower quartile."""
        found = []
        for lull in self.lulls():
            values = [
                sample.values[series]
                for sample in self.samples
                if lull.began <= sample.seconds < lull.ended and series in sample.values
            ]
            if values:
                found.append((lull.middle, sorted(values)[len(values) // 4]))
        return found

    def calm(self, series: str) -> list[float]:
        """Everything that was seen in lulls."""
        lulls = self.lulls()
        return [
            sample.values[series]
            for sample in self.samples
            if series in sample.values and any(lull.began <= sample.seconds < lull.ended for lull in lulls)
        ]

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> "Record":
        loaded = json.loads(file.read_text(encoding="utf-8"))
        loaded["samples"] = [Sample(**sample) for sample in loaded["samples"]]
        loaded["injections"] = [Injection(**injection) for injection in loaded["injections"]]
        return cls(**loaded)
