"""The demo's summary: counts, latencies, and the quality of the answers."""

from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from streams.demo.conversation import Answer, DeadLetter
from streams.evaluation.golden import Expectation
from streams.evaluation.scoring import HIT_DEPTH, Judgement, judge, measure, percentiles

__all__ = ["ANSWERED_WELL", "expected_rank", "summarize"]

# The grade of a passage that answers the question, in the sample corpus's golden set.
_BEST_GRADE = 3
# A golden question is answered well if its expected passage is among the first this many.
ANSWERED_WELL = HIT_DEPTH


def expected_rank(answer: Answer) -> int | None:
    """The rank of the first passage that answers the question; None if there is none."""
    return _judged(answer).first_relevant(_BEST_GRADE)


def summarize(outcomes: Iterable[Answer | DeadLetter]) -> dict[str, Any]:
    """Counts, latency percentiles in milliseconds, and hit rate and nDCG of the golden questions (means, 0 to 1)."""
    outcomes = list(outcomes)
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    dead_letters = Counter(outcome.code for outcome in outcomes if isinstance(outcome, DeadLetter))
    scores = measure([_judged(answer) for answer in answers], relevant_grade=_BEST_GRADE)
    latency = percentiles([answer.latency_ms for answer in answers])
    return {
        "events": len(outcomes),
        "results": len(answers),
        "passages": sum(answer.result.k_returned for answer in answers),
        "dead_letters": dict(dead_letters),
        "latency_ms": {
            "p50": round(latency.p50, 1),
            "p95": round(latency.p95, 1),
            "p99": round(latency.p99, 1),
        },
        "golden": {
            "queries": len(answers),
            "hit_at_5": round(fmean(each.hit for each in scores), 4),
            "ndcg_at_10": round(fmean(each.ndcg for each in scores), 4),
        },
    }


def _judged(answer: Answer) -> Judgement:
    expected = [
        Expectation("chunk_id", str(chunk_id), grade) for chunk_id, grade in answer.question.expected.items()
    ]
    return judge(expected, answer.result.results)
