"""Anabranch: takes query embeddings and returns ranked, token-budgeted passages, over Kafka and PostgreSQL/pgvector."""

__version__ = "0.1.0"
