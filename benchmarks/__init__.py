"""The pipeline beside its ceiling and beside what others would use: `make bench` and `make bench-long`."""

from pathlib import Path
from typing import Final

__all__ = ["CRANFIELD"]

#: Where the collection is expected: next to the checkout.
CRANFIELD: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "cranfield"
