"""A command's settings, with or without the embedding stage's topics (`--texts`)."""

from streams.settings import Settings, load, load_embedder

__all__ = ["load_both", "load_one"]


def load_both(*, texts: bool) -> tuple[Settings, Settings | None]:
    """The worker's settings, and the same with the embedding stage's topics if they are wanted."""
    return load(), load_embedder()[0] if texts else None


def load_one(*, texts: bool) -> Settings:
    """The worker's settings, or with the embedding stage's topics in their place."""
    return load_embedder()[0] if texts else load()
