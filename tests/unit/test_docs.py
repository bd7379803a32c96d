"""The documentation is true: what it names exists, and what exists is named. See also test_reference.py."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from streams.cli.main import commands
from streams.core.composition import UpstreamWarning
from streams.core.embedding_errors import EmbeddingError, text_dead_letter_codes
from streams.core.messages import Filters
from streams.core.warning_codes import WarningCode
from streams.telemetry.metrics import (
    Metrics,
)
from streams.telemetry.status import status_document
from streams.worker.dependency_health import DependencyState
from streams.worker.live_status import LiveStatus
from streams.worker.readiness import Readiness

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Every page of the site, as docs/conf.py has them.
PAGES = [
    *(
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
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
    return {cell for line in section.splitlines() for cell in re.findall(r"^\| \[?`([^`]+)`", line)}


def links(page: Path) -> set[Path]:
    """The files of the checkout that it links to."""
    paths = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / path).resolve() for path in paths}


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    assert first_cells("commands.md", "Commands") == set(leaves(commands))


def test_every_field_of_the_status_has_a_row() -> None:
    text = (ROOT / "docs/running.md").read_text(encoding="utf-8")
    rows = [
        line.split(" | ")[0] for line in text.split("# The live page\n")[1].split("\n## ")[0].splitlines()
    ]
    named = {field for row in rows if row.startswith("| `") for field in re.findall(r"`(\w+)`", row)}
    status = LiveStatus(
        "worker",
        Metrics(profiles=["docs"]),
        lag=lambda: (),
        oldest_waiting=lambda: (),
        in_flight=lambda: 0,
        versions=dict,
    ).status(Readiness("store", DependencyState.UP, None, None, 1, [], stopping=False))
    assert named == set(status_document(status))


def test_the_contract_s_page_describes_every_filter() -> None:
    page = (ROOT / "contracts/query_embedding/v1/README.md").read_text(encoding="utf-8")
    note, _ = (line for line in page.splitlines() if line.startswith("| `filters` |"))
    assert set(Filters.model_fields) <= set(re.findall(r"`(\w+)`", note))


def test_every_warning_that_a_result_can_carry_has_a_row() -> None:
    assert first_cells("retrieval.md", "Warnings in a result") == set(WarningCode)


def test_the_embedding_stage_s_codes_have_rows() -> None:
    kinds = [EmbeddingError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    assert first_cells("embedding.md", "Errors") == {kind.code for kind in kinds if "code" in vars(kind)}
    assert first_cells("embedding.md", "Warnings") == set(UpstreamWarning)
    page = (ROOT / "docs/embedding.md").read_text(encoding="utf-8")
    section = page.split("\n## Dead letters\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row)} == text_dead_letter_codes()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_links_to_exists(page: Path) -> None:
    """Without the site's generator; that one checks anchors too."""
    assert not [path for path in links(page) if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_markup_that_the_site_would_print_or_spoil(page: Path) -> None:
    """Definition lists are printed with their colons; a line break in a picture's description joins two words."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"^: .*", text, re.MULTILINE)
    assert not [found for found in re.findall(r"!\[([^\]]*)\]", text) if "\n" in found]


def test_the_readme_leads_to_every_page() -> None:
    """It is the contents for whoever reads in a code browser."""
    linked = links(ROOT / "README.md") | links(ROOT / "docs/contracts.md")
    assert set(PAGES) - {ROOT / "README.md", ROOT / "docs/index.md"} <= linked


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 200
