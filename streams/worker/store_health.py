"""What the worker knows of the store's health: readiness, one log line a change, and who may start.

Events report what they met; the probe says what is true. A state is told once when it changes, however many events
meet it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Protocol

from streams.core.errors import StoreMisconfigured, TransientError

__all__ = ["StartupRefused", "StoreHealth", "StoreState", "Verdict"]

logger = logging.getLogger(__name__)


class StoreState(Enum):
    """As the readiness page tells it."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    MISCONFIGURED = "misconfigured"


class StartupRefused(Exception):  # a verdict, not a fault
    """Working would not be safe, or cannot begin with these settings; the worker must end."""


class Verdict(Protocol):
    """One finding of the preflight."""

    @property
    def level(self) -> str: ...

    @property
    def detail(self) -> str: ...

    @property
    def remedy(self) -> str: ...


class StoreHealth:
    """The state of the store, kept true by `watch`.

    Args:
        probe: asks for a sign of life; raises TransientError.
        inspect: the preflight's findings, on a connection like those that search; raises TransientError.
        interval_seconds: between two probes; readiness follows an outage within about two of them.
        inspect_every: a full preflight every so many probes, so that a role that became unsafe is noticed.
        silence_seconds: a misconfiguration that the preflight does not see counts for so long after an event met it.
    """

    def __init__(
        self,
        *,
        probe: Callable[[], Awaitable[None]],
        inspect: Callable[[], Awaitable[Sequence[Verdict]]],
        interval_seconds: float = 1.0,
        inspect_every: int = 60,
        quiet_period_seconds: float = 30.0,
    ) -> None:
        self._probe = probe
        self._inspect = inspect
        self._interval_seconds = interval_seconds
        self._inspect_every = inspect_every
        self._quiet_period_seconds = quiet_period_seconds
        self._admitted = asyncio.Event()
        # When an event last met a misconfiguration that the preflight did not see (loop time, seconds).
        self._reported_at: float | None = None
        self._successes = 0
        self.state = StoreState.UNKNOWN
        self.reason = "no probe yet"

    @property
    def ready(self) -> bool:
        return self.state is StoreState.UP and self._admitted.is_set()

    async def admitted(self) -> None:
        """Wait until a preflight has passed: before that nobody knows whether searching is safe."""
        await self._admitted.wait()

    def report(self, fault: TransientError) -> None:
        """An event met a fault. Only misconfiguration is taken at its word: a probe cannot see a missing table."""
        if isinstance(fault, StoreMisconfigured):
            self._reported_at = asyncio.get_running_loop().time()
            self._set_state(StoreState.MISCONFIGURED, str(fault))

    def succeeded(self) -> None:
        """A search worked: whatever was misconfigured is mended."""
        self._reported_at = None
        self._successes += 1
        if self.state is StoreState.MISCONFIGURED:
            self._set_state(StoreState.UP, "a search succeeded")

    async def answers(self) -> bool:
        """Ask for a sign of life now; an event that timed out may have met a store that is frozen or locked."""
        try:
            await self._probe()
        except TransientError:
            return False
        return True

    async def watch(self) -> None:
        """Probe for ever.

        Raises:
            Refused: the preflight says that working on this store is not safe.
        """
        probes = 0
        while True:
            due = not self._admitted.is_set() or probes % self._inspect_every == 0
            # A sign of life mends nothing: behind an outage an index may still be missing.
            await self.look(thoroughly=due or self.state is not StoreState.UP)
            probes += 1
            await asyncio.sleep(self._interval_seconds)

    async def look(self, *, thoroughly: bool = True) -> None:
        """Probe once, or run the whole preflight.

        Raises:
            Refused: the preflight says that working on this store is not safe.
        """
        successes = self._successes
        try:
            if thoroughly:
                await self._preflight()
            else:
                await self._probe()
                self._set_state(StoreState.UP, "it answers")
        except StoreMisconfigured as fault:
            if self._successes == successes:  # else it was mended while we looked
                self._set_state(StoreState.MISCONFIGURED, str(fault))
        except TransientError as fault:
            self._set_state(StoreState.DOWN, str(fault))
        except StartupRefused:
            raise
        except Exception as defect:  # noqa: BLE001  # watching must not end: readiness would stay what it was
            self._set_state(StoreState.DOWN, f"unforeseen {type(defect).__name__}")

    async def _preflight(self) -> None:
        findings = await self._inspect()
        refused = [finding for finding in findings if finding.level == "refused"]
        if refused:
            self._admitted.clear()
            raise StartupRefused("; ".join(f"{finding.detail} ({finding.remedy})" for finding in refused))
        unready = [finding for finding in findings if finding.level == "unready"]
        if unready:
            raise StoreMisconfigured("; ".join(f"{finding.detail}: {finding.remedy}" for finding in unready))
        if not self._admitted.is_set():
            for finding in findings:
                if finding.level == "warning":
                    logger.warning("preflight: %s (%s)", finding.detail, finding.remedy)
        self._admitted.set()
        if self._reported_at is not None:
            # The preflight does not see what events met: they retry, so silence is the only other sign of mending.
            if asyncio.get_running_loop().time() - self._reported_at < self._quiet_period_seconds:
                return
            self._reported_at = None
        self._set_state(StoreState.UP, "preflight passed")

    def _set_state(self, state: StoreState, reason: str) -> None:
        if state is not self.state:
            level = logging.INFO if state is StoreState.UP else logging.ERROR
            logger.log(level, "store is %s: %s", state.value, reason)
        self.state, self.reason = state, reason
