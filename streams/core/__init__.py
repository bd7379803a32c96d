"""The pure core: values and rules. Nothing here does I/O, reads a clock, logs or counts."""
