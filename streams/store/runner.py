"""Runs a migration's statements or, in a dry run, collects them."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import asyncpg

from streams.store.locks import LOCK_TIMEOUT, STATEMENT_SECONDS, LockRetries

__all__ = ["MigrationError", "Runner"]

# A concurrent index build waits for older transactions. Nobody waits for the build meanwhile.
_CONCURRENTLY_TIMEOUT: Final = "30min"


class MigrationError(Exception):
    """The schema could not be applied; the message says what to do, with the SQL for it."""


class Runner:
    """Executes the statements of one migration.

    Args:
        connection: logged in as the role that runs the migration.
        locks: of the same connection.
        dry_run: collect the SQL in ``script`` instead of running it.
        report: called with each line as soon as the step is done.
    """

    def __init__(
        self,
        connection: "asyncpg.Connection[asyncpg.Record]",
        locks: LockRetries,
        *,
        dry_run: bool,
        report: Callable[[str], None] | None,
    ) -> None:
        self.connection = connection
        self.locks = locks
        self.dry_run = dry_run
        self.done: list[str] = []
        self.script: list[str] = []
        self._report = report
        self._heading = ""
        self._preamble: list[str] = []

    @property
    def worked(self) -> bool:
        """Whether any statement was run, or would be run without dry_run."""
        return bool(self.script if self.dry_run else self.done)

    def preamble(self, statements: Sequence[str]) -> None:
        """Session settings; a dry run shows them before the next statement."""
        self._preamble = [f"{statement};" for statement in statements]

    def phase(self, heading: str) -> None:
        """The purpose of the next statements; shown before the first of them."""
        self._heading = heading

    def note(self, text: str) -> None:
        """Add a comment to a dry run."""
        if self._heading:
            self.script.append(f"\n-- {self._heading}")
            self._heading = ""
        self.script.extend(f"-- {line}" for line in text.splitlines())

    def say(self, line: str) -> None:
        """Report a line to the user."""
        self.done.append(line)
        if self.dry_run:
            self.note(line)
        if self._report is not None:
            self._report(line)

    async def transaction(self, statements: Sequence[str], *done: str) -> None:
        """Run statements in one short transaction; retry until its locks are free.

        Raises:
            LockUnavailable: a lock did not become free.
            MigrationError: the server rejects a statement.
        """
        if self.dry_run:
            self._write(
                [
                    "BEGIN",
                    f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'",
                    f"SET LOCAL statement_timeout = '{STATEMENT_SECONDS * 1000:.0f}ms'",
                    *statements,
                    "COMMIT",
                ]
            )
        else:
            await self.locks.run(lambda limit: self._once(statements, limit))
            for line in done:
                self.say(line)

    async def alone(self, statement: str, *done: str, before_retry: str | None = None) -> None:
        """Run a statement that cannot run in a transaction, such as a concurrent index build.

        Args:
            statement: the statement.
            done: lines to report to the user.
            before_retry: statement that removes the remains of a failed attempt.

        Raises:
            LockUnavailable: older transactions did not end.
            MigrationError: the server rejects the statement.
            QueryCanceledError: another session cancelled the statement.
        """
        if self.dry_run:
            self._write([statement])
            return
        await self.connection.execute(f"SET lock_timeout = '{_CONCURRENTLY_TIMEOUT}'")
        attempts = 0

        async def attempt(_: float) -> None:  # takes no blocking locks
            nonlocal attempts
            attempts += 1
            if attempts > 1 and before_retry is not None:
                await self._execute(before_retry)
            await self._execute(statement)

        def report_wait(sessions: str) -> None:
            self.say(
                f"note: waiting, up to {_CONCURRENTLY_TIMEOUT}, for other transactions to end: {sessions}"
            )

        await self.locks.run(attempt, limited=False, report_wait=report_wait)
        for line in done:
            self.say(line)

    async def fetch(self, query: str, *arguments: Any) -> list[asyncpg.Record]:
        """Run a query, also in a dry run."""
        return await self.connection.fetch(query, *arguments)

    def _write(self, statements: Sequence[str]) -> None:
        self.script += ["", *self._preamble] if self._preamble else []
        self._preamble = []
        self.note("")
        self.script.extend(f"{statement};" for statement in statements)

    async def _once(self, statements: Sequence[str], limit: float) -> None:
        end = time.monotonic() + limit
        async with self.connection.transaction():
            await self.connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
            for statement in statements:
                left = max(1, round((end - time.monotonic()) * 1000))
                await self.connection.execute(f"SET LOCAL statement_timeout = {left}")
                await self._execute(statement)

    async def _execute(self, statement: str) -> None:
        try:
            await self.connection.execute(statement)
        except asyncpg.InsufficientPrivilegeError as error:
            raise MigrationError(
                f"PostgreSQL reports: {error}. As a superuser, run `anabranch migrate`, or run this"
                f" statement once:\n{statement};"
            ) from error
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError, asyncpg.QueryCanceledError):
            raise
        except asyncpg.PostgresError as error:
            raise MigrationError(f"PostgreSQL reports: {error}, for the statement:\n{statement};") from error
