"""The report on a golden set, used for the table, the JSON output and the page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, Final, Literal

from streams.core.messages import Passage
from streams.evaluation.golden import GoldenQuery
from streams.evaluation.query_runner import Answered, DeadLettered, Outcome
from streams.evaluation.scoring import Percentiles, Scores, judge, measure, percentiles
from streams.evaluation.vectors import VectorCount

__all__ = ["COMPLETENESS_FIELDS", "Assessment", "Bounds", "Mode", "Report", "assess"]

Mode = Literal["live", "direct"]

COMPLETENESS_FIELDS: Final = ("title", "source_url", "page", "section")


@dataclass(frozen=True, slots=True)
class Assessment:
    """One query with its outcome and measures.

    Attributes:
        first_relevant_rank: rank of the first passage with a relevant grade; None if there is none.
        first_relevant_score: its cosine similarity.
    """

    query: GoldenQuery
    outcome: Outcome
    scores: Scores
    first_relevant_rank: int | None
    first_relevant_score: float | None

    @property
    def label(self) -> str:
        """The query's name for people."""
        return self.query.text or self.query.key

    @property
    def passages(self) -> Sequence[Passage]:
        return self.outcome.result.results if isinstance(self.outcome, Answered) else ()

    @property
    def trouble(self) -> str | None:
        """Why there is no answer; None if there is one."""
        if isinstance(self.outcome, Answered):
            return None
        if isinstance(self.outcome, DeadLettered):
            return f"dead letter {self.outcome.code}: {self.outcome.reason}"
        return self.outcome.reason

    def to_json(self) -> dict[str, Any]:
        outcome, first = self.outcome, next(iter(self.passages), None)
        result = outcome.result if isinstance(outcome, Answered) else None
        return {
            "id": self.query.key,
            "text": self.query.text,
            "outcome": "answered"
            if result
            else "dead_lettered"
            if isinstance(outcome, DeadLettered)
            else "unanswered",
            "trouble": self.trouble,
            "hit_at_5": bool(self.scores.hit),
            "ndcg_at_10": round(self.scores.ndcg, 4),
            "recall_at_k": round(self.scores.recall, 4),
            "reciprocal_rank": round(self.scores.reciprocal_rank, 4),
            "first_relevant_rank": self.first_relevant_rank,
            "first_relevant_score": None
            if self.first_relevant_score is None
            else round(self.first_relevant_score, 4),
            "profile": result.profile if result else None,
            "k_effective": result.k_effective if result else None,
            "k_returned": result.k_returned if result else None,
            "warnings": list(result.warnings) if result else [],
            "latency_ms": round(outcome.latency_ms, 2) if isinstance(outcome, Answered) else None,
            "query_time_ms": round(result.query_time_ms, 2) if result else None,
            "first_passage": None
            if first is None
            else {
                "chunk_id": str(first.chunk_id),
                "document_id": str(first.document_id),
                "title": first.title,
                "score": round(first.score, 4),
            },
        }


@dataclass(frozen=True, slots=True)
class Bounds:
    """The minimum measures of a golden set; None: no minimum."""

    min_ndcg: float | None = None
    min_hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a golden set; in means, a query without an answer counts as 0.

    Attributes:
        at: when it was finished.
        mean: the means over all queries.
        latency: time from sending a query to receiving its result, of answered queries; None if there are none.
        query_time: the worker's part of the latency.
        completeness: field → share of the returned passages that have it; None if nothing was returned.
        vectors: None if they could not be counted.
    """

    at: datetime
    mode: Mode
    golden: str
    relevant_grade: int
    bounds: Bounds
    assessments: Sequence[Assessment]
    mean: Scores
    latency: Percentiles | None
    query_time: Percentiles | None
    completeness: dict[str, float | None]
    warnings: dict[str, int]
    dead_letters: dict[str, int]
    vectors: VectorCount | None

    @property
    def answered(self) -> int:
        return sum(isinstance(each.outcome, Answered) for each in self.assessments)

    @property
    def dead_lettered(self) -> int:
        return sum(self.dead_letters.values())

    @property
    def unanswered(self) -> int:
        return len(self.assessments) - self.answered - self.dead_lettered

    @property
    def passages(self) -> int:
        return sum(len(each.passages) for each in self.assessments)

    @property
    def failures(self) -> list[str]:
        """The missed bounds, one line each; empty if the golden set passed."""
        shortfalls = []
        bounds, mean = self.bounds, self.mean
        if bounds.min_ndcg is not None and mean.ndcg < bounds.min_ndcg:
            shortfalls.append(f"nDCG@10 is {mean.ndcg:.4f}, below {bounds.min_ndcg:g}")
        if bounds.min_hit_rate is not None and mean.hit < bounds.min_hit_rate:
            shortfalls.append(f"hit rate@5 is {mean.hit:.4f}, below {bounds.min_hit_rate:g}")
        if self.unanswered:
            shortfalls.append(f"{self.unanswered} of {len(self.assessments)} queries were not answered")
        if self.dead_lettered:
            shortfalls.append(f"{self.dead_lettered} of {len(self.assessments)} queries were dead-lettered")
        return shortfalls

    def worst(self, number: int) -> list[Assessment]:
        """The worst queries first, starting with unanswered ones; omits queries with a perfect score."""
        imperfect = [each for each in self.assessments if each.trouble or each.scores.ndcg < 1 - 1e-9]
        imperfect.sort(key=lambda each: (each.trouble is None, each.scores.ndcg, each.scores.reciprocal_rank))
        return imperfect[:number]

    def to_json(self) -> dict[str, Any]:
        """The JSON output; new keys may be added, existing ones never change."""
        return {
            "at": self.at.isoformat(timespec="seconds"),
            "way": self.mode,
            "golden": self.golden,
            "passed": not self.failures,
            "failures": self.failures,
            "bounds": asdict(self.bounds),
            "queries": len(self.assessments),
            "answered": self.answered,
            "unanswered": self.unanswered,
            "dead_lettered": self.dead_lettered,
            "dead_letters": self.dead_letters,
            "relevant_grade": self.relevant_grade,
            "hit_rate_at_5": round(self.mean.hit, 4),
            "ndcg_at_10": round(self.mean.ndcg, 4),
            "recall_at_k": round(self.mean.recall, 4),
            "mrr": round(self.mean.reciprocal_rank, 4),
            "latency_ms": _durations(self.latency),
            "query_time_ms": _durations(self.query_time),
            "passages": self.passages,
            "completeness": {
                field: None if share is None else round(share, 4)
                for field, share in self.completeness.items()
            },
            "vectors": self.vectors and asdict(self.vectors),
            "warnings": self.warnings,
            "per_query": [each.to_json() for each in self.assessments],
        }


def assess(
    queries: Sequence[GoldenQuery],
    outcomes: Sequence[Outcome],
    *,
    mode: Mode,
    golden: str,
    relevant_grade: int,
    bounds: Bounds,
    vectors: VectorCount | None,
) -> Report:
    """Judge and measure the outcomes.

    Args:
        queries: at least one.
        outcomes: one for each query.
        mode: how the queries were run.
        golden: the golden set's name.
        relevant_grade: minimum grade that counts for hit, recall and reciprocal rank.
        bounds: the required minimums.
        vectors: the number of searchable vectors.
    """
    results = [outcome.result for outcome in outcomes if isinstance(outcome, Answered)]
    judgements = [
        judge(query.expected, outcome.result.results if isinstance(outcome, Answered) else ())
        for query, outcome in zip(queries, outcomes, strict=True)
    ]
    assessments = []
    for query, outcome, judgement, scores in zip(
        queries, outcomes, judgements, measure(judgements, relevant_grade=relevant_grade), strict=True
    ):
        rank = judgement.first_relevant(relevant_grade)
        score = (
            outcome.result.results[rank - 1].score
            if rank is not None and isinstance(outcome, Answered)
            else None
        )
        assessments.append(Assessment(query, outcome, scores, rank, score))
    every = [each.scores for each in assessments]
    passages = [passage for result in results for passage in result.results]
    return Report(
        at=datetime.now(UTC),
        mode=mode,
        golden=golden,
        relevant_grade=relevant_grade,
        bounds=bounds,
        assessments=assessments,
        mean=Scores(
            hit=fmean(scores.hit for scores in every),
            ndcg=fmean(scores.ndcg for scores in every),
            recall=fmean(scores.recall for scores in every),
            reciprocal_rank=fmean(scores.reciprocal_rank for scores in every),
        ),
        latency=percentiles([outcome.latency_ms for outcome in outcomes if isinstance(outcome, Answered)])
        if results
        else None,
        query_time=percentiles([result.query_time_ms for result in results]) if results else None,
        completeness={
            field: fmean(getattr(passage, field) not in (None, "") for passage in passages)
            if passages
            else None
            for field in COMPLETENESS_FIELDS
        },
        warnings=dict(Counter(warning for result in results for warning in result.warnings).most_common()),
        dead_letters=dict(
            Counter(outcome.code for outcome in outcomes if isinstance(outcome, DeadLettered)).most_common()
        ),
        vectors=vectors,
    )


def _durations(of: Percentiles | None) -> dict[str, float] | None:
    names = ("p50", "p95", "p99", "max")
    return (
        None
        if of is None
        else {name: round(value, 2) for name, value in zip(names, astuple(of), strict=True)}
    )
