"""Providers of embeddings, against imitations of their servers and against a real model."""
