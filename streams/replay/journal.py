"""The journal of what has been replayed, stored on the dead-letter topic itself, next to the dead letters.

Committed offsets would not suffice: a replay of selected dead letters skips others, which must stay eligible. And an
empty group's offsets are deleted after a week, but dead letters are kept for four. An entry is in the partition of its
dead letters and after them, so retention does not delete it before them.

Entries are written before a partition's first dead letter is published, after each batch that the input topic's broker
has acknowledged, and after the last one. All but the last record the offsets in the input topic from which on this run
publishes. A killed run leaves such an entry open, and the next run searches from these offsets for the replay headers
of dead letters that were published but not recorded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from streams.replay.offsets import Offsets
from streams.wire.deadletter import CODE_HEADER
from streams.wire.replay_headers import Headers

__all__ = ["JOURNAL_HEADER", "BadEntry", "Entry", "Journal", "is_entry"]

JOURNAL_HEADER = "anabranch.replay.journal"
_VERSION = b"1"
_MAX_OFFSET = 2**63 - 1


class BadEntry(ValueError):
    """This release cannot read an entry, so it is unknown what has been replayed."""


def is_entry(headers: Headers) -> bool:
    """Whether a record is an entry. A dead letter's event may have any headers, including those of an entry."""
    names = {name for name, _ in headers}
    return JOURNAL_HEADER in names and CODE_HEADER not in names


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of the journal.

    Attributes:
        run: id of the replay that wrote it.
        replayed: offsets, in the entry's own partition, of dead letters that were published to the input topic.
        scan_from: input partition → offset from which on the run publishes more. None: it publishes nothing more.
        settled: earlier interrupted runs that this run has settled.
    """

    run: str
    replayed: Offsets
    scan_from: Mapping[int, int] | None
    settled: frozenset[str] = frozenset()

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        return [(JOURNAL_HEADER, _VERSION)]

    def encode(self) -> bytes:
        return json.dumps(
            {
                "run": self.run,
                "replayed": self.replayed.ranges,
                "beyond": self.scan_from,
                "settled": sorted(self.settled),
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def read(cls, headers: Headers, value: bytes | None, *, offset: int) -> "Entry | None":
        """Parse a record of the dead-letter topic; None if it is not an entry.

        Args:
            headers: the record's headers.
            value: the record's value.
            offset: the record's offset.

        Raises:
            BadEntry: it is an entry, but cannot be parsed.
        """
        if not is_entry(headers):
            return None
        versions = [version for name, version in headers if name == JOURNAL_HEADER]
        if versions != [_VERSION] or value is None:
            raise BadEntry("written by another release")
        try:
            parsed = json.loads(value)
            scan_from = parsed["beyond"]
            return cls(
                run=str(parsed["run"]),
                replayed=Offsets(_range(first, last, before=offset) for first, last in parsed["replayed"]),
                scan_from=None
                if scan_from is None
                else {int(partition): _offset(at) for partition, at in scan_from.items()},
                settled=frozenset(map(str, parsed["settled"])),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise BadEntry("malformed, or with an impossible offset") from None


@dataclass(slots=True)
class Journal:
    """The combined entries of one partition."""

    _replayed: list[Offsets] = field(default_factory=list)
    _open: dict[str, Mapping[int, int]] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Add the next entry, in log order."""
        self._replayed.append(entry.replayed)
        for run in entry.settled:
            self._open.pop(run, None)
        if entry.scan_from is None:
            self._open.pop(entry.run, None)
        else:
            self._open[entry.run] = entry.scan_from

    @property
    def replayed(self) -> Offsets:
        """Offsets of dead letters that are known to have been replayed."""
        if len(self._replayed) != 1:
            self._replayed = [Offsets(chain.from_iterable(offsets.ranges for offsets in self._replayed))]
        return self._replayed[0]

    @property
    def unsettled(self) -> frozenset[str]:
        """Runs that started in this partition and did not finish."""
        return frozenset(self._open)

    def scan_from(self, partition: int) -> int:
        """The offset of an input partition from which on unsettled runs may have published dead letters."""
        # A partition that is not in an entry was added later: scan it from its beginning.
        return min((known.get(partition, 0) for known in self._open.values()), default=0)


def _range(first: object, last: object, *, before: int) -> tuple[int, int]:
    """An entry comes after the dead letters that it names; otherwise Anabranch did not write it."""
    first, last = _offset(first), _offset(last)
    if not first <= last < before:
        raise ValueError
    return first, last


def _offset(parsed: object) -> int:
    if not isinstance(parsed, int) or not 0 <= parsed <= _MAX_OFFSET:
        raise ValueError
    return parsed
