"""PgBouncer in transaction mode, before a test's database."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import unquote, urlsplit

import asyncpg

from tests.conftest import Database
from tests.integration.harness import free_port
from tests.left_out import unavailable

__all__ = ["POOL_SIZE", "PgBouncer", "program"]

# Fewer server connections than any test has clients, so that they change hands all the time.
POOL_SIZE: Final = 3


def program(version: str) -> str:
    """The executable of one release, as `.ci/pgbouncer` installs it."""
    name = f"pgbouncer-{version}"
    return (
        shutil.which(name, path=str(Path(sys.executable).parent))
        or shutil.which(name)
        or unavailable(f"{name} is not installed", enable="on Debian: .ci/pgbouncer")
    )


class PgBouncer:
    """One process; a context manager.

    Args:
        program: the executable.
        database: what it connects to, and as whom: the worker's role.
        max_prepared_statements: a setting of 1.21 and later; None leaves it out.
    """

    def __init__(self, program: str, database: Database, max_prepared_statements: int | None = None) -> None:
        self._program = program
        self._server = urlsplit(database.worker)
        self._max_prepared_statements = max_prepared_statements
        self._process: subprocess.Popen[bytes] | None = None
        # PgBouncer refuses to run as root.
        self._account = "nobody" if os.geteuid() == 0 else None
        self._folder = Path()
        self.port = free_port()
        self.crashes = 0

    @property
    def dsn(self) -> str:
        """The worker's connection string, through the pooler."""
        login = f"{self._server.username}:{self._server.password}"
        return f"postgresql://{login}@127.0.0.1:{self.port}{self._server.path}"

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-pgbouncer-"))
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": self._folder / "users",
            "pool_mode": "transaction",
            "default_pool_size": POOL_SIZE,
        }
        if self._max_prepared_statements is not None:
            settings["max_prepared_statements"] = self._max_prepared_statements
        lines = [
            "[databases]",
            f"* = host={self._server.hostname} port={self._server.port}",
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in settings.items()),
        ]
        (self._folder / "ini").write_text("\n".join(lines) + "\n")
        user, password = unquote(self._server.username or ""), unquote(self._server.password or "")
        (self._folder / "users").write_text(f'"{user}" "{password}"\n')
        for path in (self._folder, *self._folder.iterdir()):
            if self._account is not None:
                shutil.chown(path, self._account)
        self._start()
        return self

    def restart_if_crashed(self) -> bool:
        """Start it again if it has ended; returns whether it ever had to be."""
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(timeout=0.5)  # clients notice it earlier
                self.crashes += 1
                self._start()
        return self.crashes > 0

    def _start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, str(self._folder / "ini")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                user=self._account,
                extra_groups=[] if self._account is not None else None,
            )
        deadline = time.monotonic() + 10
        while self.log.count("process up") <= self.crashes:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._stop()
                raise AssertionError(f"PgBouncer did not start:\n{self.log}")
            time.sleep(0.02)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        print(f"--- PgBouncer ---\n{self.log[-4000:]}")  # shown where the test failed
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    async def connect(self) -> asyncpg.Connection:
        """A connection through the pooler that needs nothing of it."""
        return await asyncpg.connect(self.dsn, statement_cache_size=0)
