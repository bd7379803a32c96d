"""Retrievers and document converters for LangChain, LlamaIndex and Haystack, each in a module of its own.

Nothing here imports these libraries but the modules with their names, so only those need the extras.
"""

from streams.adapters.shared import SharedClient

__all__ = ["SharedClient"]
