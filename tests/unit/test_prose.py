"""Documentation and deployment files are in plain technical English: no phrase that was replaced comes back."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.words import PHRASES

ROOT: Final = Path(__file__).resolve().parents[2]

_PHRASE: Final = re.compile("|".join(PHRASES), re.IGNORECASE)
#: What a line of Markdown, YAML, SQL or a script begins with before its text.
_LEAD: Final = re.compile(r"^(?:\s|#+|--|>|[*-] )*")

# Page to excerpts that are not prose.
_EXCEPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    # The name of a fault, quoted from the output of `make faults`.
    "docs/faults.md": ("kafka-gone-at-sigterm",),
}


def _files() -> list[Path]:
    """Where users, operators and developers read prose. Code and SQL schemas have a test of their own."""
    single = (
        *(
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "Makefile",
            "Dockerfile",
            "docker-compose.yml",
            "pyproject.toml",
        ),
        *(".ci/run", ".dockerignore", ".pre-commit-config.yaml", "requirements/licences.toml"),
        "streams/sample/README.md",
    )
    found = [
        path
        for folder in ("docs", "contracts", "k8s")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in {".png", ".pyc"}
    ]
    return sorted([*(ROOT / name for name in single), *found])


def _found_in(text: str, excerpts: tuple[str, ...] = ()) -> Iterator[tuple[int, str]]:
    """Line and phrase; a phrase may continue on the next line."""
    for excerpt in excerpts:
        text = text.replace(excerpt, " ")
    joined, starts = "", []
    for line in text.splitlines():
        starts.append(len(joined))
        joined += " ".join(_LEAD.sub("", line).split()) + " "
    for match in _PHRASE.finditer(joined):
        yield bisect_right(starts, match.start()), match[0]


def test_no_replaced_phrase_comes_back() -> None:
    files = _files()
    assert len(files) > 50
    found = [
        f"{name}:{line}: {phrase}"
        for path in files
        for name in [path.relative_to(ROOT).as_posix()]
        for line, phrase in _found_in(path.read_text(encoding="utf-8"), _EXCEPTIONS.get(name, ()))
    ]
    assert not found, f"{len(found)} findings\n" + "\n".join(found)


def test_every_exception_is_needed() -> None:
    """One that is not is a hole for the next phrase."""
    for name, excerpts in _EXCEPTIONS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not [excerpt for excerpt in excerpts if excerpt not in text], name
        assert all(list(_found_in(excerpt)) for excerpt in excerpts), name


@pytest.mark.parametrize(
    "text",
    [
        "only what the asker may read",
        "ten events in work a worker",
        "# it put the event\n#   aside, and went on",
        "it stayed out of its group for\never",
        "The embedding has not 768 components",
        "it is no integer",
        "embedding has no component that is not zero",
        "Who may write the input topic may claim any principal",
        "Accepted are Avro and JSON",
        "may end as a deadlock, which is to be repeated",
        "Nothing: Faust would count a gap out",
    ],
)
def test_a_phrase_is_found(text: str) -> None:
    assert [line for line, _ in _found_in(text)][:1] == [1]


@pytest.mark.parametrize(
    "text",
    [
        "there is no ratio",
        "it is no longer read",
        "a recommendation, networks",
        "Anyone who can write to the input topic can claim any principal",
    ],
)
def test_plain_english_is_not_found(text: str) -> None:
    assert not list(_found_in(text))
