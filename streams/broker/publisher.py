"""Publishing: a record is published when the broker has acknowledged it on every in-sync replica, and not before."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
)
from mode import Service
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from streams.broker.resets import patch_connection_resets
from streams.core.errors import ResultTooLarge

__all__ = ["Headers", "Publisher"]

Headers = Sequence[tuple[str, bytes]]

_TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
# The broker decides what is too large; this only has to be above anything that a topic may take.
_MAX_REQUEST_BYTES = 64 * 1024 * 1024
_MAX_BATCH_BYTES = 16 * 1024
# A few milliseconds batch well; they are paid by every event.
_LINGER_MS = 2
_REQUEST_TIMEOUT_MS = 15_000


class Publisher(Service):
    """One producer. As a service it starts when a broker can be reached, however long that takes.

    Args:
        options: keyword arguments of an aiokafka client.
        on_fault: told of every attempt that failed and is repeated.
        on_success: told of every attempt that succeeded.
        wait_seconds: least and most seconds between two attempts; grows exponentially, with jitter.
    """

    logger = logging.getLogger("mode")  # each step of a service's life

    def __init__(
        self,
        options: dict[str, Any],
        *,
        on_fault: Callable[[BaseException], None],
        on_success: Callable[[], None],
        wait_seconds: tuple[float, float],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._options = options
        self._on_fault = on_fault
        self._on_success = on_success
        self._least_wait, self._most_wait = wait_seconds
        self._producer: AIOKafkaProducer | None = None

    async def on_start(self) -> None:
        """Connect, trying until it works."""
        await self._persist(self._connect)

    async def on_stop(self) -> None:
        """Close the producer. Whoever awaited a `publish` has its answer already."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.stop()

    async def publish(self, topic: str, key: bytes | None, value: bytes, headers: Headers) -> None:
        """Publish one record; returns when the broker has acknowledged it.

        A broker that cannot be reached, or refuses for a while, is tried for ever.

        Raises:
            ResultTooLarge: the topic does not take a record of this size.
        """

        async def send() -> None:
            if self._producer is None:
                raise KafkaError("the producer is not started")
            await self._producer.send_and_wait(topic, value=value, key=key, headers=list(headers))

        try:
            await self._persist(send)
        except _TOO_LARGE as error:
            raise ResultTooLarge("the broker does not take a record of this size") from error

    async def _connect(self) -> None:
        patch_connection_resets()
        producer = AIOKafkaProducer(
            **self._options,
            # All in-sync replicas have it, or it is not published. No idempotence: a repeat is harmless (the result's
            # id is the event's), and a sequence that is broken for good would need the process to be restarted.
            acks="all",
            linger_ms=_LINGER_MS,
            # A topic bounds batches, not records: below this bound, records that fit alone would be refused together.
            max_batch_size=_MAX_BATCH_BYTES,
            max_request_size=_MAX_REQUEST_BYTES,
            request_timeout_ms=_REQUEST_TIMEOUT_MS,
            client_id="anabranch",
        )
        try:
            await producer.start()
        except BaseException:
            await producer.stop()
            raise
        self._producer = producer

    async def _persist(self, attempt: Callable[[], Any]) -> None:
        def failed(state: RetryCallState) -> None:
            if state.outcome is not None and (error := state.outcome.exception()) is not None:
                self._on_fault(error)

        async for trial in AsyncRetrying(
            retry=retry_if_exception(_worth_repeating),
            wait=wait_random_exponential(multiplier=self._least_wait, max=self._most_wait),
            before_sleep=failed,
            sleep=asyncio.sleep,
            reraise=True,
        ):
            with trial:
                await attempt()
        self._on_success()


def _worth_repeating(error: BaseException) -> bool:
    return isinstance(error, (KafkaError, OSError, TimeoutError)) and not isinstance(error, _TOO_LARGE)
