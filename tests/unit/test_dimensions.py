"""What reads events takes the number of components from its settings."""

import json
from uuid import uuid4

import pytest

from streams.cli.publish import read_events
from streams.configured import open_codec
from streams.core.errors import DimensionMismatch
from streams.evaluation.golden import GoldenError, read_golden
from streams.settings import load
from tests.integration.harness import as_json, query

EVENT = query([0.5] * 1024)


def test_a_workers_codec() -> None:
    codec = open_codec(load({"ANABRANCH_EMBEDDING_DIMENSIONS": "1024"}))
    assert len(codec.decode_query(as_json(EVENT)).embedding) == 1024
    with pytest.raises(DimensionMismatch, match=r"^embedding has 768 components, expected 1024$"):
        codec.decode_query(as_json(query([0.5] * 768)))
    with pytest.raises(DimensionMismatch, match=r"^embedding has 1024 components, expected 768$"):
        open_codec(load({})).decode_query(as_json(EVENT))


def test_the_number_comes_before_the_values() -> None:
    """The contract's order of codes."""
    with pytest.raises(DimensionMismatch):
        open_codec(load({})).decode_query(as_json(query([0.0] * 1024, topic_id=uuid4())))


def test_events_and_golden_queries() -> None:
    [read], _ = read_events([json.dumps(EVENT).encode()], dimensions=1024)
    assert len(read.event.embedding) == 1024
    line = json.dumps(EVENT | {"expected": [{"document_id": str(uuid4())}]})
    (golden,) = read_golden([line], dimensions=1024)
    assert len(golden.event.embedding) == 1024
    with pytest.raises(GoldenError, match="embedding has 1024 components, expected 1536"):
        read_golden([line], dimensions=1536)
