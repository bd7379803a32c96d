"""The sample corpus: a river valley's course notes, manuals, policies, and questions with known answers."""

from streams.sample.corpus import (
    Chunk,
    Corpus,
    Document,
    GoldenQuery,
    Grant,
    SampleError,
    Session,
    Topic,
    load,
)

__all__ = [
    "Chunk",
    "Corpus",
    "Document",
    "GoldenQuery",
    "Grant",
    "SampleError",
    "Session",
    "Topic",
    "load",
]
