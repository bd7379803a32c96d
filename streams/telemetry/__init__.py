"""Metrics, logs and the live page, for operators."""
