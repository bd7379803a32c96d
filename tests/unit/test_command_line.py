"""The command line as a whole: help, one format for errors, suggestions, completion; and `anabranch settings`."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import click
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner, Result

from streams.cli.errors import Failed, Interrupted, NeedsConsent, Unusable
from streams.cli.main import commands
from streams.settings import EmbeddingSettings, IngestionSettings, environment_names, load_all, secret_names
from tests.commands_page import PAGE, every_command, help_of, with_help

ROOT: Final = Path(__file__).resolve().parents[2]
SECRET: Final = "canary-5e0f"
#: Imported by what commands do, not by help, completion and errors of usage.
HEAVY: Final = (
    *("aiohttp", "aiokafka", "asyncio", "asyncpg", "cramjam", "fastavro", "faust", "numpy"),
    *("prometheus_client", "pydantic", "pydantic_settings", "tiktoken"),
)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(commands, list(arguments))


def command_of(names: tuple[str, ...]) -> click.Command:
    command: click.Command = commands
    for name in names:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


# Help


def test_help_and_version_import_nothing_heavy() -> None:
    program = f"""
import sys
from streams.cli import main
for arguments in (["--help"], ["--version"], ["replay", "--help"], ["validate", "--help"], ["chekc"], ["tail", "--x"]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit:
        pass
print(sorted({{*{HEAVY!r}}} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "did you mean check?" in done.stderr


@pytest.mark.parametrize("columns", [50, 80, 200])
@pytest.mark.parametrize("names", [(), ("contract",), *every_command()], ids=" ".join)
def test_help_is_never_truncated(names: tuple[str, ...], columns: int) -> None:
    shown = help_of(*names, columns=columns)
    command = command_of(names)
    texts = [command.help or "", *(getattr(param, "help", None) or "" for param in command.params)]
    if isinstance(command, click.Group):
        texts += [(each.help or "").split("\n")[0].split(". ")[0] for each in command.commands.values()]
    # Whitespace differs, and a long word may be broken.
    squeezed = "".join(shown.split())
    assert not [text for text in texts if "".join(text.split()) not in squeezed]
    assert "..." not in shown.replace("[ARGS]...", "")


@pytest.mark.parametrize("names", every_command(), ids=" ".join)
def test_every_command_has_examples_that_work(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("documents.jsonl", "events.jsonl", "golden.jsonl", "questions.jsonl"):
        Path(file).touch()
    lines = help_of(*names).split("Example")[1].splitlines()[1:]
    assert lines
    for line in lines:
        assert len(line) <= 80
        # Without variables and `source` before it, and redirections and pipes behind it.
        words = shlex.split(re.findall(r"anabranch [^<>|)]*", line)[0])
        assert words[: len(names) + 1] == ["anabranch", *names]
        with command_of(names).make_context(names[-1], words[len(names) + 1 :]):
            pass


def test_options_of_the_same_name_mean_the_same() -> None:
    metavars: dict[str, set[str]] = {}
    for names in every_command():
        for line in help_of(*names).splitlines():
            if match := re.match(r"  (--[a-z-]+)(?: ([A-Z]\S*))?(?:  |$)", line):
                metavars.setdefault(match[1], set()).add(match[2] or "")
    assert len(metavars) > 30
    assert {name: kinds for name, kinds in metavars.items() if len(kinds) > 1} == {}
    assert "--json" in metavars
    # None of click's own, such as INTEGER RANGE.
    known = {
        "",
        "N",
        "BYTES",
        "CODE",
        "CONDITION",
        "FILE",
        "ID",
        "NAME",
        "PRINCIPAL",
        "SECONDS",
        "SHARE",
        "WHEN",
    }
    assert {kind for kinds in metavars.values() for kind in kinds} <= known


def test_the_page_shows_the_help() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_help(page), "run: python -m tests.commands_page"
    assert re.findall(r"^### `anabranch (.*)`$", page, re.MULTILINE) == [
        " ".join(names) for names in every_command()
    ]


def test_the_page_has_every_exit_code() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## Exit codes\n")[1].split("\n## ")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    kinds = (Failed, Unusable, NeedsConsent, Interrupted)
    assert codes == {0, *(kind.exit_code for kind in kinds)}
    shown = help_of().split("Exit codes:")[1]
    assert {int(code) for code in re.findall(r"\b(\d+) [a-z]", shown)} == codes


# Errors


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["chekc"], "anabranch: no such command: chekc; did you mean check?"),
        (["frobnicate"], "anabranch: no such command: frobnicate; see `anabranch --help`"),
        (["--verson"], "anabranch: no such option: --verson; did you mean --version?"),
        (["contract", "deriv"], "anabranch contract: no such command: deriv; did you mean derive?"),
        (["replay", "--aply"], "anabranch replay: no such option: --aply; did you mean --apply?"),
        (["replay", "--zzz"], "anabranch replay: no such option: --zzz; see `anabranch replay --help`"),
        (
            ["contract", "derive", "--chekc"],
            "anabranch contract derive: no such option: --chekc; did you mean --check?",
        ),
        (
            ["replay", "--code", "expird"],
            "anabranch replay: invalid value for '--code': 'expird' is not one of the choices; did you mean expired?",
        ),
        (
            ["bench", "--workload", "xyz"],
            ("anabranch bench: invalid value for '--workload': 'xyz' is not one of 'chat', 'extraction', 'mixed';"
            " see `anabranch bench --help`"),
        ),
        (
            ["ingest", "nowhere.jsonl"],
            ("anabranch ingest: invalid value for '[FILE]': 'nowhere.jsonl': No such file or directory;"
            " see `anabranch ingest --help`"),
        ),
        (["tail", "--limit"], "anabranch tail: option '--limit' requires an argument; see `anabranch tail --help`"),
        (["completion"], "anabranch completion: missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish; see"),
        (["bench", "--events", "-"], "anabranch bench: --events requires --rate; see `anabranch bench --help`"),
        (["stats"], "anabranch stats: DATABASE_ADMIN_CONNECTION_STRING is not set: set it to the connection string"),
    ],
)  # fmt: skip
def test_an_error_of_usage_is_one_line(arguments: list[str], line: str) -> None:
    done = run(*arguments, DATABASE_ADMIN_CONNECTION_STRING="")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(line)
    assert done.exception is None or isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("names", [(), ("contract",)])
def test_a_group_alone_shows_its_help_as_an_error(names: tuple[str, ...]) -> None:
    done = run(*names)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == help_of(*names)


def test_a_defect_is_reported_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LookupError("\x1b[31m")

    monkeypatch.setattr("streams.cli.contracts.broken", fail)
    done = run("contract", "compatible")
    assert (done.exit_code, done.stdout) == (1, "")
    *trace, last = done.stderr.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1] == "LookupError: \\x1b[31m"
    assert last == "anabranch contract compatible: unexpected LookupError; please report it as a defect"


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streams.cli.contracts.broken", interrupt)
    done = run("contract", "compatible")
    assert (done.exit_code, done.stderr) == (130, "anabranch contract compatible: interrupted\n")


def test_a_closed_pipe_is_not_a_defect() -> None:
    done = subprocess.run(
        f"{sys.executable} -m streams settings --json | head --lines 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[\n", "")


# Names that resemble settings


def test_a_misspelt_name_with_a_shared_prefix_is_a_warning() -> None:
    done = run("stats", KAFKA_SASL_PASSWROD=SECRET, DATABASE_ADMIN_CONECTION_STRING=SECRET)
    assert done.exit_code == 2
    *warnings, error = done.stderr.splitlines()
    assert warnings == [
        (
            "anabranch stats: warning: DATABASE_ADMIN_CONECTION_STRING is ignored; did you mean"
            " DATABASE_ADMIN_CONNECTION_STRING?"
        ),
        "anabranch stats: warning: KAFKA_SASL_PASSWROD is ignored; did you mean KAFKA_SASL_PASSWORD?",
    ]
    assert error.startswith("anabranch stats: DATABASE_ADMIN_CONNECTION_STRING is not set")
    assert SECRET not in done.output
    assert run("contract", "compatible", KAFKA_SASL_PASSWROD=SECRET).stderr == ""  # it reads no settings


# Settings


def listed(**environment: str) -> dict[str, tuple[object, str]]:
    done = run("settings", "--json", **environment)
    assert done.exit_code == 0, done.stderr
    assert SECRET not in done.output
    return {each["name"]: (each["value"], each["origin"]) for each in json.loads(done.stdout)}


def test_all_settings_of_all_commands_are_listed_with_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET)
    found = listed(
        ANABRANCH_CONCURRENCY="3",
        ANABRANCH_EMBEDDING_API_KEY=SECRET,
        ANABRANCH_REPLY_TOPICS="one,two",
        KAFKA_SASL_PASSWORD_FILE=str(file),
        KAFKA_SASL_USERNAME="worker",
        KAFKA_SECURITY_PROTOCOL="SASL_PLAINTEXT",
    )
    assert found.keys() >= (
        environment_names() | environment_names(EmbeddingSettings) | environment_names(IngestionSettings)
    )
    assert found["ANABRANCH_CONCURRENCY"] == (3, "environment")
    assert found["ANABRANCH_EMBEDDING_API_KEY"] == ("***", "environment")
    assert found["ANABRANCH_REPLY_TOPICS"] == ("one,two", "environment")
    assert found["KAFKA_SASL_PASSWORD"] == ("***", "file")
    assert found["ANABRANCH_WEB_BIND_ADDRESS"] == ("0.0.0.0", "default")
    assert found["ANABRANCH_POOL_SIZE"] == found["DATABASE_CONNECTION_STRING"] == (None, "default")
    assert found["ANABRANCH_EMBEDDING_MODEL"] == (None, "default")
    assert {origin for _, origin in found.values()} == {"default", "environment", "file"}


def test_no_secret_is_listed() -> None:
    secrets = {*secret_names(), *secret_names(EmbeddingSettings), *secret_names(IngestionSettings)}
    assert len(secrets) == 7
    found = listed(**dict.fromkeys(secrets, SECRET))
    assert {found[name] for name in secrets} == {("***", "environment")}


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://worker:{}@db:5432/app", "postgresql://worker:***@db:5432/app"),
        ("postgres://worker:{}@a,b:5433/app?sslmode=verify-full", "postgres://worker:***@a,b:5433/app?sslmode=verify-full"),
        ("postgresql://worker@[::1]:5432/app", "postgresql://worker@[::1]:5432/app"),
        ("postgresql:///app?host=/run/postgresql&user=worker", "postgresql:///app?host=/run/postgresql&user=worker"),
        ("postgresql://?host=h&password={}", "postgresql://?host=h&password=***"),
        ("postgresql://h/app?sslpassword={}&p%61ssword={}", "postgresql://h/app?sslpassword=***&p%61ssword=***"),
        ("postgresql://worker:%40{}@db/app", "postgresql://worker:***@db/app"),
        # A password that is not percent-encoded.
        *((f"postgresql://worker:12{char}{{}}@db/app", "***") for char in "@/?#: "),
        *((f"postgresql://worker:{{}}{char}12@db/app", "***") for char in "@/?#: "),
        *((f"postgresql://worker:1@2{char}{{}}@db/app", "***") for char in "@/?#: "),
        ("host=db password={}", "***"),
        ("{}", "***"),
        # Separators in the wrong place or encoding, and values that are more than one.
        ("postgresql://worker%3A{}@db/app", "postgresql://***@db/app"),
        *((f"postgresql://worker@db/app{char}password={{}}", "***") for char in "&;"),
        ("postgresql://worker@db/app%26password%3D{}", "***"),
        ("postgresql://worker@db/password={}", "***"),
        ("postgresql://db;password={}/app", "***"),
        *(
            (f"postgresql://db/app?sslmode=require{char}password={{}}", "postgresql://db/app?sslmode=***")
            for char in (";", "%26", ",")
        ),
        ("postgresql://db/app?options=-c%20app.secret%3D{}", "postgresql://db/app?options=***"),
        ("postgresql://db/app?user=worker:{}", "postgresql://db/app?user=***"),
        ("postgresql://db/app?sslkey=-----BEGIN%20PRIVATE%20KEY-----{}", "postgresql://db/app?sslkey=***"),
        ("postgresql://?host=a:5433,[::1]&user=worker", "postgresql://?host=a:5433,[::1]&user=worker"),
    ],
)  # fmt: skip
def test_of_a_connection_string_only_the_password_is_masked(address: str, shown: str) -> None:
    found = listed(DATABASE_CONNECTION_STRING=address.format(SECRET, SECRET))
    assert found["DATABASE_CONNECTION_STRING"] == (shown, "environment")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://embed.example:8080/v1", "https://embed.example:8080/v1"),
        ("https://me:{}@embed.example/v1?key={}", "https://***@embed.example/v1?key=***"),
        ("https://{}@embed.example/v1", "https://***@embed.example/v1"),
        ("https://{}:@embed.example/v1", "https://***@embed.example/v1"),
        ("https://embed.example/v1?user={}&{}", "https://embed.example/v1?user=***&***"),
        ("https://embed.example/v1#{}", "***"),
        ("me:{}@embed.example/v1", "***"),
    ],
)
def test_an_address_of_a_provider_is_masked_too(address: str, shown: str) -> None:
    found = listed(ANABRANCH_EMBEDDING_BASE_URL=address.format(SECRET, SECRET))
    assert found["ANABRANCH_EMBEDDING_BASE_URL"] == (shown, "environment")


def test_a_key_in_place_of_its_file_is_not_shown() -> None:
    key = f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----"
    names = [name.upper() for settings in load_all({}) for name in type(settings).model_fields]
    names += [f"{name}_FILE" for name in names if name.endswith(("_KEY", "_PASSWORD", "_STRING"))]
    shown = 0
    for name in {*names} - {"ANABRANCH_PROFILES_FILE", "ANABRANCH_SCHEMA_PATH"}:  # their errors name the path
        for tls in ({}, {"KAFKA_SECURITY_PROTOCOL": "SSL", "KAFKA_SSL_CERTFILE": "certificate.pem"}):
            done = run("settings", **{**tls, name: key})
            assert SECRET not in done.output, name
            shown += done.exit_code == 0
    assert shown > 5


def test_settings_in_a_pipe_are_lines() -> None:
    done = run("settings", ANABRANCH_CONCURRENCY="3", ANABRANCH_CONSUMER_GROUP="two\nlines")
    assert done.exit_code == 0, done.stderr
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert {len(row) for row in rows} == {3}
    assert ["ANABRANCH_CONCURRENCY", "3", "environment"] in rows
    assert ["ANABRANCH_CONSUMER_GROUP", "two\\nlines", "environment"] in rows


@pytest.mark.parametrize(
    "environment",
    [
        {"ANABRANCH_CONCURRENCY": "0"},
        {"ANABRANCH_CONCURENCY": "1"},
        {"ANABRANCH_DEFAULT_PROFILE": "unknown"},
        {"ANABRANCH_EMBEDDING_DIMENSIONS": "1024"},
        {"KAFKA_BOOTSTRAP_SERVERS": "kafka://broker:9092"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_settings_fails_with_the_line_of_a_worker(environment: dict[str, str]) -> None:
    everything = {"PATH": os.environ["PATH"], "DATABASE_CONNECTION_STRING": "postgresql://127.0.0.1:1"}
    lines = [
        subprocess.run(
            [sys.executable, "-m", "streams", command],
            env=everything | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        ).stderr.splitlines()[-1]
        for command in ("worker", "settings")
    ]
    assert lines[0].removeprefix("anabranch worker: ") == lines[1].removeprefix("anabranch settings: ")
    assert lines[1].startswith(
        ("anabranch settings: ANABRANCH_", "anabranch settings: unknown", "anabranch settings: KAFKA")
    )


# Completion


def completed(*words: str) -> set[str]:
    kind = get_completion_class("bash")
    assert kind is not None
    completer = kind(commands, {}, "anabranch", "_ANABRANCH_COMPLETE")
    return {item.value for item in completer.get_completions(list(words[:-1]), words[-1])}


def test_commands_options_and_choices_are_completed() -> None:
    assert completed("re") == {"replay"}
    assert completed("contract", "c") == {"compatible"}
    assert {"--apply", "--code", "--json"} <= completed("replay", "--")
    assert completed("replay", "--code", "unknown_") == {"unknown_profile", "unknown_schema"}
    assert completed("bench", "--workload=c") == {"chat"}
    assert completed("completion", "") == {"bash", "zsh", "fish"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed_unchanged(shell: str) -> None:
    kind = get_completion_class(shell)
    assert kind is not None
    done = run("completion", shell)
    assert done.exit_code == 0
    assert done.stdout == kind(commands, {}, "anabranch", "_ANABRANCH_COMPLETE").source() + "\n"


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    program = tmp_path / "anabranch"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m streams "$@"\n')
    program.chmod(0o755)
    script = """
source <(anabranch completion bash)
COMP_WORDS=(anabranch replay --ap) COMP_CWORD=2
$(complete -p anabranch | sed 's/.*-F \\([^ ]*\\).*/\\1/') anabranch
echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("--apply\n", "")
