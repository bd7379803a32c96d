"""`make docs` fails on whatever a reader would stumble over. The real pages are built by `.ci/run`."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.left_out import unavailable

SOUND = {
    "README.md": "# Read me\n\n## A `heading`: of it\n\n[Contract](contracts/one/v1/README.md#of-one)\n",
    "CHANGELOG.md": "# Changelog\n",
    "docs/page.md": (
        "# Page\n\n[README](../README.md#a-heading-of-it), [here](#page), [file](../schema.avsc), ![](picture.png), "
        "[elsewhere](https://example.invalid/), ~~struck~~\n"
    ),
    "docs/index.md": "# Index\n\n```{toctree}\npage\n../README\n../CHANGELOG\n../contracts/one/v1/README\n```\n",
    "contracts/one/v1/README.md": "# Contract\n\n## Of one\n",
    "schema.avsc": "{}",
    "tests/notes.md": "# No page\n",
}

# What is wrong in a page, and what the warning names.
BROKEN = {
    "[page](missing_page.md)": "missing_page.md",
    "[page](../README.md#missing-heading)": "missing-heading",
    "[heading](#missing-here)": "missing-here",
    "[file](../missing_file.avsc)": "missing_file.avsc",
    "![image](missing_image.png)": "missing_image.png",
    "![image](../missing_image_above.png)": "missing_image_above.png",
    "[outside](../tests/notes.md)": "tests/notes",
    "[no file](../streams/)": "streams/",
    "```{missing-directive}\n```": "missing-directive",
    "```json\n{no JSON}\n```": "json",
    "# A second\n\n#### A fourth": "H1 to H4",
}


@pytest.fixture
def build(root: Path, tmp_path: Path) -> Callable[[], tuple[int, str]]:
    """As `make docs` does, of other pages."""
    if importlib.util.find_spec("sphinx") is None:
        unavailable("Sphinx is not installed", enable="make docs")
    options = re.search(r"^SPHINX := \S+/sphinx-build (.+)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert options
    for name, text in SOUND.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(root / "docs/conf.py", tmp_path / "docs")
    for folder in ("root", "static"):
        shutil.copytree(root / "docs" / folder, tmp_path / "docs" / folder)
    shutil.copy(root / "docs/validate.png", tmp_path / "docs/picture.png")

    def run() -> tuple[int, str]:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "sphinx",
                *options[1].split(),
                "--quiet",
                "--builder",
                "html",
                ".",
                "build/docs",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stderr

    return run


def test_what_is_sound_is_built(build: Callable[[], tuple[int, str]], tmp_path: Path) -> None:
    assert build() == (0, "")
    built = tmp_path / "build/docs"
    [target] = re.findall(r"url=([^\"]+)", (built / "index.html").read_text())
    assert (built / target).is_file()
    page = (built / "docs/page.html").read_text()
    for linked in ("../README.html#a-heading-of-it", "#page", "https://example.invalid/"):
        assert f'href="{linked}"' in page
    assert not (built / "tests").exists()


def test_what_is_broken_fails_the_build(build: Callable[[], tuple[int, str]], tmp_path: Path) -> None:
    for number, defect in enumerate(BROKEN):
        (tmp_path / f"docs/broken{number}.md").write_text(f"# Broken\n\n{defect}\n")
    index = tmp_path / "docs/index.md"
    index.write_text(
        index.read_text().replace("\npage\n", "\nbroken*\n").replace("{toctree}", "{toctree}\n:glob:")
    )
    code, said = build()
    assert code == 1
    warnings = said.splitlines()
    for number, (defect, name) in enumerate(BROKEN.items()):
        mine = [line for line in warnings if f"/broken{number}.md:" in line and ": WARNING: " in line]
        assert any(name in line for line in mine), (defect, mine)
    assert any("/docs/page.md: WARNING: document isn't included in any toctree" in line for line in warnings)


async def test_a_page_fits_a_phone_and_dark_rooms(
    build: Callable[[], tuple[int, str]], tmp_path: Path, browser: Browser
) -> None:
    """Long names in a table break instead of hiding the column that explains them."""
    page = tmp_path / "docs/page.md"
    rows = "".join(
        f"| `ANABRANCH_A_NAME_THAT_IS_QUITE_LONG_{number}` | `default` | what it means, in a sentence |\n"
        for number in range(3)
    )
    page.write_text(f"{page.read_text()}\n| setting | default | |\n|---|---|---|\n{rows}")
    assert build() == (0, "")
    address = (tmp_path / "build/docs/docs/page.html").as_uri()
    for dark in (False, True):
        async with browser.tab() as tab:
            await tab.open(address, width=400, dark=dark)
            assert await tab.evaluate("document.scrollingElement.scrollWidth") == 400
            table = "document.querySelector('.table-wrapper')"
            assert await tab.evaluate(f"{table}.scrollWidth <= {table}.clientWidth + 1")
            picture = "getComputedStyle(document.querySelector('article img')).filter"
            assert (await tab.evaluate(picture) != "none") == dark


async def test_the_search_works_without_a_server(
    build: Callable[[], tuple[int, str]], tmp_path: Path, browser: Browser
) -> None:
    assert build() == (0, "")
    async with browser.tab() as tab:
        await tab.open((tmp_path / "build/docs/search.html").as_uri() + "?q=contract")
        await tab.until("document.querySelector('#search-results li a') !== null")
        found = await tab.evaluate("[...document.querySelectorAll('#search-results li a')].map(a => a.href)")
        await tab.open(next(link for link in found if "contracts/one/v1/README.html" in link))
        assert await tab.evaluate("document.querySelector('h1').textContent.includes('Contract')")
