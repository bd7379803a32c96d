"""The pure core: values and rules. Nothing here does I/O, reads the clock, logs or records metrics."""
