"""`anabranch ask`: filters as people write them, what is printed of an answer, and how the demo leads to it."""

import io
import shlex
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import pytest
from click.testing import CliRunner

from streams import sample
from streams.cli import ask as view
from streams.cli.ask import Answer, Question
from streams.cli.filters import FilterError, parse_filters
from streams.cli.main import commands
from streams.core.messages import ArmExplanation, Explanation, Filters, MetadataRange, RetrievalResult
from streams.demo.conversation import Answer as DemoAnswer
from streams.demo.screen import Screen
from streams.demo.stack import Stack, demo_settings, embedding_environment
from streams.result_view import reasons
from streams.terminal import Console
from tests.evaluation import made_up

# Filters

CONDITIONS: list[tuple[list[str], dict[str, Any]]] = [
    (["section=1.2 Gates"], {"section": "1.2 Gates"}),
    (["document_type = manual"], {"document_type": "manual"}),
    (["source_url_prefix=https://a.example/?b=c"], {"source_url_prefix": "https://a.example/?b=c"}),
    (["metadata.year=2020"], {"metadata": {"year": "2020"}}),
    (["metadata.a b.c == x = y"], {"metadata": {"a b.c": "x = y"}}),
    (["metadata.note="], {"metadata": {"note": ""}}),
    (["metadata.a=in b", "metadata.c=d"], {"metadata": {"a": "in b", "c": "d"}}),
    (["metadata.year in 2020,2021"], {"metadata_any": {"year": ["2020", "2021"]}}),
    (['metadata.by in "Sluice, Ann", Weir'], {"metadata_any": {"by": ["Sluice, Ann", "Weir"]}}),
    (["metadata.tags has a, b", "metadata.tags has c"], {"metadata_contains": {"tags": ["a", "b", "c"]}}),
    (
        ["metadata.year>=2020", "metadata.year < 2025", "metadata.x > -1.5e3", "metadata.x<=0"],
        {"metadata_range": {"year": {"gte": 2020, "lt": 2025}, "x": {"gt": -1500, "lte": 0}}},
    ),
    (
        [
            "metadata.on>=2024-05-01",
            "metadata.on<2024-05-01T12:00:00+02:00",
            "metadata.by>2024-01-01T00:00:00",
        ],
        {
            "metadata_range": {
                "on": {
                    "at_or_after": datetime(2024, 5, 1, tzinfo=UTC),
                    "before": datetime(2024, 5, 1, 10, tzinfo=UTC),
                },
                "by": {"after": datetime(2024, 1, 1, tzinfo=UTC)},
            }
        },
    ),
    (
        ['{"metadata": {"a=b": "c"}, "section": null}', "section=1", "metadata.d=e"],
        {"metadata": {"a=b": "c", "d": "e"}, "section": "1"},
    ),
    (["metadata.a=b", "metadata.a in b,c"], {"metadata": {"a": "b"}, "metadata_any": {"a": ["b", "c"]}}),
]


@pytest.mark.parametrize(("conditions", "expected"), CONDITIONS, ids=lambda value: str(value)[:40])
def test_conditions_become_the_contract_s_filters(conditions: list[str], expected: dict[str, Any]) -> None:
    assert parse_filters(conditions) == Filters.parse(expected)


def test_every_filter_and_bound_has_a_readable_form() -> None:
    covered = {field for _, expected in CONDITIONS for field in expected}
    assert covered == set(Filters.model_fields)
    bounds = {
        bound
        for conditions, expected in CONDITIONS
        for of_key in expected.get("metadata_range", {}).values()
        for bound in of_key
    }
    # The fourth of both kinds is like the others.
    assert bounds | {"at_or_before"} == set(MetadataRange.model_fields)


def test_without_conditions_there_are_no_filters() -> None:
    assert parse_filters([]) is None


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (["title=x"], "title=x: is not a condition; conditions are section=…"),
        (["metadata.year"], "is not a condition"),
        (["metadata.year!=2020"], "there is no filter for values that differ"),
        (["metadata.year>=soon"], "the bound is not a number, a date (2024-05-01)"),
        (["metadata.on>2024-02-30"], "the bound is not a number, a date"),
        (['metadata.year in ""'], "a value is empty"),
        (["metadata.year in 1,,2"], "a value is empty"),
        (["metadata.year in 1\n2"], r"metadata.year in 1\n2: a line end in a list must be in quotes"),
        (["section=1", "section=2"], "section=2: section is given twice"),
        (["metadata.a=1", "metadata.a=2"], "for one of several values: metadata.KEY in A, B"),
        (["metadata.a>1", "metadata.a>2"], "metadata.a>2: this key already has such a condition"),
        (["{"], "is not valid JSON"),
        (['{"sectoin": "1"}'], "unknown filter sectoin; there are section,"),
        (['{"metadata": {"year": 2020}}'], "metadata.* contains a non-string value"),
        (["metadata.a has " + ",".join("b" * 65)], "does not have 1 to 64 items"),
        (["metadata.a has " + ",".join("b" * 40)] * 2, "does not have 1 to 64 items"),
    ],
)
def test_a_wrong_condition_is_named_in_one_line(conditions: list[str], message: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse_filters(conditions)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Answers


def arm(scope: str = "global", **counts: int) -> ArmExplanation:
    names = [name for name in ArmExplanation.model_fields if name not in {"scope", "candidates"}]
    found = dict.fromkeys(names, 0) | counts
    return ArmExplanation.parse({"scope": scope, "candidates": sum(found.values()), **found})


def result(*arms: ArmExplanation, passages: int = 0, **fields: Any) -> RetrievalResult:
    answer = made_up.result([made_up.passage(rank) for rank in range(1, passages + 1)])
    explained = Explanation(arms=arms) if arms else None
    return answer.model_copy(update={"k_effective": 5, "explanation": explained} | fields)


QUESTION = Question("Why?", None, ["user:1", "group:a"], None, None, None, None, None, 10)
READABLE = "that user:1 or group:a may read."


@pytest.mark.parametrize(
    ("answer", "filtered", "expected"),
    [
        (result(arm(returned=5, not_needed=3), passages=5), False, []),
        (result(passages=5), False, []),
        (result(arm()), False, [f"There are no chunks {READABLE}"]),
        (result(arm()), True, [f"There are no chunks within the filters {READABLE}"]),
        (result(arm(returned=1), passages=1), False, [f"There is only 1 chunk {READABLE}"]),
        (
            result(arm(below_threshold=3, returned=2), passages=2, similarity_threshold=0.5),
            False,
            ["The threshold of 0.5 excludes 3 of 5 candidates."],
        ),
        (
            result(
                arm("local", same_parent=1, over_budget=2, returned=1),
                arm(duplicates=4, missing=1),
                passages=1,
                session_id=uuid4(),
                token_budget=90,
            ),
            False,
            [
                "In the topic, the token budget of 90 excludes 2 of 4 candidates.",
                "In the topic, a parent that is already in the answer replaces 1 of 4 candidates.",
                "In the session, deleted documents or revoked grants took away 1 of 5 candidates.",
            ],
        ),
        (
            result(arm("local"), arm(returned=2), passages=2, session_id=uuid4()),
            False,
            [
                f"In the topic, there are no chunks {READABLE}",
                f"In the session, there are only 2 chunks {READABLE}",
            ],
        ),
        (
            result(arm(returned=2), passages=2, warnings=("scan_truncated",)),
            False,
            ["The scope is too large to search exactly, so there may be more passages."],
        ),
        (
            result(token_budget=7, warnings=("first_passage_exceeds_budget",)),
            False,
            ["The first passage does not fit into the token budget of 7."],
        ),
        (
            result(),
            False,
            ["Why there are no more is not known: workers explain it with ANABRANCH_RESULT_CONTRACT=1.1.0."],
        ),
    ],
)
def test_an_empty_or_short_answer_has_its_reasons(
    answer: RetrievalResult,
    filtered: bool,  # noqa: FBT001  # a parameter of the test
    expected: list[str],
) -> None:
    assert reasons(answer, principals=QUESTION.principals, filtered=filtered) == expected


def shown(answer: Answer, *, explain: bool = False) -> list[str]:
    stream = io.StringIO()
    with redirect_stdout(stream), patch.dict("os.environ", COLUMNS="100"):
        view.show(answer, QUESTION, explain=explain)
    return stream.getvalue().splitlines()


def test_an_answer_is_shown_with_its_passages_reasons_and_warnings() -> None:
    found = result(
        arm(below_threshold=1, returned=1),
        passages=1,
        similarity_threshold=0.5,
        tokens_used=3,
        k_requested=2,
        warnings=("k_clamped", "parent_missing"),
    )
    lines = shown(Answer(found, ["text_truncated"]))
    assert lines[0] == (
        "  user:1, group:a · extraction · all readable documents · 1 passage, 3 tokens, 5 ms in the worker"
    )
    assert "1  global  0.500  Some text." in lines[1]
    assert lines[2:] == [
        "The threshold of 0.5 excludes 1 of 2 candidates.",
        "warning: text_truncated: only the beginning of the question was embedded",
        "warning: k_clamped: the profile extraction does not allow 2 passages; k is 5",
        "warning: parent_missing",
    ]


def test_an_explanation_is_shown_if_it_is_wanted() -> None:
    answer = Answer(result(arm("local", returned=1), arm(duplicates=1, returned=4), passages=5))
    assert not any("duplicates" in line for line in shown(answer))
    lines = [line.split() for line in shown(answer, explain=True)]
    assert ["explanation", "local", "global"] in lines
    assert ["candidates", "1", "5"] in lines
    assert ["duplicates", "0", "1"] in lines


def test_a_missing_explanation_is_a_warning_only_if_it_is_wanted() -> None:
    answer = Answer(result(passages=5, warnings=("explanation_unavailable",)))
    assert not any("warning" in line for line in shown(answer))
    assert shown(answer, explain=True)[-1] == "warning: explanation_unavailable"


def test_a_prompt_has_the_passages_as_their_tokens_were_counted(capsys: pytest.CaptureFixture[str]) -> None:
    passages = [
        made_up.passage(1, header="[Source: a]", text_content="One\tand\x0ctwo."),
        made_up.passage(2, text_content="Three."),
    ]
    view.show_prompt(Answer(made_up.result(passages), ["text_truncated"]), QUESTION)
    captured = capsys.readouterr()
    assert captured.out == "[Source: a]\nOne\tand\x0ctwo.\n\nThree.\n"
    assert captured.err.splitlines()[-1].startswith("warning: text_truncated: ")


# The demo's lines


def test_the_demo_passes_on_the_provider_but_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("another")
    assert embedding_environment() == {}
    given = {
        "ANABRANCH_EMBEDDING_PROVIDER": "cohere",
        "ANABRANCH_EMBEDDING_MODEL": "m",
        "ANABRANCH_EMBEDDING_API_KEY": "canary-5e0f",
        "ANABRANCH_EMBEDDING_SUMMARIZER_API_KEY_FILE": "key",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    passed = embedding_environment()
    assert passed == given | {"ANABRANCH_EMBEDDING_SUMMARIZER_API_KEY_FILE": str(tmp_path / "key")}

    stack = Stack(
        "broker:1", "postgresql://admin", "postgresql://worker", "http://web", 3, tmp_path, demo_settings()
    )
    corpus = sample.load()
    example = DemoAnswer(corpus.queries[0], result(passages=1), 5)
    Screen(Console(), corpus, show_all=False).show_addresses(stack, example, passed)
    lines = capsys.readouterr().out.splitlines()
    assert (
        "Paste into another terminal (besides ANABRANCH_EMBEDDING_API_KEY, which must be set there)" in lines
    )
    assert "export ANABRANCH_EMBEDDING_PROVIDER=cohere" in lines
    assert not [line for line in lines if "canary-5e0f" in line]
    words = shlex.split(lines[-1])
    assert words == ["anabranch", "ask", "--principal", "group:students", corpus.queries[0].text]


# Usage

CHUNK = str(UUID(int=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "specify either a question or --like"),
        (["Why?", "--like", CHUNK], "specify either a question or --like"),
        ([" "], "the question is empty"),
        (["Why?", "--topic", CHUNK], "--topic requires --session"),
        (["Why?", "--timeout", "nan"], "--timeout: nan is not a number"),
        (["Why?", "--json", "--prompt"], "--explain, --json and --prompt cannot be combined"),
        (["Why?", "--filter", "year>1"], "--filter year>1: is not a condition"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(commands, ["ask", *arguments], prog_name="anabranch")
    assert (ended.exit_code, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("anabranch ask: ")
    assert message in line
