"""The names in a worker's and an embedding stage's exposition."""

from itertools import chain

from streams.telemetry.metrics import EmbedderMetrics, Metrics

__all__ = ["metric_names"]


def metric_names() -> dict[str, frozenset[str]]:
    """Every sample name in the exposition with its label names: what a dashboard may query."""
    metrics = Metrics(
        profiles=["extraction"],
        pool=lambda: [("idle", 0)],
        lag=lambda: [(0, 0)],
        committed=lambda: [(0, 0)],
        oldest_waiting=lambda: [(0, 0.0)],
    )
    names: dict[str, frozenset[str]] = {}
    for family in chain(metrics.registry.collect(), EmbedderMetrics().registry.collect()):
        for sample in family.samples:
            names[sample.name] = names.get(sample.name, frozenset()) | frozenset(sample.labels)
    return names
