"""Retries with tenacity, without its cost for an operation that succeeds at once."""

from collections.abc import Awaitable, Callable
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception

__all__ = ["retry"]


async def retry(
    attempt: Callable[[], Awaitable[None]], *, retriable: Callable[[BaseException], bool], **options: Any
) -> None:
    """Run an operation until it succeeds.

    Args:
        attempt: makes one attempt.
        retriable: whether an error leads to another attempt.
        options: keyword arguments of `AsyncRetrying`.

    Raises:
        Exception: the error of the first attempt that is not retried.
    """
    try:
        await attempt()
    except Exception as error:
        if not retriable(error):
            raise
        failed: Exception | None = error
    else:
        return  # tenacity's objects for one attempt cost more than the rest of publishing
    async for trial in AsyncRetrying(retry=retry_if_exception(retriable), reraise=True, **options):
        with trial:
            if failed is not None:  # tenacity counts the attempt above as its first
                first, failed = failed, None
                raise first
            await attempt()
