"""Hostile input: mutated events by the hundred thousand, and what must hold for each. `make fuzz`."""
