"""Codes are an interface: operators alert on them, and `replay` selects by them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from streams.core import errors
from streams.core.errors import AnabranchError, GaveUp, TerminalError, TransientError, codes_that_fail_again

Kind = TypeVar("Kind", bound=AnabranchError)

PAGE = Path(__file__).resolve().parents[2] / "docs/delivery.md"

# Section 6 of the specification.
DEAD_LETTERS = {
    "undecodable",
    "unknown_schema",
    "unsupported_version",
    "contract_violation",
    "dimension_mismatch",
    "non_finite_embedding",
    "zero_embedding",
    "topic_without_session",
    "unknown_profile",
    "model_mismatch",
    "expired",
    "result_too_large",
    "unreadable_batch",
    "record_too_large",
}
GIVEN_UP = {"search_timeout", "store_unavailable", "internal_error"}
TRANSIENT = {"store_unavailable", "search_timeout", "store_misconfigured"}


def below(kind: type[Kind]) -> Iterator[type[Kind]]:
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:  # the embedding stage's are documented with it
            yield child
            yield from below(child)


def codes(kind: type[AnabranchError]) -> list[str]:
    return [child.code for child in below(kind) if child is not GaveUp]


def test_codes_are_exactly_the_specifications_and_each_has_one_class() -> None:
    assert sorted(codes(TerminalError)) == sorted(DEAD_LETTERS)
    assert sorted(codes(TransientError)) == sorted(TRANSIENT)


def test_codes_are_bounded_labels_and_header_values() -> None:
    for code in DEAD_LETTERS | GIVEN_UP | TRANSIENT:
        assert re.fullmatch(r"[a-z][a-z_]+", code)


def test_the_tree_has_one_root_and_two_branches() -> None:
    assert {*below(AnabranchError)} & {*AnabranchError.__subclasses__()} == {TerminalError, TransientError}
    for kind in below(AnabranchError):
        assert not (issubclass(kind, TerminalError) and issubclass(kind, TransientError))
        assert kind.__name__ in errors.__all__


def test_the_tree_is_drawn_as_it_is() -> None:
    drawn = re.findall(r"├── (\w+) +(\S+)|└── (\w+) +(\S+)", errors.__doc__ or "")
    leaves = {(first or third, second or fourth) for first, second, third, fourth in drawn}
    for kind in below(AnabranchError):
        if kind not in {TerminalError, TransientError, GaveUp}:
            assert (kind.__name__, kind.code) in leaves


def test_each_has_a_stage_for_the_dead_letters_header() -> None:
    stages = {kind.code: kind.stage for kind in below(TerminalError) if kind is not GaveUp}
    assert stages.pop("result_too_large") == "publish"
    assert {stages.pop(code) for code in ("unreadable_batch", "record_too_large")} == {"read"}
    assert set(stages.values()) == {"decode"}


def test_the_page_says_the_same_as_replay_about_events_that_fail_again() -> None:
    table = PAGE.read_text(encoding="utf-8").split("\n## Dead letters\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", table, flags=re.MULTILINE)
    assert len(rows) == len(DEAD_LETTERS | GIVEN_UP)
    assert {code for code, advice in rows if "a replay fails again" in advice} == codes_that_fail_again()
    assert {code for code, advice in rows if "then replay" in advice} == (
        (DEAD_LETTERS | GIVEN_UP) - codes_that_fail_again() - {"unreadable_batch", "record_too_large"}
    )


def test_giving_up_carries_its_own_code_and_leaves_the_class_alone() -> None:
    timeout, defect = GaveUp("search_timeout", "thrice"), GaveUp("internal_error", "thrice", stage="assemble")
    assert (timeout.code, timeout.stage, str(timeout)) == ("search_timeout", "search", "thrice")
    assert (defect.code, defect.stage) == ("internal_error", "assemble")
    assert not hasattr(GaveUp, "code")


def test_every_code_is_documented() -> None:
    table = PAGE.read_text(encoding="utf-8").split("\n## Dead letters\n")[1].split("\n## ")[0]
    codes = re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)
    assert sorted(codes) == sorted(DEAD_LETTERS | GIVEN_UP)
