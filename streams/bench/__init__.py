"""Load, a store to search, and measurements: what `anabranch bench` and the benchmarks of the checkout share."""

__all__ = ["BenchError"]


class BenchError(Exception):
    """The benchmark cannot continue; the message says why in one line."""
