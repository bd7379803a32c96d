"""Ends a worker in time, whatever is broken: one deadline for all steps, and a forced exit as the last resort.

Faust and aiokafka have no time limits: the final commit is retried as long as the broker is unreachable, and leaving a
group waits for the broker's answer.
"""

import logging
import os
import sys
import threading
from time import monotonic

__all__ = ["ShutdownDeadline"]

logger = logging.getLogger(__name__)

# The documented limit is the grace period plus 5 s. Steps are aborted this long after the grace period, but each has a
# minimum time. The cleanup after them takes another second, longer on a busy machine.
_STEPS_SECONDS = 1.0
_LAST_RESORT_SECONDS = 4.0
_SHORTEST_STEP_SECONDS = 0.3


class ShutdownDeadline:
    """The deadline for stopping this process.

    Args:
        grace_seconds: time for events in flight to finish after shutdown begins.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._began: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._began is not None

    def begin(self) -> None:
        """Start the shutdown: the deadline applies from now on."""
        if self._began is not None:
            return
        logger.info("stopping", extra={"grace_seconds": self._grace_seconds})
        self._began = monotonic()
        last_resort = threading.Timer(self._grace_seconds + _LAST_RESORT_SECONDS, self._force_exit)
        last_resort.daemon = True
        last_resort.start()

    def seconds_left(self) -> float:
        """Time limit of the next step; the full time if the shutdown has not started."""
        total = self._grace_seconds + _STEPS_SECONDS
        if self._began is None:
            return total
        return max(_SHORTEST_STEP_SECONDS, self._began + total - monotonic())

    def _force_exit(self) -> None:
        # From a thread, because the event loop may hang. Nothing is lost: uncommitted events are read again.
        logger.critical(
            "shutdown took %.1f s longer than the grace period; forcing exit", _LAST_RESORT_SECONDS
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
