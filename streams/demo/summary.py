"""What the demo amounts to: counts, latencies, and how good the answers were."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from streams.demo.conversation import Answer, DeadLetter

__all__ = ["ANSWERED_WELL", "expected_rank", "summarize"]

# The grade of a passage that answers the question, in the sample corpus's golden set.
_BEST_GRADE = 3
# A golden question is answered well when its expected passage is among this many.
ANSWERED_WELL = 5


def expected_rank(answer: Answer) -> int | None:
    """The rank of the first passage that answers the question; None where it is not there."""
    best = (
        passage.rank
        for passage in answer.result.results
        if answer.question.expected.get(passage.chunk_id, 0) >= _BEST_GRADE
    )
    return next(best, None)


def summarize(outcomes: Iterable[Answer | DeadLetter]) -> dict[str, Any]:
    """Counts; latency percentiles in milliseconds; hit rate and nDCG of the golden questions (means, 0 to 1)."""
    import ir_measures  # noqa: PLC0415  # SciPy comes with it, and nobody should wait for that before the first result

    outcomes = list(outcomes)
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    letters = Counter(outcome.code for outcome in outcomes if isinstance(outcome, DeadLetter))
    hit, ndcg = ir_measures.Success(rel=_BEST_GRADE) @ ANSWERED_WELL, ir_measures.nDCG @ 10
    qrels = [
        ir_measures.Qrel(str(answer.question.id), str(chunk_id), grade)
        for answer in answers
        for chunk_id, grade in answer.question.expected.items()
    ]
    run = [
        # By rank, not score: a chat's passages stand in the order of selection.
        ir_measures.ScoredDoc(str(answer.question.id), str(passage.chunk_id), -passage.rank)
        for answer in answers
        for passage in answer.result.results
    ]
    measured = ir_measures.calc_aggregate([hit, ndcg], qrels, run)
    p50, p95, p99 = np.percentile([answer.latency_ms for answer in answers], [50, 95, 99])
    return {
        "events": len(outcomes),
        "results": len(answers),
        "passages": sum(answer.result.k_returned for answer in answers),
        "dead_letters": dict(letters),
        "latency_ms": {"p50": round(p50, 1), "p95": round(p95, 1), "p99": round(p99, 1)},
        "golden": {
            "queries": len(answers),
            "hit_at_5": round(measured[hit], 4),
            "ndcg_at_10": round(measured[ndcg], 4),
        },
    }
