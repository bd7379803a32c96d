"""Embeds texts: providers as thin adapters, and around them batches, retries and limits."""
