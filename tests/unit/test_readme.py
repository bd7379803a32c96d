"""README.md is true: what it names exists, and what exists is named. Settings and codes have tests of their own."""

import re
from collections.abc import Iterator
from pathlib import Path

import click

from streams.cli.main import commands
from streams.core.profiles import BUILTIN_PROFILES
from streams.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def leaves(group: click.Group, prefix: str = "anabranch") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}"


def first_cells(heading: str) -> set[str]:
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return {cell for line in section.splitlines() for cell in re.findall(r"^\| `([^`]+)`", line)}


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    assert first_cells("Commands") == set(leaves(commands))


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    families = {
        # A counter's family has no suffix, and an info's has; what a query names is the sample.
        family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        for family in Metrics(pool=lambda: [("idle", 0)], lag=lambda: [(0, 0)]).registry.collect()
    }
    assert first_cells("Metrics") == families


def test_every_profile_has_a_row() -> None:
    assert first_cells("Profiles") == set(BUILTIN_PROFILES)


def test_every_warning_that_a_result_can_carry_has_a_row() -> None:
    source = (ROOT / "streams/retrieval.py").read_text(encoding="utf-8")
    block = source.split("    warnings = {\n")[1].split("    }\n")[0]
    assert first_cells("Warnings in a result") == set(re.findall(r'^ +"(\w+)":', block, re.MULTILINE))


def test_every_path_that_it_links_to_exists() -> None:
    paths = [path for path in re.findall(r"\]\(([^)#:]+)\)", README) if path]
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_make_help_lists_the_targets_that_it_names() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z]+)\b", README)):
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target
