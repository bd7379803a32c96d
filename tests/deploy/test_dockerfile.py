"""The image: small, pinned, not root, and healthy when the worker says so."""

import json
import re
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

import streams
from streams.settings import Settings

Instructions = list[tuple[str, str]]


@pytest.fixture
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture
def final_stage(dockerfile: Instructions) -> Instructions:
    last = max(position for position, (name, _) in enumerate(dockerfile) if name == "FROM")
    return dockerfile[last:]


def _arguments(instructions: Instructions, wanted: str) -> list[str]:
    return [arguments for name, arguments in instructions if name == wanted]


def _copied_from_context(instructions: Instructions) -> set[str]:
    return {
        source.rstrip("/")
        for arguments in _arguments(instructions, "COPY")
        if "--from=" not in arguments
        for source in arguments.split()[:-1]
        if not source.startswith("--")
    }


def test_base_image_is_pinned_to_a_patch_release(dockerfile: Instructions, project: dict[str, Any]) -> None:
    named = [arguments.partition("=") for arguments in _arguments(dockerfile, "ARG")]
    defaults = {name: value for name, _, value in named if value}
    images = [arguments.split()[0] for arguments in _arguments(dockerfile, "FROM")]
    bases = {re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], image) for image in images}
    assert len(images) >= 2
    # One interpreter for both stages: the virtual environment is a link to it.
    assert len(bases) == 1
    version = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", bases.pop())
    assert version is not None
    assert f"Programming Language :: Python :: {version[1]}" in project["project"]["classifiers"]


def test_runs_as_a_number_that_is_not_root(final_stage: Instructions) -> None:
    user = _arguments(final_stage, "USER")[-1]
    assert re.fullmatch(r"\d+:\d+", user)
    assert not {"0"} & set(user.split(":"))


def test_entry_point_is_a_script_of_the_distribution(
    final_stage: Instructions, project: dict[str, Any]
) -> None:
    assert json.loads(_arguments(final_stage, "ENTRYPOINT")[-1]) == ["anabranch"]
    assert json.loads(_arguments(final_stage, "CMD")[-1]) == ["worker"]
    assert "anabranch" in project["project"]["scripts"]


def test_final_stage_holds_no_build_tool(final_stage: Instructions) -> None:
    commands = " ".join(_arguments(final_stage, "RUN"))
    assert not re.search(r"\b(apt-get|pip|gcc|hatch|uv)\b", commands)
    assert _copied_from_context(final_stage) == set()


def test_port_is_the_web_port(final_stage: Instructions) -> None:
    assert _arguments(final_stage, "EXPOSE") == [str(Settings().anabranch_web_port)]


def test_build_context_holds_all_that_the_wheel_needs(
    dockerfile: Instructions, project: dict[str, Any], root: Path
) -> None:
    copied = _copied_from_context(dockerfile)
    hatch = project["tool"]["hatch"]
    wheel = hatch["build"]["targets"]["wheel"]
    needed = {
        "pyproject.toml",
        *(fragment["path"] for fragment in hatch["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]),
        *project["project"]["license-files"],
        *wheel["packages"],
        *wheel["force-include"],
    }
    assert needed <= copied
    allowed = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied <= allowed
    missing = sorted(source for source in copied if not (root / source).exists())
    assert missing == []


def test_image_tag_is_the_version(compose: dict[str, Any]) -> None:
    for service, image in (("worker", "anabranch"), ("embedder", "anabranch-embedder")):
        assert compose["services"][service]["image"] == f"{image}:{streams.__version__}"


def test_each_image_installs_pins_that_exist(
    dockerfile: Instructions, compose: dict[str, Any], root: Path
) -> None:
    (default,) = (argument for argument in _arguments(dockerfile, "ARG") if "REQUIREMENTS" in argument)
    chosen = compose["services"]["embedder"]["build"]["args"]["REQUIREMENTS"]
    assert (default, chosen) == ("REQUIREMENTS=runtime", "embedder")
    assert (root / f"requirements/{chosen}.txt").is_file()
    installing = " ".join(_arguments(dockerfile, "RUN"))
    assert set(re.findall(r"requirements/(\S+)\.txt", installing)) == {"build", "${REQUIREMENTS}"}


class _Health(BaseHTTPRequestHandler):
    status: ClassVar[int] = 200
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        pass


@pytest.fixture
def web_port() -> Iterator[int]:
    _Health.status = 200
    _Health.asked.clear()
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def health_check(final_stage: Instructions) -> list[str]:
    _, command = _arguments(final_stage, "HEALTHCHECK")[-1].split("CMD ", 1)
    return list(json.loads(command))


def _exit_code(health_check: list[str], port: int) -> int:
    return subprocess.run(
        health_check,
        # A proxy that swallows the request would make every worker unhealthy, or every one healthy.
        env={
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "ANABRANCH_WEB_PORT": str(port),
            "http_proxy": "http://127.0.0.1:9",
        },
        stderr=subprocess.DEVNULL,
        timeout=30,
        check=False,
    ).returncode


def test_health_check_follows_the_worker(health_check: list[str], web_port: int) -> None:
    health_check[0] = "python3"
    assert _exit_code(health_check, web_port) == 0
    assert _Health.asked == ["/healthz/live"]
    _Health.status = 503
    assert _exit_code(health_check, web_port) == 1


def test_health_check_fails_when_nobody_listens(health_check: list[str]) -> None:
    health_check[0] = "python3"
    assert _exit_code(health_check, 9) == 1
