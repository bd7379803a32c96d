"""Tracks whether Kafka rejects the worker: for readiness, and to log one line that says what to fix.

The clients reconnect automatically, but their log messages do not name the cause, and Faust's consumer does not report
errors in any other way. So when a client logs an error, Kafka is probed for the reason until it answers correctly.
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
    """Watches the clients' errors, and probes Kafka.

    Args:
        diagnose: returns why no broker can be used; None if one can.
        interval_seconds: minimum time between two probes.

    Attributes:
        reason: why Kafka rejects the worker, or None if it does not.
    """

    def __init__(
        self, diagnose: Callable[[], Awaitable[Diagnosis | None]], *, interval_seconds: float = 5.0
    ) -> None:
        super().__init__(logging.ERROR)
        self._diagnose = diagnose
        self._interval_seconds = interval_seconds
        self._error_reported = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._logged_reason: str | None = None
        self.reason: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Called for each error that a client logs; the consumer does so from its own thread."""
        del record
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.report_error)

    def report_error(self) -> None:
        """Report a failure, which may mean that Kafka rejects the worker."""
        self._error_reported.set()

    def report_unreachable(self, reason: str) -> None:
        """Report that no broker can be used at the moment."""
        self.reason = reason
        self.report_error()

    async def watch(self) -> None:
        """Probe after each failure, indefinitely."""
        self._loop = asyncio.get_running_loop()
        logging.getLogger(_CLIENTS).addHandler(self)
        try:
            while True:
                await self._error_reported.wait()
                self._error_reported.clear()
                if await self._check():
                    self._error_reported.set()
                # Also after a successful probe: a client may log errors every second that have other causes.
                await asyncio.sleep(self._interval_seconds)
        finally:
            logging.getLogger(_CLIENTS).removeHandler(self)

    async def _check(self) -> bool:
        """Probe once; return whether the problem persists."""
        try:
            diagnosis = await self._diagnose()
        except UnusableCertificate as error:
            self._set_state(str(error), needs_fix=True)
            return True
        if diagnosis is None:
            if self._logged_reason is not None:
                logger.info("Kafka connection restored")
            self.reason = self._logged_reason = None
            return False
        self._set_state(str(diagnosis), needs_fix=diagnosis.refused)
        return True

    def _set_state(self, reason: str, *, needs_fix: bool) -> None:
        if needs_fix and reason != self._logged_reason:
            # The publisher logs that Kafka is down; this error requires an operator.
            logger.error("%s", reason)
            self._logged_reason = reason
        self.reason = reason
