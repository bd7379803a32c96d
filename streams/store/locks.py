"""Takes locks in short attempts with pauses, so that nobody waits long, and reports which sessions block them."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import asyncpg

from streams.store.catalog import Connection

__all__ = ["LOCK_TIMEOUT", "STATEMENT_SECONDS", "LockRetries", "LockUnavailable", "hold_advisory_lock"]

T = TypeVar("T")

#: While a statement waits for a table lock, all later users of the table queue behind it.
LOCK_TIMEOUT: Final = "300ms"
#: Maximum duration of a transaction, in seconds: it holds its first lock while it waits for the others.
STATEMENT_SECONDS: Final = 0.7
#: How long to retry, in seconds.
RETRY_SECONDS = 60.0
ADVISORY_WAIT_SECONDS = 10.0

_ADVISORY_LOCK: Final = 0x616E6162  # "anab"
_FIRST_PAUSE: Final = 0.2
_MAX_PAUSE: Final = 2.0
_FIRST_CHECK: Final = 0.1
_MAX_CHECK_INTERVAL: Final = 1.0
# How long a statement without a time limit has to wait until the sessions that block it are reported.
_REPORT_SECONDS: Final = 10.0


class LockUnavailable(Exception):
    """Another session holds a lock for too long; the message says which one, and what to do."""


async def hold_advisory_lock(connection: Connection) -> None:
    """Take the session lock that prevents two concurrent migrations.

    Any login of the database can take this lock too, so do not wait for it indefinitely.

    Raises:
        LockUnavailable: another session holds it.
    """
    end = time.monotonic() + ADVISORY_WAIT_SECONDS
    while not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _ADVISORY_LOCK):
        if time.monotonic() > end:
            holders = await connection.fetch(_ADVISORY_HOLDERS, _ADVISORY_LOCK)
            raise LockUnavailable(
                f"another session holds the lock of `anabranch migrate` (advisory lock {_ADVISORY_LOCK}):"
                f" {_describe_sessions(holders)}. Wait for it, or end it: SELECT pg_terminate_backend(pid);"
            )
        await asyncio.sleep(0.1)


class LockRetries:
    """Retries work until its locks are free, and records which sessions block it.

    Args:
        connection: the connection on which the work runs.
        connect: opens a second connection of the same role; used once an attempt takes long.
    """

    def __init__(
        self, connection: Connection, connect: Callable[[], Awaitable["asyncpg.Connection[asyncpg.Record]"]]
    ) -> None:
        self._connection = connection
        self._connect = connect
        self._observer: asyncpg.Connection[asyncpg.Record] | None = None
        self._unobservable = False

    async def close(self) -> None:
        """Close the second connection."""
        if self._observer is not None:
            with suppress(TimeoutError):
                await self._observer.close(timeout=5)

    async def run(
        self,
        work: Callable[[float], Awaitable[T]],
        *,
        limited: bool = True,
        report_wait: Callable[[str], None] | None = None,
    ) -> T:
        """Run work that fails if a lock does not become free soon.

        Args:
            work: called with its time limit in seconds, including waits for locks; it raises QueryCanceledError when
                the limit is exceeded. The limit grows only if no session blocked the work.
            limited: whether the work keeps that limit; else another session must have cancelled it.
            report_wait: called once with the sessions that block the work, if it waits long.

        Raises:
            LockUnavailable: a lock was not free in any attempt.
            QueryCanceledError: another session cancelled the work.
        """
        started = time.monotonic()
        end = started + RETRY_SECONDS
        pause = _FIRST_PAUSE
        limit = STATEMENT_SECONDS
        while True:
            observed = self._observer is not None or self._unobservable
            blockers: set[int] = set()
            sessions: dict[int, str] = {}
            began = time.monotonic()
            try:
                return await self._run_observed(lambda: work(limit), blockers, sessions, report_wait)  # noqa: B023  # called in this iteration
            except (
                asyncpg.LockNotAvailableError,
                asyncpg.DeadlockDetectedError,
                asyncpg.QueryCanceledError,
            ) as error:
                if isinstance(error, asyncpg.QueryCanceledError):
                    if not limited or time.monotonic() - began < limit:
                        raise  # cancelled by another session
                    if observed and not blockers:
                        limit *= 2
                        continue
                if time.monotonic() > end and (observed or blockers):
                    raise LockUnavailable(
                        f"a table stayed locked by another transaction for {time.monotonic() - started:.0f} seconds:"
                        f" {'; '.join(sessions.values()) or 'it has just ended'}. Completed steps are kept. Run the"
                        " same command again when that transaction has ended, or end it:"
                        " SELECT pg_terminate_backend(pid);"
                    ) from error
            # Jitter, so that the attempts do not coincide with a back end's periodic writes.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311  # not for cryptography
            pause = min(2 * pause, _MAX_PAUSE)

    async def _run_observed(
        self,
        work: Callable[[], Awaitable[T]],
        blockers: set[int],
        sessions: dict[int, str],
        report_wait: Callable[[str], None] | None,
    ) -> T:
        stop = asyncio.Event()
        observer_task = asyncio.create_task(self._observe(stop, blockers, sessions, report_wait))
        try:
            return await work()
        finally:
            stop.set()
            await observer_task

    async def _observe(
        self,
        stop: asyncio.Event,
        blockers: set[int],
        sessions: dict[int, str],
        report_wait: Callable[[str], None] | None,
    ) -> None:
        """Collect the sessions that block the connection's statement."""
        pause = _FIRST_CHECK
        blocked_since: float | None = None
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
            if stop.is_set() or self._unobservable:
                return
            try:
                if self._observer is None:
                    self._observer = await self._connect()
                rows = await self._observer.fetch(_BLOCKERS, self._connection.get_server_pid())
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                self._unobservable = True  # for example a role with CONNECTION LIMIT 1
                return
            blockers.update(row["pid"] for row in rows)
            sessions.update({row["pid"]: _describe_sessions([row]) for row in rows})
            if not rows:
                blocked_since = None
            elif blocked_since is None:
                blocked_since = time.monotonic()
            elif report_wait is not None and time.monotonic() - blocked_since >= _REPORT_SECONDS:
                report_wait(_describe_sessions(rows))
                report_wait = None
            pause = min(1.2 * pause, _MAX_CHECK_INTERVAL)


def _describe_sessions(sessions: Sequence[asyncpg.Record]) -> str:
    """Describe sessions; only superusers see all details of other roles' sessions."""
    return "; ".join(map(_describe_session, sessions)) or "it has just ended"


def _describe_session(session: asyncpg.Record) -> str:
    if session["pid"] == 0:
        return "a prepared transaction (pg_prepared_xacts)"
    since = f" since {session['since']:%Y-%m-%d %H:%M:%S %Z}" if session["since"] is not None else ""
    return (
        f"process {session['pid']}, role {session['role'] or 'unknown'},"
        f" application {session['application'] or 'unnamed'}, {session['state'] or 'state unknown'}{since}"
    )


_SESSION: Final = """
    a.pid, a.usename::text AS role, a.application_name AS application, a.state,
    coalesce(a.xact_start, a.backend_start) AS since
"""

_ADVISORY_HOLDERS: Final = f"""
    SELECT {_SESSION}
    FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.classid = ($1::bigint >> 32)::oid AND l.objid = ($1::bigint & 4294967295)::oid
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""  # noqa: S608  # constant names

# A prepared transaction does not belong to a process.
_BLOCKERS: Final = """
    SELECT b.blocker AS pid, a.usename::text AS role, a.application_name AS application, a.state,
           coalesce(a.xact_start, a.backend_start) AS since
    FROM unnest(pg_blocking_pids($1)) AS b (blocker) LEFT JOIN pg_stat_activity a ON a.pid = b.blocker
"""
