"""What is installed is pinned by hash, within the ranges that users of the library have, and has a known licence."""

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Pins = dict[str, set[str]]
# The extras of the embedding stage's image.
EMBEDDING = ("cohere", "openai", "local")


@pytest.fixture
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


def pins(root: Path, name: str) -> Pins:
    """Versions by name: more than one where they differ between versions of Python."""
    found: Pins = {}
    for entry in re.split(r"\n(?=\S)", (root / "requirements" / f"{name}.txt").read_text()):
        if entry.startswith("#"):
            continue
        pin = Requirement(entry.split("\\")[0])
        [version] = pin.specifier
        assert version.operator == "=="
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), f"{pin} has no hash"
        found.setdefault(canonicalize_name(pin.name), set()).add(version.version)
    return found


def wanted(project: dict[str, Any], name: str) -> list[str]:
    groups = project["dependency-groups"]
    needed: dict[str, list[str]] = {
        "build": groups["build"] + project["build-system"]["requires"],
        "runtime": project["project"]["dependencies"],
        "demo": project["project"]["dependencies"] + project["project"]["optional-dependencies"]["demo"],
        "embedder": [
            *project["project"]["dependencies"],
            *(one for extra in EMBEDDING for one in project["project"]["optional-dependencies"][extra]),
        ],
    }
    needed["development"] = [
        *needed["demo"],
        *needed["build"],
        # The benchmark's peers have an environment of their own.
        *(one for name, group in groups.items() if name != "bench" for one in group),
    ]
    needed["bench"] = groups["bench"]
    return needed[name]


@pytest.mark.parametrize("name", ["build", "runtime", "demo", "embedder", "development", "bench"])
def test_whatever_pyproject_asks_for_is_pinned_in_its_range(
    root: Path, project: dict[str, Any], name: str
) -> None:
    """Where this fails, `make lock` has been forgotten."""
    pinned = pins(root, name)
    for requirement in map(Requirement, wanted(project, name)):
        versions = pinned.get(canonicalize_name(requirement.name), set())
        assert versions, f"{requirement} is not pinned"
        assert all(version in requirement.specifier for version in versions), f"{requirement}: {versions}"


def test_the_tests_install_what_extras_do(project: dict[str, Any]) -> None:
    """A group cannot name the project's own extras."""
    tested = set(project["dependency-groups"]["test"])
    extras = project["project"]["optional-dependencies"]
    # `make test` installs demo itself, which contains validate.
    for extra in extras.keys() - {"demo", "validate"}:
        assert set(extras[extra]) <= tested, extra


@pytest.mark.parametrize("name", ["build", "runtime", "demo", "embedder"])
def test_what_is_run_is_what_was_tested(root: Path, name: str) -> None:
    everything = pins(root, "development")
    assert {name: everything.get(name) for name in pins(root, name)} == pins(root, name)


@pytest.mark.parametrize("name", ["Dockerfile", "Makefile"])
def test_nothing_is_installed_without_its_hash(root: Path, name: str) -> None:
    lines = (root / name).read_text().replace("\\\n", " ").splitlines()
    pattern = re.compile(r"pip( --python \S+)? install|\$\(INSTALL\)")
    installing = [part for line in lines for part in line.split("&&") if pattern.search(part)]
    assert len(installing) >= 3
    for part in installing:
        held = ("--require-hashes", "--no-deps", "--constraint $(PINS)", "$(INSTALL)")
        assert any(option in part for option in held), part


def sbom(root: Path, name: str) -> str:
    return subprocess.run(
        [
            sys.executable,
            root / "requirements/sbom.py",
            sysconfig.get_path("purelib"),
            root / f"requirements/{name}.txt",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.mark.parametrize("name", ["runtime", "embedder"])
def test_the_bill_of_materials_names_everything_and_its_licence(root: Path, name: str) -> None:
    made = sbom(root, name)
    assert sbom(root, name) == made
    bill = json.loads(made)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "anabranch"
    names = {component["name"] for component in bill["components"]}
    # But for what other systems need.
    assert set(pins(root, name)) - names <= {"colorama", "tzdata"}
    refs = {component["bom-ref"] for component in [bill["metadata"]["component"], *bill["components"]]}
    assert len(refs) == len(bill["components"]) + 1
    assert {entry["ref"] for entry in bill["dependencies"]} == refs
    assert {ref for entry in bill["dependencies"] for ref in entry["dependsOn"]} < refs
    for component in bill["components"]:
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}"
        [licence] = component["licenses"]
        assert licence.get("expression") or licence["license"]["name"]


def test_a_dependency_without_a_licence_stops_the_bill(root: Path, tmp_path: Path) -> None:
    for name in ("anabranch", "nameless"):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        licence = "License-Expression: Apache-2.0\n" if name == "anabranch" else ""
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\n{licence}")
    lock = tmp_path / "lock.txt"
    lock.write_text("nameless==1\n")
    done = subprocess.run(
        [sys.executable, root / "requirements/sbom.py", tmp_path, lock],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("nameless names no licence")


def test_the_image_says_what_it_is(root: Path) -> None:
    labels = dict(
        re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]+)"', (root / "Dockerfile").read_text())
    )
    assert labels.keys() == {
        *("title", "description", "licenses", "vendor"),
        *("version", "revision", "created", "base.name"),
    }
