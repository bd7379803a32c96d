"""Says in words why no connection to a server was possible."""

import socket

__all__ = ["connection_problem"]


def connection_problem(error: BaseException) -> str:
    """The reason, without any part of the error's own text; the name of its class if there are no words for it."""
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, FileNotFoundError):
        return "the Unix socket does not exist"
    return type(error).__name__
