"""The sample corpus's golden questions in the format of golden sets.

``python -m streams.evaluation.sample > golden.jsonl`` writes them, as an example of a golden set.
"""

import json
import sys
from collections.abc import Iterator

from streams import sample

__all__ = ["sample_lines"]


def sample_lines(corpus: sample.Corpus) -> Iterator[str]:
    """One line for each question, without the fields that are not set."""
    for question in corpus.queries:
        fields = {
            "id": question.key,
            "text": question.text,
            "expected": [
                {"chunk_id": str(chunk_id), "grade": grade} for chunk_id, grade in question.expected.items()
            ],
            "principals": list(question.principals),
            "session_id": None if question.session_id is None else str(question.session_id),
            "topic_id": None if question.topic_id is None else str(question.topic_id),
            "profile": question.profile,
            "filters": question.filters,
            "embedding_model": corpus.embedding_model,
            "embedding": [float(component) for component in corpus.query_embedding(question)],
        }
        yield json.dumps({name: value for name, value in fields.items() if value is not None})


if __name__ == "__main__":
    for line in sample_lines(sample.load()):
        sys.stdout.write(line + "\n")
