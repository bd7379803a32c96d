"""Counts the selected dead letters by code, partition and disposition."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from streams.replay.dead_letters import REFUSED, DeadLetter, Disposition, Missing

__all__ = ["Row", "Tally"]

_MAX_POSITIONS = 10


@dataclass(slots=True)
class Row:
    """One code in one partition; code is None for records that Anabranch did not write."""

    code: str | None
    partition: int
    oldest: datetime
    newest: datetime
    dispositions: Counter[Disposition] = field(default_factory=Counter)

    @property
    def refused(self) -> int:
        return sum(self.dispositions[disposition] for disposition in REFUSED)


class Tally:
    def __init__(self, dead_letters: Iterable[tuple[DeadLetter, Disposition]] = ()) -> None:
        self._rows: dict[tuple[str, int], Row] = {}
        self._positions: dict[Disposition, list[tuple[int, int]]] = {}
        self.missing: list[Missing] = []
        """The events for which the placeholders stand."""
        for dead_letter, disposition in dead_letters:
            self._add(dead_letter, disposition)

    def _add(self, dead_letter: DeadLetter, disposition: Disposition) -> None:
        at = dead_letter.written_at
        row = self._rows.setdefault(
            (dead_letter.code or "", dead_letter.partition),
            Row(dead_letter.code, dead_letter.partition, at, at),
        )
        row.oldest, row.newest = min(row.oldest, at), max(row.newest, at)
        row.dispositions[disposition] += 1
        if disposition in REFUSED:
            positions = self._positions.setdefault(disposition, [])
            if dead_letter.missing is not None:
                self.missing.append(dead_letter.missing)
            if len(positions) < _MAX_POSITIONS:
                positions.append((dead_letter.partition, dead_letter.offset))

    @property
    def rows(self) -> list[Row]:
        """The rows, sorted by code and partition."""
        return [row for _, row in sorted(self._rows.items())]

    @property
    def total(self) -> int:
        return sum(row.dispositions.total() for row in self._rows.values())

    @property
    def refused(self) -> int:
        return sum(row.refused for row in self._rows.values())

    def count(self, disposition: Disposition) -> int:
        """Number of dead letters with this disposition."""
        return sum(row.dispositions[disposition] for row in self._rows.values())

    def positions(self, disposition: Disposition) -> list[tuple[int, int]]:
        """Partition and offset of the first few dead letters with this disposition."""
        return self._positions.get(disposition, [])

    def to_json(self) -> list[dict[str, Any]]:
        """One object per row, with a count for each disposition."""
        return [
            {
                "code": row.code,
                "partition": row.partition,
                "oldest": row.oldest.isoformat(),
                "newest": row.newest.isoformat(),
                **{disposition.value: row.dispositions[disposition] for disposition in Disposition},
            }
            for row in self.rows
        ]
