"""The sample corpus: course notes, manuals and policies of a river valley, and questions with known answers."""

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
