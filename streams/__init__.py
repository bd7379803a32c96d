"""Anabranch: query embeddings in, ranked and budgeted passages out, over Kafka and PostgreSQL with pgvector."""

__version__ = "0.1.0"
