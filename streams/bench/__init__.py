"""Load, a store to search, and measurements: what `anabranch bench` and the benchmarks of the checkout share."""
