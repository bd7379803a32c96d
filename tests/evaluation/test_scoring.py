"""Judging and measuring, against definitions written down naively."""

from collections.abc import Sequence
from itertools import permutations
from math import log2
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.messages import Passage
from streams.evaluation.golden import Expectation
from streams.evaluation.scoring import Judgement, judge, measure, percentiles
from tests.evaluation.made_up import passage

IDS = [UUID(int=number + 1) for number in range(6)]
URLS = [None, "https://a/1", "https://a/2", "https://b/1"]

passages = st.lists(
    st.builds(
        lambda chunk, document, matched, url: (chunk, document, matched, url),
        st.sampled_from(IDS),
        st.sampled_from(IDS),
        st.sampled_from(IDS),
        st.sampled_from(URLS),
    ),
    max_size=12,
).map(
    lambda rows: [
        passage(rank, chunk_id=chunk, document_id=document, matched_chunk_id=matched, source_url=url)
        for rank, (chunk, document, matched, url) in enumerate(rows, start=1)
    ]
)


def expecting(kind: str, *values: str) -> st.SearchStrategy[Expectation]:
    return st.builds(Expectation, st.just(kind), st.sampled_from(values), st.integers(1, 4))


expectations = st.lists(
    st.one_of(
        expecting("chunk_id", *map(str, IDS)),
        expecting("document_id", *map(str, IDS)),
        expecting("source_url", "https://a/1", "https://a/2", "https://b/1"),
        expecting("source_url_prefix", "https://a/", "https://"),
        expecting("source_url_glob", "*/1", "*"),
    ),
    min_size=1,
    max_size=6,
)


def meets(each: Expectation, it: Passage) -> bool:
    url = it.source_url
    return {
        "chunk_id": each.value in {str(it.chunk_id), str(it.matched_chunk_id)},
        "document_id": each.value == str(it.document_id),
        "source_url": url == each.value,
        "source_url_prefix": url is not None and url.startswith(each.value),
        "source_url_glob": url is not None and (each.value == "*" or url.endswith("/1")),
    }[each.kind]


def gains(expected: Sequence[Expectation], found: Sequence[Passage]) -> list[int]:
    """The grade that each passage earns, by the rule as the documentation has it."""
    order = ["chunk_id", "document_id", "source_url", "source_url_prefix", "source_url_glob"]
    left = list(expected)
    earned = []
    for it in found:
        met = [each for each in left if meets(each, it)]
        if not met:
            earned.append(0)
            continue
        best = max(met, key=lambda each: (each.grade, -order.index(each.kind)))
        left.remove(best)
        earned.append(best.grade)
    return earned


def dcg(grades: Sequence[int]) -> float:
    return sum(grade / log2(rank + 1) for rank, grade in enumerate(grades[:10], start=1))


@settings(max_examples=150)
@given(st.lists(st.tuples(expectations, passages), min_size=1, max_size=5), st.integers(1, 4))
def test_measures_are_those_of_their_definitions(
    queries: list[tuple[list[Expectation], list[Passage]]], relevant: int
) -> None:
    judgements = [judge(expected, found) for expected, found in queries]
    for (expected, found), judgement, scores in zip(
        queries, judgements, measure(judgements, relevant_grade=relevant), strict=True
    ):
        earned = gains(expected, found)
        assert [0 if index is None else judgement.grades[index] for index in judgement.answered] == earned
        ideal = sorted((each.grade for each in expected), reverse=True)
        good = [grade >= relevant for grade in earned]
        wanted = sum(each.grade >= relevant for each in expected)
        first = good.index(True) + 1 if True in good else None
        assert judgement.first_relevant(relevant) == first
        assert scores.hit == float(True in good[:5])
        assert scores.ndcg == pytest.approx(dcg(earned) / dcg(ideal), abs=1e-6)
        assert scores.recall == pytest.approx(sum(good) / wanted if wanted else 0, abs=1e-6)
        assert scores.reciprocal_rank == pytest.approx(0 if first is None else 1 / first, abs=1e-6)
        assert 0 <= scores.ndcg <= 1 + 1e-9


@given(expectations, passages)
def test_no_expectation_is_answered_twice(expected: list[Expectation], found: list[Passage]) -> None:
    answered = [index for index in judge(expected, found).answered if index is not None]
    assert len(answered) == len(set(answered))
    for it, index in zip(found, judge(expected, found).answered, strict=True):
        assert index is None or meets(expected[index], it)


def test_a_second_passage_of_a_document_keeps_its_place_and_earns_nothing() -> None:
    wanted, other = IDS[0], IDS[1]
    expected = [Expectation("document_id", str(wanted)), Expectation("document_id", str(other))]
    found = [passage(rank, document_id=wanted) for rank in (1, 2, 3)] + [passage(4, document_id=other)]
    assert list(judge(expected, found).answered) == [0, None, None, 1]
    (scores,) = measure([judge(expected, found)])
    assert scores.ndcg == pytest.approx((1 + 1 / log2(5)) / (1 + 1 / log2(3)), abs=1e-6)
    assert scores.recall == 1


def test_one_document_expected_and_all_passages_from_it_is_perfect() -> None:
    expected = [Expectation("document_id", str(IDS[0]), 3)]
    (scores,) = measure([judge(expected, [passage(rank, document_id=IDS[0]) for rank in range(1, 6)])])
    assert (scores.hit, scores.ndcg, scores.recall, scores.reciprocal_rank) == (1, 1, 1, 1)


def test_the_better_and_then_the_more_particular_expectation_is_answered_first() -> None:
    expected = [
        Expectation("source_url_glob", "*", 1),
        Expectation("document_id", str(IDS[0]), 2),
        Expectation("chunk_id", str(IDS[1]), 2),
    ]
    both = {"document_id": IDS[0], "source_url": "https://a/1"}
    found = [passage(1, chunk_id=IDS[1], **both), passage(2, **both), passage(3, **both), passage(4, **both)]
    for order in permutations(range(3)):
        shuffled = [expected[place] for place in order]
        answered = [index for index in judge(shuffled, found).answered if index is not None]
        assert [shuffled[index].kind for index in answered] == ["chunk_id", "document_id", "source_url_glob"]


def test_a_query_without_passages_scores_nothing_and_does_not_drop_out() -> None:
    empty, full = Judgement([1, 3], []), Judgement([1], [0])
    first, second, third = measure([empty, full, empty])
    assert (first.hit, first.ndcg, first.recall, first.reciprocal_rank) == (0, 0, 0, 0)
    assert second.ndcg == 1
    assert third == first


def test_ranks_count_not_scores() -> None:
    expected = [Expectation("chunk_id", str(IDS[0]))]
    found = [passage(1, score=0.2, chunk_id=IDS[0]), passage(2, score=0.9)]
    assert measure([judge(expected, found)])[0].reciprocal_rank == 1


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 102)]
    found = percentiles(values[::-1])
    assert (found.p50, found.p95, found.p99, found.maximum) == (51, 96, 100, 101)
    assert percentiles([7.0]).p99 == 7
    rng = np.random.default_rng(3).exponential(20, 37)
    # By definition: linear between the two nearest ranks.
    place = 0.95 * 36
    low = sorted(rng)[int(place)]
    high = sorted(rng)[int(place) + 1]
    assert percentiles(list(rng)).p95 == pytest.approx(low + (high - low) * (place - int(place)))
