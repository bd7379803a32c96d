"""The documentation is true: what it names exists, and what exists is named. Settings and codes: see their tests."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from streams.cli.main import commands
from streams.core.messages import Filters
from streams.core.profiles import BUILTIN_PROFILES
from streams.core.warning_codes import WarningCode
from streams.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Every page of the site, as docs/conf.py has them.
PAGES = [
    *(
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "streams/sample/README.md",
        ROOT / "benchmarks/README.md",
    ),
    *(page for folder in ("docs", "contracts", "k8s") for page in sorted((ROOT / folder).rglob("*.md"))),
]


def leaves(group: click.Group, prefix: str = "anabranch") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}"


def first_cells(page: str, heading: str) -> set[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = text.split(f"# {heading}\n")[1].split("\n## ")[0]
    return {cell for line in section.splitlines() for cell in re.findall(r"^\| `([^`]+)`", line)}


def links(page: Path) -> set[Path]:
    """The files of the checkout that it links to."""
    paths = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / path).resolve() for path in paths}


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    assert first_cells("commands.md", "Commands") == set(leaves(commands))


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    families = {
        # A counter's family has no suffix, and an info's has; what a query names is the sample.
        family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        for family in Metrics().registry.collect()
    }
    assert first_cells("metrics.md", "Metrics") == families


def test_the_contract_s_page_describes_every_filter() -> None:
    page = (ROOT / "contracts/query_embedding/v1/README.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith("| `filters` |")]
    assert set(Filters.model_fields) <= set(re.findall(r"`(\w+)`", row))


def test_every_profile_has_a_row() -> None:
    assert first_cells("retrieval.md", "Profiles") == set(BUILTIN_PROFILES)


def test_every_warning_that_a_result_can_carry_has_a_row() -> None:
    assert first_cells("retrieval.md", "Warnings in a result") == set(WarningCode)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_links_to_exists(page: Path) -> None:
    """Without the site's generator; that one checks anchors too."""
    assert not [path for path in links(page) if not path.exists()]


def test_the_readme_leads_to_every_page() -> None:
    """It is the contents for whoever reads in a code browser."""
    linked = links(ROOT / "README.md") | links(ROOT / "docs/contracts.md")
    assert set(PAGES) - {ROOT / "README.md", ROOT / "docs/index.md"} <= linked


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 250


def test_make_help_lists_the_targets_that_the_pages_name() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {
        target
        for page in PAGES
        for target in re.findall(r"(?:^|`)make ([a-z-]+)\b", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"demo", "test", "faults", "docs", "evaluate"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target
