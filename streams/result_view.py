"""Shows a result on a terminal: its passages, and why there are no more of them."""

from collections.abc import Collection, Iterator, Sequence
from typing import Final
from uuid import UUID

from rich.table import Table

from streams.core.messages import ArmExplanation, Explanation, Passage, RetrievalResult
from streams.core.warning_codes import WarningCode
from streams.terminal import Text

__all__ = ["explanation_table", "facts", "passages_table", "reasons"]

_UNEXPLAINED: Final = (
    "Why there are no more is not known: workers explain it with ANABRANCH_RESULT_CONTRACT=1.1.0."
)


def facts(result: RetrievalResult, *, principals: Sequence[str], where: str, duration: str) -> Text:
    """One line: for whom, how and where the answer was found, and how large it is."""
    passages = f"{result.k_returned} passage{'' if result.k_returned == 1 else 's'}"
    tokens = f"{result.tokens_used} token{'' if result.tokens_used == 1 else 's'}"
    parts = [", ".join(principals), result.profile, where, f"{passages}, {tokens}, {duration}"]
    return Text("  " + " · ".join(parts), style="dim")


def passages_table(passages: Sequence[Passage], *, expected: Collection[UUID] = ()) -> Table:
    """One line for each passage, cut off at the width of the terminal; those that are expected are green."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False, expand=True)
    table.add_column("rank", justify="right", style="dim", width=4)
    table.add_column("scope", width=6)
    table.add_column("score", justify="right", width=5)
    table.add_column("passage", ratio=3, no_wrap=True, overflow="ellipsis")
    table.add_column("source", ratio=2, no_wrap=True, overflow="ellipsis", style="cyan")
    table.add_column("tokens", justify="right", style="dim", width=9)
    for passage in passages:
        table.add_row(*_row(passage, is_expected=passage.chunk_id in expected))
    return table


def _row(passage: Passage, *, is_expected: bool) -> list[Text]:
    text = " ".join(passage.text_content.split())
    source = passage.title or str(passage.document_id)
    if passage.page is not None:
        source += f", p. {passage.page}"
    return [
        Text(str(passage.rank)),
        Text(passage.scope, style="magenta" if passage.scope == "local" else "blue"),
        Text(f"{passage.score:.3f}"),
        Text(text, style="green" if is_expected else ""),
        Text(source),
        Text(f"{passage.token_count} tok"),
    ]


def reasons(result: RetrievalResult, *, principals: Sequence[str], filtered: bool) -> list[str]:
    """Why a result has fewer passages than `k`: one sentence each; empty if it has as many.

    Args:
        result: with an explanation, if possible.
        principals: the requesting principals.
        filtered: whether the event has filters.
    """
    if result.k_returned >= result.k_effective:
        return []
    found = list(_reasons(result, " or ".join(principals), filtered=filtered))
    if WarningCode.FIRST_PASSAGE_EXCEEDS_BUDGET in result.warnings:
        found.insert(0, f"The first passage does not fit into the token budget of {result.token_budget}.")
    if WarningCode.SCAN_TRUNCATED in result.warnings:
        found.append("The scope is too large to search exactly, so there may be more passages.")
    return found or [_UNEXPLAINED]


def _reasons(result: RetrievalResult, readers: str, *, filtered: bool) -> Iterator[str]:
    readable = f"{' within the filters' if filtered else ''} that {readers} may read"
    for arm in () if result.explanation is None else result.explanation.arms:
        where = "In the topic, " if arm.scope == "local" else "In the session, " if result.session_id else ""
        for reason in _of_arm(arm, result, readable):
            yield where + (reason if where else reason[0].upper() + reason[1:])


def _of_arm(arm: ArmExplanation, result: RetrievalResult, readable: str) -> Iterator[str]:
    lost = {
        f"the threshold of {result.similarity_threshold} excludes": arm.below_threshold,
        f"the token budget of {result.token_budget} excludes": arm.over_budget,
        "a parent that is already in the answer replaces": arm.same_parent,
        "deleted documents or revoked grants took away": arm.missing,
    }
    for what, count in lost.items():
        if count:
            yield f"{what} {count} of {arm.candidates} candidates."
    if any(lost.values()) or WarningCode.SCAN_TRUNCATED in result.warnings:
        return
    some = f"there are only {arm.candidates} chunks"
    chunks = {0: "there are no chunks", 1: "there is only 1 chunk"}.get(arm.candidates, some)
    yield f"{chunks}{readable}."


def explanation_table(explanation: Explanation) -> Table:
    """The counts of each arm, as the contract names them."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("explanation")
    for arm in explanation.arms:
        table.add_column(arm.scope, justify="right")
    for name in ArmExplanation.model_fields:
        if name != "scope":
            table.add_row(Text(name), *(Text(str(getattr(arm, name))) for arm in explanation.arms))
    return table
