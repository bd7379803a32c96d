"""A primary and a streaming standby, from the binaries of the embedded PostgreSQL."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from streams.embedded.postgres import SUPERUSER, THROW_AWAY, EmbeddedPostgres
from tests.conftest import Database, PostgresServer

__all__ = ["PRIMARY_SETTINGS", "Pair", "pair"]

PRIMARY_SETTINGS: Final = {**THROW_AWAY, "wal_level": "replica", "max_wal_senders": "4"}
# The standby asks a silent primary for a message after half of wal_receiver_timeout.
_STANDBY_SETTINGS: Final = {
    **PRIMARY_SETTINGS,
    "wal_receiver_timeout": "2s",
    "wal_retrieve_retry_interval": "200ms",
}


class Pair:
    """Both servers, running."""

    def __init__(self, primary: PostgresServer, standby: EmbeddedPostgres) -> None:
        self.primary = primary
        self.standby = standby

    def on_standby(self, database: Database) -> Database:
        """The same database, on the standby."""
        ports = f":{self.primary.embedded.port}/", f":{self.standby.port}/"
        return replace(
            database,
            **{
                role: getattr(database, role).replace(*ports)
                for role in ("admin", "owner", "writer", "worker")
            },
        )

    def several_hosts(self, database: Database) -> str:
        """The worker's connection string with both servers, the standby preferred."""
        worker = urlsplit(database.worker)
        login, _, _ = worker.netloc.rpartition("@")
        hosts = f"127.0.0.1:{self.primary.embedded.port},127.0.0.1:{self.standby.port}"
        return f"postgresql://{login}@{hosts}{worker.path}?target_session_attrs=prefer-standby"


@contextmanager
def pair() -> Iterator[Pair]:
    with EmbeddedPostgres(settings=PRIMARY_SETTINGS) as embedded:
        primary = PostgresServer(embedded)
        folder = Path(tempfile.mkdtemp(prefix="anabranch-standby-"))
        if os.geteuid() == 0:
            shutil.chown(folder, "nobody")
        try:
            shutil.copy(embedded.directory / "password", folder / "password")
            if os.geteuid() == 0:
                shutil.chown(folder / "password", "nobody")
            copied = embedded._run(
                [
                    embedded.program("pg_basebackup"),
                    f"--dbname={embedded.dsn(SUPERUSER)}",
                    f"--pgdata={folder / 'data'}",
                    "--write-recovery-conf",
                    "--checkpoint=fast",
                    "--no-sync",
                ]
            )
            assert copied.returncode == 0, copied.stderr
            with EmbeddedPostgres(folder, settings=_STANDBY_SETTINGS) as standby:
                yield Pair(primary, standby)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
