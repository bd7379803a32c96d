"""Replies: sends a result or an error to the topic and partition that an event's headers name.

Belongs here: whether an event gets a reply, and what it consists of. Does not belong here: what happens to a result
that cannot be sent as a reply, which the stage decides. The headers are in `streams.core.replies`.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import datetime
from time import monotonic
from typing import Protocol

from prometheus_client import Counter

from streams.broker.opening import Opening
from streams.broker.publisher import CheckTarget
from streams.core.errors import ResultTooLarge, TerminalError
from streams.core.headers import Headers, result_headers
from streams.core.replies import ReplyRefused, ReplyTarget, missing_part, read_reply_target
from streams.core.warning_codes import WarningCode
from streams.telemetry.metrics import REPLY_ANSWERED, REPLY_DEAD_LETTERED
from streams.wire.deadletter import reply_error_headers, without_error_headers
from streams.wire.replay_headers import replay_source

__all__ = ["PublishReply", "Replies", "ReplyTopics"]

# How long a topic counts as missing before the broker is asked again.
_MISSING_SECONDS = 3.0
_CLOSE_SECONDS = 5.0


class PublishReply(Protocol):
    """See `Publisher.publish_reply`."""

    async def __call__(
        self,
        target: ReplyTarget,
        key: bytes | None,
        value: bytes,
        headers: Headers,
        *,
        check: CheckTarget,
        expires_at: datetime | None,
    ) -> None: ...


class ReplyTopics:
    """Which reply topics exist. The broker is asked only when a reply needs it.

    Args:
        fetch: returns the number of partitions of each reply topic that exists; None: the broker does not report it.
    """

    def __init__(self, fetch: Callable[[], Awaitable[Mapping[str, int | None]]]) -> None:
        self._fetch = fetch
        self._refreshing = Opening(self._refresh)
        self._existing: Mapping[str, int | None] = {}
        self._fetched_at = -math.inf

    async def check(self, target: ReplyTarget, *, again: bool) -> None:
        """See `CheckTarget`."""
        if not again and missing_part(target, self._existing) is None:
            return
        if again or self._fetched_at < monotonic() - _MISSING_SECONDS:
            await self._refreshing.result()
        missing = missing_part(target, self._existing)
        if missing is not None:
            raise ReplyRefused(missing)

    async def close(self) -> None:
        """Wait for the broker's answer, if one is awaited."""
        await self._refreshing.stop(_CLOSE_SECONDS)

    async def _refresh(self) -> None:
        self._existing = await self._fetch()
        self._fetched_at = monotonic()


class Replies:
    """Sends replies, and counts them.

    Args:
        publish: writes a record; returns when the broker has acknowledged it.
        allowed: the topics that may be replied to.
        topics: which of them exist.
        count: of replies, by outcome.
    """

    def __init__(
        self,
        publish: PublishReply,
        *,
        allowed: Collection[str],
        topics: ReplyTopics,
        count: Counter,
    ) -> None:
        self._publish = publish
        self._allowed = allowed
        self._topics = topics
        self._count = count

    async def answer(
        self, key: bytes | None, payload: bytes, headers: Headers, *, expires_at: datetime | None
    ) -> bool:
        """Send a result to the caller, if there is one.

        Args:
            key: the event's.
            payload: the encoded result.
            headers: the event's.
            expires_at: until when the caller waits; None: indefinitely.

        Returns:
            Whether the event's sender wanted a reply, and the broker has acknowledged it.

        Raises:
            ReplyRefused: it wanted one, and the reply cannot be sent. If the result is too large, the caller gets an
                error in its place.
        """
        try:
            target = self._target(headers)
            if target is None:
                return False
            try:
                own = without_error_headers(result_headers(headers))
                await self._send(target, key, payload, own, expires_at)
            except ResultTooLarge as error:
                await self._send_error(target, key, headers, error, expires_at)
                raise ReplyRefused(WarningCode.REPLY_TOO_LARGE) from None
        except ReplyRefused as refused:
            self._refused(refused)
            raise
        self._count.labels(REPLY_ANSWERED).inc()
        return True

    async def fail(
        self, key: bytes | None, headers: Headers, error: TerminalError, *, expires_at: datetime | None
    ) -> None:
        """Send the reason for a dead letter to the caller, if there is one and the reply can be sent.

        Args:
            key: the event's.
            headers: the event's.
            error: the reason.
            expires_at: until when the caller waits; None: indefinitely, or unknown.
        """
        try:
            target = self._target(headers)
            if target is None:
                return
            await self._send_error(target, key, headers, error, expires_at)
        except ReplyRefused as refused:
            self._refused(refused)
        else:
            self._count.labels(REPLY_DEAD_LETTERED).inc()

    async def _send_error(
        self,
        target: ReplyTarget,
        key: bytes | None,
        headers: Headers,
        error: TerminalError,
        expires_at: datetime | None,
    ) -> None:
        own = without_error_headers(result_headers(headers))
        try:
            await self._send(target, key, b"", [*own, *reply_error_headers(error)], expires_at)
        except ResultTooLarge:
            raise ReplyRefused(WarningCode.REPLY_TOO_LARGE) from None

    async def _send(
        self,
        target: ReplyTarget,
        key: bytes | None,
        value: bytes,
        headers: Headers,
        expires_at: datetime | None,
    ) -> None:
        await self._publish(target, key, value, headers, check=self._topics.check, expires_at=expires_at)

    def _refused(self, refused: ReplyRefused) -> None:
        self._count.labels(refused.code).inc()

    def _target(self, headers: Headers) -> ReplyTarget | None:
        if replay_source(headers) is not None:
            return None  # the caller has stopped waiting long ago
        target = read_reply_target(headers)
        if target is not None and target.topic not in self._allowed:
            raise ReplyRefused(WarningCode.REPLY_TOPIC_NOT_ALLOWED)
        return target
