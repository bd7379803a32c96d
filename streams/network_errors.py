"""Says in words why no connection to a server was possible."""

import errno
import socket

__all__ = ["connection_problem", "is_unreachable"]


def connection_problem(error: BaseException) -> str:
    """The reason, without any part of the error's own text; the name of its class if there are no words for it."""
    return _words(error) or type(error).__name__


def is_unreachable(error: BaseException) -> bool:
    """Whether the error says that the server is not there, or not at this address."""
    return _words(error) is not None


def _words(error: BaseException) -> str | None:
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(error, ConnectionRefusedError) or _is_refused_by_several(error):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, FileNotFoundError):
        return "the Unix socket does not exist"
    return None


def _is_refused_by_several(error: BaseException) -> bool:
    # asyncio joins the errors of a host that has several addresses, as localhost often does, into the text of one.
    return (
        isinstance(error, OSError) and error.errno is None and f"[Errno {errno.ECONNREFUSED}]" in str(error)
    )
