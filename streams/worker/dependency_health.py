"""Tracks the health of what events need: the store for a worker, the provider for an embedding stage.

For readiness, for one log line per change, and to decide when events may start.

Events report the errors they meet; the probe verifies the state. Each state is logged once when it changes, however
many events meet it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Protocol

from streams.core.errors import StoreMisconfigured, TransientError

__all__ = ["DependencyHealth", "DependencyState", "PreflightFinding", "StartupRefused"]

logger = logging.getLogger(__name__)


class DependencyState(Enum):
    """The state as shown on the readiness page."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    MISCONFIGURED = "misconfigured"


class StartupRefused(Exception):  # a decision, not an error
    """Running would be unsafe, or is impossible with these settings; a starting worker must exit."""


class PreflightFinding(Protocol):
    """One finding of the preflight."""

    @property
    def level(self) -> str: ...

    @property
    def detail(self) -> str: ...

    @property
    def remedy(self) -> str: ...


class DependencyHealth:
    """The state of the store or the provider, kept up to date by `watch`.

    Args:
        name: what it is, for the log.
        probe: pings it; raises TransientError.
        inspect: returns the preflight's findings, on a connection like those for searches; raises TransientError, or
            StartupRefused if nothing has passed yet.
        interval_seconds: time between two probes; readiness follows an outage within about two of them.
        inspect_every: number of probes between full preflights, which notice a role that has become unsafe.
        quiet_period_seconds: how long a misconfiguration reported by an event counts if the preflight does not see it.
    """

    def __init__(
        self,
        *,
        name: str = "store",
        probe: Callable[[], Awaitable[None]],
        inspect: Callable[[], Awaitable[Sequence[PreflightFinding]]],
        interval_seconds: float = 1.0,
        inspect_every: int = 60,
        quiet_period_seconds: float = 30.0,
    ) -> None:
        self._name = name
        self._probe = probe
        self._inspect = inspect
        self._interval_seconds = interval_seconds
        self._inspect_every = inspect_every
        self._quiet_period_seconds = quiet_period_seconds
        self._preflight_passed = asyncio.Event()
        self._withdrawn = False  # whether admission is withdrawn
        # When an event last reported a misconfiguration that the preflight did not see (loop time, seconds).
        self._reported_at: float | None = None
        self._successes = 0
        self.state = DependencyState.UNKNOWN
        self.reason = "no probe yet"

    @property
    def ready(self) -> bool:
        return self.state is DependencyState.UP and self._preflight_passed.is_set()

    async def wait_admitted(self) -> None:
        """Wait until a preflight has passed: before that, searching may be unsafe."""
        await self._preflight_passed.wait()

    def report(self, fault: TransientError) -> None:
        """Report an event's error. Only misconfiguration is believed at once: a probe cannot see a missing table."""
        if fault.needs_fix:
            self._reported_at = asyncio.get_running_loop().time()
            self._set_state(DependencyState.MISCONFIGURED, str(fault))

    def report_success(self) -> None:
        """Report an event's success: any misconfiguration has been fixed."""
        self._reported_at = None
        self._successes += 1
        # If admission is withdrawn, a successful search had started before, or found no rows.
        if self.state is DependencyState.MISCONFIGURED and not self._withdrawn:
            self._set_state(DependencyState.UP, "an event succeeded")

    async def ping(self) -> bool:
        """Ping now: after a timeout, the store may be frozen or locked."""
        try:
            await self._probe()
        except TransientError:
            return False
        return True

    async def watch(self) -> None:
        """Probe indefinitely.

        Raises:
            StartupRefused: the first preflight finds that it is not safe to use.
        """
        probes = 0
        while True:
            due = not self._preflight_passed.is_set() or probes % self._inspect_every == 0
            # A successful ping is not enough: after an outage, an index may still be missing.
            await self.check(full=due or self.state is not DependencyState.UP)
            probes += 1
            await asyncio.sleep(self._interval_seconds)

    async def check(self, *, full: bool = True) -> None:
        """Probe once, or run the whole preflight.

        Raises:
            StartupRefused: the first preflight finds that it is not safe to use.
        """
        successes = self._successes
        try:
            if full:
                await self._preflight()
            else:
                await self._probe()
                if self._reported_at is None:  # no event has met meanwhile what a ping cannot see
                    self._set_state(DependencyState.UP, f"the {self._name} answers")
        except TransientError as fault:
            if not fault.needs_fix:
                self._set_state(DependencyState.DOWN, str(fault))
            elif (
                self._successes == successes or self._withdrawn
            ):  # otherwise it was fixed during the preflight
                self._set_state(DependencyState.MISCONFIGURED, str(fault))
        except StartupRefused:
            raise
        except Exception as defect:  # noqa: BLE001  # watching must not stop: readiness would be stale
            self._set_state(DependencyState.DOWN, f"unexpected {type(defect).__name__}")

    async def _preflight(self) -> None:
        findings = await self._inspect()
        refused = [finding for finding in findings if finding.level == "refused"]
        if refused:
            reason = "; ".join(f"{finding.detail} ({finding.remedy})" for finding in refused)
            if not (self._preflight_passed.is_set() or self._withdrawn):
                raise StartupRefused(reason)
            # It was safe with these settings, so the store has changed, and a restart would not help.
            self._preflight_passed.clear()
            self._withdrawn = True
            raise StoreMisconfigured(reason)
        unready = [finding for finding in findings if finding.level == "unready"]
        if unready:
            raise StoreMisconfigured("; ".join(f"{finding.detail}: {finding.remedy}" for finding in unready))
        if not self._preflight_passed.is_set():
            for finding in findings:
                if finding.level == "warning":
                    logger.warning("preflight: %s (%s)", finding.detail, finding.remedy)
        self._preflight_passed.set()
        self._withdrawn = False
        if self._reported_at is not None:
            # The preflight does not see the events' errors. Events retry, so a quiet period means that it is fixed.
            if asyncio.get_running_loop().time() - self._reported_at < self._quiet_period_seconds:
                return
            self._reported_at = None
        self._set_state(DependencyState.UP, "preflight passed")

    def _set_state(self, state: DependencyState, reason: str) -> None:
        if state is not self.state:
            level = logging.INFO if state is DependencyState.UP else logging.ERROR
            logger.log(level, "%s is %s: %s", self._name, state.value, reason)
        self.state, self.reason = state, reason
