"""What has been replayed, written down on the dead-letter topic itself, beside the letters.

A committed offset could not tell it: a replay that picks some letters passes others over, and those must stay
eligible; and a group that nobody is in forgets its offsets after a week, when letters are kept for four. An entry
stands in the partition of its letters and behind them, so retention takes it no earlier than them.

Entries are written before a partition's first letter is published, after each batch that the input topic's broker has
acknowledged, and after the last. All but the last say from where on, in the input topic, whatever else this run
publishes will be found. A run that was killed leaves such an entry open, and the next one looks there for the marks
of letters that were published and not yet written down.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from streams.wire.deadletter import CODE_HEADER
from streams.wire.replay_headers import Headers

__all__ = ["JOURNAL_HEADER", "BadEntry", "Entry", "Journal", "is_entry"]

JOURNAL_HEADER = "anabranch.replay.journal"
_VERSION = b"1"


class BadEntry(ValueError):
    """An entry that this release cannot read. What has been replayed cannot be known without it."""


def is_entry(headers: Headers) -> bool:
    """Tell entries from letters. A letter's event may have come with any header, an entry's among them."""
    names = {name for name, _ in headers}
    return JOURNAL_HEADER in names and CODE_HEADER not in names


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of the journal.

    Attributes:
        run: which replay wrote it.
        replayed: offsets, in the entry's own partition, of letters that the input topic has.
        beyond: input partition to offset; whatever else the run publishes stands there or later. None: nothing else.
        settled: earlier runs whose open ends this one has looked into.
    """

    run: str
    replayed: frozenset[int]
    beyond: Mapping[int, int] | None
    settled: frozenset[str] = frozenset()

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        return [(JOURNAL_HEADER, _VERSION)]

    def encode(self) -> bytes:
        return json.dumps(
            {
                "run": self.run,
                "replayed": _ranges(self.replayed),
                "beyond": self.beyond,
                "settled": sorted(self.settled),
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def read(cls, headers: Headers, value: bytes | None) -> "Entry | None":
        """Read a record of the dead-letter topic; None where it is no entry.

        Raises:
            BadEntry: it is one, and cannot be read.
        """
        if not is_entry(headers):
            return None
        versions = [version for name, version in headers if name == JOURNAL_HEADER]
        if versions != [_VERSION] or value is None:
            raise BadEntry("written by another release")
        try:
            told = json.loads(value)
            beyond = told["beyond"]
            return cls(
                run=str(told["run"]),
                replayed=frozenset(
                    offset for first, last in told["replayed"] for offset in range(first, last + 1)
                ),
                beyond=None
                if beyond is None
                else {int(partition): int(offset) for partition, offset in beyond.items()},
                settled=frozenset(map(str, told["settled"])),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadEntry("malformed") from None


@dataclass(slots=True)
class Journal:
    """The entries of one partition, taken together.

    Attributes:
        replayed: offsets of letters that have been replayed for certain.
    """

    replayed: set[int] = field(default_factory=set)
    _open: dict[str, Mapping[int, int]] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Take in the next entry, in the order of the log."""
        self.replayed |= entry.replayed
        for run in entry.settled:
            self._open.pop(run, None)
        if entry.beyond is None:
            self._open.pop(entry.run, None)
        else:
            self._open[entry.run] = entry.beyond

    @property
    def unsettled(self) -> frozenset[str]:
        """Runs that began here and did not come to their end."""
        return frozenset(self._open)

    def beyond(self, partition: int) -> int:
        """From which offset of an input partition on unsettled runs may have published letters."""
        # A partition that an entry does not know was added later: it is looked at from its beginning.
        return min((known.get(partition, 0) for known in self._open.values()), default=0)


def _ranges(offsets: Iterable[int]) -> Sequence[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if ranges and ranges[-1][1] == offset - 1:
            ranges[-1] = (ranges[-1][0], offset)
        else:
            ranges.append((offset, offset))
    return ranges
