"""The lag gauge, on what Faust's consumer knows of a partition at each moment."""

from types import SimpleNamespace
from typing import Any

import pytest
from faust.types import TP

from streams.worker.app import WorkerApp

HERE = TP("queries", 1)


@pytest.mark.parametrize(
    ("read", "committed", "end", "told"),
    [
        ({HERE: None}, {}, 40, [(1, 40)]),  # a group that has never committed
        ({HERE: 30}, {HERE: 31}, 40, [(1, 9)]),
        ({HERE: 39}, {HERE: 40}, 40, [(1, 0)]),
        ({HERE: 30}, {HERE: 31}, None, []),  # no fetch has told the end yet
        ({}, {}, 40, []),  # just assigned: what is committed is being asked for
    ],
)
def test_only_what_is_known_is_told(
    read: dict[TP, Any], committed: dict[TP, int], end: int | None, told: list[tuple[int, int]]
) -> None:
    consumer = SimpleNamespace(highwater=lambda _: end, _committed_offset=committed, _read_offset=read)
    worker = SimpleNamespace(app=SimpleNamespace(consumer=consumer), _partitions=lambda: [HERE])
    assert list(WorkerApp._lag(worker)) == told
