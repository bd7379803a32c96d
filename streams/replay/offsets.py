"""Sets of offsets, stored as ranges, so that their memory is bounded by the input's size, not by the offsets in it."""

from bisect import bisect_right
from collections.abc import Iterable

__all__ = ["Offsets"]


class Offsets:
    """A set of offsets.

    Args:
        ranges: first and last offset of each range, in any order; they may overlap.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges: list[tuple[int, int]] = []
        """First and last offset of each range, sorted, with at least one offset between two ranges."""
        for first, last in sorted(ranges):
            if self.ranges and first <= self.ranges[-1][1] + 1:
                self.ranges[-1] = self.ranges[-1][0], max(last, self.ranges[-1][1])
            else:
                self.ranges.append((first, last))

    @classmethod
    def of(cls, offsets: Iterable[int]) -> "Offsets":
        """A set of individual offsets."""
        return cls((offset, offset) for offset in offsets)

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self.ranges, offset, key=lambda span: span[0]) - 1
        return at >= 0 and offset <= self.ranges[at][1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offsets) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(tuple(self.ranges))

    def __repr__(self) -> str:
        return f"Offsets({self.ranges})"
