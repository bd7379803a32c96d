"""The type of a record's headers."""

from collections.abc import Sequence

__all__ = ["Headers"]

Headers = Sequence[tuple[str, bytes | None]]
"""Name and value of each header, in order; names may repeat."""
