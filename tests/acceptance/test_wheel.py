"""The wheel carries what it needs: installed alone, away from the checkout, every command works."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has the built wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: the build leaves nothing in the checkout, and takes nothing that git does not know.
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout
    assert tracked, "this test builds what git tracks"
    source = folder / "source"
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", source],
        check=True,
        capture_output=True,
        text=True,
    )
    [wheel] = (folder / "dist").glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel],
        check=True,
    )
    # The dependencies are this environment's; the checkout itself must not come along with them.
    here = Path(next(path for path in sys.path if path.endswith("site-packages")))
    [there] = (folder / "venv/lib").glob("python*/site-packages")
    for entry in here.iterdir():
        if "anabranch" not in entry.name and not (there / entry.name).exists():
            (there / entry.name).symlink_to(entry)
    return folder / "venv/bin/anabranch"


def run(command: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [command, *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_it_is_the_wheel_that_runs(installed: Path) -> None:
    where = subprocess.run(
        [installed.parent / "python", "-c", "import streams; print(streams.__file__)"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.startswith(str(installed.parents[1]))


def test_every_command_has_help(installed: Path) -> None:
    reported = run(installed, "--help")
    assert reported.returncode == 0, reported.stderr
    commands = [
        line.split()[0] for line in reported.stdout.split("Commands:")[1].splitlines() if line.strip()
    ]
    assert {"worker", "demo", "migrate", "topics", "check", "contract", "publish", "tail"} <= set(commands)
    for command in commands:
        ended = run(installed, command, "--help")
        assert ended.returncode == 0, ended.stderr


def test_the_contracts_and_schemas_are_there(installed: Path) -> None:
    ended = run(installed, "contract", "derive", "--check")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert run(installed, "contract", "compatible").returncode == 0


def test_the_demo_runs(installed: Path) -> None:
    ended = run(installed, "demo", "--json")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("command", ["worker", "check"])
def test_without_a_store_there_is_one_clear_line(installed: Path, command: str) -> None:
    ended = run(installed, command)
    assert ended.returncode == 2
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith("anabranch: DATABASE_CONNECTION_STRING is not set")


def test_without_a_server_there_is_one_clear_line_and_no_secret(installed: Path) -> None:
    nobody = "postgresql://owner:very-secret@127.0.0.1:1/app"
    for command, environment in {
        "migrate": {"DATABASE_ADMIN_CONNECTION_STRING": nobody},
        "topics": {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"},
    }.items():
        ended = run(installed, command, **environment)
        assert ended.returncode == 1
        [line] = ended.stderr.splitlines()
        assert line.startswith("anabranch: ")
        assert "very-secret" not in ended.stdout + ended.stderr
    ended = run(installed, "check", DATABASE_CONNECTION_STRING=nobody, KAFKA_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert ended.returncode == 1
    assert "cannot connect to PostgreSQL" in ended.stdout
    assert re.search(r"ok\s+codecs\s+gzip, snappy, lz4, zstd", ended.stdout)
    assert "KAFKA_BOOTSTRAP_SERVERS" in ended.stdout
    assert "very-secret" not in ended.stdout + ended.stderr
