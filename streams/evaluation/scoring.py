"""Measures the quality of answers: which passages were expected, and the resulting scores.

An expectation is one relevant item, whether it names a chunk, a document or a URL. Each passage answers at most one
expectation, and each expectation is answered at most once. In order of rank, a passage answers the highest-graded
expectation that it matches and that no higher-ranked passage has answered (for equal grades, the most specific one).
So a second passage of an expected document keeps its rank but scores nothing. It cannot raise the measures above 1, and
it is not removed either, because it took the place of another passage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streams.core.messages import Passage
from streams.evaluation.golden import KINDS, Expectation

__all__ = ["HIT_DEPTH", "NDCG_DEPTH", "Judgement", "Percentiles", "Scores", "judge", "measure", "percentiles"]

HIT_DEPTH = 5
NDCG_DEPTH = 10
# No profile returns more, so recall covers all returned passages.
_EVERYTHING = 1000


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of one query's passages.

    Attributes:
        grades: the grades of all expectations.
        answered: for each passage by rank, the index of its grade in `grades`; None if it has none.
    """

    grades: Sequence[int]
    answered: Sequence[int | None]

    def first_relevant(self, relevant_grade: int) -> int | None:
        """The rank of the first passage with at least this grade; None if there is none."""
        for rank, index in enumerate(self.answered, start=1):
            if index is not None and self.grades[index] >= relevant_grade:
                return rank
        return None


@dataclass(frozen=True, slots=True)
class Scores:
    """One query's measures, 0 to 1, as trec_eval computes them.

    Attributes:
        hit: whether a relevant passage is among the first five.
        ndcg: at 10, with the grades as gains.
        recall: share of the relevant expectations that were answered by any returned passage.
        reciprocal_rank: of the first relevant passage; 0 if there is none.
    """

    hit: float
    ndcg: float
    recall: float
    reciprocal_rank: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of durations, in milliseconds."""

    p50: float
    p95: float
    p99: float
    maximum: float


def judge(expected: Sequence[Expectation], passages: Sequence[Passage]) -> Judgement:
    """Determine which passage answers which expectation.

    Args:
        expected: in any order.
        passages: by rank.
    """
    best_first = sorted(
        range(len(expected)), key=lambda index: (-expected[index].grade, KINDS.index(expected[index].kind))
    )
    answered: list[int | None] = []
    for passage in passages:
        index = next((index for index in best_first if expected[index].is_met_by(passage)), None)
        if index is not None:
            best_first.remove(index)
        answered.append(index)
    return Judgement([expectation.grade for expectation in expected], answered)


def measure(judgements: Sequence[Judgement], *, relevant_grade: int = 1) -> list[Scores]:
    """Measure each query; a query without passages scores 0 in all measures.

    Args:
        judgements: one for each query.
        relevant_grade: minimum grade that counts for hit, recall and reciprocal rank; nDCG uses all grades.

    Raises:
        ImportError: ir-measures is not installed.
    """
    import ir_measures  # noqa: PLC0415  # imports SciPy, which must not delay the first answer

    hit = ir_measures.Success(rel=relevant_grade) @ HIT_DEPTH
    ndcg = ir_measures.nDCG @ NDCG_DEPTH
    recall = ir_measures.R(rel=relevant_grade) @ _EVERYTHING
    reciprocal_rank = ir_measures.RR(rel=relevant_grade)
    qrels = [
        ir_measures.Qrel(str(query), f"expected {index}", grade)
        for query, judgement in enumerate(judgements)
        for index, grade in enumerate(judgement.grades)
    ]
    run = [
        # By rank, not score: with the profile chat, passages are in selection order.
        ir_measures.ScoredDoc(
            str(query), f"irrelevant {rank}" if index is None else f"expected {index}", -rank
        )
        for query, judgement in enumerate(judgements)
        for rank, index in enumerate(judgement.answered, start=1)
    ]
    values: dict[tuple[str, object], float] = {
        (metric.query_id, metric.measure): metric.value
        for metric in ir_measures.iter_calc([hit, ndcg, recall, reciprocal_rank], qrels, run)
    }
    return [
        Scores(*(values.get((str(query), kind), 0.0) for kind in (hit, ndcg, recall, reciprocal_rank)))
        for query in range(len(judgements))
    ]


def percentiles(milliseconds: Sequence[float]) -> Percentiles:
    """Percentiles of at least one duration, by linear interpolation."""
    return Percentiles(*(float(value) for value in np.percentile(milliseconds, [50, 95, 99, 100])))
