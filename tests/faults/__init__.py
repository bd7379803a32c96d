"""Faults under load: real workers on real servers, whose every event is accounted for. `make faults` runs them all."""
