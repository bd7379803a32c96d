"""The pipeline beside its ceiling and beside what others would use: `make bench` and `make bench-long`."""
