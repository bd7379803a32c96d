"""Ports of this machine."""

import socket

__all__ = ["HOST", "free_port"]

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that is free now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
