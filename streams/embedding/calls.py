"""Calls to a hosted provider: rate limit, timeout, retries; and what its HTTP status means."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Final, TypeVar

from tenacity import RetryCallState, stop_after_attempt, wait_exponential, wait_random

from streams.core.embedding_errors import (
    EmbeddingError,
    KeyRejected,
    ProviderMisconfigured,
    ProviderUnavailable,
    TextRejected,
)
from streams.rate_limiter import RateLimiter
from streams.retries import retry

__all__ = ["Calls", "failure"]

# A provider that asks for a longer wait is reported as unavailable at once: what then happens to the event is the
# caller's decision.
_MAX_RETRY_AFTER_SECONDS: Final = 60.0
_RETRIED: Final = frozenset({None, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_KEY_REJECTED: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_TEXT_REJECTED: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        498,  # Cohere: blocked input
    }
)
_BUSY: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})

T = TypeVar("T")


class Calls:
    """Makes calls, with at most ``retries`` retries each, on connection errors, timeouts, 429 and 503.

    A ``Retry-After`` delays all calls, not only the one that received it.

    Args:
        timeout_seconds: of one attempt, until the response is complete.
        calls_per_minute: attempts, evenly spaced; None: no limit.
        retries: after the first attempt.
        base_seconds: first back-off; doubles, with jitter.
        max_seconds: longest back-off.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        calls_per_minute: float | None = None,
        retries: int = 3,
        base_seconds: float = 1.0,
        max_seconds: float = 10.0,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._limiter = RateLimiter(calls_per_minute / 60, time.monotonic) if calls_per_minute else None
        self._stop = stop_after_attempt(1 + retries)
        # Without it, all workers that were rejected together would come back together.
        self._jitter = wait_random(0, base_seconds / 4)
        self._back_off = wait_exponential(multiplier=base_seconds, max=max_seconds) + self._jitter
        self._resume_at = time.monotonic()

    async def call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the first attempt that succeeds.

        Args:
            attempt: makes one attempt; raises only `EmbeddingError`.

        Raises:
            EmbeddingError: the last attempt's error.
        """
        results: list[T] = []

        async def once() -> None:
            results.append(await self._attempt(attempt))

        await retry(once, retriable=_is_retried, stop=self._stop, wait=self._wait)
        return results[0]

    async def _attempt(self, attempt: Callable[[], Awaitable[T]]) -> T:
        while (pause := self._resume_at - time.monotonic()) > 0:  # noqa: ASYNC110  # another response may extend it
            await asyncio.sleep(pause)
        if self._limiter is not None:
            await asyncio.sleep(self._limiter.delay())
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await attempt()
        except TimeoutError:
            raise ProviderUnavailable(f"no response within {self._timeout_seconds:g} s") from None
        except ProviderUnavailable as error:
            if _is_retried(error) and error.retry_after_seconds is not None:
                self._resume_at = max(self._resume_at, time.monotonic() + error.retry_after_seconds)
            raise

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, ProviderUnavailable) and error.retry_after_seconds is not None:
            return error.retry_after_seconds + self._jitter(state)
        return self._back_off(state)


def failure(status: int, retry_after: str | None) -> EmbeddingError:
    """The error that a response's status means.

    Args:
        status: not a success.
        retry_after: the header ``Retry-After``.
    """
    what = f"HTTP {status}"
    if status in _KEY_REJECTED:
        return KeyRejected(f"the provider rejects the API key ({what})")
    if status in _TEXT_REJECTED:
        return TextRejected(f"the provider rejects the text ({what})")
    if status in _BUSY or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ProviderUnavailable(
            f"the provider fails ({what})", status=status, retry_after_seconds=_seconds(retry_after)
        )
    return ProviderMisconfigured(f"the provider does not know this address or model ({what})")


def _is_retried(error: BaseException) -> bool:
    return (
        isinstance(error, ProviderUnavailable)
        and error.status in _RETRIED
        and (error.retry_after_seconds or 0) <= _MAX_RETRY_AFTER_SECONDS
    )


def _seconds(retry_after: str | None) -> float | None:
    """The header's value, which is a number of seconds or a date; None if it is neither."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            date = parsedate_to_datetime(retry_after)
        except ValueError:
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
    # A date in the past means now; NaN and infinity mean nothing.
    return max(seconds, 0.0) if abs(seconds) < float("inf") else None
