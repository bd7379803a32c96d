"""Replays dead letters to the input topic: each once, even if the replay is interrupted."""
