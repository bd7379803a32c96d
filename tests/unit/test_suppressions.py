"""Where a check of ruff or mypy is switched off, a comment says why."""

import io
import re
from pathlib import Path
from tokenize import COMMENT, generate_tokens
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]

_SUPPRESSION: Final = re.compile(
    r"#\s*(?:ruff: |flake8: )?(?:noqa|type:\s*ignore|pyright:\s*ignore)", re.IGNORECASE
)
_WITH_REASON: Final = re.compile(
    r"# (?:(?:ruff: )?noqa: [A-Z0-9, ]+[0-9]|type: ignore\[[a-z, -]+\])  # (?!noqa|type: ignore)\S"
)


def unexplained(code: str) -> list[str]:
    comments = (token for token in generate_tokens(io.StringIO(code).readline) if token.type == COMMENT)
    return [
        f"{token.start[0]}: {token.string}"
        for token in comments
        for found in _SUPPRESSION.finditer(token.string)
        if not _WITH_REASON.match(token.string, found.start())
    ]


@pytest.mark.parametrize("folder", ["streams", "examples", "tests", "benchmarks", "docs"])
def test_every_suppression_has_a_reason(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): unexplained(path.read_text("utf-8"))
        for path in (ROOT / folder).rglob("*.py")
    }
    assert found
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "comment",
    [
        "# noqa",
        "# noqa: S311",
        "# NOQA:S311",
        "# ruff: noqa: S311",
        "# type: ignore",
        "# type: ignore[misc]",
        "# type: ignore[misc]  # noqa: S311",
        "# type: ignore[misc]  # noqa: S311  # a reason for one",
        "# type: ignore  # a reason, but everything is ignored",
    ],
)
def test_a_suppression_without_one_is_found(comment: str) -> None:
    assert unexplained(f"x = 1  {comment}\n")
    assert not unexplained("x = 1  # noqa: S311  # a reason\ny = 1  # type: ignore[misc]  # a reason\n")
