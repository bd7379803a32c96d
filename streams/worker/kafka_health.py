"""What the worker knows of Kafka refusing it: readiness, and one log line that says what has to be mended.

The clients connect again and again by themselves, but log what they met in their own words, and Faust's consumer tells
nobody else. So whenever one of them reports an error, Kafka is asked why, until it answers as it should.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from streams.broker.connection import UnusableCertificate
from streams.broker.diagnosis import Diagnosis

__all__ = ["KafkaHealth"]

logger = logging.getLogger(__name__)

_CLIENTS = "aiokafka"


class KafkaHealth(logging.Handler):
    """Listens to the clients' errors, and asks.

    Args:
        diagnose: why no broker can be talked to; None where one can.
        interval_seconds: between two questions, at least.

    Attributes:
        reason: why not, or None while all is well.
    """

    def __init__(
        self, diagnose: Callable[[], Awaitable[Diagnosis | None]], *, interval_seconds: float = 5.0
    ) -> None:
        super().__init__(logging.ERROR)
        self._diagnose = diagnose
        self._interval_seconds = interval_seconds
        self._occurred = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: str | None = None
        self.reason: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """A client has reported an error; the consumer's does so from a thread of its own."""
        del record
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.occurred)

    def occurred(self) -> None:
        """Something failed; it may be Kafka that refuses."""
        self._occurred.set()

    async def watch(self) -> None:
        """Ask whenever there is trouble, for ever."""
        self._loop = asyncio.get_running_loop()
        logging.getLogger(_CLIENTS).addHandler(self)
        try:
            while True:
                await self._occurred.wait()
                self._occurred.clear()
                if await self._ask():
                    self._occurred.set()
                # Also where all is well: a client may report errors by the second that are none of the connection's.
                await asyncio.sleep(self._interval_seconds)
        finally:
            logging.getLogger(_CLIENTS).removeHandler(self)

    async def _ask(self) -> bool:
        """Whether there is trouble still."""
        try:
            diagnosis = await self._diagnose()
        except UnusableCertificate as error:
            self._set_state(str(error), mend=True)
            return True
        if diagnosis is None:
            if self._told is not None:
                logger.info("Kafka lets us in again")
            self.reason = self._told = None
            return False
        self._set_state(str(diagnosis), mend=diagnosis.refused)
        return True

    def _set_state(self, reason: str, *, mend: bool) -> None:
        if mend and reason != self._told:
            # That it is down is told by whoever wants to publish; this is for an operator to mend.
            logger.error("%s", reason)
            self._told = reason
        self.reason = reason
