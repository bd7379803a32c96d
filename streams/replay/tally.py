"""What became of the chosen dead letters, counted by code and partition."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from streams.replay.dead_letters import REFUSED, DeadLetter, Disposition

__all__ = ["Row", "Tally"]

_PLACES_NAMED = 10


@dataclass(slots=True)
class Row:
    """One code in one partition; code is None for what Anabranch did not write."""

    code: str | None
    partition: int
    oldest: datetime
    newest: datetime
    fates: Counter[Disposition] = field(default_factory=Counter)

    @property
    def refused(self) -> int:
        return sum(self.fates[fate] for fate in REFUSED)


class Tally:
    """Takes one letter after the other."""

    def __init__(self, letters: Iterable[tuple[DeadLetter, Disposition]] = ()) -> None:
        self._rows: dict[tuple[str, int], Row] = {}
        self._places: dict[Disposition, list[tuple[int, int]]] = {}
        for letter, fate in letters:
            self.add(letter, fate)

    def add(self, letter: DeadLetter, fate: Disposition) -> None:
        """Count one letter."""
        at = letter.written_at
        row = self._rows.setdefault(
            (letter.code or "", letter.partition), Row(letter.code, letter.partition, at, at)
        )
        row.oldest, row.newest = min(row.oldest, at), max(row.newest, at)
        row.fates[fate] += 1
        if fate in REFUSED:
            places = self._places.setdefault(fate, [])
            if len(places) < _PLACES_NAMED:
                places.append((letter.partition, letter.offset))

    @property
    def rows(self) -> list[Row]:
        """By code, then partition."""
        return [row for _, row in sorted(self._rows.items())]

    @property
    def total(self) -> int:
        return sum(row.fates.total() for row in self._rows.values())

    @property
    def refused(self) -> int:
        return sum(row.refused for row in self._rows.values())

    def count(self, fate: Disposition) -> int:
        """How many met this fate."""
        return sum(row.fates[fate] for row in self._rows.values())

    def places(self, fate: Disposition) -> list[tuple[int, int]]:
        """Partition and offset of the first few that were left for this reason."""
        return self._places.get(fate, [])

    def to_json(self) -> list[dict[str, Any]]:
        """One object for each row; every fate has its number."""
        return [
            {
                "code": row.code,
                "partition": row.partition,
                "oldest": row.oldest.isoformat(),
                "newest": row.newest.isoformat(),
                **{fate.value: row.fates[fate] for fate in Disposition},
            }
            for row in self.rows
        ]
